"""A graph that another tool exported, with what lies beside it, in the layout of optimum's directories.

Its task is embedding where there is a `modules.json`, unless that is a CrossEncoder's, else what `architectures` says,
and its outputs have to be that task's. What cannot be served is refused by name.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from numpy.typing import NDArray
from torch import nn

from model.checkpoints.head_config import describe_head, is_cross_encoder, read_pooling
from model.checkpoints.hub_names import CheckpointError
from model.checkpoints.json_files import read_json
from model.checkpoints.sentence_config import SENTENCE
from model.checkpoints.source import read_modules, read_tokenizer, said_length
from model.checkpoints.tokenizer_files import check_rows
from model.checkpoints.tokenizer_settings import MAX_LENGTH
from model.families.spec import SUFFIXES
from service.core.bundle import Head, Task, cosine
from service.core.encode import Encoding
from service.core.packing import pack
from service.core.session import CPU, SessionOptions, open_graph, padded_feeds

PLACES = ("model.onnx", "onnx/model.onnx")
INPUTS = ("input_ids", "attention_mask", "token_type_ids", "position_ids")
LOGITS = {"classification": ("logits",), "ner": ("logits",), "qa": ("start_logits", "end_logits")}
TOKENS = ("last_hidden_state", "token_embeddings")
ROWS = {"classification": "[1, labels]", "ner": "[1, tokens, labels]", "qa": "[1, tokens]"}
# Their positions begin behind the padding token's id, and ours from 0: nothing in a graph tells which it was made for.
POSITIONS_BEHIND_PADDING = {
    "camembert",
    "data2vec-text",
    "esm",
    "ibert",
    "lilt",
    "longformer",
    "luke",
    "markuplm",
    "mpnet",
    "roberta",
    "roberta-prelayernorm",
    "xlm-roberta",
    "xlm-roberta-xl",
    "xmod",
}
SAME_WAY = 0.9999  # cosine of what is pooled alike: rounding costs far less, another way far more

RawOutputs = Mapping[
    str, NDArray[Any]
]  # a graph's own outputs for one input, by name: a batch of one


@dataclass(frozen=True)
class ExternalModel:
    """A directory's graph before it is run; `max_length` is None where nothing says it."""

    folder: Path
    graph: Path
    config: Mapping[str, Any]
    task: str
    tokenizer: tokenizers.Tokenizer
    max_length: int | None


@dataclass(frozen=True)
class Recipe:
    """How a head is made of a graph's own outputs: those named, pooled or not, through dense layers or none."""

    head: Head
    outputs: tuple[str, ...]
    pooling: str | None = None
    dense: tuple[nn.Module, ...] = ()

    def apply(self, answers: RawOutputs) -> NDArray[np.float32]:
        """One input's output of the head, `[C]`, `[n, C]`, `[n, 2]` or `[D]`."""
        values = [answers[name][0].astype(np.float32) for name in self.outputs]
        value = values[0] if len(values) == 1 else np.stack(values, axis=-1)
        if self.pooling is not None:
            value = pool(value, self.pooling)
        with torch.no_grad():
            head: NDArray[np.float32] = nn.Sequential(*self.dense)(torch.from_numpy(value)).numpy()
        return head


def pool(states: NDArray[np.float32], pooling: str) -> NDArray[np.float32]:
    """`[n, H]` -> `[H]`."""
    pooled: NDArray[np.float32] = states.mean(axis=0) if pooling == "mean" else states[0]
    return pooled


# -- reading ------------------------------------------------------------------------------------------------------


def read_external(name: str | Path, task: Task | None = None) -> ExternalModel:
    """Read a directory, or the one that a graph lies in. Raises CheckpointError naming what cannot be served.

    task: the graph's, where `architectures` in `config.json` does not name it
    """
    folder, graph = _find(Path(name))
    config = read_json(folder / "config.json")
    if config.get("is_decoder") or config.get("add_cross_attention"):
        raise CheckpointError(f"{folder}: a decoder cannot be served")
    own = _task(folder, config, task)
    tokenizer = read_tokenizer(folder)
    rows = config.get("vocab_size")
    if not isinstance(rows, int):
        raise CheckpointError(f"{folder / 'config.json'} does not say vocab_size")
    check_rows(folder, tokenizer, rows)
    return ExternalModel(folder, graph, config, own, tokenizer, _length(folder, config))


def _find(given: Path) -> tuple[Path, Path]:
    """The directory with the configuration, and the graph."""
    if given.is_file():
        inside = given.parent.name == "onnx" and not (given.parent / "config.json").is_file()
        return given.parent.parent if inside else given.parent, given
    for place in PLACES:
        if (given / place).is_file():
            return given, given / place
    raise CheckpointError(f"{given} has neither {' nor '.join(PLACES)}")


def _task(folder: Path, config: Mapping[str, Any], task: Task | None) -> str:
    if task is not None:
        return task  # the outputs of the graph are checked later
    if (folder / "modules.json").is_file() and not is_cross_encoder(folder):
        return "embedding"
    architecture = (config.get("architectures") or [SUFFIXES["embedding"]])[0]
    for own, suffix in SUFFIXES.items():
        if architecture.endswith(suffix):
            return own
    known = ", ".join(f"...{suffix}" for suffix in SUFFIXES.values())
    raise CheckpointError(f"{folder}: architecture {architecture} is none of {known}")


def _length(folder: Path, config: Mapping[str, Any]) -> int | None:
    figures = (
        said_length(folder),
        config.get("max_position_embeddings"),
        config.get("n_positions"),
    )
    return min(
        (int(figure) for figure in figures if figure and 0 < figure < MAX_LENGTH), default=None
    )


# -- running ------------------------------------------------------------------------------------------------------


def run_external(given: ExternalModel, encodings: Sequence[Encoding]) -> list[RawOutputs]:
    """What the graph gives for each input alone. Raises CheckpointError when it cannot be fed or does not run."""
    try:
        session = open_graph(given.graph, CPU, SessionOptions(threads=0))
    except Exception as error:  # the runtime's errors have no type
        raise CheckpointError(f"{given.graph} cannot be opened: {error}") from None
    _check_inputs(given, session.get_inputs())
    names = {value.name for value in session.get_inputs()}
    outputs = [value.name for value in session.get_outputs()]
    found: list[RawOutputs] = []
    for encoding in encodings:
        feeds = {k: v for k, v in padded_feeds(pack([encoding])).items() if k in names}
        try:
            found.append(dict(zip(outputs, session.run(outputs, feeds), strict=True)))
        except Exception as error:
            said = f"{given.graph} cannot compute a text of {len(encoding)} tokens: {error}"
            raise CheckpointError(f"{said} (--max-length sets the longest)") from None
    return found


def _check_inputs(given: ExternalModel, inputs: Sequence[Any]) -> None:
    """That each is one that can be fed, as what it is. Raises CheckpointError naming the first that is not."""
    names = [value.name for value in inputs]
    unknown = [name for name in names if name not in INPUTS]
    if unknown:
        raise CheckpointError(
            f"{given.graph}: cannot feed {', '.join(unknown)}: only {', '.join(INPUTS)}"
        )
    if "input_ids" not in names:
        raise CheckpointError(f"{given.graph} has no input_ids")
    for value in inputs:
        if value.type != "tensor(int64)":
            raise CheckpointError(f"{given.graph}: {value.name} is a {value.type}: int64 only")
        if len(value.shape) != 2 or any(isinstance(size, int) for size in value.shape):
            said = f"{value.name} has shape {value.shape}: it must be [B, S], both dynamic"
            raise CheckpointError(f"{given.graph}: {said}")
    kind = given.config.get("model_type")
    if "position_ids" in names and kind in POSITIONS_BEHIND_PADDING:
        said = f"position_ids of {kind} begin behind its padding token's id: export it without them"
        raise CheckpointError(f"{given.graph}: {said}")


# -- judging ------------------------------------------------------------------------------------------------------


def read_recipe(
    given: ExternalModel, encodings: Sequence[Encoding], answers: Sequence[RawOutputs]
) -> Recipe:
    """The head that the graph's answers are for. Raises CheckpointError when they are not those of its task."""
    if given.task == "embedding":
        return _embedding(given, encodings, answers)
    head = describe_head(given.task, given.config, given.folder)
    outputs = LOGITS[given.task]
    _check_outputs(given, outputs, answers[0])
    width = () if given.task == "qa" else (head.width,)
    for encoding, own in zip(encodings, answers, strict=True):
        tokens = (len(encoding),) if head.per_token else ()
        for name in outputs:
            _check_shape(given, name, own[name], (1, *tokens, *width), ROWS[given.task])
    return Recipe(head, outputs)


def _embedding(
    given: ExternalModel, encodings: Sequence[Encoding], answers: Sequence[RawOutputs]
) -> Recipe:
    said, normalize, dense = _read_pooling(given.folder)
    tokens = next((name for name in TOKENS if name in answers[0]), None)
    if SENTENCE in answers[0]:
        name, rows = SENTENCE, "[1, numbers]"
        pooling, applied, dense = said or _find_pooling(given, answers[0], tokens), None, ()
    else:
        name, rows = tokens or TOKENS[0], "[1, tokens, numbers]"
        pooling = applied = said or "mean"
    _check_outputs(given, (name,), answers[0])
    width = answers[0][name].shape[-1:]
    for encoding, own in zip(encodings, answers, strict=True):
        length = () if name == SENTENCE else (len(encoding),)
        _check_shape(given, name, own[name], (1, *length, *width), rows)
    widths = [layer.out_features for layer in dense if isinstance(layer, nn.Linear)]
    told = {"pooling": pooling, "dimensions": [*width, *widths][-1]}
    told |= {} if normalize is None else {"normalize": normalize}
    head = describe_head("embedding", given.config, given.folder, **told)
    return Recipe(head, (name,), applied, dense)


def _read_pooling(folder: Path) -> tuple[str | None, bool | None, tuple[nn.Module, ...]]:
    """What is said of pooling and of normalising, and the dense layers between."""
    if (folder / "modules.json").is_file():
        return read_modules(folder)
    said = read_pooling(folder / "1_Pooling") if (folder / "1_Pooling").is_dir() else None
    return said, None, ()


def _find_pooling(given: ExternalModel, answers: RawOutputs, tokens: str | None) -> str:
    """How the graph pools, where nothing says it, from what it gives for each token."""
    for pooling in ("mean", "cls") if tokens else ():
        ours = pool(answers[str(tokens)][0].astype(np.float32), pooling)
        theirs = answers[SENTENCE][0].astype(np.float32)
        if ours.shape == theirs.shape and cosine(ours, theirs) > SAME_WAY:
            return pooling
    raise CheckpointError(
        f"{given.graph}: how {SENTENCE} was pooled is neither said (modules.json) nor to be seen"
    )


def _check_outputs(given: ExternalModel, names: Sequence[str], answers: RawOutputs) -> None:
    missing = [name for name in names if name not in answers]
    if missing:
        said = f"{given.task} needs {', '.join(missing)}, and it gives {', '.join(answers)}"
        raise CheckpointError(f"{given.graph}: {said}")
    for name in names:
        if answers[name].dtype not in (np.float32, np.float16):
            raise CheckpointError(f"{given.graph}: {name} is of {answers[name].dtype}")


def _check_shape(
    given: ExternalModel, name: str, value: NDArray[Any], expected: tuple[int, ...], rows: str
) -> None:
    if value.shape != expected:
        said = f"{name} has shape {value.shape} where {given.task} needs {expected}, {rows}"
        raise CheckpointError(f"{given.graph}: {said}")
    if not np.isfinite(value).all():
        raise CheckpointError(f"{given.graph}: {name} has numbers that are not finite")

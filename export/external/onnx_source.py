"""An ONNX graph of another tool, with its configuration and tokenizer, in the layout of optimum's directories.

The task is embedding where there is a `modules.json` that is not a CrossEncoder's, else the task of `architectures`.
The graph's outputs must fit the task. Anything that cannot be served is refused by name.

n tokens of one input, C labels, H hidden, D numbers of a vector
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any, get_args

import numpy as np
import tokenizers
from numpy.typing import NDArray

from model.checkpoints.errors import CheckpointError
from model.checkpoints.head_config import (
    Pooling,
    describe_head,
    is_cross_encoder,
    read_pooling,
    read_retrieval_fields,
)
from model.checkpoints.hub_download import PLACES, choose_graphs, download_graph, list_files
from model.checkpoints.json_files import read_json
from model.checkpoints.sentence_config import (
    SENTENCE,
    WEIGHTED,
    encoder_folder,
    is_multi_vector,
    read_module_list,
)
from model.checkpoints.source_files import (
    EXPECTED,
    ORDER,
    read_declared_length,
    read_modules,
    read_route,
    read_tokenizer,
)
from model.checkpoints.tokenizer_files import MAX_LENGTH, check_rows
from model.checkpoints.weight_files import WEIGHT_FILES
from model.config import SUFFIXES
from service.core.cpu import CPU
from service.core.encode import Window
from service.core.goldens import cosine
from service.core.manifest import Head, PoolingMode, Task
from service.core.packing import pack
from service.core.session import SessionOptions, open_graph, padded_feeds

INPUTS = ("input_ids", "attention_mask", "token_type_ids", "position_ids")
LOGITS = {"classification": ("logits",), "ner": ("logits",), "qa": ("start_logits", "end_logits")}
TOKENS = ("last_hidden_state", "token_embeddings")
ROWS = {"classification": "[1, labels]", "ner": "[1, tokens, labels]", "qa": "[1, tokens]"}
# Positions of these begin after the padding token's id, ours at 0, and a graph does not record which it takes.
POSITIONS_AFTER_PADDING = {
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
SAME_POOLING = 0.9999  # cosine of vectors with the same pooling: rounding costs far less, another pooling far more

# A graph's own outputs for one input, by name: a batch of one.
RawOutputs = Mapping[str, NDArray[Any]]
Floats = NDArray[np.float32]


@dataclass(frozen=True)
class ExternalModel:
    """A directory's graph before its first run. max_length: None where no file has it"""

    folder: Path
    graph: Path
    config: Mapping[str, Any]
    task: str
    tokenizer: tokenizers.Tokenizer
    max_length: int | None


@dataclass(frozen=True)
class Dense:
    """A layer after the pooling: x @ weight.T + bias, then tanh or not. weight: [N, K]; bias: [N], or None"""

    weight: Floats
    bias: Floats | None
    tanh: bool

    def apply(self, values: Floats) -> Floats:
        """Compute `[K]` -> `[N]`."""
        result = self.weight @ values + (0 if self.bias is None else self.bias)
        return np.tanh(result) if self.tanh else result


@dataclass(frozen=True)
class Recipe:
    """The computation of a head from a graph's own outputs: their names, and poolings with the dense layers after them.

    pooling: modes, whose vectors are joined; none where the outputs are the head's
    width: H, of the hidden states that are pooled
    """

    head: Head
    outputs: tuple[str, ...]
    pooling: tuple[str, ...] = ()
    dense: tuple[Dense, ...] = ()
    width: int = 0

    def apply(self, raw: RawOutputs) -> Floats:
        """Return the head's output for one input: `[C]`, `[n, C]`, `[n, 2]` or `[D]`."""
        values = [raw[name][0].astype(np.float32) for name in self.outputs]
        value = values[0] if len(values) == 1 else np.stack(values, axis=-1)
        if self.pooling:
            value = np.concatenate([POOLINGS[mode](value) for mode in self.pooling])
        for layer in self.dense:
            value = layer.apply(value)
        return value


def _weighted_mean(states: Floats) -> Floats:
    return np.average(states, axis=0, weights=np.arange(1, len(states) + 1)).astype(np.float32)


# From the hidden states of one input, [n, H], to a vector [H].
POOLINGS: Mapping[str, Callable[[Floats], Floats]] = {
    "mean": lambda states: states.mean(axis=0),
    "cls": lambda states: states[0],
    "max": lambda states: states.max(axis=0),
    "lasttoken": lambda states: states[-1],
    "weightedmean": _weighted_mean,
    "mean_sqrt_len_tokens": lambda states: states.sum(axis=0) / np.float32(len(states) ** 0.5),
}


# -- reading ------------------------------------------------------------------------------------------------------


def is_external(source: str) -> bool:
    """Return whether a source is an ONNX graph, or has graphs and no weights that can be read.

    Without torch, weights of a checkpoint cannot be read.

    source: a path, or NAME or NAME@REVISION on the hub
    """
    path = Path(source)
    if path.is_file():
        return path.suffix == ".onnx"
    if path.is_dir():
        encoder = encoder_folder(path)
        has_weights = any((encoder / name).is_file() for name in WEIGHT_FILES)
        has_graphs = bool(_graphs(path))
    elif source.startswith("package:"):
        return False
    else:
        files = list_files(source)
        has_weights = any(PurePosixPath(file).name in WEIGHT_FILES for file in files)
        has_graphs = bool(choose_graphs(files))
    return has_graphs and not (has_weights and find_spec("torch"))


def read_external(name: str | Path, task: Task | None = None) -> ExternalModel:
    """Read a directory, the directory of a graph, or a name on the hub. Raises CheckpointError with the reason.

    task: of the graph, where `architectures` in `config.json` does not name it
    """
    path = Path(name)
    folder, graph = _find(path if path.exists() else download_graph(str(name)))
    config = read_json(folder / "config.json")
    if config.get("is_decoder") or config.get("add_cross_attention"):
        raise CheckpointError(f"{folder}: a decoder cannot be served")
    own = _task(folder, config, task)
    if own == "late-interaction":
        raise CheckpointError(
            f"{folder}: late interaction cannot be served from an ONNX graph: export the checkpoint, without --onnx"
        )
    tokenizer = read_tokenizer(folder)
    rows = config.get("vocab_size")
    if not isinstance(rows, int):
        raise CheckpointError(f"{folder / 'config.json'} does not say vocab_size")
    check_rows(folder, tokenizer, rows)
    return ExternalModel(folder, graph, config, own, tokenizer, _length(folder, config))


def _find(path: Path) -> tuple[Path, Path]:
    """Return the directory with the configuration, and the graph."""
    if path.is_file():
        inside = path.parent.name == "onnx" and not (path.parent / "config.json").is_file()
        return path.parent.parent if inside else path.parent, path
    graphs = _graphs(path)
    if not graphs:
        raise CheckpointError(f"{path} has no ONNX graph, such as {' or '.join(PLACES)}")
    if len(graphs) > 1:
        named = ", ".join(str(graph.relative_to(path)) for graph in graphs)
        raise CheckpointError(f"{path} has several ONNX graphs: give the path of one of {named}")
    return path, graphs[0]


def _graphs(folder: Path) -> list[Path]:
    files = [*folder.glob("*.onnx"), *folder.glob("onnx/*.onnx")]
    return [
        folder / file for file in choose_graphs([f.relative_to(folder).as_posix() for f in files])
    ]


def _task(folder: Path, config: Mapping[str, Any], task: Task | None) -> str:
    if task == "fill-mask":
        raise CheckpointError(
            f"{folder}: --onnx has no fill-mask: export the checkpoint without it"
        )
    if task is not None:
        return task  # the outputs of the graph are checked later
    if (folder / "modules.json").is_file() and not is_cross_encoder(folder):
        return "late-interaction" if is_multi_vector(folder) else "embedding"
    architecture = (config.get("architectures") or [SUFFIXES["embedding"]])[0]
    served = {own: suffix for own, suffix in SUFFIXES.items() if own in (*LOGITS, "embedding")}
    for own, suffix in served.items():
        if architecture.endswith(suffix):
            return own
    known = ", ".join(f"...{suffix}" for suffix in served.values())
    raise CheckpointError(
        f"{folder}: architecture {architecture} is none of {known}: --task names the task of the graph, such as "
        "--task embedding"
    )


def _length(folder: Path, config: Mapping[str, Any]) -> int | None:
    figures = (
        read_declared_length(folder),
        config.get("max_position_embeddings"),
        config.get("n_positions"),
    )
    return min(
        (int(figure) for figure in figures if figure and 0 < figure < MAX_LENGTH), default=None
    )


# -- running ------------------------------------------------------------------------------------------------------


def run_external(external: ExternalModel, encodings: Sequence[Window]) -> list[RawOutputs]:
    """Return the graph's outputs for each input, unbatched.

    Raises CheckpointError where the graph takes other inputs, and where it cannot compute one.
    """
    try:
        session = open_graph(external.graph, CPU, SessionOptions(threads=0))
    except Exception as error:  # the runtime's errors have no type
        raise CheckpointError(f"{external.graph} cannot be opened: {error}") from None
    _check_inputs(external, session.get_inputs())
    names = {value.name for value in session.get_inputs()}
    outputs = [value.name for value in session.get_outputs()]
    results: list[RawOutputs] = []
    for encoding in encodings:
        feeds = {k: v for k, v in padded_feeds(pack([encoding])).items() if k in names}
        try:
            results.append(dict(zip(outputs, session.run(outputs, feeds), strict=True)))
        except Exception as error:
            raise CheckpointError(
                f"{external.graph} cannot compute a text of {len(encoding)} tokens: {error} "
                "(--max-length sets the longest)"
            ) from None
    return results


def _check_inputs(external: ExternalModel, inputs: Sequence[Any]) -> None:
    """Raise CheckpointError for an input that is unknown, of another type, or of a fixed size."""
    names = [value.name for value in inputs]
    unknown = [name for name in names if name not in INPUTS]
    if unknown:
        raise CheckpointError(
            f"{external.graph}: cannot feed {', '.join(unknown)}: only {', '.join(INPUTS)}"
        )
    if "input_ids" not in names:
        raise CheckpointError(f"{external.graph} has no input_ids")
    for value in inputs:
        if value.type != "tensor(int64)":
            raise CheckpointError(f"{external.graph}: {value.name} is a {value.type}: int64 only")
        if len(value.shape) != 2 or any(isinstance(size, int) for size in value.shape):
            raise CheckpointError(
                f"{external.graph}: {value.name} has shape {value.shape}: it must be [B, S], both dynamic"
            )
    kind = external.config.get("model_type")
    if "position_ids" in names and kind in POSITIONS_AFTER_PADDING:
        raise CheckpointError(
            f"{external.graph}: position_ids of {kind} begin behind its padding token's id: "
            "export it without them"
        )


# -- the head -----------------------------------------------------------------------------------------------------


def read_recipe(
    external: ExternalModel,
    encodings: Sequence[Window],
    raw: Sequence[RawOutputs],
    pooling: str | None = None,
    names: Sequence[str] = (),
) -> Recipe:
    """Return the head that the graph's outputs fit. Raises CheckpointError where they do not fit the task.

    pooling: of vectors, where no file declares it; "none" for outputs that are pooled
    names: of the outputs, where they are not the usual ones of the task
    """
    if external.task == "embedding":
        return _embedding(external, encodings, raw, pooling, names)
    head = describe_head(external.task, external.config, external.folder)
    usual = LOGITS[external.task]
    outputs = tuple(names) or usual
    _check_outputs(external, outputs, raw[0], len(usual))
    width = () if external.task == "qa" else (head.width,)
    for encoding, own in zip(encodings, raw, strict=True):
        tokens = (len(encoding),) if head.per_token else ()
        for name in outputs:
            _check_shape(external, name, own[name], (1, *tokens, *width), ROWS[external.task])
    return Recipe(head, outputs)


def _embedding(
    external: ExternalModel,
    encodings: Sequence[Window],
    raw: Sequence[RawOutputs],
    requested: str | None,
    names: Sequence[str],
) -> Recipe:
    declared, normalize, dense = _read_pooling(external.folder)
    if None not in (declared, requested) and requested not in ("none", declared):
        raise CheckpointError(
            f"{external.folder}: its files declare the pooling {declared}: leave out --pooling {requested}"
        )
    tokens = next((name for name in TOKENS if name in raw[0]), None)
    wanted = None if requested in (None, "none") else tokens
    sentence = SENTENCE if SENTENCE in raw[0] else None
    (name,) = names[:1] or (wanted or sentence or tokens or TOKENS[0],)
    _check_outputs(external, names or (name,), raw[0], 1)
    pooled = name == SENTENCE or (name not in TOKENS and raw[0][name].ndim == 2)
    if requested and pooled is not (requested == "none"):
        what = "a vector per text" if pooled else "a vector per token"
        raise CheckpointError(
            f"{external.graph}: {name} is {what}, which --pooling {requested} does not fit"
        )
    pooling: str | tuple[str, ...]
    if pooled:
        pooling, dense = declared or _detect_pooling(raw[0], name, tokens), ()
    else:
        pooling = declared or requested or "mean"
    applied = () if pooled else (pooling,) if isinstance(pooling, str) else pooling
    width = raw[0][name].shape[-1:]
    for encoding, own in zip(encodings, raw, strict=True):
        length = () if pooled else (len(encoding),)
        rows = "[1, numbers]" if pooled else "[1, tokens, numbers]"
        _check_shape(external, name, own[name], (1, *length, *width), rows)
    widths = [len(layer.weight) for layer in dense]
    vector = width[0] * max(1, len(applied))
    fields = {"pooling": pooling, "dimensions": [vector, *widths][-1]}
    fields |= {} if normalize is None else {"normalize": normalize}
    fields |= read_retrieval_fields(external.folder, *_pooling_folders(external.folder))
    head = describe_head("embedding", external.config, external.folder, **fields)
    return Recipe(head, (name,), applied, tuple(dense), width[0])


def _pooling_folders(folder: Path) -> list[Path]:
    if (folder / "modules.json").is_file():
        return [path for kind, path in read_module_list(folder) if kind == "Pooling"]
    return [folder / "1_Pooling"] if (folder / "1_Pooling").is_dir() else []


def _read_pooling(folder: Path) -> tuple[Pooling | None, bool | None, Sequence[Dense]]:
    """Return the declared pooling and normalization, each None if not declared, and the dense layers between."""
    if (folder / "modules.json").is_file():
        modules = read_modules(folder, ORDER, EXPECTED)
        for kind in {kind for kind, _ in modules} & {"LayerNorm", WEIGHTED}:
            raise CheckpointError(f"{folder}: {kind} is not supported after an ONNX graph")
        pooling, normalize, layers = read_route(folder, modules)
        return pooling, normalize, [_read_dense(path) for _, path in layers]
    declared = read_pooling(folder / "1_Pooling") if (folder / "1_Pooling").is_dir() else None
    return declared, None, ()


def _read_dense(path: Path) -> Dense:
    from model.checkpoints.source import read_dense  # which reads weights with torch

    linear, activation = read_dense(path)
    weight, *bias = (tensor.detach().numpy() for tensor in linear.parameters())
    return Dense(weight, bias[0] if bias else None, type(activation).__name__ == "Tanh")


def _detect_pooling(raw: RawOutputs, name: str, tokens: str | None) -> str:
    """Return the pooling of the graph's vectors, from its outputs per token; "none" where it cannot be detected."""
    theirs = raw[name][0].astype(np.float32)
    for pooling in get_args(PoolingMode) if tokens else ():
        ours = POOLINGS[pooling](raw[str(tokens)][0].astype(np.float32))
        if ours.shape == theirs.shape and cosine(ours, theirs) > SAME_POOLING:
            return str(pooling)
    return "none"


def _check_outputs(
    external: ExternalModel, names: Sequence[str], raw: RawOutputs, number: int
) -> None:
    """Raise CheckpointError for another number of outputs, and for one that is missing or has no numbers."""
    task, there = external.task, ", ".join(raw)
    if len(names) != number:
        raise CheckpointError(
            f"{external.graph}: --output: {task} needs {number} of its outputs {there}, not {len(names)}"
        )
    missing = [name for name in names if name not in raw]
    if missing:
        usual = (
            " or ".join((*TOKENS, SENTENCE)) if task == "embedding" else " and ".join(LOGITS[task])
        )
        raise CheckpointError(
            f"{external.graph}: it has no output {', '.join(missing)}, only {there}: {task} needs {usual}; "
            f"--output NAME{' NAME' * (number - 1)} selects outputs of other names"
        )
    for name in names:
        if raw[name].dtype not in (np.float32, np.float16):
            raise CheckpointError(f"{external.graph}: {name} is of {raw[name].dtype}")


def _check_shape(
    external: ExternalModel, name: str, value: NDArray[Any], expected: tuple[int, ...], rows: str
) -> None:
    if value.shape != expected:
        raise CheckpointError(
            f"{external.graph}: {name} has shape {value.shape} where {external.task} needs {expected}, {rows}"
        )
    if not np.isfinite(value).all():
        raise CheckpointError(f"{external.graph}: {name} has numbers that are not finite")

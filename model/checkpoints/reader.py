"""Checkpoints in the hub's layout, both ways: `config.json`, `model.safetensors`, `tokenizer.json`.

The files hold the hub's own names (`model/checkpoints/hub_names.py`). A joint checkpoint has the trunk under them,
heads as `heads.<name>.*`, and `heads.json`.
"""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from pydantic import ValidationError
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import nn

from model.bert import Bert
from model.checkpoints.config_table import check_config
from model.checkpoints.hub_download import download
from model.checkpoints.hub_names import (
    CheckpointError,
    Names,
    Tensors,
    from_hub,
    joint_names,
    modern_names,
    names_on_hub,
    pooler_names,
    pretraining_names,
    single_names,
    to_hub,
    trunk_names,
    within,
)
from model.checkpoints.labels import read_labels
from model.checkpoints.sentence_config import (
    encoder_folder,
    read_kind,
    read_pooling_mode,
    read_root_config,
)
from model.checkpoints.unused_tensors import check_unused
from model.checkpoints.weight_files import read_tensors, refuse_adapter
from model.config import BertConfig
from model.families.registry import family_named, family_of
from model.families.spec import SUFFIXES
from model.heads import Model, Pretraining
from service.core import bundle

PROVENANCE = "provenance.json"  # fields of the manifest's, of a checkpoint that has more to say than its weights
# What the hub has no word for; kept in `config.json` where it differs from the default.
OURS = {"normalize", "null_threshold", "max_answer_tokens", "max_query_tokens", "demo"}
POOLING = {"pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "cls"}
# What becomes of logits in sentence-transformers' CrossEncoder, of one label or of several, and our word for that.
IDENTITY = "torch.nn.modules.linear.Identity"
SIGMOID = "torch.nn.modules.activation.Sigmoid"
SOFTMAX = "torch.nn.modules.activation.Softmax"
ALONE = {IDENTITY: "regression", SIGMOID: "single_label_classification"}
SEVERAL = {
    IDENTITY: "single_label_classification",
    SOFTMAX: "single_label_classification",
    SIGMOID: "multi_label_classification",
}


# -- reading ----------------------------------------------------------------------------------------------------------


def locate(source: str | Path) -> Path:
    """A checkpoint's directory: a local one, `package:NAME/FOLDER` of an installed package, or the hub's by name.

    A name on the hub may have a revision: `NAME@REVISION`. Raises CheckpointError.
    """
    if Path(source).is_dir():
        return Path(source)
    if str(source).startswith("package:"):
        return _in_package(str(source))
    return download(str(source))


def _in_package(source: str) -> Path:
    name, _, folder = source.removeprefix("package:").partition("/")
    found = find_spec(name)  # does not run the package
    for parent in (found and found.submodule_search_locations) or []:
        if (Path(parent) / folder).is_dir():
            return Path(parent) / folder
    raise CheckpointError(f"{source}: no installed package has this folder")


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}") from None


def read_config(folder: Path) -> BertConfig:
    refuse_adapter(encoder_folder(folder))
    path = config_file(folder)
    document = read_json(path)
    check_config(path, document)
    try:
        family = family_named(document.get("model_type", "bert"))
        return family.config.from_dict(document)
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}") from None


def config_file(folder: Path) -> Path:
    """The `config.json` of a checkpoint, which may lie in a folder that `modules.json` names."""
    return encoder_folder(folder) / "config.json"


def read_weights(folder: Path) -> Tensors:
    """Return a checkpoint's tensors under the names of today. Raises CheckpointError naming the file."""
    return modern_names(read_tensors(encoder_folder(folder)))


def read_heads(folder: Path, task: bundle.Task | None = None) -> dict[str, bundle.Head]:
    """The heads of a checkpoint: `heads.json` when present, else what `architectures` says.

    task: the head to read where `architectures` names none; `embedding` for the encoder alone of any checkpoint
    Raises CheckpointError naming an architecture that is none of ours, and one that contradicts the task.
    """
    if (folder / "heads.json").is_file():
        if task is not None:
            raise CheckpointError(
                f"{folder / 'heads.json'} names the heads of this checkpoint: leave out --task"
            )
        described = read_json(folder / "heads.json")
        return {name: _describe(folder / "heads.json", **head) for name, head in described.items()}
    config = read_json(config_file(folder))
    family = family_of(read_config(folder))
    tasks = {family.architecture_of(task): task for task in SUFFIXES}
    architecture = (config.get("architectures") or [family.architecture_of("embedding")])[0]
    if task is None and architecture not in tasks:
        raise CheckpointError(
            f"{folder}: architecture {architecture} is none of {', '.join(tasks)}: "
            "--task names the head to read"
        )
    named = tasks.get(architecture)
    if task is not None and task != "embedding" and named not in (task, None, "embedding"):
        raise CheckpointError(
            f"{config_file(folder)}: architectures names {architecture}, a {named} head, and --task {task}: "
            "leave out --task, or change architectures"
        )
    task = task or named
    return {task: _head(task, config, folder)}


def read_teachers(source: str | Path) -> list[str]:
    """Who taught a checkpoint, by the names they were asked for by. Raises CheckpointError for what no names are."""
    path = locate(source) / PROVENANCE
    teachers = read_json(path).get("teachers", []) if path.is_file() else []
    if not isinstance(teachers, list) or not all(isinstance(name, str) for name in teachers):
        raise CheckpointError(f"{path}: teachers: {teachers!r} is no list of names")
    return teachers


def has_heads(folder: Path) -> bool:
    """Or is it an encoder alone, of which nothing says how vectors are made, or with what it was pretrained with?"""
    if any((folder / name).exists() for name in ("heads.json", "modules.json", "1_Pooling")):
        return True
    family = family_of(read_config(folder))
    ours = {family.architecture_of(task) for task in SUFFIXES if task != "embedding"}
    return bool(ours & {*(read_json(config_file(folder)).get("architectures") or [])})


def _head(task: str, config: Mapping[str, Any], folder: Path) -> bundle.Head:
    if task != "embedding":
        return describe_head(task, config, folder)
    pooling = read_pooling(folder / "1_Pooling") if (folder / "1_Pooling").is_dir() else "mean"
    dimensions = read_config(folder).hidden_size
    return describe_head(task, config, folder, pooling=pooling, dimensions=dimensions)


def describe_head(task: str, config: Mapping[str, Any], folder: Path, **told: Any) -> bundle.Head:
    """A head as `config.json` describes it, in any family's words, and what is told beside. Raises CheckpointError."""
    where = config_file(folder)
    ours = {key: config[key] for key in OURS & set(config)}
    if task in ("classification", "ner"):
        labels = read_labels(where, config)
        problem_type = config.get("problem_type")
        if task == "classification":
            problem_type = _cross_encoded(folder, config, len(labels)) or problem_type
        return _describe(where, task=task, labels=labels, problem_type=problem_type, **ours)
    return _describe(where, task=task, **{**ours, **told})


def is_cross_encoder(folder: Path) -> bool:
    """Is this what today's sentence-transformers writes for a CrossEncoder?"""
    return read_kind(folder) == "CrossEncoder"


def _cross_encoded(folder: Path, config: Mapping[str, Any], labels: int) -> str | None:
    """The problem type by which a CrossEncoder's scores are those of its `predict`; None for no CrossEncoder.

    Several labels come as a softmax, where `predict` gives logits unless it is asked for that (`apply_softmax`). One
    label that is said to be of several that may hold remains so: its score is the same.
    Raises CheckpointError naming another activation.
    """
    activation = (config.get("sentence_transformers") or {}).get("activation_fn")
    activation = activation or config.get("sbert_ce_default_activation_function")
    if is_cross_encoder(folder):
        said = read_root_config(folder).get("activation_fn")
        activation = said or activation or (SIGMOID if labels == 1 else IDENTITY)
    several = activation == SIGMOID and config.get("problem_type") == SEVERAL[SIGMOID]
    known = ALONE if labels == 1 and not several else SEVERAL
    if activation is None or activation in known:
        return known.get(activation)
    raise CheckpointError(f"{folder}: cannot serve the activation {activation}")


def _describe(where: Path, **head: Any) -> bundle.Head:
    try:
        return bundle.Head(**head)
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors())
        raise CheckpointError(f"{where}: {problems}") from None


def read_pooling(path: Path) -> str:
    """How a sentence-transformers Pooling module pools. Raises CheckpointError for another way, and for several."""
    modes = read_pooling_mode(path / "config.json")
    if len(modes) != 1 or modes[0] not in POOLING.values():
        raise CheckpointError(f"{path}: cannot serve pooling {', '.join(modes)}: mean or cls only")
    return modes[0]


def load_model(source: str | Path, task: bundle.Task | None = None) -> Model:
    """The encoder and heads of a checkpoint, joint or of one of the hub's architectures.

    task: as in `read_heads`
    Raises CheckpointError, also for a tensor that is neither used nor known to be without effect.
    """
    folder = locate(source)
    model = Model(read_config(folder), read_heads(folder, task))
    weights, names = read_weights(folder), model_names(model, folder)
    fill(model, weights, names, folder)
    _check_unused(weights, model, names, folder, heads=task is not None)
    return model.eval()


def _check_unused(
    weights: Tensors, module: nn.Module, names: Names, folder: Path, heads: bool = True
) -> None:
    """Raise CheckpointError for a tensor that is neither in the module nor known to be without effect.

    heads: whether the heads of other tasks are left out knowingly
    """
    used, family = names_on_hub(module, names), family_of(read_config(folder))
    check_unused(weights, used, family, str(folder), heads=heads)


def model_names(model: Model, folder: Path) -> Names:
    family = family_of(model.config)
    if (folder / "heads.json").is_file():
        return joint_names(family)
    (head,) = model.described.values()
    return single_names(family, head.task)


def fill(module: nn.Module, weights: Tensors, names: Names, folder: Path) -> None:
    """Fill a module that has a `config`, or a part of one, from a checkpoint's weights. Raises CheckpointError."""
    from_hub(module, weights, names, str(folder), family_of(read_config(folder)).prefix)


def load_encoder(source: str | Path, pooler: bool = True) -> Bert:
    """The bare encoder of any checkpoint."""
    folder = locate(source)
    config = read_config(folder)
    encoder = family_of(config).encoder(config, pooler=pooler)
    weights, names = read_weights(folder), trunk_names(family_of(config))
    fill(encoder, weights, names, folder)
    _check_unused(weights, encoder, names, folder)
    return encoder.eval()


def load_pretraining(source: str | Path) -> Pretraining:
    """A checkpoint with the masked LM, and with next sentence prediction when it has that."""
    folder = locate(source)
    config = read_config(folder)
    weights = read_weights(folder)
    asked = family_of(config).objectives.get("next_sentence.classifier")
    model = Pretraining(config, f"{asked}.weight" in weights)
    _fill_parts({folder: (model, weights)})
    return model.eval()


def init_from(model: Model, source: str | Path) -> None:
    """Start a model from another checkpoint's encoder; its classification heads from that one's pooler, if any."""
    folder = locate(source)
    weights = read_weights(folder)
    family = family_of(model.config)
    fill(model.encoder, weights, trunk_names(family), folder)
    with torch.device("meta"):  # the source may have more layers than the model takes
        whole = family.encoder(read_config(folder))
    _check_unused(weights, whole, trunk_names(family), folder)
    if not family.encoder.has_pooler:
        return
    (dense,) = pooler_names(family)("dense.weight")
    has_pooler = any(prefix + dense in weights for prefix in ("", family.prefix))
    for name, head in model.described.items():
        if head.task == "classification" and has_pooler:
            fill(model.heads[name].pooler, weights, pooler_names(family), folder)


# What pretraining cannot go on without; what it was not asked about pairs begins anew.
NEEDED = {"masked_lm": "masked language model", "replaced": "judge of replaced tokens"}


def init_pretraining(model: nn.Module, source: str | Path) -> None:
    """Go on from a checkpoint of the same shape, each part of the model from its folder.

    Raises CheckpointError for what is missing, and where tensors that should be one are not.
    """
    folder = locate(source)
    places = ((folder / name, part) for name, part in model.parts().items())
    _fill_parts({place: (part, read_weights(place)) for place, part in places})


def _fill_parts(parts: Mapping[Path, tuple[nn.Module, Tensors]]) -> None:
    """Fill the parts of a model, by the folder that each is read from, with what was read there."""
    for folder, (part, weights) in parts.items():
        for name, child in part.named_children():
            names = within(pretraining_names(family_of(part.config)), name)
            wanted, has = set(to_hub(child, names)), weights.keys()
            if name in NEEDED and has.isdisjoint(wanted):
                raise CheckpointError(f"{folder} has no {NEEDED[name]}")
            if name != "next_sentence" or has >= wanted:
                fill(child, weights, names, folder)
    for folder, (part, weights) in parts.items():
        _check_unused(weights, part, pretraining_names(family_of(part.config)), folder)
        _check_tied(part, weights, folder)


def _check_tied(part: nn.Module, weights: Tensors, folder: Path) -> None:
    """Raises CheckpointError for a table of words, or an output matrix, of another's own."""
    family = family_of(part.config)
    words = pretraining_names(family)("encoder.embeddings.word.weight")
    for name in (f"{family.decoder}.weight", *words):
        if name in weights and not torch.equal(
            weights[name].float(), part.encoder.embeddings.word.weight
        ):
            raise CheckpointError(f"{folder}: {name} is not tied to the word embeddings")


# -- writing ----------------------------------------------------------------------------------------------------------


@contextmanager
def replacing(folder: Path) -> Iterator[Path]:
    """A directory beside a checkpoint's that takes its place when all is written; never half of it."""
    partial = _partial(folder)
    shutil.rmtree(partial, ignore_errors=True)
    yield partial
    bundle.swap(partial, folder)


def put_back(folder: Path) -> None:
    """Where a process died while it replaced a checkpoint, the one that there was is there again."""
    bundle.put_back(_partial(folder), folder)


def _partial(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}.partial")


def save_teachers(folder: Path, teachers: Sequence[str]) -> None:
    """Keep beside a checkpoint who taught it, if anybody did."""
    if teachers:
        told = json.dumps({"teachers": teachers}, indent=2)
        (folder / PROVENANCE).write_text(told + "\n", encoding="utf-8")


def save_encoder(path: str | Path, encoder: Bert, tokenizer: Path) -> None:
    family = family_of(encoder.config)
    state = to_hub(encoder, trunk_names(family))
    _write(Path(path), encoder.config, state, tokenizer, family.architecture_of("embedding"))


def save_pretraining(path: str | Path, model: nn.Module, tokenizer: Path) -> None:
    """As `ForPreTraining`, or `ForMaskedLM` when that is all; what is trained beside the encoder has its own folder."""
    for folder, part in model.parts().items():
        family = family_of(part.config)
        state = to_hub(part, pretraining_names(family))
        architecture = family.architecture + part.architecture
        _write(Path(path) / folder, part.config, state, tokenizer, architecture)


def save_joint(path: str | Path, model: Model, tokenizer: Path) -> None:
    """The trunk under the hub's names, every head under its own, and what each head is in `heads.json`."""
    heads = {name: head.model_dump(exclude_defaults=True) for name, head in model.described.items()}
    family = family_of(model.config)
    state = to_hub(model, joint_names(family))
    files = {"heads.json": heads}
    _write(Path(path), model.config, state, tokenizer, family.architecture_of("embedding"), files)


def save_head(path: str | Path, model: Model, name: str, tokenizer: Path) -> None:
    """One head of a model with its encoder, as an ordinary checkpoint of the hub's architecture for its task."""
    head = model.described[name]
    family = family_of(model.config)
    alone = Model(model.config, {name: head})
    alone.encoder, alone.heads[name] = model.encoder, model.heads[name]
    is_embedding = head.task == "embedding"
    names = joint_names(family) if is_embedding else single_names(family, head.task)
    extra: dict[str, Any] = head.model_dump(include=OURS, exclude_defaults=True)
    if head.labels:
        extra["id2label"] = {str(index): label for index, label in enumerate(head.labels)}
        extra["label2id"] = {label: index for index, label in enumerate(head.labels)}
    single = head.task == "classification" and len(head.labels) == 1
    if single:  # for a CrossEncoder
        activation = IDENTITY if head.problem_type == "regression" else SIGMOID
        extra["sentence_transformers"] = {"activation_fn": activation}
    if head.problem_type and not (single and head.problem_type == ALONE[SIGMOID]):  # refused there
        extra["problem_type"] = head.problem_type
    files = _sentence_modules(model.config, head) if is_embedding else {}
    architecture = family.architecture_of(head.task)
    _write(Path(path), model.config, to_hub(alone, names), tokenizer, architecture, files, extra)


def _sentence_modules(config: BertConfig, head: bundle.Head) -> dict[str, Any]:
    """What sentence-transformers reads beside an encoder: its modules in order, and how to pool."""
    kinds = ["Transformer", "Pooling", *(["Normalize"] if head.normalize else [])]
    modules = [
        {
            "idx": i,
            "name": str(i),
            "path": f"{i}_{kind}" if i else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for i, kind in enumerate(kinds)
    ]
    pooling = {switch: name == head.pooling for switch, name in POOLING.items()}
    return {
        "modules.json": modules,
        "1_Pooling/config.json": {"word_embedding_dimension": config.hidden_size, **pooling},
    }


def _write(
    folder: Path,
    shape: BertConfig,
    state: Tensors,
    tokenizer: Path,
    architecture: str,
    files: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
) -> None:
    known = Tokenizer.from_file(str(tokenizer)).get_vocab()
    special_tokens = family_of(shape).special_tokens
    folder.mkdir(parents=True, exist_ok=True)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    documents = {
        "config.json": {**shape.to_dict(), "architectures": [architecture], **(config or {})},
        "tokenizer_config.json": {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": shape.max_length,
            # Where segments are not named transformers leaves those of a pair out, and its logits are others.
            "model_input_names": [
                "input_ids",
                *(["token_type_ids"] if shape.type_vocab_size > 1 else []),
                "attention_mask",
            ],
            # A reader adds those without an id, and the model has no rows for them.
            **{f"{kind}_token": token for kind, token in special_tokens.items() if token in known},
        },
        **(files or {}),
    }
    for name, document in documents.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    if tokenizer.resolve() != (folder / "tokenizer.json").resolve():
        shutil.copyfile(tokenizer, folder / "tokenizer.json")

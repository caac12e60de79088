"""Read checkpoints in the hub's layout: `config.json`, weights, and the heads that the files describe.

`read_*` functions read a folder's files, `load_*` and `init_*` fill PyTorch modules from them. Tensors have the hub's
names there (`model/checkpoints/hub_names.py`). A joint checkpoint has the encoder under them, its heads as
`heads.<name>.*`, and a description of each head in `heads.json`.
"""

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from model.bert import Bert
from model.checkpoints.card import PROVENANCE
from model.checkpoints.config_table import check_config
from model.checkpoints.errors import CheckpointError
from model.checkpoints.head_config import (
    declares_pooling,
    describe_head,
    read_pooling,
    read_retrieval_fields,
    read_splade,
    validate_head,
)
from model.checkpoints.hub_download import download
from model.checkpoints.hub_names import (
    Names,
    Tensors,
    encoder_names,
    from_hub,
    joint_names,
    modern_name,
    modern_names,
    names_on_hub,
    pooler_names,
    pretraining_names,
    single_names,
    to_hub,
    within,
)
from model.checkpoints.json_files import read_json
from model.checkpoints.sentence_config import config_file, encoder_folder, read_kind
from model.checkpoints.tokenizer_files import read_mask_token, read_tokenizer
from model.checkpoints.unused_tensors import check_unused
from model.checkpoints.weight_files import read_tensors, refuse_adapter, weight_bytes
from model.config import SUFFIXES, BertConfig
from model.families.registry import family_named, family_of
from model.families.spec import PRETRAINING
from model.heads import EncoderWithHeads, Pretraining
from service.core.manifest import Head, Task

M = TypeVar("M", bound=nn.Module)

DRAWING = {  # functions that fill a tensor with random numbers
    *(nn.init.normal_, nn.init.uniform_, nn.init.kaiming_uniform_),
    *(Tensor.normal_, Tensor.uniform_),
}
MASKED_LM = ("fill-mask", "sparse-embedding")  # tasks of heads with an output matrix
# Pretraining cannot resume without these parts; without a next-sentence head it begins with a fresh one.
REQUIRED_PARTS = {"masked_lm": "masked language model", "replaced": "judge of replaced tokens"}


# -- files ------------------------------------------------------------------------------------------------------------


def locate(source: str | Path) -> Path:
    """Return the directory of a checkpoint. Raises CheckpointError.

    source: a local directory, `package:NAME/FOLDER` of an installed package, or a hub name: `NAME` or `NAME@REVISION`
    """
    if Path(source).is_dir():
        return Path(source)
    if str(source).startswith("package:"):
        return _in_package(str(source))
    if Path(source).is_file():
        raise CheckpointError(f"{source} is a file: give the directory of the checkpoint")
    return download(str(source))


def _in_package(source: str) -> Path:
    name, _, folder = source.removeprefix("package:").partition("/")
    spec = find_spec(name)  # does not run the package
    for parent in (spec and spec.submodule_search_locations) or []:
        if (Path(parent) / folder).is_dir():
            return Path(parent) / folder
    raise CheckpointError(f"{source}: no installed package has this folder")


def read_config(folder: Path) -> BertConfig:
    """Return the configuration of a checkpoint's encoder. Raises CheckpointError naming an unsupported setting."""
    refuse_adapter(encoder_folder(folder))
    path = config_file(folder)
    document = read_json(path)
    check_config(path, document)
    try:
        family = family_named(document.get("model_type", "bert"))
        return family.config.from_dict(document)
    except (AttributeError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}") from None


def read_weights(folder: Path) -> Tensors:
    """Return a checkpoint's tensors under current names (`weight`, not `gamma`). Raises CheckpointError."""
    return modern_names(read_tensors(encoder_folder(folder)))


def read_heads(folder: Path, task: Task | None = None) -> dict[str, Head]:
    """Return a checkpoint's heads by name, from `heads.json` or `architectures`; task: where these name none.

    Raises CheckpointError naming an unknown architecture, and one that contradicts the task.
    """
    if (folder / "heads.json").is_file():
        if task is not None:
            raise CheckpointError(
                f"{folder / 'heads.json'} names the heads of this checkpoint: leave out --task"
            )
        heads = read_json(folder / "heads.json")
        return {name: validate_head(folder / "heads.json", **head) for name, head in heads.items()}
    if task is None and read_kind(folder) == "SparseEncoder":
        task = "sparse-embedding"
    config = read_json(config_file(folder))
    family = family_of(read_config(folder))
    tasks = {
        family.architecture_of(task): task
        for task in SUFFIXES
        if task != "fill-mask" or family.has_masked_lm
    }
    if task in MASKED_LM and not family.has_masked_lm:
        raise CheckpointError(
            f"{folder}: {family.model_type} has no masked language model for --task {task}"
        )
    if (
        family.has_masked_lm and "pretraining" not in family.make_heads
    ):  # ELECTRA's has no masked language model
        tasks[family.architecture + PRETRAINING] = "fill-mask"
    architecture = _read_architectures(config)[0] or family.architecture_of("embedding")
    if task is None and architecture not in tasks:
        raise CheckpointError(
            f"{folder}: architecture {architecture} is none of {', '.join(tasks)}: "
            "--task names the head to read"
        )
    named = tasks.get(architecture)
    if task == "sparse-embedding" and named == "fill-mask":
        named = task
    if task is not None and task != "embedding" and named not in (task, None, "embedding"):
        raise CheckpointError(
            f"{config_file(folder)}: architectures names {architecture}, a {named} head, and --task {task}: "
            "leave out --task, or change architectures"
        )
    task = task or named
    if task == "late-interaction":
        raise CheckpointError(
            f"{folder}: modules.json is missing: late interaction needs the files of a MultiVectorEncoder or of PyLate"
        )
    return {task: _read_head(task, config, folder)}


def _read_architectures(config: Mapping[str, Any]) -> list[str]:
    """Return the current names of the classes in `architectures`; one empty name if there are none."""
    return [modern_name(name) for name in config.get("architectures") or [""]]


def _read_head(task: str, config: Mapping[str, Any], folder: Path) -> Head:
    if task == "sparse-embedding":
        size = read_config(folder).vocab_size
        return describe_head(task, config, folder, sparse=read_splade(folder), vocabulary_size=size)
    if task == "fill-mask":
        return describe_head(task, config, folder, **_read_vocabulary(config, folder))
    if task != "embedding":
        return describe_head(task, config, folder)
    module = folder / "1_Pooling"
    poolings = [module] if module.is_dir() else []
    pooling = read_pooling(module) if poolings else "mean"
    modes = 1 if isinstance(pooling, str) else len(pooling)
    dimensions = modes * read_config(folder).hidden_size
    own = read_retrieval_fields(folder, *poolings)
    return describe_head(task, config, folder, pooling=pooling, dimensions=dimensions, **own)


def _read_vocabulary(config: Mapping[str, Any], folder: Path) -> dict[str, int]:
    """Return the fields of a fill-mask head. Raises CheckpointError for a tokenizer without a mask token."""
    if config.get("legacy") is False:
        raise CheckpointError(
            f"{config_file(folder)}: legacy = false is another masked language model, which cannot be served"
        )
    token = read_mask_token(folder)
    number = read_tokenizer(folder).token_to_id(token)
    if number is None:
        raise CheckpointError(f"{folder}: the tokenizer has no token {token!r}, its mask_token")
    return {"mask_token_id": number, "vocabulary_size": read_config(folder).vocab_size}


def has_heads(folder: Path) -> bool:
    """Return whether a checkpoint describes a head; False for an encoder alone or with its pretraining heads."""
    if declares_pooling(folder):
        return True
    family = family_of(read_config(folder))
    ours = {family.architecture_of(task) for task in SUFFIXES.keys() - {"embedding", "fill-mask"}}
    return bool(ours & {*_read_architectures(read_json(config_file(folder)))})


def read_teachers(source: str | Path) -> list[str]:
    """Return the names of a checkpoint's teachers, as distillation got them. Raises CheckpointError for no list."""
    path = locate(source) / PROVENANCE
    teachers = read_json(path).get("teachers", []) if path.is_file() else []
    if not isinstance(teachers, list) or not all(isinstance(name, str) for name in teachers):
        raise CheckpointError(f"{path}: teachers: {teachers!r} is no list of names")
    return teachers


# -- modules ----------------------------------------------------------------------------------------------------------


def load_model(source: str | Path, task: Task | None = None) -> EncoderWithHeads:
    """Return the encoder and heads of a checkpoint, joint or of one of the hub's architectures; task: see `read_heads`.

    Raises CheckpointError, also for a tensor that is neither used nor known to be without effect.
    """
    folder = locate(source)
    config, heads = read_config(folder), read_heads(folder, task)
    weights = read_weights(folder)
    model = make_encoder(lambda: EncoderWithHeads(config, heads), config, folder)
    names = model_names(model, folder)
    if not declares_pooling(folder):
        _check_head(model, weights, names, folder)
    fill(model, weights, names, folder)
    _check_unused(weights, model, names, folder, heads=task is not None)
    if any(head.task in MASKED_LM for head in model.described.values()):
        _check_tied(model, weights, folder)
    return model.eval()


def make_encoder(make: Callable[[], M], config: BertConfig, folder: Path) -> M:
    """Return a new module of a checkpoint's configuration. Raises CheckpointError as `make_module` does."""
    integers = {name: value for name, value in config.to_dict().items() if isinstance(value, int)}
    return make_module(make, integers, config_file(folder), encoder_folder(folder))


class WithoutDrawing(TorchFunctionMode):
    """Writes zeros in place of random initial values, because drawing them takes longer than reading a checkpoint."""

    def __torch_function__(self, function: Any, _: Any, args: Any = (), named: Any = None) -> Any:
        if function in DRAWING:
            return (args[0] if args else named["tensor"]).zero_()
        return function(*args, **(named or {}))


def make_module(make: Callable[[], M], integers: Mapping[str, int], file: Path, folder: Path) -> M:
    """Return a new module, whose weights are in a folder, without random initial values.

    Raises CheckpointError, before it takes memory, if it has more numbers than the weight files have bytes.
    integers: the fields of `file` that describe it
    """
    with torch.device("meta"):
        parameters = [*make().parameters()]
    count, size = sum(one.numel() for one in parameters), weight_bytes(folder)
    if count > size:
        largest = max(parameters, key=torch.numel)
        name = "num_hidden_layers"
        if largest.numel() > size:  # a dimension is that of a field, or a small multiple of it
            fitting = {name for name, value in integers.items() if value <= max(largest.shape)}
            name = max(fitting, key=lambda name: integers[name], default=name)
        raise CheckpointError(
            f"{file}: {name} = {integers.get(name)} makes a model of {count:,} numbers, and its weight files have"
            f" {size:,} bytes: correct {name}, or download the weights again"
        )
    with torch.no_grad(), WithoutDrawing():
        return make()


def _check_head(model: EncoderWithHeads, weights: Tensors, names: Names, folder: Path) -> None:
    """Raise CheckpointError for the weights of an encoder alone, where `architectures` names a head."""
    prefix = family_of(model.config).prefix
    missing = {
        part: names_on_hub(module, within(names, part)) - {*weights, *(prefix + n for n in weights)}
        for part, module in model.named_children()
    }
    if missing["heads"] and not missing["encoder"]:
        (task,), shown = model.described, ", ".join(sorted(missing["heads"])[:3])
        raise CheckpointError(
            f"{folder}: architectures in config.json names a {task} head, and {len(missing['heads'])} of its tensors "
            f"are missing: {shown} ...: --task embedding reads the encoder alone"
        )


def _check_unused(
    weights: Tensors, module: nn.Module, names: Names, folder: Path, heads: bool = True
) -> None:
    """Raise CheckpointError for a tensor with an effect that the module lacks; heads: other tasks' heads may be."""
    used, family = names_on_hub(module, names), family_of(read_config(folder))
    check_unused(weights, used, family, str(folder), heads=heads)


def model_names(model: EncoderWithHeads, folder: Path) -> Names:
    """Return the hub's names for a model's parameters in its checkpoint, joint or of one head."""
    family = family_of(model.config)
    if (folder / "heads.json").is_file():
        return joint_names(family)
    (head,) = model.described.values()
    return single_names(family, head.task)


def fill(module: nn.Module, weights: Tensors, names: Names, folder: Path) -> None:
    """Fill a module that has a `config`, or a part of one, from a checkpoint's weights. Raises CheckpointError."""
    from_hub(module, weights, names, str(folder), family_of(read_config(folder)).prefix)


def load_encoder(source: str | Path, pooler: bool = True) -> Bert:
    """Return the encoder of any checkpoint, without heads. Raises CheckpointError."""
    folder = locate(source)
    config = read_config(folder)
    make = family_of(config).encoder
    weights, names = read_weights(folder), encoder_names(family_of(config))
    encoder = make_encoder(lambda: make(config, pooler=pooler), config, folder)
    fill(encoder, weights, names, folder)
    _check_unused(weights, encoder, names, folder)
    return encoder.eval()


def load_pretraining(source: str | Path) -> Pretraining:
    """Return a checkpoint's encoder with its masked LM head and, if it has one, its next-sentence head."""
    folder = locate(source)
    config = read_config(folder)
    weights = read_weights(folder)
    classifier = family_of(config).objectives.get("next_sentence.classifier")
    has_classifier = f"{classifier}.weight" in weights
    model = make_encoder(lambda: Pretraining(config, has_classifier), config, folder)
    _fill_parts({folder: (model, weights)})
    return model.eval()


def init_from(model: EncoderWithHeads, source: str | Path) -> None:
    """Fill a model's encoder from another checkpoint's, and the poolers of its classifiers from the pooler, if any."""
    folder = locate(source)
    weights = read_weights(folder)
    family = family_of(model.config)
    fill(model.encoder, weights, encoder_names(family), folder)
    with torch.device("meta"):  # the source may have more layers than the model takes
        whole = family.encoder(read_config(folder))
    _check_unused(weights, whole, encoder_names(family), folder)
    if not family.encoder.has_pooler:
        return
    (dense,) = pooler_names(family)("dense.weight")
    has_pooler = any(prefix + dense in weights for prefix in ("", family.prefix))
    for name, head in model.described.items():
        if head.task == "classification" and has_pooler:
            fill(model.heads[name].pooler, weights, pooler_names(family), folder)


def init_pretraining(model: nn.Module, source: str | Path) -> None:
    """Fill a model to pretrain from a checkpoint of its shape, each part from its folder. Raises CheckpointError."""
    folder = locate(source)
    places = ((folder / name, part) for name, part in model.parts().items())
    _fill_parts({place: (part, read_weights(place)) for place, part in places})


def _fill_parts(parts: Mapping[Path, tuple[nn.Module, Tensors]]) -> None:
    """Fill the parts of a model. parts: by folder, each part and the tensors that were read from the folder"""
    for folder, (part, weights) in parts.items():
        for name, child in part.named_children():
            names = within(pretraining_names(family_of(part.config)), name)
            wanted, present = set(to_hub(child, names)), weights.keys()
            if name in REQUIRED_PARTS and wanted and present.isdisjoint(wanted):
                raise CheckpointError(f"{folder} has no {REQUIRED_PARTS[name]}")
            if name != "next_sentence" or present >= wanted:
                fill(child, weights, names, folder)
    for folder, (part, weights) in parts.items():
        _check_unused(weights, part, pretraining_names(family_of(part.config)), folder)
        _check_tied(part, weights, folder)


def _check_tied(part: nn.Module, weights: Tensors, folder: Path) -> None:
    """Raise CheckpointError where a copy of the word embeddings, or of the output's bias, is not equal."""
    family = family_of(part.config)
    bias, own = f"{family.decoder}.bias", f"{family.objectives.get('masked_lm')}.bias"
    if {bias, own} <= weights.keys() and not torch.equal(weights[bias], weights[own]):
        raise CheckpointError(f"{folder}: {bias} differs from {own}: only one of the two is used")
    words = pretraining_names(family)("encoder.embeddings.word.weight")
    for name in (f"{family.decoder}.weight", *words):
        if name in weights and not torch.equal(
            weights[name].float(), part.encoder.embeddings.word.weight
        ):
            raise CheckpointError(f"{folder}: {name} is not tied to the word embeddings")

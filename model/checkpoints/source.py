"""A checkpoint in the hub's layout with its heads and tokenizer, for export, evaluation and teachers.

The heads are in `heads.json` (a joint checkpoint), else in `modules.json` (a sentence-transformers directory), else in
`architectures`, as for an older CrossEncoder. A checkpoint that cannot be served is refused by name.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tokenizers
import torch
from torch import nn

from model.checkpoints.adapters import merge_adapter
from model.checkpoints.bge_heads import read_further_heads
from model.checkpoints.errors import CheckpointError
from model.checkpoints.gliclass import is_gliclass, load_gliclass
from model.checkpoints.gliner import GLINER, is_gliner, load_gliner
from model.checkpoints.head_config import (
    Pooling,
    is_cross_encoder,
    read_retrieval_fields,
    validate_head,
)
from model.checkpoints.hub_names import check_numbers, from_hub
from model.checkpoints.json_files import read_json, read_object
from model.checkpoints.late_interaction_config import read_late_interaction, read_text_lengths
from model.checkpoints.reader import (
    load_encoder,
    load_model,
    locate,
    make_module,
    read_config,
    read_weights,
)
from model.checkpoints.sentence_config import (
    DENSE_TABLE,
    ROOT,
    ROUTER,
    SENTENCE,
    TOKENS,
    WEIGHTED,
    WEIGHTED_TABLE,
    check_module_names,
    config_file,
    encoder_folder,
    is_first_colbert,
    is_multi_vector,
    read_kind,
    read_module_list,
    read_root_config,
    read_router,
    static_folder,
)
from model.checkpoints.source_files import (
    read_declared_length,
    read_modules,
    read_route,
    read_tokenizer,
)
from model.checkpoints.static_source import read_static_files, read_static_modules
from model.checkpoints.tokenizer_files import check_rows, write_tokenizer
from model.checkpoints.yes_no import is_yes_no, load_yes_no, read_yes_no
from model.config import MOST
from model.heads import EncoderWithHeads, SentenceEmbedding, TokenEmbedding, mix_layers
from model.static_embedding import StaticModel
from service.core.manifest import PROMPT_NAMES, Head, Task

TANH = "torch.nn.modules.activation.Tanh"
ACTIVATIONS: Mapping[str, type[nn.Module]] = {"Identity": nn.Identity, "Tanh": nn.Tanh}
HeadModules = tuple[Pooling, bool, tuple[nn.Module, ...]]
# The modules of late interaction: of a MultiVectorEncoder, and of PyLate, which normalizes and masks always.
MULTI_VECTOR_ORDER = re.compile(
    r"Transformer(, Dense)*, (MultiVectorMask(, Normalize)?|Normalize, MultiVectorMask)"
)
SPARSE_ORDER = re.compile(r"Transformer, SpladePooling")
PYLATE_ORDER = re.compile(r"Transformer(, Dense)+")
TRANSFORMER_ONLY = re.compile("Transformer")  # a CrossEncoder has the architecture's own head
# Families whose attention hides masked tokens as queries, too, in the reference implementation.
MASKED_QUERIES = ("deberta", "deberta-v2")


@dataclass(frozen=True)
class Source:
    """A model with its tokenizer (without truncation or padding) and its maximum length in tokens."""

    folder: Path
    model: EncoderWithHeads
    tokenizer: tokenizers.Tokenizer
    max_length: int


def read_source(name: str | Path, task: Task | None = None, adapter: str | None = None) -> Source:
    """Read a local directory or a hub name. Raises CheckpointError.

    task: see `read_heads`
    adapter: a folder of the checkpoint with an adapter to merge into the weights
    """
    folder = locate(name)
    if adapter is not None:
        folder = merge_adapter(folder, adapter)
    if static_folder(folder) is not None:
        return _static_source(folder, task)
    if not is_gliner(folder) and is_yes_no(folder, task):
        tokenizer = read_tokenizer(folder, framed=False)
        scoring = read_yes_no(folder, tokenizer)
        model = load_yes_no(folder, scoring)
        scoring.append(tokenizer)
    else:
        model = _read_model(folder, task)
        tokenizer = read_tokenizer(folder)
    check_rows(folder, tokenizer, model.config.vocab_size)
    return Source(folder, model, tokenizer, read_max_length(folder, model.config.max_length))


def _static_source(folder: Path, task: Task | None) -> Source:
    """Read a directory of static embeddings. Raises CheckpointError."""
    if task not in (None, "embedding"):
        raise CheckpointError(
            f"{folder} has static embeddings, and --task {task}: leave out --task"
        )
    modules, normalize = read_static_modules(folder)
    files, layers = read_static_files(folder), [*read_layers(modules)]
    fields = read_retrieval_fields(folder)
    head = _embedding_head(folder, files.table.shape[1], "mean", normalize, layers, **fields)
    model = StaticModel(files.table, files.counted, head, layers)
    return Source(folder, model.eval(), files.tokenizer, files.max_length)


def _read_model(folder: Path, task: Task | None) -> EncoderWithHeads:
    for is_own, load, file in (
        (is_gliner, load_gliner, GLINER),
        (is_gliclass, load_gliclass, "config.json"),
    ):
        if is_own(folder):
            if task is not None:
                raise CheckpointError(
                    f"{folder / file} describes the head: leave out --task {task}"
                )
            return load(folder)
    first = is_first_colbert(folder)
    if not first and not (folder / "modules.json").is_file():
        return load_model(folder, task)
    own: Task = "classification" if is_cross_encoder(folder) else "embedding"
    if is_multi_vector(folder):
        own = "late-interaction"
    elif read_kind(folder) == "SparseEncoder":
        own = "sparse-embedding"
    if task not in (None, own):
        file = "config.json" if first else "modules.json"
        raise CheckpointError(
            f"{folder / file} describes a model of the task {own}, and --task {task}: "
            f"leave out --task, or remove {'HF_ColBERT from architectures' if first else file}"
        )
    if own == "late-interaction":
        return _multi_vector_encoder(folder)
    if own == "sparse-embedding":
        return _sparse_encoder(folder)
    return _cross_encoder(folder) if own == "classification" else _sentence_transformer(folder)


def tokenizer_file(folder: Path, output: Path) -> Path:
    """Return a `tokenizer.json` that splits as `read_tokenizer` does: the checkpoint's, or one written to `output`."""
    return write_tokenizer(encoder_folder(folder), read_tokenizer(folder), output)


def read_max_length(folder: Path, positions: int | None = None) -> int:
    """Return the maximum length in tokens: the declared one, at most the number of positions of the encoder.

    positions: None to read them
    """
    positions = positions or read_config(folder).max_length
    declared = read_declared_length(folder)
    if is_multi_vector(folder):
        lengths = [length or declared or positions for length in read_text_lengths(folder)]
        return min(max(lengths), positions)
    return positions if declared is None else min(declared, positions)


# -- sentence-transformers ------------------------------------------------------------------------


def _cross_encoder(folder: Path) -> EncoderWithHeads:
    """Load a CrossEncoder. Raises CheckpointError for further modules, and for another architecture."""
    read_modules(folder, TRANSFORMER_ONLY, "Transformer alone in a CrossEncoder")
    model = load_model(folder)
    if [*model.described] != ["classification"]:
        raise CheckpointError(f"{folder}: cannot serve a CrossEncoder that is no text classifier")
    return model


def _sparse_encoder(folder: Path) -> EncoderWithHeads:
    """Load a SparseEncoder of a masked language model. Raises CheckpointError for further modules, and for prompts."""
    read_modules(folder, SPARSE_ORDER, "Transformer, SpladePooling in a SparseEncoder")
    if any((read_root_config(folder).get("prompts") or {}).values()):
        raise CheckpointError(
            f"{folder / ROOT}: prompts of a SparseEncoder are not supported: remove them, and write them before the "
            "texts in requests"
        )
    return load_model(folder, "sparse-embedding")


def _multi_vector_encoder(folder: Path) -> EncoderWithHeads:
    """Load an encoder, and a head of late interaction from the modules that follow it."""
    dense: list[nn.Module] = []
    if is_first_colbert(folder):
        modules, normalize, dense = [], True, [_projection(folder)]
    elif read_kind(folder) == "ColBERT":
        expected = "Transformer and Dense in a model of PyLate"
        modules = read_modules(folder, PYLATE_ORDER, expected, TOKENS)
        normalize = True
    else:
        expected = "Transformer, any Dense, MultiVectorMask, and Normalize or not"
        modules = read_modules(folder, MULTI_VECTOR_ORDER, expected, TOKENS)
        normalize = any(kind == "Normalize" for kind, _ in modules)
    dense += [
        layer for kind, path in modules if kind == "Dense" for layer in read_dense(path, TOKENS)
    ]
    encoder = load_encoder(folder, pooler=False)
    outputs = [layer.out_features for layer in dense if isinstance(layer, nn.Linear)]
    late = read_late_interaction(folder, read_tokenizer(folder))
    if late.hides_expansion and encoder.config.model_type in MASKED_QUERIES:
        raise CheckpointError(
            f"{folder}: query expansion to which no token attends is not supported for"
            f" {encoder.config.model_type}, which masks queries, too"
        )
    longest, declared = read_max_length(folder), read_declared_length(folder)
    lengths = {
        name: min(length, longest) if length else None
        for name, length in (
            ("query_length", late.query_length or declared),
            ("document_length", late.document_length or declared),
        )
    }
    head = validate_head(
        folder / "modules.json",
        task="late-interaction",
        dimensions=[encoder.config.hidden_size, *outputs][-1],
        normalize=normalize,
        late_interaction={**late.model_dump(), **lengths},
        demo=read_json(config_file(folder)).get("demo", False),
    )
    model = EncoderWithHeads(encoder.config, {"late-interaction": head}, encoder)
    model.heads["late-interaction"] = TokenEmbedding(nn.Sequential(*dense))
    return model.eval()


def _projection(folder: Path) -> nn.Linear:
    """Return the layer after the encoder in a checkpoint of the first ColBERT code. Raises CheckpointError."""
    weights = read_weights(folder)
    shape = weights.get("linear.weight", torch.empty(1, 1)).shape
    if len(shape) != 2:
        raise CheckpointError(
            f"{folder}: linear.weight has shape {tuple(shape)}, which is no matrix"
        )
    linear = nn.Linear(shape[1], shape[0], bias=False)
    from_hub(linear, weights, lambda name: [f"linear.{name}"], str(folder))
    return linear


def _sentence_transformer(folder: Path) -> EncoderWithHeads:
    """Load an encoder, and an embedding head from the modules that follow it; with a Router, one for each route."""
    routes = _read_routes(folder)
    modules = {name: _read_route(folder, route) for name, route in routes.items()}
    poolings = [path for route in routes.values() for kind, path in route if kind == "Pooling"]
    fields = read_retrieval_fields(folder, *dict.fromkeys(poolings))
    fields["demo"] = read_json(config_file(folder)).get("demo", False)
    encoder = load_encoder(folder, pooler=False)
    _mix_layers(folder, encoder, [module for route in routes.values() for module in route])
    width, heads = encoder.config.hidden_size, {}
    for name, own in modules.items():
        side = {"input_type": name} if name in PROMPT_NAMES else {}
        heads[name] = _embedding_head(folder, width, *own, **fields, **side)
    further = read_further_heads(folder, encoder.config.hidden_size, encoder.config.vocab_size)
    heads |= {name: head for name, (head, _) in further.items()}
    model = EncoderWithHeads(encoder.config, heads, encoder)
    for name, (pooling, _, dense) in modules.items():
        model.heads[name] = SentenceEmbedding(pooling, nn.Sequential(*dense))
    for name, (_, module) in further.items():
        model.heads[name] = module
    return model.eval()


def _read_route(folder: Path, modules: Sequence[tuple[str, Path]]) -> HeadModules:
    pooling, normalize, layers = read_route(folder, modules)
    return pooling, normalize, tuple(read_layers(layers))


def _mix_layers(folder: Path, encoder: nn.Module, modules: Sequence[tuple[str, Path]]) -> None:
    """Let an encoder return the mean of its layers that a WeightedLayerPooling computes. Raises CheckpointError."""
    places = {path for kind, path in modules if kind == WEIGHTED}
    if len(places) > 1:
        raise CheckpointError(f"{folder}: cannot serve routes with {WEIGHTED} of their own")
    for path in places:
        document = read_object(path / "config.json")
        WEIGHTED_TABLE.check(path / "config.json", document)
        weights = read_weights(path).get("layer_weights", torch.empty(0))
        check_numbers("layer_weights", weights, str(path))
        layers, first = encoder.config.num_hidden_layers, document.get("layer_start", 4)
        known = type(first) is int and 0 <= first <= layers
        if not known or weights.shape != (layers + 1 - first,):
            raise CheckpointError(
                f"{path}: layer_start = {first!r} with {weights.numel()} layer_weights does not fit {layers} layers"
            )
        if read_json(config_file(folder)).get("output_hidden_states"):
            mix_layers(encoder, weights.tolist(), first)


def _read_routes(folder: Path) -> dict[str, list[tuple[str, Path]]]:
    """Return the modules of each embedding head: `embedding`, or `query` and `document`, the default first.

    Raises CheckpointError for routes with different encoders.
    """
    read_root_config(folder)
    modules = read_module_list(folder)
    if not modules or modules[0][0] != ROUTER:
        return {"embedding": modules}
    router = read_router(modules[0][1])
    by_task = {task: router.structure[router.route(task)] for task in (None, *PROMPT_NAMES)}
    if by_task["query"] == by_task["document"] == by_task[None]:
        return {"embedding": [*by_task[None], *modules[1:]]}
    encoders = {path for route in by_task.values() for kind, path in route if kind == "Transformer"}
    if len(encoders) > 1:
        raise CheckpointError(
            f"{router.path}: cannot serve routes with different encoders"
            f" ({', '.join(sorted(path.name for path in encoders))}) in one bundle: save each route's modules as a"
            " SentenceTransformer of its own, and export those"
        )
    names = sorted(PROMPT_NAMES, key=lambda name: by_task[name] != by_task[None])
    if by_task[names[0]] != by_task[None]:
        raise CheckpointError(
            f"{router.path}: cannot serve a default_route for neither query nor document"
        )
    return {name: [*by_task[name], *modules[1:]] for name in names}


def _get(path: Path, config: Mapping[str, Any], *names: str) -> list[Any]:
    missing = [name for name in names if name not in config]
    if missing:
        raise CheckpointError(f"{path} does not say {', '.join(missing)}")
    return [config[name] for name in names]


def _embedding_head(
    folder: Path,
    width: int,
    pooling: Pooling,
    normalize: bool,
    dense: Sequence[nn.Module],
    **fields: Any,
) -> Head:
    """Return the head of an encoder of this width and its modules. Raises CheckpointError."""
    outputs = [layer.out_features for layer in dense if isinstance(layer, nn.Linear)]
    modes = 1 if isinstance(pooling, str) else len(pooling)
    return validate_head(
        config_file(folder),
        task="embedding",
        pooling=pooling,
        dimensions=[modes * width, *outputs][-1],
        normalize=normalize,
        **fields,
    )


def read_layers(modules: Sequence[tuple[str, Path]]) -> Iterator[nn.Module]:
    """Yield the layers of Dense and LayerNorm modules. Raises CheckpointError."""
    for kind, path in modules:
        yield from read_dense(path) if kind == "Dense" else [read_layer_norm(path)]


def read_layer_norm(path: Path) -> nn.LayerNorm:
    """Return the layer of a LayerNorm module. Raises CheckpointError."""
    weights = read_weights(path)
    norm = nn.LayerNorm(len(weights.get("norm.weight", ())))
    from_hub(norm, weights, lambda name: [f"norm.{name}"], str(path))
    return norm


def read_dense(path: Path, vectors: str = SENTENCE) -> list[nn.Module]:
    """Return the layers of a Dense module. Raises CheckpointError for a setting that is not supported."""
    file = path / "config.json"
    config = read_object(file)
    DENSE_TABLE.check(file, config)
    check_module_names(file, config, vectors, default=vectors)
    inputs, outputs = _get(file, config, "in_features", "out_features")
    bias, activation = config.get("bias", True), config.get("activation_function", TANH)
    for name, size in (("in_features", inputs), ("out_features", outputs)):
        if isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= MOST:
            raise CheckpointError(
                f"{file}: {name} = {size!r} must be a positive integer up to {MOST}"
            )
    if not isinstance(bias, bool):
        raise CheckpointError(f"{file}: bias = {bias!r} must be true or false")
    kind = str(activation).rpartition(".")[2]
    if not str(activation).startswith("torch.") or kind not in ACTIVATIONS:
        raise CheckpointError(
            f"{path}: cannot serve activation {activation}: torch's {', '.join(ACTIVATIONS)} only"
        )
    sizes = {"in_features": inputs, "out_features": outputs}
    weights = read_weights(path)
    linear = make_module(lambda: nn.Linear(inputs, outputs, bias=bias), sizes, file, path)
    if unused := sorted(weights.keys() - {"linear.weight", "linear.bias"}):
        raise CheckpointError(f"{path}: a Dense layer has no tensor {unused[0]}")
    from_hub(linear, weights, lambda name: [f"linear.{name}"], str(path))
    return [linear, ACTIVATIONS[kind]()]

"""The files of a checkpoint that say what surrounds its weights: tokenizer, length, and modules after the encoder.

They are read without torch, because a served ONNX graph has no further need of it.
"""

import re
from collections.abc import Sequence
from pathlib import Path

import tokenizers

from model.checkpoints import tokenizer_files
from model.checkpoints.errors import CheckpointError
from model.checkpoints.head_config import Pooling, read_pooling
from model.checkpoints.json_files import read_object
from model.checkpoints.late_interaction_config import mark_prefixes
from model.checkpoints.sentence_config import (
    NORMALIZE_TABLE,
    SENTENCE,
    STATIC,
    WEIGHTED,
    check_module_names,
    encoder_folder,
    lower_case,
    read_module_list,
    read_root_config,
    read_sentence_config,
)
from model.checkpoints.tokenizer_files import MAX_LENGTH, read_model_max_length

MODULES = {
    *("Transformer", "Pooling", "Dense", "LayerNorm", "Normalize"),
    *("MultiVectorMask", "SpladePooling", STATIC, WEIGHTED),
}
EXPECTED = "Transformer, WeightedLayerPooling or not, Pooling, any Dense and LayerNorm, and Normalize or not"
# The modules that our embedding head supports.
ORDER = re.compile(
    r"Transformer(, WeightedLayerPooling)?, Pooling(, (Dense|LayerNorm))*(, Normalize)?"
)


def read_tokenizer(folder: Path, framed: bool = True) -> tokenizers.Tokenizer:
    """Read a directory's tokenizer, as sentence-transformers does for its own files. Raises CheckpointError.

    framed: refuse one without special tokens around texts
    """
    tokenizer = tokenizer_files.read_tokenizer(encoder_folder(folder), framed)
    lower_case(tokenizer, read_sentence_config(folder))
    mark_prefixes(tokenizer, folder)
    return tokenizer


def read_declared_length(folder: Path) -> int | None:
    """Return sentence-transformers' maximum length, else the tokenizer's; None for none or "no limit"."""
    length = read_sentence_config(folder).get("max_seq_length")
    if length is None:
        return read_model_max_length(encoder_folder(folder))
    return None if length > MAX_LENGTH else int(length)


def read_modules(
    folder: Path, order: re.Pattern[str], expected: str, vectors: str = SENTENCE
) -> list[tuple[str, Path]]:
    """Return kind and folder of modules, which read and write `vectors`. Raises CheckpointError for another order."""
    read_root_config(folder)
    modules = read_module_list(folder)
    check_modules(folder, modules, order, expected, vectors)
    return modules


def check_modules(
    folder: Path,
    modules: Sequence[tuple[str, Path]],
    order: re.Pattern[str],
    expected: str,
    vectors: str = SENTENCE,
) -> None:
    """Raise CheckpointError for a module that is not supported, and for another order."""
    for kind, _ in modules:
        if kind not in MODULES:
            raise CheckpointError(f"{folder}: cannot serve the sentence-transformers module {kind}")
    kinds = ", ".join(kind for kind, _ in modules)
    if not order.fullmatch(kinds):
        path = folder / "modules.json"
        raise CheckpointError(
            f"{path}: cannot serve {kinds or 'no modules'}: they must be {expected}"
        )
    for kind, place in modules:
        if kind == "Normalize":
            path = place / "config.json"
            document = read_object(path) if path.is_file() else {}
            NORMALIZE_TABLE.check(path, document)
            check_module_names(path, document, vectors, default=SENTENCE)


def read_route(
    folder: Path, modules: Sequence[tuple[str, Path]]
) -> tuple[Pooling, bool, list[tuple[str, Path]]]:
    """Return pooling, normalization and the modules between them. Raises CheckpointError for other modules."""
    check_modules(folder, modules, ORDER, EXPECTED)
    (pooling,) = (read_pooling(path) for kind, path in modules if kind == "Pooling")
    layers = [(kind, path) for kind, path in modules if kind in ("Dense", "LayerNorm")]
    return pooling, modules[-1][0] == "Normalize", layers

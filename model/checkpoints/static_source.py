"""Directories of static embeddings: sentence-transformers' StaticEmbedding, and model2vec's.

They have a table of vectors and `tokenizer.json`, and no encoder. A directory without `modules.json`, as of the first
versions of model2vec, is read as model2vec does, which leaves out unknown tokens.
"""

import json
import re
from pathlib import Path
from typing import NamedTuple

from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing
from torch import Tensor, nn

from model.checkpoints.errors import CheckpointError
from model.checkpoints.hub_names import check_numbers
from model.checkpoints.json_files import read_optional_object
from model.checkpoints.sentence_config import is_sentence_directory, static_folder
from model.checkpoints.source_files import read_modules
from model.checkpoints.tokenizer_files import SAVED, check_rows
from model.checkpoints.weight_files import read_tensors
from model.static_embedding import START
from service.core.encode import load_tokenizer

ORDER = re.compile(r"StaticEmbedding(, (Dense|LayerNorm))*(, Normalize)?")
EXPECTED = "StaticEmbedding, any Dense and LayerNorm, and Normalize or not"
# Tokens of the longest text where the tokenizer states none: then sentence-transformers reads all.
LONGEST = 8192


class StaticFiles(NamedTuple):
    """The table of a directory and its tokenizer, which puts `START` before each text."""

    table: Tensor  # [V, H]
    counted: Tensor  # [V], 1 for tokens that count, else 0
    tokenizer: Tokenizer
    max_length: int


def read_static_files(folder: Path) -> StaticFiles:
    """Read the table and the tokenizer of a directory. Raises CheckpointError."""
    place = static_folder(folder) or folder
    table = _read_table(place)
    path = place / SAVED
    try:
        longest = (Tokenizer.from_file(str(path)).truncation or {}).get("max_length", LONGEST)
        tokenizer = load_tokenizer(path)
    except Exception as error:  # the class that the library raises
        raise CheckpointError(f"{path} cannot be read: {error}") from None
    check_rows(place, tokenizer, len(table))
    unknown = None if is_sentence_directory(folder) else _unknown_id(tokenizer)
    tokenizer.add_special_tokens([START])
    start = tokenizer.token_to_id(START)
    vocabulary = tokenizer.get_vocab()
    if len({*vocabulary.values()}) < len(vocabulary):
        raise CheckpointError(f"{path}: two tokens have one id: number the tokens without gaps")
    tokenizer.post_processor = TemplateProcessing(
        single=f"{START} $A", pair=f"{START} $A {START} $B", special_tokens=[(START, start)]
    )
    table = nn.functional.pad(table, (0, 0, 0, max(0, start + 1 - len(table))))
    counted = table.new_ones(len(table))
    for number in {start, unknown} - {None}:
        table[number] = counted[number] = 0
    return StaticFiles(table, counted, tokenizer, longest + 1)


def read_static_modules(folder: Path) -> tuple[list[tuple[str, Path]], bool]:
    """Return the modules after the table, and whether vectors are normalized. Raises CheckpointError."""
    if not is_sentence_directory(folder):
        return [], bool(read_optional_object(folder / "config.json").get("normalize", False))
    modules = read_modules(folder, ORDER, EXPECTED)
    is_normalized = modules[-1][0] == "Normalize"
    return modules[1:-1] if is_normalized else modules[1:], is_normalized


def _read_table(place: Path) -> Tensor:
    """Return the vector of each token, `[V, H]`. model2vec may share vectors by a mapping, and weigh tokens."""
    weights = read_tensors(place)
    own = [name for name in ("embedding.weight", "embeddings") if name in weights]
    if len(own) != 1 or weights.keys() - {*own, "mapping", "weights"}:
        names = ", ".join(sorted(weights))
        raise CheckpointError(f"{place}: the tensors {names} are no table of static embeddings")
    table = weights[own[0]]
    check_numbers(own[0], table, str(place))
    try:
        rows = table.float()[weights["mapping"].long()] if "mapping" in weights else table.float()
        rows = rows * weights["weights"].float()[:, None] if "weights" in weights else rows
        if rows.dim() == 2:
            return rows
    except (IndexError, RuntimeError) as error:
        raise CheckpointError(f"{place}: mapping or weights do not fit {own[0]}: {error}") from None
    raise CheckpointError(f"{place}: {own[0]} has shape {tuple(table.shape)}, not [tokens, width]")


def _unknown_id(tokenizer: Tokenizer) -> int | None:
    model = json.loads(tokenizer.to_str())["model"]
    if model.get("unk_token") is not None:
        return tokenizer.token_to_id(model["unk_token"])
    number: int | None = model.get("unk_id")
    return number

"""Late interaction: how a directory of `MultiVectorEncoder`, PyLate or the first ColBERT code reads and compares texts.

`MultiVectorEncoder` is a class of sentence-transformers; it also reads what the other two wrote. PyLate's settings are
all in `config_sentence_transformers.json`, and the first code keeps them in `artifact.metadata`.
"""

import string
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from tokenizers import AddedToken, Tokenizer

from model.checkpoints.errors import CheckpointError
from model.checkpoints.json_files import read_object, read_optional_object
from model.checkpoints.sentence_config import (
    EXPANDED,
    MASK_TABLE,
    PYLATE_SETTINGS,
    ROOT,
    encoder_folder,
    is_first_colbert,
    is_multi_vector,
    read_module_list,
    read_root_config,
    read_sentence_config,
)
from model.checkpoints.settings_table import shown
from model.checkpoints.tokenizer_files import read_special_token
from service.core.manifest import LateInteraction

LENGTHS = ("query_length", "document_length")
EXPANSION = "query_expansion"
EXPANSION_FIELDS = {"strategy", "attend", "token", "length"}
PREFIXES = {"query": "query_prefix", "document": "document_prefix"}  # of PyLate, by the prompt


def read_late_interaction(folder: Path, tokenizer: Tokenizer) -> LateInteraction:
    """Return how a directory's head reads and compares texts. Raises CheckpointError naming file and setting."""
    root, settings = read_root_config(folder), _transformer_settings(folder)
    prompts = _prompts(root)
    fields: dict[str, Any] = {name: _length(folder, settings, name) for name in LENGTHS}
    fields |= _expansion(folder, settings, fields["query_length"], tokenizer)
    words = _skip_words(folder, root)
    unknown = read_special_token(encoder_folder(folder), "unk_token")
    ids = {word: tokenizer.token_to_id(word) for word in words}
    known = (number for word, number in ids.items() if number is not None)
    unknown_id = tokenizer.token_to_id(unknown) if unknown else None
    skipped = {number for number in known if number != unknown_id or unknown in words}
    mean = root.get("similarity_fn_name") == "meanmaxsim"
    try:
        return LateInteraction(
            query_prefix=prompts["query"],
            document_prefix=prompts["document"],
            skip_token_ids=tuple(sorted(skipped)),
            similarity="meanmaxsim" if mean else "maxsim",
            **fields,
        )
    except ValidationError as error:
        problems = "; ".join(problem["msg"] for problem in error.errors())
        raise CheckpointError(f"{folder / ROOT}: {problems}") from None


def read_text_lengths(folder: Path) -> list[int | None]:
    """Return the tokens of the longest query and document; None for no own length of the head."""
    settings = _transformer_settings(folder)
    query, document = (_length(folder, settings, name) for name in LENGTHS)
    expansion = settings.get(EXPANSION)
    if isinstance(expansion, Mapping) and isinstance(floor := expansion.get("length"), int):
        fixed = expansion.get("strategy") == "fixed"
        query = floor if fixed else query and max(query, floor)
    return [query, document]


def mark_prefixes(tokenizer: Tokenizer, folder: Path) -> None:
    """Make the prefixes of PyLate that are tokens of the vocabulary special tokens, so that texts keep them whole."""
    if not is_multi_vector(folder):
        return
    root = read_root_config(folder)
    for name in PREFIXES.values():
        value = root.get(name) or ""
        for prefix in (value, *value.split(None, 1)[:1]):
            if not prefix.strip() or tokenizer.token_to_id(prefix) is None:
                continue
            if [prefix] != tokenizer.encode(prefix, add_special_tokens=False).tokens:
                tokenizer.add_special_tokens([AddedToken(prefix, normalized=False, special=True)])
            break


def _transformer_settings(folder: Path) -> Mapping[str, Any]:
    """Return lengths and expansion: the Transformer's own, else PyLate's."""
    own, root = read_sentence_config(folder), read_root_config(folder)
    names = (*LENGTHS, EXPANSION)
    settings = {name: root[name] for name in LENGTHS if root.get(name) is not None}
    if EXPANSION in root:
        settings[EXPANSION] = root[EXPANSION]
    elif any(name in root for name in PYLATE_SETTINGS):
        settings[EXPANSION] = None
        if root.get("do_query_expansion") is not False:
            attend = root.get(
                "attend_to_expansion_tokens", root.get("attend_to_mask_tokens", False)
            )
            length = settings.pop("query_length", EXPANDED)
            settings[EXPANSION] = {"strategy": "fixed", "attend": bool(attend), "length": length}
    return {**settings, **{name: own[name] for name in names if name in own}}


def _prompts(root: Mapping[str, Any]) -> dict[str, str]:
    """Return the text before queries and documents: PyLate's prefix, then the prompt."""
    prompts = root.get("prompts") or {}
    found = {}
    for name, key in PREFIXES.items():
        prefix, prompt = root.get(key) or "", prompts.get(name) or ""
        found[name] = prefix + prompt.removeprefix(prefix)
    return found


def _length(folder: Path, settings: Mapping[str, Any], name: str) -> int | None:
    value = settings.get(name)
    if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 3):
        reason = "must be a whole number of tokens, at least 3"
        raise CheckpointError(f"{folder}: {name} = {shown(value)} {reason}")
    return value


def _expansion(
    folder: Path, settings: Mapping[str, Any], query_length: int | None, tokenizer: Tokenizer
) -> dict[str, Any]:
    """Return the fields of query expansion. Raises CheckpointError for settings that the reference refuses, too."""
    expansion = settings.get(EXPANSION)
    if expansion is None:
        return {}
    place = f"{folder}: {EXPANSION} = {shown(expansion)}"
    if not isinstance(expansion, Mapping) or not {*expansion} <= EXPANSION_FIELDS:
        raise CheckpointError(
            f"{place}: must be an object of {', '.join(sorted(EXPANSION_FIELDS))}"
        )
    strategy, length = expansion.get("strategy"), expansion.get("length")
    attend = expansion.get("attend", False)
    if strategy not in ("fixed", "min") or not isinstance(attend, bool):
        raise CheckpointError(f"{place}: strategy must be fixed or min, attend true or false")
    if isinstance(length, bool) or not isinstance(length, int) or length < 3:
        raise CheckpointError(f"{place}: length must be a whole number of tokens, at least 3")
    if query_length is not None and query_length < length:
        raise CheckpointError(f"{place}: length exceeds query_length {query_length}")
    inner = encoder_folder(folder)
    if read_optional_object(inner / "tokenizer_config.json").get("padding_side") == "left":
        reason = "padding_side = 'left' of tokenizer_config.json is not supported with it"
        raise CheckpointError(f"{place}: {reason}")
    tokens = (read_special_token(inner, name) for name in ("mask_token", "eos_token"))
    token = expansion.get("token") or next(filter(None, tokens), None)
    number = None if token is None else tokenizer.token_to_id(token)
    if number is None:
        raise CheckpointError(f"{place}: the tokenizer has no token {shown(token)} to expand with")
    return {
        "query_length": length if strategy == "fixed" else query_length,
        "query_expansion": length,
        "expansion_token_id": number,
        "attend_to_expansion": attend,
    }


def _skip_words(folder: Path, root: Mapping[str, Any]) -> list[str]:
    """Return the words that have no vector in documents; in PyLate punctuation, where no setting names others."""
    words: Any = root.get("skiplist_words")
    words = [*string.punctuation] if words is None else words
    modules = [] if is_first_colbert(folder) else read_module_list(folder)
    for kind, place in modules:
        if kind == "MultiVectorMask":
            path = place / "config.json"
            document = read_object(path)
            MASK_TABLE.check(path, document)
            words = document.get("skiplist_words") or []
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise CheckpointError(f"{folder}: skiplist_words = {shown(words)} must be a list of words")
    return words

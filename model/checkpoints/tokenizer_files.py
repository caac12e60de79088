"""A checkpoint's tokenizer: the one that transformers' AutoTokenizer builds from the same files.

Files are `tokenizer.json`, or older ones (`vocab.txt`; `vocab.json` with `merges.txt`), and the settings next to them.
Which class reads them is in `config.json` and `tokenizer_config.json`. SentencePiece models are refused.
"""

import base64
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Encoding, Tokenizer, models

from model.checkpoints.hub_names import CheckpointError
from model.checkpoints.json_files import read_object, read_optional_object
from model.checkpoints.settings_table import shown
from model.checkpoints.tokenizer_classes import (
    ALWAYS_AS_SAVED,
    AS_SAVED,
    CLASSES,
    MODEL_TYPES,
    Parts,
    Token,
    TokenizerClass,
    canonical,
)
from model.checkpoints.tokenizer_settings import (
    NAMED,
    TokenizerSettings,
    read_settings,
)
from model.checkpoints.tokenizer_tables import TOKENIZER_CONFIG, TOKENIZER_JSON
from service.core.encode import load_tokenizer

SAVED = "tokenizer.json"
SAVE = "load it with transformers' AutoTokenizer and write it with save_pretrained to get tokenizer.json"
OTHER_FILES = ("tokenizer.model", "tiktoken.model", "tekken.json")  # win over vocab.txt there
PROBE = "a \u2603\U0010fffe"  # a letter, and characters that no vocabulary has


def has_tokenizer(folder: Path) -> bool:
    """Return whether a directory has a file that `read_tokenizer` takes a vocabulary from."""
    return any((folder / name).is_file() for name in (SAVED, "vocab.txt", "vocab.json"))


def read_tokenizer(folder: Path) -> Tokenizer:
    """Read a directory's tokenizer, without truncation or padding.

    Token types of its template are those that the model gets: all 0 where `model_input_names` has no token_type_ids,
    or where the model has one type only. Raises CheckpointError, one line with file, setting and value.
    """
    path = folder / SAVED
    try:
        config = read_optional_object(folder / "config.json")
        saved = read_object(path) if path.is_file() else None
        parsed = load_tokenizer(path) if saved is not None else None
        settings = read_settings(folder, saved)
        kind = _class_of(folder, config, settings)
        _check_side(path, saved, settings)
        tokenizer = _build(folder, kind, settings, saved, parsed)
        _check_ids(settings, tokenizer)
        _check_template(path if saved is not None else folder, tokenizer)
        if not _has_segments(kind, config, settings):
            _drop_segments(tokenizer)
    except CheckpointError:
        raise
    except ValueError as error:  # of `load_tokenizer`, which names the file
        raise CheckpointError(" ".join(str(error).split())) from None
    return tokenizer


def read_mask_token(folder: Path) -> str:
    """Return a checkpoint's mask token. Raises CheckpointError where the tokenizer has none."""
    token = read_special_token(folder, "mask_token")
    if token is None:
        raise CheckpointError(
            f"{folder / TOKENIZER_CONFIG.file}: mask_token is missing: name the mask token of the model"
        )
    return token


def read_special_token(folder: Path, name: str) -> str | None:
    """Return the token that transformers' AutoTokenizer has as `name`, such as "mask_token"; None if it has none."""
    path = folder / SAVED
    settings = read_settings(folder, read_object(path) if path.is_file() else None)
    kind = _class_of(folder, read_optional_object(folder / "config.json"), settings)
    defaults = kind.named if kind else {}
    named = _named(settings, defaults, kind.wrap if kind else None)  # without defaults not called
    token = named.get(name)
    return token.content if isinstance(token, AddedToken) else token


def write_tokenizer(folder: Path, tokenizer: Tokenizer, output: Path) -> Path:
    """Return the checkpoint's `tokenizer.json` if it is this tokenizer; else one that is written to `output`."""
    path = folder / SAVED
    if path.is_file() and tokenizer.to_str() == load_tokenizer(path).to_str():
        return path
    output.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(output / SAVED))
    return output / SAVED


def check_rows(folder: Path, tokenizer: Tokenizer, rows: int) -> None:
    """Raise CheckpointError naming tokens whose ids are not rows of the model's embedding table."""
    beyond = {index: token for token, index in tokenizer.get_vocab().items() if index >= rows}
    if beyond:
        tokens = ", ".join(shown(token) for _, token in sorted(beyond.items())[:3])
        raise CheckpointError(
            f"{folder}: the tokenizer has {max(beyond) + 1} tokens, the model {rows}: "
            f"{len(beyond)} have no row, such as {tokens}"
        )


# -- which class --------------------------------------------------------------------------------------------------


def _class_of(
    folder: Path, config: Mapping[str, Any], settings: TokenizerSettings
) -> TokenizerClass | None:
    """Return the class that reads the tokenizer; None for `tokenizer.json` as it is."""
    model_type = config.get("model_type", "bert")
    path = folder / TOKENIZER_CONFIG.file
    declared = settings.values.get("tokenizer_class")
    if declared is None and config.get("tokenizer_class") is not None:
        path, declared = folder / "config.json", config["tokenizer_class"]
    if declared is not None and (not isinstance(declared, str) or not declared):
        raise CheckpointError(f"{path}: tokenizer_class = {shown(declared)} is not a name")
    if isinstance(model_type, str) and model_type in ALWAYS_AS_SAVED:
        name: str | None = AS_SAVED
    elif declared is not None:
        name = canonical(declared)
    else:
        name = MODEL_TYPES.get(model_type) if isinstance(model_type, str) else None
    if name is None:
        known = ", ".join([*CLASSES, AS_SAVED])
        what = f"tokenizer_class = {shown(declared)} is not supported"
        if declared is None:
            what = f"tokenizer_class is missing, and not known for model_type {shown(model_type)}"
        raise CheckpointError(
            f"{path}: {what}; set {AS_SAVED} if tokenizer.json alone is right (known are {known})"
        )
    return CLASSES.get(name)


# -- building -----------------------------------------------------------------------------------------------------


def _build(
    folder: Path,
    kind: TokenizerClass | None,
    settings: TokenizerSettings,
    saved: Mapping[str, Any] | None,
    parsed: Tokenizer | None,
) -> Tokenizer:
    if kind is None:
        if parsed is None or saved is None:
            raise CheckpointError(f"{folder}: {AS_SAVED} needs {SAVED}, which is missing; {SAVE}")
        padding = saved.get("padding")
        if "pad_token" not in settings.values and isinstance(padding, dict):
            settings.values["pad_token"] = padding.get("pad_token")
            settings.paths["pad_token"] = folder / SAVED
        named = _named(settings, {}, _as_it_is)
        _add_tokens(parsed, settings, named, settings.extra(()))
        return parsed
    parts = _parts(folder, kind, settings, saved, parsed)
    for name in kind.frame_tokens:
        if parts.named[name] is None:
            raise settings.refuse(name, f"a token, which {kind.name} needs")
    try:
        tokenizer = kind.build(parts)
        _add_tokens(tokenizer, settings, parts.named, settings.extra(kind.extra))
        kind.frame(tokenizer, parts)
    except CheckpointError:
        raise
    except Exception as error:  # the library has no narrower one
        where = folder / SAVED if saved is not None else folder
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{where}: {kind.name} cannot be built: {reason}") from None
    return tokenizer


def _named(
    settings: TokenizerSettings, defaults: Mapping[str, str], wrap: Any
) -> dict[str, Token | None]:
    """Return special tokens by name, in the order in which missing ones are added to the vocabulary."""
    named: dict[str, Token | None] = {}
    for name in NAMED:
        if name in settings.values or name in defaults:
            value = settings.token(name) if name in settings.values else defaults[name]
            known = name in defaults and isinstance(value, str)
            named[name] = wrap(name, value) if known else value
    return {**named, **settings.other_named()}


def _as_it_is(_: str, token: Token) -> Token:
    return token


def _parts(
    folder: Path,
    kind: TokenizerClass,
    settings: TokenizerSettings,
    saved: Mapping[str, Any] | None,
    parsed: Tokenizer | None,
) -> Parts:
    named = _named(settings, kind.named, kind.wrap)
    if saved is None or parsed is None:
        vocabulary, merges = _older_files(folder, kind)
        return Parts(vocabulary, merges, None, None, settings, named)
    model = type(parsed.model).__name__
    if model != kind.model:
        raise CheckpointError(
            f"{folder / SAVED}: model.type = {model!r}, and {kind.name} reads {kind.model}; "
            f"set tokenizer_class to {AS_SAVED} in tokenizer_config.json if the file is right"
        )
    vocabulary = saved["model"]["vocab"]
    if kind.model == "Unigram":
        vocabulary = [(piece, score) for piece, score in vocabulary]
    merges = [
        (*merge.split(" "),) if isinstance(merge, str) else (*merge,)
        for merge in saved["model"].get("merges", [])
    ]
    frame = parsed.post_processor
    return Parts(vocabulary, merges, _charsmap(saved), frame, settings, named)


def _charsmap(saved: Mapping[str, Any]) -> bytes | None:
    """Return the first precompiled normalization, alone or in a sequence."""
    normalizer = saved.get("normalizer") or {}
    steps = normalizer["normalizers"] if normalizer.get("type") == "Sequence" else [normalizer]
    for step in steps:
        if step.get("type") == "Precompiled":
            return base64.b64decode(step["precompiled_charsmap"])
    return None


def _older_files(folder: Path, kind: TokenizerClass) -> tuple[Any, list[tuple[str, str]]]:
    """Read the vocabulary, and merges if any, of a directory without `tokenizer.json`."""
    other = [name for name in OTHER_FILES if (folder / name).is_file()]
    missing = [name for name in kind.files if not (folder / name).is_file()]
    if other:
        raise CheckpointError(f"{folder / other[0]} is not supported; {SAVE}")
    if not kind.files:
        raise CheckpointError(
            f"{folder}: {kind.name} needs {SAVED}, which is missing (SentencePiece models are not "
            f"read); {SAVE}"
        )
    if missing:
        raise CheckpointError(
            f"{folder} has neither {SAVED} nor {' with '.join(kind.files)}, which {kind.name} needs"
        )
    paths = [str(folder / name) for name in kind.files]
    try:
        if kind.model == "WordPiece":
            return models.WordPiece.read_file(*paths), []
        vocabulary, merges = models.BPE.read_file(*paths)
        return vocabulary, merges
    except Exception as error:  # the library has no narrower one
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{' with '.join(paths)} cannot be read: {reason}") from None


def _add_tokens(
    tokenizer: Tokenizer,
    settings: TokenizerSettings,
    named: Mapping[str, Token | None],
    extra: list[Token],
) -> None:
    """Add declared tokens in the order of their ids, then special tokens that are not among them."""
    present = tokenizer.get_added_tokens_decoder().values()
    known = {repr(token) for token in present}
    new: list[Token] = [
        token for _, token in sorted(settings.added.items()) if repr(token) not in known
    ]
    contents = {token.content for token in present} | {str(token) for token in new}
    special = [token for token in named.values() if token is not None]
    for token in [*special, *extra]:
        if str(token) not in contents and token not in new:
            new.append(token)
    spellings = {str(token) for token in special}
    tokenizer.add_tokens([_as_added(token, spellings) for token in new])


def _as_added(token: Token, special: set[str]) -> AddedToken:
    if isinstance(token, str):
        return AddedToken(token, special=True)
    if token.content in special:
        token.special = True  # and `normalized` stays as it is
    return token


# -- checks -------------------------------------------------------------------------------------------------------


def _check_side(path: Path, saved: Mapping[str, Any] | None, settings: TokenizerSettings) -> None:
    """Refuse truncation of the beginning; `truncation_side` wins over `tokenizer.json`."""
    truncation = (saved or {}).get("truncation")
    if isinstance(truncation, dict) and "truncation_side" not in settings.values:
        side = str(truncation.get("direction", "right")).lower()
        TOKENIZER_JSON.check(path, {"truncation.direction": side})


def _check_ids(settings: TokenizerSettings, tokenizer: Tokenizer) -> None:
    """Refuse a declared id that transformers does not follow: the model may have been trained with either."""
    for index, token in settings.added.items():
        found = tokenizer.token_to_id(token.content)
        if found != index:
            raise CheckpointError(
                f"{settings.sources[index]}: token {shown(token.content)} has id {index}, and {found} "
                "in transformers: give it the id that the model was trained with"
            )


def _check_template(path: Path, tokenizer: Tokenizer) -> None:
    """Refuse a tokenizer that fails on some text, or that puts no special tokens around texts."""
    try:
        found = [tokenizer.encode("a"), tokenizer.encode("a", "a"), tokenizer.encode(PROBE)]
    except Exception as error:  # the library has no narrower one
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{path}: the tokenizer fails on a text: {reason}") from None
    for encoding, texts in zip(found, (1, 2, 1), strict=True):
        if not any(encoding.special_tokens_mask):
            raise CheckpointError(
                f"{path}: post_processor puts no special tokens around a text; add a template with some"
            )
        if _texts(encoding) != texts:
            raise CheckpointError(f"{path}: the tokenizer makes no tokens of the text 'a'")


def _texts(encoding: Encoding) -> int:
    """Return how many texts have tokens."""
    pairs = zip(encoding.sequence_ids, encoding.special_tokens_mask, strict=True)
    return len({sequence for sequence, special in pairs if sequence is not None and not special})


# -- token types --------------------------------------------------------------------------------------------------


def _has_segments(
    kind: TokenizerClass | None, config: Mapping[str, Any], settings: TokenizerSettings
) -> bool:
    default = ["token_type_ids"] if kind is not None and kind.segments else []
    types = config.get("type_vocab_size", 2)
    one_type = isinstance(types, int) and types < 2
    return "token_type_ids" in settings.names("model_input_names", default) and not one_type


def _drop_segments(tokenizer: Tokenizer) -> None:
    """Give all tokens of a template type 0."""
    holder = Tokenizer(models.WordLevel({}, unk_token=""))
    holder.post_processor = tokenizer.post_processor
    document = json.loads(holder.to_str())
    document["post_processor"] = _without_types(document["post_processor"])
    tokenizer.post_processor = Tokenizer.from_str(json.dumps(document)).post_processor


def _without_types(part: Any) -> Any:
    """Return a post-processor's JSON with all token types 0."""
    if isinstance(part, list):
        return [_without_types(item) for item in part]
    if not isinstance(part, dict):
        return part
    if part.get("type") == "BertProcessing":
        return _bert_template(part)
    return {key: 0 if key == "type_id" else _without_types(value) for key, value in part.items()}


def _bert_template(part: Mapping[str, Any]) -> dict[str, Any]:
    (sep, sep_id), (cls, cls_id) = part["sep"], part["cls"]
    first: list[Any] = [_piece("SpecialToken", cls), _piece("Sequence", "A")]
    end = _piece("SpecialToken", sep)
    known = {
        token: {"id": token, "ids": [index], "tokens": [token]}
        for token, index in ((cls, cls_id), (sep, sep_id))
    }
    return {
        "type": "TemplateProcessing",
        "single": [*first, end],
        "pair": [*first, end, _piece("Sequence", "B"), end],
        "special_tokens": known,
    }


def _piece(kind: str, name: str) -> dict[str, Any]:
    return {kind: {"id": name, "type_id": 0}}

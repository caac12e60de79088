"""A checkpoint's tokenizer: the one that transformers' AutoTokenizer builds, as a `tokenizers.Tokenizer`.

transformers is imported where a tokenizer is read, since that takes a second. It runs no code of a checkpoint and
reaches no network. What only Python code of a tokenizer class does is refused. Where transformers is not installed,
`tokenizer.json` is read.
"""

import json
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenizers import Encoding, Tokenizer, models

from model.checkpoints.errors import INSTALL_TRAIN, CheckpointError
from model.checkpoints.json_files import read_object, read_optional_object
from model.checkpoints.settings_table import shown
from model.checkpoints.tokenizer_tables import TOKENIZER_CONFIG, TOKENIZER_JSON
from service.core.encode import load_tokenizer

SAVED = "tokenizer.json"
SAVE = "load it with transformers' AutoTokenizer and write it with save_pretrained to get tokenizer.json"
VOCABULARIES = (
    *(SAVED, "vocab.txt", "vocab.json", "tokenizer.model", "spm.model"),
    *("sentencepiece.bpe.model", "sentencepiece.model", "spiece.model"),
)
PROBE = "a \u2603\U0010fffe"  # a letter, and characters that no vocabulary has
# Repetitions, on which a regular expression that tries every way to split a text exceeds its library's limit.
REPETITIONS = tuple(f"{200 * letter}{end}" for letter in "aA1 .\u6587" for end in "b!\n")
COMPATIBLE = "ａﬁ²"  # characters that SentencePiece's usual normalization replaces
SWITCHES = {
    *("do_lower_case", "strip_accents", "tokenize_chinese_chars", "keep_accents"),
    *("split_by_punct", "add_prefix_space", "trim_offsets"),
}
# Settings that replace the settings of a BertNormalizer, and their names there.
OVERRIDES = {
    "do_lower_case": "lowercase",
    "strip_accents": "strip_accents",
    "tokenize_chinese_chars": "handle_chinese_chars",
}
MAX_LENGTH = 1_000_000  # tokens; files write "no limit" as a larger number


def has_tokenizer(folder: Path) -> bool:
    """Return whether a directory has a file that `read_tokenizer` takes a vocabulary from."""
    return any((folder / name).is_file() for name in VOCABULARIES)


def read_tokenizer(folder: Path, framed: bool = True) -> Tokenizer:
    """Read a directory's tokenizer, without truncation or padding.

    Token types of its template are those that the model gets: all 0 where `model_input_names` has no token_type_ids,
    or where the model has one type only. Raises CheckpointError, one line with file, setting and value.

    framed: refuse a template without special tokens
    """
    if find_spec("transformers") is None:
        tokenizer, inputs = _read_saved(folder)
    else:
        loaded = _load(folder)
        tokenizer, inputs = (
            Tokenizer.from_str(loaded.backend_tokenizer.to_str()),
            loaded.model_input_names,
        )
    tokenizer.no_truncation()
    tokenizer.no_padding()
    _check_ids(folder, tokenizer)
    path = folder / SAVED
    _check_template(path if path.is_file() else folder, tokenizer, framed)
    types = read_optional_object(folder / "config.json").get("type_vocab_size", 2)
    if "token_type_ids" not in inputs or (isinstance(types, int) and types < 2):
        _drop_segments(tokenizer)
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
    token: str | None = _load(folder).special_tokens_map.get(name)
    return token


def render_chat(folder: Path, query: str, document: str) -> str:
    """Return the text that a directory's chat template makes of a pair. Raises CheckpointError."""
    pair = [{"role": "query", "content": query}, {"role": "document", "content": document}]
    loaded = _load(folder)
    with _refusing(f"{folder}: the chat template cannot be rendered"):
        return str(loaded.apply_chat_template(pair, tokenize=False))


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


def read_model_max_length(folder: Path) -> int | None:
    """Return `model_max_length` in tokens, None for no limit. Raises CheckpointError for a value that is no number."""
    path = folder / TOKENIZER_CONFIG.file
    values = read_optional_object(path)
    name = next((name for name in ("model_max_length", "max_len") if name in values), None)
    value = None if name is None else values[name]
    if value is None:
        return None
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not (value > MAX_LENGTH or (value >= 1 and value == int(value))):
        raise CheckpointError(
            f"{path}: {name} = {shown(value)} is not a whole number of tokens; set a number"
        )
    return None if value > MAX_LENGTH else int(value)


# -- loading ----------------------------------------------------------------------------------------------------------


def _read_saved(folder: Path) -> tuple[Tokenizer, Sequence[str]]:
    """Return the tokenizer of `tokenizer.json` with the settings that transformers applies, and the model's inputs.

    An installation that serves ONNX graphs only has no transformers. Raises CheckpointError.
    """
    path = folder / SAVED
    if not path.is_file():
        raise CheckpointError(
            f"{path} is missing; other tokenizers need transformers: {INSTALL_TRAIN}"
        )
    _check_settings(folder)
    document = read_object(path)
    settings = read_optional_object(folder / TOKENIZER_CONFIG.file)
    normalizer = document.get("normalizer") or {}
    if normalizer.get("type") == "BertNormalizer":
        normalizer |= {ours: settings[name] for name, ours in OVERRIDES.items() if name in settings}
    inputs = settings.get("model_input_names") or ["token_type_ids"]
    return Tokenizer.from_str(json.dumps(document)), inputs


def _load(folder: Path) -> Any:
    """Return transformers' tokenizer of a directory. Raises CheckpointError."""
    if not has_tokenizer(folder):
        raise CheckpointError(
            f"{folder} has neither {SAVED} nor vocab.txt, vocab.json or a SentencePiece model"
        )
    for path in (folder / name for name in VOCABULARIES):
        if path.is_file() and path.stat().st_size == 0:
            raise CheckpointError(f"{path} is empty; copy the file of the model again")
    _check_settings(folder)
    config = read_optional_object(folder / "config.json")
    settings = read_optional_object(folder / TOKENIZER_CONFIG.file)
    kind = settings.get("tokenizer_class") or config.get("tokenizer_class")
    kind = kind or f"the tokenizer of model_type {shown(config.get('model_type'))}"
    with _quiet():
        from transformers import AutoTokenizer

        with _refusing(f"{folder}: {kind} cannot be read"):
            loaded = AutoTokenizer.from_pretrained(
                str(folder),
                config=_config(folder, config),
                use_fast=True,
                local_files_only=True,
                trust_remote_code=False,
            )
    if not loaded.is_fast:
        raise CheckpointError(f"{folder}: {kind} is Python code, which cannot be served; {SAVE}")
    _check_normalizer(folder, kind, loaded)
    path = folder / SAVED
    if path.is_file():
        saved, model = read_object(path)["model"].get("type"), type(loaded.backend_tokenizer.model)
        if saved and saved != model.__name__:
            raise CheckpointError(
                f"{path}: model.type = {saved!r}, and {kind} reads {model.__name__}; "
                "set tokenizer_class to PreTrainedTokenizerFast in tokenizer_config.json if the file is right"
            )
    return loaded


def _config(folder: Path, config: Mapping[str, Any]) -> Any:
    """Return a configuration with the tokenizer's class where transformers does not know the model type; else None."""
    from transformers import PretrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    if config.get("model_type") in CONFIG_MAPPING_NAMES:
        return None
    declared = config.get("tokenizer_class")
    if declared is None and "model_type" not in config:
        declared = "BertTokenizer"
    return PretrainedConfig(tokenizer_class=declared) if declared else None


@contextmanager
def _refusing(what: str) -> Iterator[None]:
    """Raise a CheckpointError for any error, including a panic of the library's Rust code."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:
        raise CheckpointError(f"{what}: {' '.join(str(error).split())}") from None


@contextmanager
def _quiet() -> Iterator[None]:
    """Suppress what transformers logs, since our errors name what is wrong."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(before)


def _check_settings(folder: Path) -> None:
    """Raise CheckpointError for a setting that is refused, and for a `tokenizer.json` that cannot be read."""
    path = folder / TOKENIZER_CONFIG.file
    values = read_optional_object(path)
    mapped = values.get("auto_map")
    if isinstance(mapped, dict):  # code for other parts of a model is of no interest here
        values = {**values, "auto_map": mapped.get("AutoTokenizer") or {}}
    TOKENIZER_CONFIG.check(path, values)
    for name in SWITCHES & values.keys():
        if not isinstance(values[name], bool | None):
            raise CheckpointError(f"{path}: {name} = {shown(values[name])} is not true or false")
    names = values.get("model_input_names")
    if names is not None and not (
        isinstance(names, list) and all(isinstance(name, str) for name in names)
    ):
        raise CheckpointError(f"{path}: model_input_names = {shown(names)} is not a list of names")
    saved = folder / SAVED
    if saved.is_file():
        truncation = read_object(saved).get("truncation")
        if isinstance(truncation, dict) and "truncation_side" not in values:
            side = str(truncation.get("direction", "right")).lower()
            TOKENIZER_JSON.check(saved, {"truncation.direction": side})
        try:
            load_tokenizer(saved)
        except ValueError as error:  # which names the file
            raise CheckpointError(" ".join(str(error).split())) from None


# -- checks -----------------------------------------------------------------------------------------------------------


def _check_ids(folder: Path, tokenizer: Tokenizer) -> None:
    """Refuse a declared id that transformers does not follow: the model may have been trained with either."""
    for path, index, token in _declared(folder):
        found = tokenizer.token_to_id(token)
        if found != index:
            raise CheckpointError(
                f"{path}: token {shown(token)} has id {index}, and {found} "
                "in transformers: give it the id that the model was trained with"
            )


def _declared(folder: Path) -> Iterator[tuple[Path, int, str]]:
    """Yield each added token with the id and the file that declares it; `added_tokens_decoder` replaces all others."""
    path = folder / TOKENIZER_CONFIG.file
    decoder = read_optional_object(path).get("added_tokens_decoder")
    if isinstance(decoder, dict):
        for key, token in decoder.items():
            if "content" not in token:
                raise CheckpointError(
                    f"{path}: added_tokens_decoder[{key!r}] = {shown(token)} has no content"
                )
            yield path, int(key), token["content"]
        return
    path = folder / "added_tokens.json"
    for token, index in read_optional_object(path).items():
        yield path, index, token
    path = folder / SAVED
    if path.is_file():
        for entry in read_object(path).get("added_tokens", []):
            yield path, entry["id"], entry["content"]


def _check_normalizer(folder: Path, kind: str, loaded: Any) -> None:
    """Refuse a class of transformers 5 that ignores the normalization of a SentencePiece model."""
    path = next((path for name in VOCABULARIES if (path := folder / name).is_file()), folder)
    if path.suffix != ".model":
        return
    import sentencepiece

    normalizer = loaded.backend_tokenizer.normalizer
    ours = normalizer.normalize_str(COMPATIBLE) if normalizer else COMPATIBLE
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(path)).normalize(COMPATIBLE)
    if COMPATIBLE in ours and COMPATIBLE not in theirs:
        raise CheckpointError(
            f"{path}: {kind} of transformers 5 does not normalize texts as this model does; "
            "write tokenizer.json with transformers 4, and set tokenizer_class to PreTrainedTokenizerFast"
        )


def _check_template(path: Path, tokenizer: Tokenizer, framed: bool) -> None:
    """Refuse a tokenizer that fails on some text, or that puts no special tokens around texts."""
    with _refusing(f"{path}: the tokenizer fails on a text"):
        found = [tokenizer.encode("a"), tokenizer.encode("a", "a"), tokenizer.encode(PROBE)]
        tokenizer.encode_batch([*REPETITIONS])
    for encoding, texts in zip(found, (1, 2, 1), strict=True):
        if framed and not any(encoding.special_tokens_mask):
            raise CheckpointError(
                f"{path}: post_processor puts no special tokens around a text; add a template with some"
            )
        # transformers puts the text None into the template of a class whose token is null
        if "None" in encoding.tokens:
            raise CheckpointError(
                f"{path}: the template has no token at one end; give cls_token and sep_token a token"
            )
        if _texts(encoding) != texts:
            raise CheckpointError(f"{path}: the tokenizer makes no tokens of the text 'a'")


def _texts(encoding: Encoding) -> int:
    """Return how many texts have tokens."""
    pairs = zip(encoding.sequence_ids, encoding.special_tokens_mask, strict=True)
    return len({sequence for sequence, special in pairs if sequence is not None and not special})


# -- token types --------------------------------------------------------------------------------------------------


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

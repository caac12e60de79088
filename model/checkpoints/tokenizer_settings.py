"""The settings and added tokens of a checkpoint's tokenizer, from all files that hold some.

They are merged in the order of transformers 5: `tokenizer_config.json`; without its `added_tokens_decoder`, also
`special_tokens_map.json`, `added_tokens.json` and the added tokens of `tokenizer.json`.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tokenizers import AddedToken

from model.checkpoints.hub_names import CheckpointError
from model.checkpoints.json_files import read_optional_object
from model.checkpoints.settings_table import shown
from model.checkpoints.tokenizer_classes import Token
from model.checkpoints.tokenizer_tables import SPECIAL, SPECIAL_TOKENS_MAP, TOKENIZER_CONFIG

NAMED = tuple(setting.name for setting in SPECIAL)  # the order in which missing ones are added
FLAGS = ("single_word", "lstrip", "rstrip", "normalized", "special")
MAX_LENGTH = 1_000_000  # tokens; files write "no limit" as a larger number


def make_token(path: Path, name: str, value: Mapping[str, Any], **fixed: bool) -> AddedToken:
    """Return the token that an object describes. Raises CheckpointError for a field of another type."""
    content = value.get("content")
    flags = {flag: value[flag] for flag in FLAGS if flag in value} | fixed
    if not isinstance(content, str) or not all(isinstance(flag, bool) for flag in flags.values()):
        raise CheckpointError(
            f"{path}: {name} = {shown(dict(value))} is not a token: "
            f"content must be text, and {', '.join(FLAGS)} true or false"
        )
    return AddedToken(content, **flags)


@dataclass
class TokenizerSettings:
    """The settings of one tokenizer.

    values: by name, of all files; tokens that files write as objects are AddedToken
    paths: the file that each value is from
    added: declared added tokens by id
    sources: the file that declares each of them
    """

    folder: Path
    values: dict[str, Any]
    paths: dict[str, Path]
    added: dict[int, AddedToken] = field(default_factory=dict)
    sources: dict[int, Path] = field(default_factory=dict)

    # -- typed access: each raises CheckpointError for a value of another type ------------------------------------

    def refuse(self, name: str, expected: str) -> CheckpointError:
        return CheckpointError(
            f"{self.paths[name]}: {name} = {shown(self.values[name])} is not {expected}"
        )

    def boolean(self, name: str, default: bool) -> bool:
        value = self.values.get(name, default)
        if not isinstance(value, bool):
            raise self.refuse(name, "true or false")
        return value

    def optional_boolean(self, name: str) -> bool | None:
        return None if self.values.get(name) is None else self.boolean(name, False)

    def integer(self, name: str, default: int) -> int:
        value = self.values.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise self.refuse(name, "a whole number")
        return value

    def token(self, name: str) -> Token | None:
        value = self.values[name]
        if value is not None and not isinstance(value, str | AddedToken):
            raise self.refuse(name, 'text, or an object with "__type": "AddedToken"')
        return value

    def names(self, name: str, default: list[str]) -> list[str]:
        value = self.values.get(name, default)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise self.refuse(name, "a list of names")
        return value

    # -- special tokens -------------------------------------------------------------------------------------------

    def other_named(self) -> dict[str, Token]:
        """Return the special tokens with names of their own, by name."""
        marked = {
            name: value
            for name, value in self.values.items()
            if name not in NAMED and name.endswith("_token") and isinstance(value, str | AddedToken)
        }
        return {**marked, **self.values.get("model_specific_special_tokens", {})}

    def extra(self, default: tuple[str, ...]) -> list[Token]:
        """Return the special tokens without names; `default` if no file has some."""
        name = "extra_special_tokens"
        if name not in self.values and "additional_special_tokens" in self.values:
            name = "additional_special_tokens"
        value = self.values.get(name, [*default])
        if value is None:
            return [*default] if name == "additional_special_tokens" else []
        if not isinstance(value, list) or not all(
            isinstance(item, str | AddedToken) for item in value
        ):
            raise self.refuse(name, 'a list of texts, or of objects with "__type": "AddedToken"')
        return value


def read_settings(folder: Path, saved: Mapping[str, Any] | None) -> TokenizerSettings:
    """Read and merge the settings in a directory; `saved` is the content of its `tokenizer.json`, if there is one.

    Raises CheckpointError naming the file and the setting that is refused or has another type.
    """
    path = folder / TOKENIZER_CONFIG.file
    values = read_optional_object(path)
    _check(path, values)
    settings = TokenizerSettings(folder, values, dict.fromkeys(values, path))
    if values.get("additional_special_tokens") and not values.get("extra_special_tokens"):
        values["extra_special_tokens"] = values.pop("additional_special_tokens")
        settings.paths["extra_special_tokens"] = path
    specific = {
        name: values.pop(name)
        for name in [*values]
        if name not in NAMED and name.endswith("_token") and isinstance(values[name], str)
    }
    if isinstance(values.get("extra_special_tokens"), dict):
        specific |= values.pop("extra_special_tokens")
    if specific:
        _put(settings, "model_specific_special_tokens", specific, path)
    if "added_tokens_decoder" in values:
        _read_decoder(settings, path, values["added_tokens_decoder"])
    else:
        _read_map(settings, folder / SPECIAL_TOKENS_MAP.file)
        _read_added(settings, folder / "added_tokens.json")
        _read_saved(settings, folder / "tokenizer.json", saved)
    _convert(settings)
    return settings


def _put(settings: TokenizerSettings, name: str, value: Any, path: Path) -> None:
    settings.values[name], settings.paths[name] = value, path


def _check(path: Path, values: Mapping[str, Any]) -> None:
    mapped = values.get("auto_map")
    if isinstance(mapped, dict):  # code for other parts of a model is of no interest here
        values = {**values, "auto_map": mapped.get("AutoTokenizer") or {}}
    TOKENIZER_CONFIG.check(path, values)


def _declare(settings: TokenizerSettings, path: Path, index: Any, token: AddedToken) -> None:
    if not isinstance(index, int) or isinstance(index, bool) or index < 0:
        raise CheckpointError(f"{path}: {shown(index)}, the id of {token.content!r}, is not an id")
    settings.added[index], settings.sources[index] = token, path


def _read_decoder(settings: TokenizerSettings, path: Path, decoder: Any) -> None:
    """Read `added_tokens_decoder`: objects by their ids."""
    name = "added_tokens_decoder"
    if not isinstance(decoder, dict):
        raise settings.refuse(name, "an object of tokens by their ids")
    for key, value in decoder.items():
        if not (key.isdecimal() and isinstance(value, dict)):
            raise CheckpointError(
                f"{path}: {name}: {shown({key: value})} is not an id with an object"
            )
        _declare(settings, path, int(key), make_token(path, f"{name}[{shown(key)}]", value))


def _read_map(settings: TokenizerSettings, path: Path) -> None:
    """Merge `special_tokens_map.json`, whose values replace the values of `tokenizer_config.json`."""
    lists = ("extra_special_tokens", "additional_special_tokens")
    for name, value in read_optional_object(path).items():
        if not name.endswith("_token") and name not in lists:
            raise CheckpointError(f"{path}: {shown(name)} is not a special token; remove it")
        if name == "extra_special_tokens":
            merged = _joined(settings, path, value) if isinstance(value, list) else value
        else:
            is_token = isinstance(value, dict)
            merged = make_token(path, name, value, special=True) if is_token else value
        _put(settings, name, merged, path)
    specific = settings.values.get("extra_special_tokens")
    if isinstance(specific, dict):
        known = settings.values.get("model_specific_special_tokens") or {}
        if not isinstance(known, dict):
            raise settings.refuse("model_specific_special_tokens", "an object of named tokens")
        del settings.values["extra_special_tokens"]
        _put(settings, "model_specific_special_tokens", {**known, **specific}, path)


def _joined(settings: TokenizerSettings, path: Path, more: list[Any]) -> list[Any]:
    known = settings.values.get("extra_special_tokens") or []
    if not isinstance(known, list):
        raise settings.refuse("extra_special_tokens", "a list of tokens")
    joined = [*known]
    for item in more:
        is_token = isinstance(item, dict)
        token = make_token(path, "extra_special_tokens", item, special=True) if is_token else item
        if token not in joined:
            joined.append(token)
    return joined


def _read_added(settings: TokenizerSettings, path: Path) -> None:
    """Read `added_tokens.json`: ids by token; special are those that another file names as such."""
    values = settings.values
    special = {str(values[name]) for name in NAMED if values.get(name)}
    extra = values.get("extra_special_tokens") or []
    special |= {str(token) for token in extra} if isinstance(extra, list) else set()
    for content, index in read_optional_object(path).items():
        is_special = content in special
        token = AddedToken(content, normalized=not is_special, special=is_special)
        _declare(settings, path, index, token)


def _read_saved(settings: TokenizerSettings, path: Path, saved: Mapping[str, Any] | None) -> None:
    """Read the added tokens of `tokenizer.json`."""
    entries = (saved or {}).get("added_tokens", [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise CheckpointError(f"{path}: added_tokens = {shown(entries)} is not a list of objects")
    for entry in entries:
        _declare(settings, path, entry.get("id"), make_token(path, "added_tokens", entry))


def _convert(settings: TokenizerSettings) -> None:
    """Make tokens of the objects that are marked as such, and give named tokens the flags that they are added with."""
    values = settings.values
    flagged = {token.content: token for token in settings.added.values()}
    for name in [*values]:
        path = settings.paths[name]
        if name == "model_specific_special_tokens":
            values[name] = dict(_named_tokens(settings, path, values[name]))
        elif name.endswith("_token") or name.endswith("_special_tokens"):
            values[name] = _marked(path, name, values[name])
        if name in NAMED and values[name] is not None:
            values[name] = flagged.get(str(values[name]), values[name])


def _marked(path: Path, name: str, value: Any) -> Any:
    if isinstance(value, list):
        return [_marked(path, name, item) for item in value]
    if isinstance(value, dict) and value.get("__type") == "AddedToken":
        return make_token(path, name, value)
    return value


def _named_tokens(
    settings: TokenizerSettings, path: Path, value: Any
) -> Iterator[tuple[str, Token]]:
    name = "model_specific_special_tokens"
    if not isinstance(value, dict):
        raise settings.refuse(name, "an object of named tokens")
    for key, given in value.items():
        token = _marked(path, key, given)
        if not isinstance(token, str | AddedToken) or key in NAMED:
            raise CheckpointError(
                f"{path}: {shown(key)} = {shown(given)} is not a special token with a name of its own"
            )
        yield key, token


def read_model_max_length(folder: Path) -> int | None:
    """Return `model_max_length` in tokens, None for no limit. Raises CheckpointError for a value that is no number."""
    path = folder / TOKENIZER_CONFIG.file
    values = read_optional_object(path)
    name = next((name for name in ("model_max_length", "max_len") if name in values), None)
    value = None if name is None else values[name]
    if value is None:
        return None
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)
        or not (value > MAX_LENGTH or (math.isfinite(value) and value == int(value) >= 1))
    ):
        raise CheckpointError(
            f"{path}: {name} = {shown(value)} is not a whole number of tokens; set a number"
        )
    return None if value > MAX_LENGTH else int(value)

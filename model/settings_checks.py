"""Checks of a script's settings: types, counts and names, each with an error that names the setting."""

import dataclasses
from collections.abc import Iterable
from typing import Any, Literal, get_args, get_origin

from pydantic import TypeAdapter, ValidationError


def check_choice(name: str, value: str, known: Iterable[str]) -> None:
    """Raises ValueError for a setting that is none of the known ones."""
    if value not in known:
        raise ValueError(f"{name}: {value!r} is none of {', '.join(known)}")


def check_types(settings: Any) -> None:
    """Raises ValueError for a setting of a dataclass that is not of its field's type."""
    for field in dataclasses.fields(settings):
        name, value = field.name, getattr(settings, field.name)
        if get_origin(field.type) is Literal:
            check_choice(name, value, get_args(field.type))
            continue
        try:
            TypeAdapter(field.type).validate_python(value, strict=True)
        except ValidationError as error:
            fault = error.errors()[0]
            raise ValueError(f"{name}: {fault['msg']}, not {fault['input']!r}") from None


def check_counts(settings: Any, *names: str) -> None:
    """Raises ValueError for one of these settings that is below 1."""
    for name in names:
        if getattr(settings, name) < 1:
            raise ValueError(f"{name}: {getattr(settings, name)} is not 1 or more")

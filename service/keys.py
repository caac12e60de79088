"""API keys by name, stored as hashes. `python -m service.keys NAME` makes one.

A key that this module makes has 256 random bits, so an attacker can neither guess it nor find it from its hash. One
plain SHA-256 is therefore enough. Slow and salted hashes protect passwords, which people choose, and would delay every
request.
"""

import argparse
import hashlib
import re
import secrets
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, TypeAdapter

from service.core.program_name import program_name

Permission = Literal["inference", "metrics", "admin"]
Class = Literal["interactive", "bulk"]  # of requests, by priority

CLASSES: tuple[Class, ...] = get_args(Class)  # the index of a class is its priority
PRIORITIES: Mapping[str, int] = {name: priority for priority, name in enumerate(CLASSES)}
ONLY = "default"  # the name of a key that is set without a name
NAME = r"^[A-Za-z0-9_-]{1,64}$"  # a bare key in TOML
PLAIN = r"^[!-~]{16,}$"  # valid in a header, and too long to guess

KeyName = Annotated[str, StringConstraints(pattern=NAME)]


class Key(BaseModel):
    """The record of a key: its hash, its permissions, the priority class of its requests, and its rate limits.

    models: names of the models that the key may use, in which `*` stands for any letters; empty for all
    requests_per_minute, tokens_per_minute: None for no limit
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    may: tuple[Permission, ...] = Field(("inference",), min_length=1)
    priority: Class = "interactive"
    models: tuple[Annotated[str, StringConstraints(min_length=1)], ...] = ()
    requests_per_minute: int | None = Field(None, ge=1)
    tokens_per_minute: int | None = Field(None, ge=1)


Keys = Mapping[KeyName, Key]
KEYS = TypeAdapter(dict[KeyName, Key])


class KeyFile(BaseModel):
    """A file of keys, which contains only a table `[keys.NAME]` for each key."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    keys: dict[KeyName, Key] = Field(min_length=1)


def read_keys(path: Path) -> Keys:
    """Read the keys in a file. Raises OSError, and ValueError for invalid contents."""
    return KeyFile.model_validate(tomllib.loads(path.read_text(encoding="utf-8-sig"))).keys


def dump_keys(keys: Keys) -> bytes:
    """Return keys as JSON, to send them to another process."""
    return KEYS.dump_json(dict(keys))


def load_keys(text: bytes) -> Keys:
    return KEYS.validate_json(text)


def join_keys(*sources: Keys) -> Keys:
    """Join the keys of all sources. Raises ValueError for a name that occurs twice, or a key with two names."""
    joined: dict[str, Key] = {}
    for name, key in (item for source in sources for item in source.items()):
        if name in joined:
            raise ValueError(f"there are two keys named {name}")
        same = next((other for other in joined if joined[other].sha256 == key.sha256), None)
        if same is not None:
            raise ValueError(f"{same} and {name} are the same key")
        joined[name] = key
    return joined


def digest(key: str) -> bytes:
    """Return the SHA-256 of a key as it is encoded in a header."""
    return hashlib.sha256(key.encode("latin-1")).digest()


def make_key() -> str:
    return f"quartet_{secrets.token_urlsafe(32)}"


def record(name: str, key: str) -> str:
    """Return the lines of a key in a file of keys."""
    return f'[keys.{name}]\nsha256 = "{digest(key).hex()}"\n'


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    program = program_name("service.keys")
    description = (
        "Make an API key: print the key on standard error, once, and its line for the service's file of keys: "
        f"{program} NAME >> keys.toml. The service reads the file with --api-keys keys.toml."
    )
    parser = argparse.ArgumentParser(program, description=description)
    parser.add_argument("name", metavar="NAME", help="name of the key's owner, which the log shows")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Print a new key on standard error, only this once, and its record on standard output."""
    name = parser().parse_args(argv).name
    if not re.fullmatch(NAME, name):
        parser().error("NAME: letters, digits, '_' and '-', at most 64")
    key = make_key()
    print(f"The key of {name}, shown only now:\n\n    {key}\n", file=sys.stderr)
    print(record(name, key))


if __name__ == "__main__":
    main()

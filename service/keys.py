"""Who may ask: keys by name, of which only hashes are kept. `python -m service.keys NAME` makes one.

A key that was made here holds 256 random bits. Nobody guesses it, and nobody finds it from its hash, so one plain
SHA-256 is right; slow and salted hashes are for passwords, which people choose, and would cost every request dearly.
"""

import argparse
import hashlib
import re
import secrets
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, TypeAdapter

from service.priority import CLASSES, Class

Permission = Literal["inference", "metrics", "admin"]

PRIORITIES: Mapping[str, int] = {name: priority for priority, name in enumerate(CLASSES)}
ONLY = "default"  # the name of a key that is given without one
NAME = r"^[A-Za-z0-9_-]{1,64}$"  # what TOML takes without quotes
PLAIN = r"^[!-~]{16,}$"  # what a header can carry, and is long enough not to be guessed

KeyName = Annotated[str, StringConstraints(pattern=NAME)]


class Key(BaseModel):
    """What is kept of a key: its hash, and what whoever has it may do, how soon and how much in a minute."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    may: tuple[Permission, ...] = Field(("inference",), min_length=1)
    priority: Class = "interactive"
    requests_per_minute: int | None = Field(None, ge=1)
    tokens_per_minute: int | None = Field(None, ge=1)


Keys = Mapping[KeyName, Key]
KEYS = TypeAdapter(dict[KeyName, Key])


class KeyFile(BaseModel):
    """A file of keys: a table `[keys.NAME]` for each, and nothing else."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    keys: dict[KeyName, Key] = Field(min_length=1)


def read_keys(path: Path) -> Keys:
    """The keys in a file. Raises OSError, and ValueError for what is no file of keys."""
    return KeyFile.model_validate(tomllib.loads(path.read_text(encoding="utf-8"))).keys


def dump_keys(keys: Keys) -> bytes:
    """Keys as JSON, to send to another process."""
    return KEYS.dump_json(dict(keys))


def load_keys(text: bytes) -> Keys:
    return KEYS.validate_json(text)


def join_keys(*sources: Keys) -> Keys:
    """All keys in one. Raises ValueError for a name that is there twice, or a key under two names."""
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
    """The SHA-256 of a key as a header carries it."""
    return hashlib.sha256(key.encode("latin-1")).digest()


def make_key() -> str:
    return f"quartet_{secrets.token_urlsafe(32)}"


def record(name: str, key: str) -> str:
    """What a file is told of a key."""
    return f'[keys.{name}]\nsha256 = "{digest(key).hex()}"\n'


def main(argv: Sequence[str] | None = None) -> None:
    """Print a new key once, on standard error, and its record, on standard output."""
    parser = argparse.ArgumentParser(
        "python -m service.keys",
        description="Make a key: python -m service.keys NAME >> keys.toml",
    )
    parser.add_argument("name", metavar="NAME", help="who is to have it")
    name = parser.parse_args(argv).name
    if not re.fullmatch(NAME, name):
        parser.error("NAME: letters, digits, '_' and '-', at most 64")
    key = make_key()
    print(f"The key of {name}, shown only now:\n\n    {key}\n", file=sys.stderr)
    print(record(name, key))


if __name__ == "__main__":
    main()

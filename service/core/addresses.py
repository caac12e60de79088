"""Addresses of files in place of their paths. Imports nothing slow."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

SCHEME = re.compile(r"(hf|s3|gs|https?):/+(?=[^/])")

# The version of each file, and the time of its last change in nanoseconds, or 0 where the store has none.
Listing = Mapping[str, tuple[str, int]]


class RemoteError(OSError):
    """An address that cannot be read or written; the message contains it and the reason."""


def address(path: Path | str) -> str | None:
    """Return the address that a path is, also a `Path`, which loses a slash of it; None for a local path."""
    match = SCHEME.match(str(path))
    return match and f"{match[1]}://{str(path)[match.end() :].rstrip('/')}"


def full_name(path: Path | str) -> str:
    """Return an address as it is written, or an absolute local path."""
    return address(path) or str(Path(path).absolute())


@contextmanager
def readable(url: str) -> Iterator[None]:
    """Raise RemoteError for the errors of libraries, but FileNotFoundError for an absent file."""
    try:
        yield
    except (FileNotFoundError, ModuleNotFoundError, RemoteError):
        raise
    except Exception as error:  # the many errors of three libraries mean one thing here
        reason = " ".join(str(error).split()) or type(error).__name__
        raise RemoteError(f"{url}: {reason}") from None

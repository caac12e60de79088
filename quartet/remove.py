"""`quartet remove NAME ...`: remove models from the cache."""

import argparse
import sys
from pathlib import Path

from quartet import cache
from service.core import bundle_cache
from service.core.addresses import address


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = argparse.ArgumentParser(
        "quartet remove",
        description="Remove exported models from the cache. A model is exported again when it is served.",
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="as quartet list prints it, or without the commit"
    )
    parser.add_argument("--all", action="store_true", help="remove all models")
    return parser


def main() -> int:
    """Remove the named models, all of their commits. Returns 2 for a name that the cache does not have."""
    arguments = parser().parse_args()
    if not arguments.names and not arguments.all:
        parser().error("name a model, or give --all")
    unwanted = bundle_cache.entries() if arguments.all else []
    for name in arguments.names:
        found = [entry for entry in bundle_cache.entries() if is_named(entry, name)]
        if not found:
            print(
                f"quartet: {name} is not in the cache; quartet list lists the models",
                file=sys.stderr,
            )
            return 2
        unwanted += found
    for entry in {entry.source.key: entry for entry in unwanted}.values():
        size = entry.size / 1e6
        cache.remove([entry])
        print(f"removed {entry.source.name}, {size:.1f} MB")
    return 0


def is_named(entry: bundle_cache.Entry, name: str) -> bool:
    if address(name):
        return entry.source.name == address(name)
    model, _, commit = name.partition("@")
    return entry.source.name in (
        model,
        str(Path(model).resolve()),
    ) and entry.source.commit.startswith(commit)

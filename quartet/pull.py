"""`quartet pull NAME [--to FILE.tar]`: export a model into the cache, or into a file for a machine without network."""

import argparse
import sys
from pathlib import Path

from quartet import cache

DESCRIPTION = """\
Export a model into the cache, so that quartet serve NAME starts without a network; or into a file for another machine.
"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = argparse.ArgumentParser("quartet pull", description=DESCRIPTION)
    parser.add_argument(
        "name",
        metavar="NAME",
        help="a name on the hub, NAME@REVISION, a checkpoint or an ONNX graph",
    )
    parser.add_argument(
        "--to",
        type=Path,
        metavar="FILE.tar",
        help="also write the bundle to this file, which quartet serve FILE.tar takes",
    )
    return parser


def main() -> int:
    """Export, and print what the cache or the file has. Returns the exit status."""
    arguments = parser().parse_args()
    try:
        entry = cache.find(arguments.name)
        if arguments.to is not None:
            cache.pack(entry, arguments.to)
    except (cache.SourceError, OSError) as error:
        print(f"quartet: {error}", file=sys.stderr)
        return 1
    commit = f" at commit {entry.source.commit}" if entry.source.commit else ""
    print(f"{arguments.to or entry.bundle}: {arguments.name}{commit}, {entry.size / 1e6:.1f} MB")
    return 0

"""`quartet serve [NAME ...]`: export what is no bundle, then serve as `quartet-serve` does, with the same flags."""

import argparse
import os
import sys

from service.processes.child_process import child_python

DESCRIPTION = """\
Serve models over HTTP. A model that is no bundle is exported once into the cache (quartet list), which may take a
minute; later starts take it from there. Each flag is a setting, and may also be a variable or a line of a file.
"""
NAME = (
    "what to serve, the default model first: a name on the hub, NAME@REVISION, a directory of a checkpoint, an ONNX "
    "graph or a bundle, the name of a bundle in bundles/, or a file of quartet pull --to; without it all in bundles/ "
    "but quartet-starter, else the model that Quartet comes with. Checkpoints need the extra train, ONNX graphs do not"
)
SWITCHES = frozenset({"--version", "--check-config"})  # flags without a value


def parser() -> argparse.ArgumentParser:
    """Return the parser of the service, whose bundles may be other models here."""
    from service.__main__ import parser

    return parser(DESCRIPTION, ("NAME", NAME))


def main() -> int:
    """Become the service, which starts before any thread that could take its stop signals. Returns the exit status."""
    from quartet.cache import SourceError  # here, because --help needs no bundles and no numpy

    try:
        arguments = with_bundles(sys.argv[1:])
    except SourceError as error:
        print(f"quartet: {error}", file=sys.stderr)
        return 3
    program = f"import sys; sys.argv[0] = {sys.argv[0]!r}; from service.command import main; main()"
    command = [*child_python(), "-c", program, *arguments]
    sys.stdout.flush()
    return os.execv(command[0], command)


def with_bundles(arguments: list[str]) -> list[str]:
    """Return the arguments with a bundle's directory in place of each model. Raises SourceError."""
    from quartet.cache import resolve

    resolved = []
    takes_value = False
    for argument in arguments:
        is_flag = argument.startswith("-")
        resolved.append(argument if is_flag or takes_value else str(resolve(argument)))
        takes_value = is_flag and "=" not in argument and argument not in SWITCHES
    return resolved

"""The command line of `model.evaluate`, apart from it because it imports nothing slow."""

import argparse

from service.core.program_name import program_name

STRIDE = 64


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = argparse.ArgumentParser(
        program_name("model.evaluate"), description="Evaluate the heads of a checkpoint."
    )
    parser.add_argument("checkpoint", help="a directory or a hub name")
    parser.add_argument(
        "--eval",
        action="append",
        required=True,
        metavar="HEAD=FILE",
        help="a head, and a file with its labelled rows; once for each head",
    )
    parser.add_argument("--max-length", type=int, default=512, help="tokens of a window")
    parser.add_argument("--stride", type=int, default=STRIDE, help="tokens that windows share")
    parser.add_argument(
        "--limit", type=int, default=0, help="rows of each file, evenly spaced; 0: all"
    )
    return parser

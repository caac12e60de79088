"""The command line of `model.evaluate`, apart from it because it imports nothing slow."""

import argparse

from service.core.program_name import program_name

STRIDE = 64


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = argparse.ArgumentParser(
        program_name("model.evaluate"),
        description="Print the metrics of a checkpoint's heads on labeled files, in the columns of quartet train.",
    )
    parser.add_argument("checkpoint", help="a directory, or a name on the hub")
    parser.add_argument(
        "--eval",
        action="append",
        required=True,
        metavar="HEAD=FILE",
        help="a head, and a file with its labeled rows; once for each head",
    )
    parser.add_argument(
        "--max-length", type=int, default=512, help="tokens of a window; default: 512"
    )
    parser.add_argument(
        "--stride",
        type=int,
        default=STRIDE,
        help="tokens that windows of a long text share; default: %(default)s",
    )
    parser.add_argument(
        "--limit",
        type=int,
        default=0,
        help="evaluate this many rows of each file, evenly spaced; default: all",
    )
    return parser

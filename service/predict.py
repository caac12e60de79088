"""Predict files: `python -m service.predict BUNDLE INPUT OUTPUT [--head NAME] [--options JSON]`.

The rows of INPUT become requests to the service in this process, without a network: results are the served ones.
INPUT is a file, a directory or a pattern with `*`: tables and JSON files that training reads, Parquet and Arrow files,
with `text` and `text_pair`, or `question` and `context`, under any of their recognized names, or .txt with a text a
line. OUTPUT is a file: .jsonl or .parquet (each row with its `result`), or .csv for classification (each row with
`predicted_label` and `score`); or a directory, which gets a file for each 4,096 rows. A row that cannot be predicted
has an `error` instead. A run that was killed and is started again computes only what is missing. All three may be at
addresses, such as s3://bucket/new/.
"""

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from service.core.addresses import address
from service.core.bundle import BundleError
from service.core.data_files import sources
from service.core.data_files.text_files import DataError
from service.core.program_name import program_name
from service.observability import logs

FORMATS = ("jsonl", "csv", "parquet")


def main(argv: Sequence[str] | None = None) -> int:
    """Predict a file. Returns 0; 1 where rows failed; 2 for wrong arguments and files; 3 for a bad bundle."""
    arguments = parse_arguments(argv)
    logs.configure("warning", "auto", sys.stderr)
    try:
        count, failed = asyncio.run(predict(arguments))
    except BundleError as error:
        print(f"predict: {error}", file=sys.stderr)
        return 3
    except (DataError, OSError) as error:
        print(f"predict: {error}", file=sys.stderr)
        return 2
    print(
        f"{address(arguments.output) or arguments.output}: {count:,} rows, {failed:,} with an error"
    )
    return 1 if failed else 0


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = argparse.ArgumentParser(
        program_name("service.predict"),
        description="Write a model's predictions for each row of a file. The exit status is 1 if some rows failed.",
    )
    parser.add_argument(
        "bundle", type=Path, help="a bundle's directory or address. Example: bundles/questions"
    )
    parser.add_argument(
        "input",
        help="a file that training reads, .parquet, .arrow, or .txt with a text a line; a directory of them, or a"
        " pattern with *; or an address of these. Example: new.csv",
    )
    parser.add_argument(
        "output",
        type=Path,
        help="a file: .jsonl, .csv, .parquet; or a directory, for a file of each 4,096 rows; or an address of these."
        " Example: out.csv",
    )
    parser.add_argument(
        "--format", choices=FORMATS, help="of the files in a directory; default: parquet"
    )
    parser.add_argument("--head", help="name of the head; default: the first. Example: --head mood")
    parser.add_argument(
        "--columns",
        type=json.loads,
        default={},
        metavar="JSON",
        help='names of the columns; default: the usual ones. Example: --columns \'{"text": "review"}\'',
    )
    parser.add_argument(
        "--options",
        type=json.loads,
        default={},
        metavar="JSON",
        help="further fields of each request, see docs/reference/api.md; default: none. "
        'Example: --options \'{"top_k": 3, "calibrated": true}\'',
    )
    parser.add_argument(
        "--precision",
        default="auto",
        help="auto, fp32, int8 or fp16; default: auto. Example: --precision fp32",
    )
    parser.add_argument(
        "--escape-formulas",
        action="store_true",
        help="write ' before cells of .csv that a spreadsheet would compute; default: cells are as they were",
    )
    return parser


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the arguments. Exits with status 2 for wrong ones."""
    arguments = parser().parse_args(argv)
    ending = arguments.output.suffix.lower().removeprefix(".")
    if ending and ending not in FORMATS and not arguments.output.is_dir():
        endings = ", ".join(FORMATS)
        parser().error(f"output: {arguments.output} must end with {endings}, or be a directory")
    if ending in FORMATS and arguments.format not in (None, ending):
        parser().error(f"--format: {arguments.output} is {ending}")
    arguments.format = ending if ending in FORMATS else arguments.format or "parquet"
    if arguments.escape_formulas and arguments.format != "csv":
        parser().error(f"--escape-formulas: {arguments.output} must end with .csv")
    for name in ("columns", "options"):
        if not isinstance(getattr(arguments, name), dict):
            parser().error(f"--{name}: must be an object of JSON")
    if not all(isinstance(name, str) for name in arguments.columns.values()):
        parser().error("--columns: each name must be a string")
    return arguments


async def predict(arguments: argparse.Namespace) -> tuple[int, int]:
    """Write the results of all rows. Returns the number of rows, and of those with an error.

    Raises BundleError and DataError.
    """
    # Here, so that `--help` does not wait for these imports.
    from service.bulk.input_files import find_files
    from service.bulk.output_files import output_at
    from service.bulk.predictor import Predictor
    from service.bulk.run import run

    source = sources.with_columns(arguments.input, arguments.columns)
    predictor = Predictor(arguments.bundle, arguments.head, arguments.options, arguments.precision)
    output = output_at(arguments.output, f".{arguments.format}", arguments.escape_formulas)
    output.check(predictor.task)
    files = find_files(source)
    async with predictor:
        return await run(predictor, files, output)


if __name__ == "__main__":
    sys.exit(main())

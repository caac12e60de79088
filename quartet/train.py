"""`quartet train FILE`: find the task of a file of labeled rows, train a head, and write a bundle to serve."""

import argparse
import re
import signal
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

from quartet.cache import BUNDLES, SourceError, run_export
from service.core.bundle_versions import MANIFEST
from service.core.data_files import sources
from service.processes.child_process import child_python

ENCODER = Path("encoders/quartet-base")  # of a checkout
HUB_ENCODER = "sentence-transformers/all-MiniLM-L6-v2"
# A file with columns of several tasks has the first of them.
TASKS = ("qa", "ner", "classification", "embedding")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    base = ENCODER if ENCODER.is_dir() else HUB_ENCODER
    parser = argparse.ArgumentParser(
        "quartet train",
        description="Train a head on a file of labeled rows, and write bundles/NAME, or its next version, such as "
        "bundles/NAME-v2, which quartet serve NAME serves. "
        "python -m model.finetune has further options, such as --epochs 4, which may follow FILE.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "file",
        metavar="FILE",
        help=".csv, .tsv, .jsonl, .json, .parquet or .conll, with the usual columns: text and label; tokens and tags; "
        "question, context and answers; or anchor and positive. 'FILE?text=COLUMN&label=COLUMN' names other columns",
    )
    parser.add_argument(
        "--task", choices=TASKS, help="task of the rows; by default found from the columns"
    )
    parser.add_argument("--name", help="the model's name in requests; the file's name by default")
    parser.add_argument(
        "--base",
        default=str(base),
        help="checkpoint to start from, or a name on the hub; default: %(default)s",
    )
    parser.add_argument(
        "--frozen",
        action="store_true",
        help="train the head alone, in seconds, on the hidden states of a bundle that is served with it; --base names "
        "that bundle, or a checkpoint, which is exported to bundles/ first",
    )
    parser.add_argument(
        "--minutes",
        metavar="N",
        help="end the training after this time, with the best checkpoint so far; by default it ends when the score "
        "does not rise",
    )
    return parser


def main() -> int:
    """Train and export. Returns the exit status."""
    from service.core.manifest import NAME  # here, because `--help` does not need this import

    arguments, further = parser().parse_known_args()
    file = Path(arguments.file.partition("?")[0])
    name = arguments.name or re.sub(r"[^A-Za-z0-9._-]+", "-", file.name.partition(".")[0]).strip(
        "._-"
    )
    if not re.fullmatch(NAME, name):
        parser().error(
            "--name: needs a letter or digit first, and may have letters, digits, dots, dashes and _ only"
        )
    if find_spec("torch") is None:
        raise ModuleNotFoundError("train needs torch", name="torch")
    if not sources.is_hub(arguments.file) and not file.is_file():
        parser().error(f"{file}: no such file")
    try:
        task = arguments.task or find_task(arguments.file)
        found = show_columns(arguments.file, task)
        print(f"quartet: {file}: {task}{found}; training from {arguments.base}", flush=True)
        output = f"runs/{name}"
        options = [
            "--data",
            arguments.file,
            "--task",
            task,
            "--init-from",
            arguments.base,
            "--output",
            output,
        ]
        if arguments.minutes:
            options += ["--minutes", arguments.minutes]
        script = "model.finetune"
        if arguments.frozen:
            encoder = encoder_bundle(arguments.base)
            options[options.index("--init-from") + 1] = str(encoder)
            options += ["--out", str(BUNDLES / name)]
            script = "export.head_bundle"
        command = [*child_python(), "-m", script, *options, *further]
        if status := run_training(command):
            return status
        if arguments.frozen:
            print(f"Serve the head with its encoder: quartet serve {encoder} {name}")
            return 0
        run_export([f"{output}/checkpoint", str(BUNDLES / name), "--name", name, "--next-version"])
    except (OSError, SourceError, ValueError) as error:
        reason = f"{file}: {error.strerror}" if isinstance(error, OSError) else error
        print(f"quartet: {reason}", file=sys.stderr)
        return 2
    print(f"See {output}/report.html. Serve the model: quartet serve {name}")
    return 0


def run_training(command: list[str]) -> int:
    """Run a process that saves its state at Ctrl-C, and wait for its end. Returns its exit status."""
    with subprocess.Popen(command) as run:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # the process receives it, too
        status = run.wait()
    signal.signal(signal.SIGINT, before)
    return status if status >= 0 else 128 - status


def encoder_bundle(base: str) -> Path:
    """Return the bundle of an encoder that gives its hidden states; a checkpoint is exported first. Raises SourceError.

    base: a bundle, the name of one in bundles/, a checkpoint, or a name on the hub
    """
    for folder in (Path(base), BUNDLES / Path(base).name):
        if (folder / MANIFEST).is_file():
            return folder
    folder = BUNDLES / Path(base).name
    run_export([base, str(folder), "--states"])
    return folder


def show_columns(file: str, task: str) -> str:
    """Return the columns of a file in parentheses, as FIELD=COLUMN; "" for a format without. Raises ValueError."""
    from model.data.labelled_rows import columns_of

    named = ", ".join(f"{field}={column}" for field, column in columns_of(file, task).items())
    return f" ({named})" if named else ""


def find_task(file: str) -> str:
    """Return the task whose columns and rows a file has. Raises ValueError with the reason where none fits."""
    from model.data.labelled_rows import read
    from service.core.data_files.columns import TRAINING, ColumnsError
    from service.core.data_files.text_files import DataError

    reasons = []  # of the tasks whose columns the file has
    for task in TASKS:
        try:
            read(file, task)
        except ColumnsError:
            continue
        except DataError as error:
            reasons.append(str(error))
        else:
            return task
    if reasons:
        raise ValueError("; ".join(dict.fromkeys(reasons)))
    path, _ = sources.split(file)
    needs = "; ".join(f"{task}: {' and '.join(TRAINING[task].required[0])}" for task in TASKS[::-1])
    raise ValueError(
        f"{path}: no columns of a task ({needs}): name them: '{path}?text=COLUMN&label=COLUMN'"
    )

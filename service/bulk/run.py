"""A run of predictions in shards: each is a file, which is complete or absent.

So a run that was killed computes only what is missing, and its output has the bytes of a run that was not.
"""

import asyncio
import fcntl
import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from service.bulk.input_files import local_copies, read_rows, survey
from service.bulk.output_files import Output, Write, join, writing
from service.bulk.predictor import Predictor
from service.bulk.rows import Row
from service.core.data_files import sources
from service.core.data_files.text_files import DataError

SHARD_ROWS = 4096
REQUEST_ROWS = 128  # that are computed together, in batches of similar lengths
REQUEST_CHARACTERS = 2**17
IN_FLIGHT = 4  # requests at a time
# The file of a directory of shards. Its first line is the identity of the run; each other line is a complete shard with
# its number of rows with an error.
RECORD = "_run.jsonl"  # readers of Parquet directories skip names that begin with _
REPORT_S = 10.0  # between two lines of progress


class Counts(NamedTuple):
    """The number of rows of a run, and of its rows with an error."""

    rows: int
    failed: int


async def run(
    predictor: Predictor, files: Sequence[str], output: Output, shard_rows: int = SHARD_ROWS
) -> Counts:
    """Predict the rows of files, into one file or into a directory of shards. Shards that exist are kept.

    files: sources of rows, see `service.core.data_files.sources`
    output: a file, whose shards are in a hidden directory until it is complete, or a directory
    Raises DataError for a file that cannot be read, and for shards of a run with other inputs or options.
    """
    with local_copies(files) as copies:
        return await run_copies(predictor, files, copies, output, shard_rows)


async def run_copies(
    predictor: Predictor,
    files: Sequence[str],
    copies: Sequence[str],
    output: Output,
    shard_rows: int,
) -> Counts:
    """Predict the rows of files from their local copies; see `run`."""
    folder = output.path
    if output.is_file:
        folder = folder.with_name(f".{folder.name}.shards")
    output.receive(RECORD)
    surveys = [
        survey(file, predictor.needs, local) for file, local in zip(files, copies, strict=True)
    ]
    names = [*dict.fromkeys(name for own, _ in surveys for name in own)]
    counts = [count for _, count in surveys]
    sizes = [os.path.getsize(sources.split(local)[0]) for local in copies]
    identity = {
        "inputs": [*map(list, zip(files, sizes, strict=True))],
        "format": output.suffix,
        "escape_formulas": output.escape_formulas,
        "shard_rows": shard_rows,
        **predictor.identity,
    }
    progress = Progress(sum(counts))
    paths: list[Path] = []
    with recorded(folder, identity) as (failed, save):
        for file_number, (file, count) in enumerate(zip(files, counts, strict=True)):
            rows = read_rows(file, predictor.needs, copies[file_number])
            for number in range(-(-count // shard_rows)):
                path = folder / f"part-{file_number:05}-{number:05}{output.suffix}"
                own = islice(rows, shard_rows)
                sends = bool(output.url) and not output.is_file
                if path.name in failed and (sends or path.exists()):
                    progress.skip(sum(1 for _ in own))
                else:
                    header = not output.is_file or not paths
                    with writing(path, output, names, header) as write:
                        errors = await compute(predictor, own, write, progress)
                    if sends:  # before its line in the record, which means that the shard is there
                        output.send(path)
                        path.unlink()
                    save(path.name, errors)
                    if sends:
                        output.send(folder / RECORD)
                paths.append(path)
        if output.is_file:
            join(paths, output.path)
            output.send(output.path)
    if output.is_file:
        shutil.rmtree(folder)
    if output.url:
        shutil.rmtree(output.path.parent)
    return Counts(sum(counts), sum(failed.values()))


async def compute(
    predictor: Predictor, rows: Iterator[Row], write: Write, progress: "Progress | None" = None
) -> int:
    """Write rows with their outcomes, in their order. Returns the number of rows with an error."""
    errors = 0
    requests = requests_of(rows)
    while together := [*islice(requests, IN_FLIGHT)]:
        found = await asyncio.gather(*map(predictor.predict, together))
        for own, outcomes in zip(together, found, strict=True):
            for row, outcome in zip(own, outcomes, strict=True):
                write(row, outcome)
                errors += bool(outcome.error)
            if progress is not None:
                progress.add(len(own))
    return errors


def requests_of(rows: Iterator[Row]) -> Iterator[list[Row]]:
    """Yield consecutive rows with at most `REQUEST_CHARACTERS` together; a longer row is alone."""
    request: list[Row] = []
    characters = 0
    for row in rows:
        own = sum(map(len, row.texts.values()))
        if request and (len(request) == REQUEST_ROWS or characters + own > REQUEST_CHARACTERS):
            yield request
            request, characters = [], 0
        request.append(row)
        characters += own
    if request:
        yield request


@contextmanager
def recorded(
    folder: Path, identity: Mapping[str, Any]
) -> Iterator[tuple[dict[str, int], Callable[[str, int], None]]]:
    """Yield the shards that are complete, each with its rows with an error, and a function that adds one.

    Raises DataError for a directory of a run with another identity, of other files, or that another process writes.
    """
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / RECORD
    if not path.exists() and any(folder.iterdir()):
        raise DataError(f"{folder} has files, but not of a run: name another output")
    with path.open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise DataError(f"{folder}: another process writes it") from None
        file.seek(0)
        text = file.read()
        # The last line is incomplete where a run was killed while it wrote.
        complete = text[: text.rfind("\n") + 1]
        file.truncate(len(complete))
        known, *shards = map(json.loads, complete.splitlines() or ["{}"])
        for name, value in identity.items():
            if known and known.get(name) != value:
                reason = f"has a run with {name} {known.get(name)}, not {value}"
                raise DataError(f"{folder} {reason}: remove it, or name another output")
        if not known:
            file.write(json.dumps(identity) + "\n")
        failed = dict(shards)

        def save(name: str, errors: int) -> None:
            failed[name] = errors
            file.write(json.dumps([name, errors]) + "\n")
            file.flush()

        try:
            yield failed, save
        finally:
            if not failed:  # nothing is computed, so another run may have the directory
                path.unlink()
                with suppress(OSError):
                    folder.rmdir()


class Progress:
    """Reports on standard error how much of a run is done, its rate and the time left.

    total: rows of the run
    """

    def __init__(self, total: int) -> None:
        self._left = total
        self._total = total
        self._computed = 0
        self._began = self._shown = time.monotonic()

    def skip(self, rows: int) -> None:
        """Count rows that an earlier run has computed."""
        self._left -= rows

    def add(self, rows: int) -> None:
        """Count rows that are computed."""
        self._left -= rows
        self._computed += rows
        now = time.monotonic()
        if now - self._shown < REPORT_S:
            return
        self._shown = now
        rate = self._computed / (now - self._began)
        done = f"{self._total - self._left:,} of {self._total:,} rows"
        left = self._left / rate
        time_left = f"{left / 60:.0f} min" if left >= 120 else f"{left:.0f} s"
        print(f"{done}, {rate:.0f} rows/s, {time_left} left", file=sys.stderr, flush=True)

"""Ask a running service and transformers' pipelines the same of 500 real texts, and fail where they disagree.

    python -m benchmarks.compat [--texts N] [--models minilm roberta xlm-roberta] [--tasks NAME ...] [--out FILE]

An answer may differ from the pipeline's only by what docs/reference/compat.md lists, and then has to be what the
pipeline gives with exactly that difference. The pipeline for questions is that of transformers 5.2, in an environment
of its own, which is built first; the others are the installed version's. Prints a table and one JSON line.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import transformers

from benchmarks.compat import checkpoints, compare, texts
from benchmarks.compat.checkpoints import MAX_LENGTH
from benchmarks.compat.compare import AT_ONCE, Tally
from benchmarks.lib import environments, machine, run_record, servers
from benchmarks.lib.environments import PEERS, ROOT
from service.core.decode import AnswerSpan

PEER = "question_answering"
TASKS = ("classify", "zero-shot", "rerank", "vectors", "fill-mask", "ner", "qa")
MODELS: dict[str, Callable[[Path, Sequence[str]], Path]] = {
    "minilm": lambda folder, _: checkpoints.minilm(folder),
    "roberta": lambda folder, corpus: checkpoints.at_random("roberta", corpus, folder),
    "xlm-roberta": lambda folder, corpus: checkpoints.at_random("xlm-roberta", corpus, folder),
}


@dataclass(frozen=True)
class Inputs:
    """The inputs of all tasks."""

    texts: list[str]
    pairs: list[tuple[str, str]]
    questions: list[tuple[str, str]]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--texts", type=int, default=500, help="how many")
    parser.add_argument("--models", nargs="+", choices=MODELS, default=[*MODELS])
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=[*TASKS])
    parser.add_argument("--out", type=Path, help="write the JSON line to this file, too")
    given = parser.parse_args()
    count = given.texts
    inputs = Inputs(texts.singles(count), texts.pairs(count), texts.questions(count))
    if "qa" in given.tasks:
        environments.of_peer(PEER).build()
    print(f"{machine.describe()}, transformers {transformers.__version__}")
    transformers.logging.disable_progress_bar()
    transformers.logging.set_verbosity_error()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for name in given.models:
            checkpoint = MODELS[name](Path(folder) / name, inputs.texts)
            for tally in measure(checkpoint, inputs, Path(folder), given.tasks):
                show(name, tally)
                rows.append({"model": name, **as_json(tally)})
        run_record.write({"texts": count, "rows": rows}, given.out, Path(folder))
    return int(any(row["unexplained"] for row in rows))


def measure(
    checkpoint: Path, inputs: Inputs, scratch: Path, tasks: Sequence[str] = TASKS
) -> Iterator[Tally]:
    """Yield the comparisons of one model's service and pipelines."""
    peer_answers = ask_peer(checkpoint / "answers", inputs.questions) if "qa" in tasks else []
    with servers.serving(servers.quartet("fp32"), bundle_of(checkpoint), scratch) as running:
        ask, length = partial(post, running.port), MAX_LENGTH
        comparisons: dict[str, Iterator[Tally]] = {
            "classify": compare.classify(ask, checkpoint, inputs.texts, inputs.pairs, length),
            "zero-shot": compare.zero_shot(ask, checkpoint, inputs.texts, length),
            "rerank": compare.rerank(ask, checkpoint, inputs.pairs, length),
            "vectors": compare.vectors(ask, checkpoint, inputs.texts, length),
            "fill-mask": compare.fill_mask(ask, checkpoint, inputs.texts, length),
            "ner": compare.ner(ask, checkpoint, inputs.texts, length),
            "qa": compare.qa(ask, checkpoint, inputs.questions, length, peer_answers),
        }
        for task in TASKS:
            if task in tasks:
                yield from comparisons[task]


def bundle_of(checkpoint: Path) -> Path:
    command = [sys.executable, "-m", "export", checkpoint / "joint", checkpoint / "bundle"]
    shape = ["--precision", "fp32", "--max-length", MAX_LENGTH]
    servers.run_once([*map(str, command + shape)], checkpoint / "export.log")
    return checkpoint / "bundle"


def post(
    port: int, path: str, columns: Mapping[str, Sequence[Any]], fields: Mapping[str, Any]
) -> list[Any]:
    """The results of as many requests as it takes."""
    results = []
    for start in range(0, len(next(iter(columns.values()))), AT_ONCE):
        part = {name: [*column[start : start + AT_ONCE]] for name, column in columns.items()}
        _, document = servers.post(port, path, {**part, **fields})
        answer = json.loads(document)
        results += answer.get("results") or answer["embeddings"]
    return results


def ask_peer(folder: Path, questions: Sequence[tuple[str, str]]) -> list[list[list[AnswerSpan]]]:
    """What the pipeline for questions answers, to each question in each of the ways to ask."""
    how = {"doc_stride": compare.STRIDE, "asked": compare.QUESTIONS}
    lines = [json.dumps({"question": q, "context": c, **how}) for q, c in questions]
    python, script = environments.of_peer(PEER).python(), PEERS / PEER / "answers.py"
    ended = subprocess.run(
        [python, script, folder, str(MAX_LENGTH)],
        cwd=ROOT,
        input="\n".join(lines),
        capture_output=True,
        text=True,
        check=False,
    )
    if ended.returncode:
        raise servers.StartError(f"{PEER} failed: {ended.stderr[-servers.TAIL :]}")
    told = (json.loads(line) for line in ended.stdout.splitlines())
    return [[compare.answers(found) for found in line] for line in told]


def show(model: str, tally: Tally) -> None:
    """Return a line for the request, one for each difference, and then the unexplained answers."""
    told = f"{model:<12} {tally.what:<42} {tally.texts[()]:>4} equal"
    others = [f"{count} by: {'; '.join(why)}" for why, count in tally.texts.most_common() if why]
    print(
        f"{told}, to {tally.largest:.0e} of {tally.answers} scores",
        *others,
        sep="\n    ",
        flush=True,
    )
    for words in tally.unexplained[: compare.SHOWN]:
        print(f"    DIFFERENT: {words[:1000]}", flush=True)
    if tally.unexplained:
        print(f"    {len(tally.unexplained)} differ by nothing that is listed")


def as_json(tally: Tally) -> dict[str, Any]:
    told = asdict(tally)
    told["texts"] = {"; ".join(why): count for why, count in tally.texts.items()}
    return told | {"unexplained": len(tally.unexplained)}


if __name__ == "__main__":
    sys.exit(main())

"""Whether the servers give the same answers: only then may their speeds be compared.

    python -m benchmarks.agreement [--tasks embed classify ner] [--servers NAME ...]

Each available server answers the same texts, of 5 to 400 words, several at once so that it makes batches, and is
compared with Quartet at fp32: embeddings by the worst cosine, classes by the worst difference of a score, entities by
the share that both found in the same place with the same label. What int8 differs by is its quantisation.
"""

import argparse
import json
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers

from benchmarks.lib import models, servers
from benchmarks.lib.environments import Unavailable
from benchmarks.lib.servers import Entities, Scores, Server, Vector

AT_ONCE = 8
TASKS = ("embed", "classify", "ner")
FEWEST_WORDS = 5
MOST_WORDS = 400  # cut at 256 tokens, by every server in the same place


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=TASKS)
    parser.add_argument("--servers", nargs="+", metavar="NAME", help="all by default")
    parser.add_argument("--texts", type=int, default=20, help="how many")
    given = parser.parse_args()
    chosen = servers.chosen(given.servers)
    rows = []
    with tempfile.TemporaryDirectory() as scratch:
        for task in given.tasks:
            rows += measure(task, chosen, texts(given.texts), Path(scratch))
    print(json.dumps(rows))


def texts(count: int, seed: int = 0) -> list[str]:
    """Words of MiniLM's own vocabulary at random, in sentences, from few to more than a window holds."""
    vocabulary = tokenizers.Tokenizer.from_file(str(models.minilm() / "tokenizer.json"))
    words = sorted(w for w in vocabulary.get_vocab() if w.isascii() and w.isalpha() and len(w) > 2)
    rng = np.random.default_rng(seed)
    lengths = np.linspace(FEWEST_WORDS, MOST_WORDS, count).astype(int)
    return [". ".join(sentences(rng.choice(words, size=length))) + "." for length in lengths]


def sentences(words: np.ndarray, longest: int = 12) -> list[str]:
    starts = range(0, len(words), longest)
    return [" ".join(words[start : start + longest]).capitalize() for start in starts]


def measure(
    task: str, chosen: list[Server], inputs: list[str], scratch: Path
) -> list[dict[str, Any]]:
    """One row for each server that offers the task, Quartet's at fp32 first."""
    reference = servers.named("quartet fp32")
    expected = answers(reference, task, inputs, scratch)
    rows = []
    for server in chosen:
        if server == reference or task not in server.calls:
            continue
        row: dict[str, Any] = {"task": task, "server": server.name}
        try:
            row |= COMPARE[task](expected, answers(server, task, inputs, scratch))
        except Unavailable as error:
            row["skipped"] = str(error)
        figures = "  ".join(f"{key}: {shown(row[key])}" for key in list(row)[2:])
        print(f"{task:<10}{server.name:<28}{figures}", flush=True)
        rows.append(row)
    return rows


def shown(value: Any) -> str:
    return f"{value:.7f}" if isinstance(value, float) else str(value)


def answers(server: Server, task: str, inputs: list[str], scratch: Path) -> list[Any]:
    checkpoint = models.checkpoint(task, scratch)
    with (
        servers.serving(server, checkpoint, scratch) as running,
        ThreadPoolExecutor(AT_ONCE) as clients,
    ):
        ask = partial(servers.ask, running.port, server.calls[task])
        return [*clients.map(ask, inputs)]


def compare_vectors(expected: list[Vector], found: list[Vector]) -> dict[str, Any]:
    a, b = np.asarray(expected), np.asarray(found)
    cosines = (a * b).sum(1) / np.linalg.norm(a, axis=1) / np.linalg.norm(b, axis=1)
    lengths = np.linalg.norm(b, axis=1)
    return {
        "worst cosine": float(cosines.min()),
        "worst length": float(lengths[np.abs(lengths - 1).argmax()]),
    }


def compare_scores(expected: list[Scores], found: list[Scores]) -> dict[str, Any]:
    differences = [
        abs(a[label] - b[label]) for a, b in zip(expected, found, strict=True) for label in a
    ]
    return {"worst difference": max(differences)}


def compare_entities(expected: list[Entities], found: list[Entities]) -> dict[str, Any]:
    ours = {(i, *span): score for i, spans in enumerate(expected) for *span, score in spans}
    theirs = {(i, *span): score for i, spans in enumerate(found) for *span, score in spans}
    both = ours.keys() & theirs.keys()
    return {
        "the same": len(both) / max(1, len(ours.keys() | theirs.keys())),
        "of": len(ours.keys() | theirs.keys()),
        "worst difference": max((abs(ours[key] - theirs[key]) for key in both), default=0.0),
    }


COMPARE = {"embed": compare_vectors, "classify": compare_scores, "ner": compare_entities}


if __name__ == "__main__":
    main()

"""Score the heads of a running service on labelled files, through HTTP.

    python -m benchmarks.scores --url http://127.0.0.1:8000 --eval HEAD=FILE ... [--limit N] [--out FILE]

Requests set no options. Labels of `/classify`, entities of `/ner`, answers of `/qa` and cosines of the vectors of
`/embed` are compared with the file as in `model.evaluate`. A word has the tag of the entity that contains its first
character. Files have the formats of training data. Prints a table and one JSON line.
"""

import argparse
import json
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
from seqeval.metrics import f1_score as entity_f1
from sklearn.metrics import accuracy_score

from benchmarks.lib import machine
from model.data import head_rows
from model.data.labelled_rows import QuestionRow, Sentence, Similar, Text
from model.evaluate import answer_f1, correlations, exact_match, spread
from service.core.manifest import Head
from service.core.tags import OUTSIDE

INPUTS = 32  # of a request
REQUESTS = 4  # at once
TIMEOUT_S = 60.0

Post = Callable[[str, list[Any]], list[Any]]  # a path and inputs; returns a result for each input


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the service")
    parser.add_argument("--eval", nargs="+", required=True, metavar="HEAD=FILE")
    parser.add_argument("--limit", type=int, default=0, help="rows of each file, evenly spaced")
    parser.add_argument("--out", type=Path, help="write the JSON line to this file, too")
    given = parser.parse_args()
    scores: dict[str, dict[str, float]] = {}
    with httpx.Client(base_url=given.url, timeout=TIMEOUT_S) as client:
        model = client.get("/models").raise_for_status().json()["models"][0]
        for pair in given.eval:
            name, _, file = pair.partition("=")
            if name not in model["heads"] or not file:
                parser.error(
                    f"--eval {pair}: HEAD=FILE, with a head of {', '.join(model['heads'])}"
                )
            rows = head_rows.read(file, read_head(model["heads"][name]))
            found = score(Sender(client, name), spread(rows, given.limit))
            scores[pair] = {metric: round(100 * value, 2) for metric, value in found.items()}
            values = "  ".join(f"{metric} {value:.2f}" for metric, value in scores[pair].items())
            print(f"{name}  {file}  {values}", flush=True)
    line = json.dumps({"machine": machine.describe(), "model": model["id"], "scores": scores})
    print(line)
    if given.out:
        given.out.write_text(line + "\n")


def read_head(described: dict[str, Any]) -> Head:
    """Return a head as `GET /models` describes it, without what only that page has."""
    known = {name: value for name, value in described.items() if name in Head.model_fields}
    return Head.model_validate(known)


class Sender:
    """Sends inputs for one head in requests of 32, four at once."""

    def __init__(self, client: httpx.Client, head: str) -> None:
        self._client = client
        self._head = head

    def __call__(self, path: str, inputs: list[Any]) -> list[Any]:
        """Return the result of each input. Raises httpx.HTTPStatusError for a refused request."""
        parts = [inputs[start : start + INPUTS] for start in range(0, len(inputs), INPUTS)]
        with ThreadPoolExecutor(REQUESTS) as pool:
            answers = pool.map(lambda part: self._send(path, part), parts)
            return [result for answer in answers for result in answer]

    def _send(self, path: str, inputs: list[Any]) -> list[Any]:
        response = self._client.post(path, json={"inputs": inputs, "head": self._head})
        answer = response.raise_for_status().json()
        results: list[Any] = answer["embeddings" if path == "/embed" else "results"]
        return results


def score(post: Post, rows: Sequence[Any]) -> dict[str, float]:
    """Return metrics of rows of one kind, from 0 to 1. Raises ValueError for rows that this program cannot score."""
    match rows[0]:
        case Text():
            return score_texts(post, rows)
        case Sentence():
            return score_sentences(post, rows)
        case QuestionRow():
            return score_questions(post, rows)
        case Similar(score=float()):
            return score_pairs(post, rows)
    raise ValueError(f"{rows[0].where}: rows of this kind are not scored through HTTP")


def score_texts(post: Post, rows: Sequence[Text]) -> dict[str, float]:
    """Compare the best label of each text with the right one. Raises ValueError for pairs and several labels."""
    for row in rows:
        if row.pair is not None or len(row.labels) != 1:
            raise ValueError(f"{row.where}: only single texts with one label are scored")
    results = post("/classify", [row.text for row in rows])
    best = [result[0]["label"] for result in results]
    return {"accuracy": float(accuracy_score([row.labels[0] for row in rows], best))}


def score_sentences(post: Post, rows: Sequence[Sentence]) -> dict[str, float]:
    results = post("/ner", [row.text for row in rows])
    answers = [word_tags(row, found) for row, found in zip(rows, results, strict=True)]
    return {"f1": float(entity_f1([row.tags for row in rows], answers, zero_division=0))}


def word_tags(sentence: Sentence, entities: Sequence[dict[str, Any]]) -> list[str]:
    """Return a BIO tag for each word of a sentence, from the entities of a response."""
    tags = []
    before = None  # the entity of the word before
    for start in sentence.starts.tolist():
        own = next((each for each in entities if each["start"] <= start < each["end"]), None)
        prefix = "I" if own is not None and own is before else "B"
        tags.append(OUTSIDE if own is None else f"{prefix}-{own['entity_group']}")
        before = own
    return tags


def score_questions(post: Post, rows: Sequence[QuestionRow]) -> dict[str, float]:
    """Compare the best answer of each question with the right ones. Raises ValueError for a question without answer."""
    for row in rows:
        if not row.answers:
            raise ValueError(f"{row.where}: only questions with an answer are scored")
    results = post("/qa", [{"question": row.question, "context": row.context} for row in rows])
    pairs = [
        (result[0]["answer"] if result else "", [text for text, _ in row.answers])
        for row, result in zip(rows, results, strict=True)
    ]
    return {
        "f1": float(np.mean([answer_f1(answer, right) for answer, right in pairs])),
        "em": float(np.mean([exact_match(answer, right) for answer, right in pairs])),
    }


def score_pairs(post: Post, rows: Sequence[Similar]) -> dict[str, float]:
    found = post("/embed", [text for row in rows for text in row.texts])
    vectors = np.asarray(found, dtype=np.float64)  # [2n, D]
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    cosines = (vectors[0::2] * vectors[1::2]).sum(axis=1)
    return correlations(cosines.tolist(), [row.score for row in rows if row.score is not None])


if __name__ == "__main__":
    main()

"""Requests of every kind, and whether two answers are the same."""

from collections.abc import Mapping
from typing import Any

from tests import samples

LONG = samples.text(700, seed=5)


def calls() -> list[tuple[str, dict[str, Any]]]:
    """Return 64 requests of all tasks, short and long, some with several texts, some read in windows.

    Every other one is in the dialect of another server.
    """
    made: list[tuple[str, dict[str, Any]]] = []
    for index in range(16):
        text = samples.text(3 + 11 * index, seed=index)
        question = f"Who {samples.VERBS[index % 8]} it?"
        own: list[tuple[str, dict[str, Any]]] = [
            ("/classify", {"inputs": [text, samples.text(index + 1)]}),
            ("/ner", {"inputs": LONG if index == 3 else text}),
            ("/qa", {"question": question, "context": LONG if index == 5 else text, "top_k": 2}),
            ("/embed", {"inputs": text, "truncate": "window" if index % 2 else True}),
        ]
        made += [
            in_dialect(*call) if (index + place) % 2 else call for place, call in enumerate(own)
        ]
    return made


def in_dialect(path: str, body: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return a request with the same texts in the dialect of another server."""
    match path:
        case "/classify":
            return "/tei/predict", {"inputs": [[text] for text in body["inputs"]]}
        case "/embed" if len(body["inputs"]) % 2:
            return "/v1/embeddings", {"input": body["inputs"]}
        case "/embed":
            return "/tei/embed", {"inputs": body["inputs"], "truncate": True}
        case "/ner":
            return "/hf/pipeline/token-classification", {"inputs": body["inputs"]}
        case "/qa":
            inputs = {key: body[key] for key in ("question", "context")}
            parameters = {"top_k": body["top_k"]}
            return "/hf/pipeline/question-answering", {"inputs": inputs, "parameters": parameters}
    raise AssertionError(path)


def close(expected: Any, found: Any) -> bool:
    """Equal, numbers to 1e-5."""
    if isinstance(expected, float):
        return abs(expected - found) <= 1e-5
    if isinstance(expected, list):
        return len(expected) == len(found) and all(map(close, expected, found))
    if isinstance(expected, dict):
        return expected.keys() == found.keys() and all(
            close(expected[k], found[k]) for k in expected
        )
    return bool(expected == found)

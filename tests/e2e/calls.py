"""Requests of every kind, and whether two answers are the same."""

from typing import Any

from tests import samples

LONG = samples.text(700, seed=5)


def calls() -> list[tuple[str, dict[str, Any]]]:
    """64 requests of all tasks, short and long, some with several texts, some read in windows."""
    made: list[tuple[str, dict[str, Any]]] = []
    for index in range(16):
        text = samples.text(3 + 11 * index, seed=index)
        question = f"Who {samples.VERBS[index % 8]} it?"
        made += [
            ("/classify", {"inputs": [text, samples.text(index + 1)]}),
            ("/ner", {"inputs": LONG if index == 3 else text}),
            ("/qa", {"question": question, "context": LONG if index == 5 else text, "top_k": 2}),
            ("/embed", {"inputs": text, "truncate": "window" if index % 2 else True}),
        ]
    return made


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

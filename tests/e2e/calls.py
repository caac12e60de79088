"""Requests of every task, half of them in the dialects of other servers, and whether two answers are equal."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tests import samples

Call = tuple[str, dict[str, Any]]  # path and body
Body = Mapping[str, Any]

LONG = samples.text(700, seed=5)
VARYING = {"id", "created"}  # fields that differ from answer to answer


def calls() -> list[Call]:
    """Return 64 requests of all tasks, short and long, some with several texts, some read in windows.

    Every other one is in the dialect of another server.
    """
    made: list[Call] = []
    for index in range(16):
        text = samples.text(3 + 11 * index, seed=index)
        question = f"Who {samples.VERBS[index % 8]} it?"
        own: list[Call] = [
            ("/classify", {"inputs": [text, samples.text(index + 1)]}),
            ("/ner", {"inputs": LONG if index == 3 else text}),
            ("/qa", {"question": question, "context": LONG if index == 5 else text, "top_k": 2}),
            ("/embed", {"inputs": text, "truncate": "window" if index % 2 else True}),
        ]
        made += own if index % 2 else [*own[1:], own[0]]
    return mixed(made)


def embed_calls(inputs: Sequence[str | list[str]], model: str | None = None) -> list[Call]:
    """Return requests for embeddings, one for each text or list of texts, every other one in another dialect."""
    named = {} if model is None else {"model": model}
    return mixed([("/embed", {"inputs": one, **named}) for one in inputs])


def mixed(native: Sequence[Call]) -> list[Call]:
    """Return the requests, every other one in the dialect of another server, which take turns."""
    return [
        in_dialect(*call, number // 2) if number % 2 else call for number, call in enumerate(native)
    ]


def in_dialect(path: str, body: Body, turn: int) -> Call:
    """Return a native request with the same texts in the dialect of another server.

    turn: selects one of the servers that have the task
    """
    dialects = DIALECTS[path]
    address, translate = dialects[turn % len(dialects)]
    model = {"model": body["model"]} if "model" in body else {}
    return address, {**translate(body), **model}


def hugging_face_question(body: Body) -> dict[str, Any]:
    inputs = {key: body[key] for key in ("question", "context")}
    return {"inputs": inputs, "parameters": {"top_k": body["top_k"]}}


def as_list(inputs: str | list[str]) -> list[str]:
    return [inputs] if isinstance(inputs, str) else inputs


def openai_body(body: Body) -> dict[str, Any]:
    return {"input": body["inputs"]}


def inputs_body(body: Body) -> dict[str, Any]:
    return {"inputs": body["inputs"]}


# By the native path: paths and bodies of other servers.
DIALECTS: Mapping[str, Sequence[tuple[str, Callable[[Body], dict[str, Any]]]]] = {
    "/classify": [
        ("/tei/predict", lambda body: {"inputs": [[text] for text in body["inputs"]]}),
        ("/hf/pipeline/text-classification", inputs_body),
        ("/infinity/classify", openai_body),
    ],
    "/ner": [("/hf/pipeline/token-classification", inputs_body)],
    "/qa": [("/hf/pipeline/question-answering", hugging_face_question)],
    "/embed": [
        ("/v1/embeddings", openai_body),
        ("/tei/embed", lambda body: {"inputs": body["inputs"], "truncate": True}),
        ("/hf/pipeline/feature-extraction", inputs_body),
        ("/infinity/embeddings", openai_body),
        (
            "/cohere/v2/embed",
            lambda body: {"texts": as_list(body["inputs"]), "input_type": "search_document"},
        ),
    ],
}


def without_varying(answer: Any) -> Any:
    """Return an answer without the fields that differ from answer to answer."""
    if isinstance(answer, dict):
        return {key: value for key, value in answer.items() if key not in VARYING}
    return answer


def same_answer(expected: Any, found: Any) -> bool:
    """Equal without the fields that differ from answer to answer, numbers to 1e-5."""
    return close(without_varying(expected), without_varying(found))


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

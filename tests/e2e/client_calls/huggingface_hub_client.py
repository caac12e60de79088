"""Hugging Face's client, which calls the Inference API and a server of text-embeddings-inference by their URLs.

Source: https://github.com/huggingface/huggingface_hub
"""

import asyncio
from typing import Any

from tests.e2e.client_calls.records import TEXTS, Call, Failure, KeyUse, Run, native
from tests.e2e.conftest import Server

ERROR = "huggingface_hub.errors.HfHubHTTPError"
BAD_REQUEST = "huggingface_hub.errors.BadRequestError"
TEI, HF = "/tei", "/hf"
QUESTION = {"question": "What did Ada draw?", "context": "In Turin, Ada drew a comet. It rained."}
LABELS = ["weather", "art", "money"]
TEMPLATE = "The text is about {}."
MASKED = "Ada drew a [MASK]."


def call(path: str, method: str, *arguments: Any, **options: Any) -> Run:
    def run(server: Server) -> Any:
        return plain(getattr(connect(server, path), method)(*arguments, **options))

    return run


def call_async(path: str, method: str, *arguments: Any, **options: Any) -> Run:
    async def answer(server: Server) -> Any:
        from huggingface_hub import AsyncInferenceClient

        async with AsyncInferenceClient(f"{server.url}{path}") as client:
            return await getattr(client, method)(*arguments, **options)

    return lambda server: plain(asyncio.run(answer(server)))


def connect(server: Server, path: str = TEI, **options: Any) -> Any:
    from huggingface_hub import InferenceClient

    return InferenceClient(f"{server.url}{path}", **options)


def plain(value: Any) -> Any:
    """Return a result of the client as lists and dictionaries without its empty fields."""
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, list):
        return [*map(plain, value)]
    if isinstance(value, dict):
        return {key: one for key, one in value.items() if one is not None}
    return value


def by_task(task: str) -> str:
    return f"{HF}/pipeline/{task}"


def first(path: str, **body: object) -> Run:
    return native(path, body, "results", 0)


# The task, the client's method with its arguments, and the native answer.
TASKS: list[tuple[str, tuple[Any, ...], dict[str, Any], Run]] = [
    ("text-classification", (TEXTS[0],), {}, first("/classify", inputs=TEXTS[0])),
    (
        "text-classification",
        (TEXTS[0],),
        {"top_k": 1, "function_to_apply": "sigmoid"},
        first("/classify", inputs=TEXTS[0], top_k=1, function_to_apply="sigmoid"),
    ),
    ("token-classification", (TEXTS[0],), {}, first("/ner", inputs=TEXTS[0], aggregation_strategy="simple")),
    (
        "token-classification",
        (TEXTS[0],),
        {"aggregation_strategy": "none", "ignore_labels": ["O"], "stride": 8},
        first("/ner", inputs=TEXTS[0], aggregation_strategy="none", stride=8),
    ),
    ("question-answering", (), QUESTION, native("/qa", QUESTION, "results", 0, 0)),
    (
        "question-answering",
        (),
        {
            **QUESTION,
            "top_k": 3,
            "doc_stride": 8,
            "handle_impossible_answer": True,
            "align_to_words": True,
        },
        first("/qa", **QUESTION, top_k=3, stride=8, handle_impossible_answer=True),
    ),
    ("feature-extraction", (TEXTS,), {}, native("/embed", {"inputs": TEXTS, "normalize": True}, "embeddings")),
    (
        "feature-extraction",
        (TEXTS[0],),
        {"normalize": False, "truncate": True, "truncation_direction": "right", "dimensions": 8},
        native("/embed", {"inputs": TEXTS[0], "normalize": False, "dimensions": 8}, "embeddings"),
    ),
    (
        "sentence-similarity",
        (TEXTS[0],),
        {"other_sentences": TEXTS},
        native("/similarity", {"source": TEXTS[0], "inputs": TEXTS}, "results"),
    ),
    ("fill-mask", (MASKED,), {}, first("/fill-mask", inputs=MASKED)),
    (
        "fill-mask",
        (MASKED,),
        {"targets": ["a", "the"], "top_k": 2},
        first("/fill-mask", inputs=MASKED, targets=["a", "the"], top_k=2),
    ),
    ("zero-shot-classification", (TEXTS[0], LABELS), {}, first("/zero-shot", inputs=TEXTS[0], labels=LABELS)),
    (
        "zero-shot-classification",
        (TEXTS[0], LABELS),
        {"multi_label": True, "hypothesis_template": TEMPLATE},
        first(
            "/zero-shot",
            inputs=TEXTS[0],
            labels=LABELS,
            multi_label=True,
            hypothesis_template=TEMPLATE,
        ),
    ),
]  # fmt: skip


def written(task: str, arguments: tuple[Any, ...], options: dict[str, Any]) -> str:
    """Return a call as the client's documentation writes it, with the names of its options."""
    names = ["..."] * bool(arguments) + [f"{name}=..." for name in options]
    return f"{task.replace('-', '_')}({', '.join(names)})"


CALLS = [
    Call(
        "feature_extraction",
        call(TEI, "feature_extraction", TEXTS[0]),
        native("/embed", {"inputs": TEXTS[0]}, "embeddings"),
    ),
    Call(
        "feature_extraction(normalize=False, truncate=True)",
        call(TEI, "feature_extraction", TEXTS[0], normalize=False, truncate=True),
        native("/embed", {"inputs": TEXTS[0], "normalize": False}, "embeddings"),
    ),
    Call(
        "sentence_similarity",
        call(TEI, "sentence_similarity", TEXTS[0], other_sentences=TEXTS),
        native("/similarity", {"source": TEXTS[0], "inputs": TEXTS}, "results"),
    ),
    Call(
        "text_classification",
        call(TEI, "text_classification", TEXTS[0]),
        native("/classify", {"inputs": TEXTS[0]}, "results", 0, 0),
    ),
    *(
        Call(
            f"{prefix}{written(task, arguments, options)} of /hf",
            make(by_task(task), task.replace("-", "_"), *arguments, **options),
            expected,
        )
        for prefix, make in (("", call), ("async ", call_async))
        for task, arguments, options, expected in TASKS
    ),
    *(
        Call(
            f"{written(task, arguments, options)} of /tei",
            call(TEI, task.replace("-", "_"), *arguments, **options),
            expected,
        )
        for task, arguments, options, expected in TASKS[3:6] + TASKS[9:]
    ),
    Call(
        "question_answering by URL",
        call(HF, "question_answering", **QUESTION),
        native("/qa", QUESTION, "results", 0, 0),
    ),
    Call(
        "fill_mask by the head in the URL",
        call(f"{HF}/models/tasks/masks", "fill_mask", MASKED),
        first("/fill-mask", inputs=MASKED),
    ),
    Call("health_check", lambda server: connect(server, HF, provider="hf-inference").health_check(), lambda _: True),
    Call(
        "get_endpoint_info",
        lambda server: connect(server, HF, provider="hf-inference").get_endpoint_info()["model_id"],
        lambda _: "tasks@1",
    ),
]  # fmt: skip
FAILURES = [
    Failure("too long", call(TEI, "feature_extraction", "word " * 600, truncate=False), ERROR),
    Failure(
        "too long for /hf",
        call(by_task("feature-extraction"), "feature_extraction", "word " * 600, truncate=False),
        BAD_REQUEST,
    ),
    Failure(
        "no mask token", call(by_task("fill-mask"), "fill_mask", "It rained in Turin."), BAD_REQUEST
    ),
    Failure(
        "unknown strategy",
        call(
            by_task("token-classification"), "token_classification", "a", aggregation_strategy="all"
        ),
        BAD_REQUEST,
    ),
    Failure("a task that the URL leaves open", call(HF, "text_classification", "a"), BAD_REQUEST),
    Failure("unknown model", call(f"{HF}/models/huge", "fill_mask", MASKED), ERROR),
]


def embed_with_key(server: Server, key: str, retry: bool) -> Any:
    return plain(connect(server, token=key).feature_extraction(TEXTS[0]))


# The client itself does not repeat a request that was refused.
KEY_USE = KeyUse(embed_with_key, ERROR, ERROR, retries=False)

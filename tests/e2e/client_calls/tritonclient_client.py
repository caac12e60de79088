"""NVIDIA's client of the Open Inference Protocol: https://github.com/triton-inference-server/client"""

import itertools
import json
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tests.e2e.client_calls.records import TEXTS, TOO_MANY, Call, Failure, KeyUse, Run, native
from tests.e2e.conftest import Server

ERROR = "tritonclient.utils.InferenceServerException"
MODEL = "tasks"
QUESTION = {"question": "What did Ada draw?", "context": "In Turin, Ada drew a comet. It rained."}
MASKED = "Ada drew a [MASK]."


def connect(server: Server) -> Any:
    import tritonclient.http as client

    return client.InferenceServerClient(server.url.removeprefix("http://"))


def texts(name: str, values: Sequence[str], *, binary: bool = True) -> Any:
    import tritonclient.http as client

    tensor = client.InferInput(name, [len(values)], "BYTES")
    data = np.array([value.encode() for value in values], dtype=np.object_)
    return tensor.set_data_from_numpy(data, binary_data=binary)


def integers(name: str, values: Sequence[int], kind: str = "int64") -> Any:
    import tritonclient.http as client

    tensor = client.InferInput(name, [len(values)], kind.upper())
    return tensor.set_data_from_numpy(np.array(values, kind))


def output(name: str, *, binary: bool = True, class_count: int = 0) -> Any:
    import tritonclient.http as client

    return client.InferRequestedOutput(name, binary_data=binary, class_count=class_count)


def infer(
    inputs: Callable[[], list[Any]],
    *names: str,
    show: Callable[[Any], Any] = lambda found: found.tolist(),
    binary: bool = True,
    class_count: int = 0,
    model: str = MODEL,
    **options: Any,
) -> Run:
    """Return a run of `infer` whose result has each named output as a list."""

    def run(server: Server) -> Any:
        outputs = [output(name, binary=binary, class_count=class_count) for name in names]
        found = connect(server).infer(model, inputs(), outputs=outputs, **options)
        return [show(found.as_numpy(name)) for name in names]

    return run


def infer_all(server: Server) -> Any:
    """Return the outputs of a request that names none."""
    found = connect(server).infer(MODEL, [texts("text", TEXTS)])
    names = [one["name"] for one in found.get_response()["outputs"]]
    numeric = [name for name in names if found.as_numpy(name).dtype == np.float32]
    return {name: found.as_numpy(name).tolist() for name in numeric}


def infer_ids(bounds: Callable[[list[int]], Any]) -> Run:
    def run(server: Server) -> Any:
        found = server.answer("/tokenize", {"inputs": TEXTS})["results"]
        ids = [[token["id"] for token in one["tokens"]] for one in found]
        together = [*itertools.chain.from_iterable(ids)]
        inputs = [integers("input_ids", together), bounds([*map(len, ids)])]
        return infer(lambda: inputs, "topics", "embeddings")(server)

    return run


def from_json(found: Any) -> Any:
    return [json.loads(one) for one in found]


def scores(results: Sequence[Any], labels: Sequence[str]) -> Any:
    """Return the scores of each input in the order of the labels."""
    tables = [{one["label"]: one["score"] for one in found} for found in results]
    return [[table[label] for label in labels] for table in tables]


def labels(server: Server, head: str) -> Any:
    return server.get("/models").json()["models"][0]["heads"][head]["labels"]


def native_scores(head: str, **body: object) -> Run:
    def answer(server: Server) -> Any:
        found = server.answer("/native/classify", {"inputs": TEXTS, "head": head, **body})
        return scores(found["results"], labels(server, head))

    return answer


def native_all(server: Server) -> Any:
    """Return the native answers of all heads with numbers."""
    heads = server.get("/models").json()["models"][0]["heads"]
    return {
        name: native_scores(name)(server) if head["task"] == "classification" else VECTORS(server)
        for name, head in heads.items()
        if head["task"] in ("classification", "embedding")
    }


def best(server: Server) -> Any:
    """Return the two best labels of each text as the classification extension writes them."""
    names = labels(server, "topics")
    found = server.answer("/native/classify", {"inputs": TEXTS, "head": "topics", "top_k": 2})
    return [
        [f"{one['score']:f}:{names.index(one['label'])}:{one['label']}" for one in result]
        for result in found["results"]
    ]


def both(*runs: Run) -> Run:
    return lambda server: [run(server) for run in runs]


def one(run: Run) -> Run:
    return lambda server: [run(server)]


VECTORS = native("/embed", {"inputs": TEXTS}, "embeddings")
ENTITIES = native("/ner", {"inputs": TEXTS}, "results")
CALLS = [
    Call(
        "infer(text, outputs=[embeddings])",
        infer(lambda: [texts("text", TEXTS)], "embeddings"),
        one(VECTORS),
    ),
    Call(
        "infer(text, outputs=[embeddings]) as JSON",
        infer(lambda: [texts("text", TEXTS, binary=False)], "embeddings", binary=False),
        one(VECTORS),
    ),
    Call(
        "infer(text, outputs=[topics, embeddings])",
        infer(lambda: [texts("text", TEXTS)], "topics", "embeddings"),
        both(native_scores("topics"), VECTORS),
    ),
    Call("infer(text)", infer_all, native_all),
    Call(
        "infer(text, outputs=[entities])",
        infer(lambda: [texts("text", TEXTS)], "entities", show=from_json),
        one(ENTITIES),
    ),
    Call(
        "infer(text, outputs=[entities]) as JSON, compressed",
        infer(
            lambda: [texts("text", TEXTS)],
            "entities",
            show=from_json,
            binary=False,
            request_compression_algorithm="gzip",
            response_compression_algorithm="gzip",
        ),
        one(ENTITIES),
    ),
    Call(
        "infer(text, outputs=[topics with class_count=2])",
        infer(
            lambda: [texts("text", TEXTS)],
            "topics",
            class_count=2,
            show=lambda found: [[one.decode() for one in row] for row in found],
        ),
        one(best),
    ),
    Call(
        "infer(text, text_pair, outputs=[entailment])",
        infer(lambda: [texts("text", TEXTS), texts("text_pair", TEXTS[::-1])], "entailment"),
        one(native_scores("entailment", text_pair=TEXTS[::-1])),
    ),
    Call(
        "infer(question, context, parameters={'top_k': 2})",
        infer(
            lambda: [texts(name, [text]) for name, text in QUESTION.items()],
            "answers",
            show=from_json,
            parameters={"top_k": 2},
        ),
        one(native("/qa", {**QUESTION, "top_k": 2}, "results")),
    ),
    Call(
        "infer(text, outputs=[masks])",
        infer(lambda: [texts("text", [MASKED])], "masks", show=from_json),
        one(native("/fill-mask", {"inputs": MASKED}, "results")),
    ),
    Call(
        "infer(input_ids, lengths)",
        infer_ids(lambda sizes: integers("lengths", sizes, "int32")),
        both(native_scores("topics"), VECTORS),
    ),
    Call(
        "infer(input_ids, cu_seqlens)",
        infer_ids(lambda sizes: integers("cu_seqlens", np.cumsum([0, *sizes]).tolist())),
        both(native_scores("topics"), VECTORS),
    ),
    Call(
        "infer(..., model_version='1', request_id='7', timeout=10_000_000)",
        infer(
            lambda: [texts("text", TEXTS)],
            "embeddings",
            model_version="1",
            request_id="7",
            timeout=10_000_000,
        ),
        one(VECTORS),
    ),
    Call(
        "async_infer",
        lambda server: (
            connect(server)
            .async_infer(MODEL, [texts("text", TEXTS)], outputs=[output("embeddings")])
            .get_result()
            .as_numpy("embeddings")
            .tolist()
        ),
        VECTORS,
    ),
    Call(
        "is_server_live, is_server_ready, is_model_ready",
        lambda server: [
            connect(server).is_server_live(),
            connect(server).is_server_ready(),
            connect(server).is_model_ready(MODEL, "1"),
            connect(server).is_model_ready("huge"),
        ],
        lambda _: [True, True, True, False],
    ),
    Call(
        "get_server_metadata",
        lambda server: connect(server).get_server_metadata()["name"],
        lambda _: "quartet",
    ),
    Call(
        "get_model_metadata",
        lambda server: {
            one["name"]: one["parameters"]["labels"]
            for one in connect(server).get_model_metadata(MODEL)["outputs"]
            if "labels" in one["parameters"]
        },
        lambda server: {
            name: head["labels"]
            for name, head in server.get("/models").json()["models"][0]["heads"].items()
            if head["task"] == "classification"
        },
    ),
    Call(
        "get_model_repository_index",
        lambda server: connect(server).get_model_repository_index(),
        lambda _: [{"name": "tasks", "version": "1", "state": "READY", "reason": ""}],
    ),
]
FAILURES = [
    Failure("unknown model", infer(lambda: [texts("text", TEXTS)], model="huge"), ERROR),
    Failure("unknown version", infer(lambda: [texts("text", TEXTS)], model_version="9"), ERROR),
    Failure("unknown output", infer(lambda: [texts("text", TEXTS)], "logits"), ERROR),
    Failure("unknown input", infer(lambda: [texts("words", TEXTS)]), ERROR),
    Failure("too many texts", infer(lambda: [texts("text", TOO_MANY)]), ERROR),
    Failure(
        "ids beyond the vocabulary",
        infer(lambda: [integers("input_ids", [99999]), integers("lengths", [1])]),
        ERROR,
    ),
    Failure("sequences", infer(lambda: [texts("text", TEXTS)], sequence_id=7), ERROR),
    Failure("unload without keys", lambda server: connect(server).unload_model(MODEL), ERROR),
]


def infer_with_key(server: Server, key: str, retry: bool) -> Any:
    headers = {"Authorization": f"Bearer {key}"}
    return infer(lambda: [texts("text", TEXTS)], "embeddings", headers=headers)(server)


# The client itself does not repeat a request that was refused.
KEY_USE = KeyUse(infer_with_key, ERROR, ERROR, retries=False)

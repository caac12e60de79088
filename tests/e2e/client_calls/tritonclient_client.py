"""NVIDIA's client of the Open Inference Protocol: https://github.com/triton-inference-server/client"""

import importlib
import itertools
import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from tests.e2e.client_calls.records import TEXTS, TOO_MANY, Call, Failure, KeyUse, Run, native

if TYPE_CHECKING:
    from tests.e2e.conftest import Server

PACKAGE = r"tritonclient\[grpc,http\]"
ERROR = "tritonclient.utils.InferenceServerException"
MODEL = "tasks"
OPTIONS = ("--grpc-port", "0")
QUESTION = {"question": "What did Ada draw?", "context": "In Turin, Ada drew a comet. It rained."}
MASKED = "Ada drew a [MASK]."


def client(over: str) -> Any:
    """Return the client's module for a transport, `http` or `grpc`."""
    return importlib.import_module(f"tritonclient.{over}")


def connect(server: "Server", over: str = "http") -> Any:
    address = server.grpc_address if over == "grpc" else server.url.removeprefix("http://")
    return client(over).InferenceServerClient(address)


# Tensors of a request, made by the module of a transport.
Inputs = Callable[[Any], list[Any]]


def texts(name: str, values: Sequence[str], **options: bool) -> Inputs:
    def make(module: Any) -> list[Any]:
        data = np.array([value.encode() for value in values], dtype=np.object_)
        tensor = module.InferInput(name, [len(values)], "BYTES")
        return [tensor.set_data_from_numpy(data, **options)]

    return make


def integers(name: str, values: Sequence[int], kind: str = "int64") -> Inputs:
    def make(module: Any) -> list[Any]:
        tensor = module.InferInput(name, [len(values)], kind.upper())
        return [tensor.set_data_from_numpy(np.array(values, kind))]

    return make


def together(*inputs: Inputs) -> Inputs:
    return lambda module: [tensor for make in inputs for tensor in make(module)]


def infer(
    over: str,
    inputs: Inputs,
    *names: str,
    show: Callable[[Any], Any] = lambda found: found.tolist(),
    wanted: dict[str, Any] | None = None,
    model: str = MODEL,
    **options: Any,
) -> Run:
    """Return a run of `infer` whose result has each named output as a list. wanted: options of the outputs"""

    def run(server: "Server") -> Any:
        module = client(over)
        outputs = [module.InferRequestedOutput(name, **(wanted or {})) for name in names]
        found = connect(server, over).infer(model, inputs(module), outputs=outputs, **options)
        return [show(found.as_numpy(name)) for name in names]

    return run


def infer_all(over: str) -> Run:
    """Return a run of `infer` that names no output."""

    def run(server: "Server") -> Any:
        found = connect(server, over).infer(MODEL, texts("text", TEXTS)(client(over)))
        heads = server.get("/models").json()["models"][0]["heads"]
        numeric = [
            n for n, head in heads.items() if head["task"] in ("classification", "embedding")
        ]
        return {name: found.as_numpy(name).tolist() for name in numeric}

    return run


def infer_ids(over: str, bounds: Callable[[list[int]], Inputs]) -> Run:
    def run(server: "Server") -> Any:
        found = server.answer("/tokenize", {"inputs": TEXTS})["results"]
        ids = [[token["id"] for token in one["tokens"]] for one in found]
        all_ids = integers("input_ids", [*itertools.chain.from_iterable(ids)])
        inputs = together(all_ids, bounds([*map(len, ids)]))
        return infer(over, inputs, "topics", "embeddings")(server)

    return run


def from_json(found: Any) -> Any:
    return [json.loads(one) for one in found]


def decoded(found: Any) -> Any:
    return [[one.decode() for one in row] for row in found]


def scores(results: Sequence[Any], labels: Sequence[str]) -> Any:
    """Return the scores of each input in the order of the labels."""
    tables = [{one["label"]: one["score"] for one in found} for found in results]
    return [[table[label] for label in labels] for table in tables]


def labels(server: "Server", head: str) -> Any:
    return server.get("/models").json()["models"][0]["heads"][head]["labels"]


def native_scores(head: str, **body: object) -> Run:
    def answer(server: "Server") -> Any:
        found = server.answer("/native/classify", {"inputs": TEXTS, "head": head, **body})
        return scores(found["results"], labels(server, head))

    return answer


def native_all(server: "Server") -> Any:
    """Return the native answers of all heads with numbers."""
    heads = server.get("/models").json()["models"][0]["heads"]
    return {
        name: native_scores(name)(server) if head["task"] == "classification" else VECTORS(server)
        for name, head in heads.items()
        if head["task"] in ("classification", "embedding")
    }


def best(server: "Server") -> Any:
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


def calls(over: str) -> list[Call]:
    """Return the calls that both transports have."""
    both_texts = texts("text", TEXTS)
    question = together(*(texts(name, [text]) for name, text in QUESTION.items()))
    found = [
        ("infer(text)", infer_all(over), native_all),
        ("infer(text, outputs=[embeddings])", infer(over, both_texts, "embeddings"), one(VECTORS)),
        (
            "infer(text, outputs=[topics, embeddings])",
            infer(over, both_texts, "topics", "embeddings"),
            both(native_scores("topics"), VECTORS),
        ),
        (
            "infer(text, outputs=[entities])",
            infer(over, both_texts, "entities", show=from_json),
            one(ENTITIES),
        ),
        (
            "infer(text, outputs=[topics with class_count=2])",
            infer(over, both_texts, "topics", wanted={"class_count": 2}, show=decoded),
            one(best),
        ),
        (
            "infer(text, text_pair, outputs=[entailment])",
            infer(over, together(both_texts, texts("text_pair", TEXTS[::-1])), "entailment"),
            one(native_scores("entailment", text_pair=TEXTS[::-1])),
        ),
        (
            "infer(question, context, parameters={'top_k': 2})",
            infer(over, question, "answers", show=from_json, parameters={"top_k": 2}),
            one(native("/qa", {**QUESTION, "top_k": 2}, "results")),
        ),
        (
            "infer(text, outputs=[masks])",
            infer(over, texts("text", [MASKED]), "masks", show=from_json),
            one(native("/fill-mask", {"inputs": MASKED}, "results")),
        ),
        (
            "infer(text, outputs=[weights], parameters={'top_k': 3})",
            infer(over, both_texts, "weights", show=from_json, parameters={"top_k": 3}),
            one(native("/embed-sparse", {"inputs": TEXTS, "top_k": 3}, "embeddings")),
        ),
        (
            "infer(text, outputs=[tokens])",
            infer(over, both_texts, "tokens", show=from_json),
            one(native("/embed-tokens", {"inputs": TEXTS}, "embeddings")),
        ),
        (
            "infer(input_ids, lengths)",
            infer_ids(over, lambda sizes: integers("lengths", sizes, "int32")),
            both(native_scores("topics"), VECTORS),
        ),
        (
            "infer(input_ids, cu_seqlens)",
            infer_ids(over, lambda sizes: integers("cu_seqlens", np.cumsum([0, *sizes]).tolist())),
            both(native_scores("topics"), VECTORS),
        ),
        (
            "infer(..., model_version='1', request_id='7', timeout=10_000_000)",
            infer(
                over,
                both_texts,
                "embeddings",
                model_version="1",
                request_id="7",
                timeout=10_000_000,
            ),
            one(VECTORS),
        ),
        ("is_server_live", lambda server: connect(server, over).is_server_live(), lambda _: True),
        ("is_server_ready", lambda server: connect(server, over).is_server_ready(), lambda _: True),
        (
            "is_model_ready",
            lambda server: connect(server, over).is_model_ready(MODEL, "1"),
            lambda _: True,
        ),
    ]
    return [Call(f"{over}: {name}", run, expected) for name, run, expected in found]


def failures(over: str) -> list[Failure]:
    """Return the failures that both transports have."""
    both_texts = texts("text", TEXTS)
    beyond = together(integers("input_ids", [99999]), integers("lengths", [1]))
    found = [
        ("unknown model", infer(over, both_texts, model="huge")),
        ("unknown version", infer(over, both_texts, model_version="9")),
        ("unknown output", infer(over, both_texts, "logits")),
        ("unknown input", infer(over, texts("words", TEXTS))),
        ("too many texts", infer(over, texts("text", TOO_MANY))),
        ("ids beyond the vocabulary", infer(over, beyond)),
        ("sequences", infer(over, both_texts, sequence_id=7)),
        ("late", infer(over, both_texts, timeout=1)),
        ("unload without keys", lambda server: connect(server, over).unload_model(MODEL)),
    ]
    return [Failure(f"{over}: {name}", run, ERROR) for name, run in found]


CALLS = [
    *calls("http"),
    *calls("grpc"),
    Call(
        "http: infer(text, outputs=[embeddings]) as JSON",
        infer(
            "http",
            texts("text", TEXTS, binary_data=False),
            "embeddings",
            wanted={"binary_data": False},
        ),
        one(VECTORS),
    ),
    Call(
        "http: infer(text, outputs=[entities]), compressed",
        infer(
            "http",
            texts("text", TEXTS),
            "entities",
            show=from_json,
            request_compression_algorithm="gzip",
            response_compression_algorithm="gzip",
        ),
        one(ENTITIES),
    ),
    Call(
        "grpc: infer(text, outputs=[entities]), compressed",
        infer(
            "grpc", texts("text", TEXTS), "entities", show=from_json, compression_algorithm="gzip"
        ),
        one(ENTITIES),
    ),
    Call(
        "http: async_infer",
        lambda server: (
            connect(server)
            .async_infer(MODEL, texts("text", TEXTS)(client("http")))
            .get_result()
            .as_numpy("embeddings")
            .tolist()
        ),
        VECTORS,
    ),
    Call(
        "http: is_model_ready of another model",
        lambda server: connect(server).is_model_ready("huge"),
        lambda _: False,
    ),
    Call(
        "http: get_server_metadata",
        lambda server: connect(server).get_server_metadata()["name"],
        lambda _: "quartet",
    ),
    Call(
        "grpc: get_server_metadata",
        lambda server: connect(server, "grpc").get_server_metadata().name,
        lambda _: "quartet",
    ),
    Call(
        "http: get_model_metadata",
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
        "grpc: get_model_metadata",
        lambda server: {
            one.name: [*one.shape]
            for one in connect(server, "grpc").get_model_metadata(MODEL).outputs
        },
        lambda server: {
            one["name"]: one["shape"] for one in server.get(f"/v2/models/{MODEL}").json()["outputs"]
        },
    ),
    Call(
        "http: get_model_repository_index",
        lambda server: connect(server).get_model_repository_index(),
        lambda _: [{"name": "tasks", "version": "1", "state": "READY", "reason": ""}],
    ),
    Call(
        "grpc: get_model_repository_index",
        lambda server: [
            (one.name, one.version, one.state)
            for one in connect(server, "grpc").get_model_repository_index().models
        ],
        lambda _: [("tasks", "1", "READY")],
    ),
]
FAILURES = [*failures("http"), *failures("grpc")]


def infer_with_key(server: "Server", key: str, retry: bool) -> Any:
    """Call over gRPC first, and over HTTP. A refusal is that of gRPC."""
    found = [
        infer(over, texts("text", TEXTS), "embeddings", headers=headers)(server)
        for over, headers in (
            ("grpc", {"authorization": f"Bearer {key}"}),
            ("http", {"Authorization": f"Bearer {key}"}),
        )
    ]
    return found[0]


# The client itself does not repeat a request that was refused.
KEY_USE = KeyUse(infer_with_key, ERROR, ERROR, retries=False)

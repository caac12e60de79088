"""Calls over gRPC with messages that are made up, changed, cut off and compressed."""

import os
import random
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

from tests.e2e.conftest import children, serving

grpc = pytest.importorskip("grpc")

from google.protobuf.descriptor import FieldDescriptor  # noqa: E402

from service.api.dialects import open_inference_pb2 as messages  # noqa: E402
from service.api.dialects.inference_grpc import SERVICE  # noqa: E402
from service.api.dialects.standard_grpc import SERVICES  # noqa: E402

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

REQUESTS = int(os.environ.get("CONTRACT_REQUESTS", "300"))
# Words of valid requests, so that some are answered.
WORDS = [
    "tasks",
    "text",
    "text_pair",
    "question",
    "context",
    "BYTES",
    "INT64",
    "input_ids",
    "lengths",
]
WORDS += ["sentiment", "embeddings", "top_k", "timeout", "", "\0", "\U0001f600" * 40]
NUMBERS = [0, 1, 2, 3, -1, 127, 2**31 - 1, -(2**31), 2**63 - 1, -(2**63), 2**32 - 1, 2**64 - 1]
VALID = {
    "model_name": "tasks",
    "inputs": [
        {
            "name": "text",
            "datatype": "BYTES",
            "shape": [2],
            "contents": {"bytes_contents": [b"Ada drew a comet.", b"a" * 500]},
        }
    ],
    "outputs": [{"name": "topics"}, {"name": "embeddings"}],
}
REFUSED = {"INVALID_ARGUMENT", "NOT_FOUND", "RESOURCE_EXHAUSTED", "PERMISSION_DENIED"}
REFUSED |= {"FAILED_PRECONDITION", "DEADLINE_EXCEEDED", "CANCELLED", "UNIMPLEMENTED"}
COMPRESSIONS = [grpc.Compression.NoCompression, grpc.Compression.Gzip, grpc.Compression.Deflate]


def value(chance: random.Random, field: Any) -> Any:
    if field.message_type is not None:
        return fields(chance, field.message_type)
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING:
            word = chance.choice(WORDS)
            return word if field.type == FieldDescriptor.TYPE_STRING else word.encode()
        case FieldDescriptor.CPPTYPE_BOOL:
            return chance.random() < 0.5
        case FieldDescriptor.CPPTYPE_DOUBLE | FieldDescriptor.CPPTYPE_FLOAT:
            return chance.choice([0.0, -0.5, float("nan"), float("inf")])
    bits = 64 if "64" in field.name else 32
    low, high = (0, 2**bits) if "uint" in field.name else (-(2 ** (bits - 1)), 2 ** (bits - 1))
    return chance.choice([number for number in NUMBERS if low <= number < high])


def fields(chance: random.Random, kind: Any) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for field in kind.fields:
        if chance.random() < 0.4:
            continue
        if not field.is_repeated:
            found[field.name] = value(chance, field)
            continue
        several = [value(chance, field) for _ in range(chance.choice([0, 1, 1, 1, 2, 40]))]
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            found[field.name] = {one.get("key", ""): one.get("value", {}) for one in several}
        else:
            found[field.name] = several
    return found


def make_message(chance: random.Random, kind: Any) -> bytes:
    """Return a valid or made-up message as it is, repeated, cut off or with other bytes."""
    valid = kind is messages.ModelInferRequest and chance.random() < 0.5
    content = VALID if valid else fields(chance, kind.DESCRIPTOR)
    message = bytearray(kind(**content).SerializeToString())
    match chance.randrange(5):
        case 0 if message:
            del message[chance.randrange(len(message)) :]
        case 1:
            message *= chance.choice([2, 50, 5000])
        case 2 if message:
            for _ in range(chance.choice([1, 5])):
                message[chance.randrange(len(message))] = chance.randrange(256)
    return bytes(message[: 10 * 1024 * 1024])


def ends(server: Any, chance: random.Random) -> Iterator[str]:
    """Yield the statuses of generated calls, on a new connection for every hundred.

    Some have no message or two, some leave their stream open, and some are of calls that do not exist.
    """
    every = [(service, name) for service, rpcs in SERVICES.items() for name in rpcs]
    for number in range(REQUESTS):
        if number % 100 == 0:
            channel = grpc.insecure_channel(server.grpc_address)
        service, name = chance.choice([*every, (SERVICE, "Other"), ("a.Other", "Check")])
        if number % 2:
            service, name = SERVICE, "ModelInfer"
        rpc = SERVICES.get(service, {}).get(name)
        kind = rpc.asked if rpc and rpc.asked else messages.ModelInferRequest
        count = chance.choice([1] * 18 + [0, 2])
        sent = [make_message(chance, kind) for _ in range(count)]
        over = threading.Event()
        call = channel.stream_stream(f"/{service}/{name}")(
            sending(sent, over if chance.random() < 0.05 else None),
            timeout=0.2 if name == "Watch" else 60,
            compression=chance.choice(COMPRESSIONS),
        )
        if chance.random() < 0.05:
            call.cancel()
        with suppress(grpc.RpcError):
            for _ in call:
                over.set()
        over.set()
        yield call.code().name
        if number % 100 == 99:
            channel.close()


def sending(sent: list[bytes], over: threading.Event | None) -> Iterator[bytes]:
    """Yield messages, and leave the stream open for a while if there is an event."""
    yield from sent
    if over is not None:
        over.wait(0.2)


def test_messages_of_any_content(tasks_bundle):
    """Each call is answered or refused with a status of its own; no process ends, and nothing unexpected is logged."""
    with serving(tasks_bundle, "--grpc-port", 0) as server:
        before = children(server)
        counts = Counter(ends(server, random.Random(1)))
        print(dict(counts))
        assert before == children(server)
        assert "unexpected error" not in "".join(server.log)
    assert counts["OK"] > REQUESTS / 20
    assert counts.keys() <= REFUSED | {"OK"}

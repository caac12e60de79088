"""The Open Inference Protocol over gRPC, where tritonclient does not reach."""

import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.lib.processes import resident_mb
from service.keys import make_key, record
from service.middleware.body_memory import BODIES
from service.middleware.refusal_throttle import REFUSALS_PER_S
from tests.e2e.client_calls.records import TEXTS
from tests.e2e.conftest import Server, children, serving, start, until

grpc = pytest.importorskip("grpc")

from google.protobuf.descriptor_pool import DescriptorPool  # noqa: E402
from google.protobuf.message_factory import GetMessageClass  # noqa: E402

from service.api.dialects import open_inference_pb2 as messages  # noqa: E402
from service.api.dialects.grpc_server import STREAMS  # noqa: E402
from service.api.dialects.inference_grpc import RPCS, SERVICE  # noqa: E402
from service.api.dialects.standard_grpc import (  # noqa: E402
    ANSWER,
    ASKED,
    HEALTH,
    NOT_SERVING,
    REFLECTION,
    SERVICE_UNKNOWN,
    SERVICES,
    SERVING,
    class_of,
)

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

INFER = "ModelInfer"
LONG = "Ada drew a comet, and it rained in Turin. " * 4000


@contextmanager
def channel_to(server: Server) -> Iterator[Any]:
    with grpc.insecure_channel(server.grpc_address) as channel:
        yield channel


@pytest.fixture(scope="module")
def server(tiny_bundle: Path) -> Iterator[Server]:
    options = ("--grpc-port", 0, "--max-inputs-per-request", 8, "--http-workers", 2)
    with serving(tiny_bundle, *options) as running:
        yield running


@pytest.fixture(scope="module")
def channel(server: Server) -> Iterator[Any]:
    with channel_to(server) as channel:
        yield channel


def begin(channel: Any, name: str, asked: Any, **options: Any) -> Any:
    """Begin a call; the result is its future."""
    method = channel.unary_unary(
        f"/{SERVICE}/{name}",
        request_serializer=lambda message: message.SerializeToString(),
        response_deserializer=getattr(messages, f"{name}Response").FromString,
    )
    return method.future(asked, timeout=60, **options)


def send(channel: Any, *message: bytes, **options: Any) -> Any:
    """Call ModelInfer with the bytes of a message, or without one. Returns the ended call."""
    method = channel.stream_unary(f"/{SERVICE}/{INFER}")
    call = method.future(iter(message), timeout=60, **options)
    call.exception()
    return call


class Waiting:
    """Calls that begin and send no message until they are over."""

    def __init__(self, channel: Any, count: int, **options: Any) -> None:
        self._over = threading.Event()
        method = channel.stream_unary(f"/{SERVICE}/{INFER}")
        self.calls = [method.future(self._wait(), timeout=60, **options) for _ in range(count)]

    def _wait(self) -> Iterator[bytes]:
        self._over.wait()
        yield from ()

    def __enter__(self) -> Any:
        return self.calls

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for call in self.calls:
            call.cancel()


def texts(values: list[str] = TEXTS, name: str = "text") -> Any:
    contents = {"bytes_contents": [value.encode() for value in values]}
    return {"name": name, "datatype": "BYTES", "shape": [len(values)], "contents": contents}


def infer(*inputs: Any, **fields: Any) -> Any:
    return messages.ModelInferRequest(model_name="tiny", inputs=[*inputs], **fields)


def refusal(channel: Any, name: str, asked: Any, **options: Any) -> tuple[str, str]:
    """Return the status and the message of a call that fails."""
    with pytest.raises(grpc.RpcError) as raised:
        begin(channel, name, asked, **options).result()
    return raised.value.code().name, raised.value.details()


def test_contents(server, channel):
    """A request whose tensors have contents gets contents, and the id and the request's id back."""
    asked = infer(texts(), id="7", outputs=[{"name": "embeddings"}, {"name": "entities"}])
    call = begin(channel, INFER, asked, metadata=[("x-request-id", "from-a-client")])
    found = call.result()
    assert ("tiny", "1", "7") == (found.model_name, found.model_version, found.id)
    vectors, entities = found.outputs
    assert ([2, 64], [2]) == ([*vectors.shape], [*entities.shape])
    expected = server.answer("/embed", {"inputs": TEXTS})["embeddings"]
    np.testing.assert_allclose(
        np.reshape(vectors.contents.fp32_contents, [2, 64]), expected, atol=1e-6
    )
    assert 2 == len(entities.contents.bytes_contents)
    assert [] == [*found.raw_output_contents]
    assert "from-a-client" == dict(call.trailing_metadata())["x-request-id"]


def test_ids(channel):
    """Ids may be INT32 or INT64, in contents or raw."""
    results = []
    for datatype, field, kind in (
        ("INT64", "int64_contents", "<i8"),
        ("INT32", "int_contents", "<i4"),
    ):
        columns = {"input_ids": [2, 5, 6, 3], "lengths": [2, 2]}
        tensors = [
            {"name": name, "datatype": datatype, "shape": [len(column)]}
            for name, column in columns.items()
        ]
        filled = [
            {**tensor, "contents": {field: column}}
            for tensor, column in zip(tensors, columns.values(), strict=True)
        ]
        found = begin(channel, INFER, infer(*filled, outputs=[{"name": "topics"}])).result()
        results.append([*found.outputs[0].contents.fp32_contents])
        raw = [np.array(column, kind).tobytes() for column in columns.values()]
        asked = infer(*tensors, outputs=[{"name": "topics"}], raw_input_contents=raw)
        found = begin(channel, INFER, asked).result()
        results.append(np.frombuffer(found.raw_output_contents[0], "<f4").tolist())
    for result in results[1:]:
        np.testing.assert_allclose(result, results[0], atol=1e-6)


BOOL = {"a": {"bool_param": True}}


@pytest.mark.parametrize(
    ("asked", "status", "named"),
    [
        (infer(), "INVALID_ARGUMENT", "inputs"),
        (infer(texts([])), "INVALID_ARGUMENT", "shape"),
        (infer({"name": "text", "datatype": "BYTES", "shape": [1]}), "INVALID_ARGUMENT", "0 elements"),
        (infer({"name": "text", "datatype": "FP64", "shape": [1]}), "INVALID_ARGUMENT", "FP64"),
        (infer({"name": "text", "datatype": "BYTES", "shape": [-1]}), "INVALID_ARGUMENT", "shape"),
        (infer(texts(["a"] * 9)), "INVALID_ARGUMENT", "9 elements"),
        (infer({**texts(["a"] * 5000), "shape": [1]}), "INVALID_ARGUMENT", "raw_input_contents"),
        (infer(texts(), raw_input_contents=[b"", b""]), "INVALID_ARGUMENT", "align"),
        (infer(texts(["a"]), raw_input_contents=[b"\1\0\0"]), "INVALID_ARGUMENT", "length"),
        (infer(texts(), parameters=BOOL), "INVALID_ARGUMENT", "parameters.a"),
        (infer({**texts(), "parameters": BOOL}), "INVALID_ARGUMENT", "parameters.a"),
        (infer(texts(), parameters={"a": {}}), "INVALID_ARGUMENT", "parameters.a"),
        (infer(texts(), outputs=[{"name": "topics", "parameters": BOOL}]), "INVALID_ARGUMENT", "parameters.a"),
        (
            infer(texts(), parameters={"binary_data_output": {"bool_param": True}}),
            "INVALID_ARGUMENT",
            "binary_data_output",
        ),
        (infer(texts(), parameters={"timeout": {"string_param": "a"}}), "INVALID_ARGUMENT", "timeout"),
        (infer(texts(), outputs=[{"name": "logits"}]), "NOT_FOUND", "logits"),
        (messages.ModelInferRequest(inputs=[texts()]), "NOT_FOUND", "''"),
    ],
)  # fmt: skip
def test_errors(channel, asked, status, named):
    """A request that is not valid has a status and our message."""
    found, message = refusal(channel, INFER, asked)
    assert status == found
    assert named in message


def test_other_errors(server, channel):
    """So has a call of other kinds, of a message that is too large, and one that does not exist."""
    index = messages.RepositoryIndexRequest(repository_name="other")
    assert "INVALID_ARGUMENT" == refusal(channel, "RepositoryIndex", index)[0]
    huge = messages.ModelReadyRequest(name="huge")
    assert "NOT_FOUND" == refusal(channel, "ModelReady", huge)[0]
    load = messages.RepositoryModelLoadRequest(model_name="tiny")
    assert "PERMISSION_DENIED" == refusal(channel, "RepositoryModelLoad", load)[0]
    large = infer(texts(["a" * 11_000_000]))
    assert "RESOURCE_EXHAUSTED" == refusal(channel, INFER, large)[0]
    assert "INVALID_ARGUMENT" == send(channel, b"\x2a\x05\0").code().name
    late = infer(texts(), parameters={"timeout": {"int64_param": 1}})
    assert refusal(channel, INFER, late)[0] in ("DEADLINE_EXCEEDED", "RESOURCE_EXHAUSTED")
    unknown = channel.unary_unary("/inference.Other/Call").future(b"")
    assert ("UNIMPLEMENTED", True) == (unknown.code().name, SERVICE in unknown.details())
    metadata = [("x-request-timeout-ms", "soon")]
    assert "INVALID_ARGUMENT" == refusal(channel, INFER, infer(texts()), metadata=metadata)[0]
    until(lambda: f'path":"/{SERVICE}/ModelReady"' in "".join(server.log).replace('": "', '":"'))
    # A request is counted after its response.
    until(lambda: f'route="/{SERVICE}/{INFER}"' in server.get("/metrics").body.decode())


def test_client_that_leaves(server, channel):
    """A call that its client cancels is no longer computed."""
    call = begin(channel, INFER, infer(texts([LONG] * 8), outputs=[{"name": "embeddings"}]))
    call.cancel()
    begin(channel, "ServerReady", messages.ServerReadyRequest()).result()
    assert "Traceback" not in "".join(server.log)


def test_keys(tiny_bundle, tmp_path):
    """Calls need a key, health checks none; a refused call says when to repeat it."""
    slow, keys = make_key(), tmp_path / "keys.toml"
    keys.write_text(record("slow", slow) + "requests_per_minute = 60\n")
    options = ("--api-keys", keys, "--grpc-port", 0)
    with serving(tiny_bundle, *options) as server, channel_to(server) as channel:
        assert begin(channel, "ServerLive", messages.ServerLiveRequest()).result().live
        assert begin(channel, "ServerReady", messages.ServerReadyRequest()).result().ready
        for name in RPCS.keys() - {"ServerLive", "ServerReady"}:
            assert "UNAUTHENTICATED" == refusal(channel, name, RPCS[name].asked())[0], name
        unload = messages.RepositoryModelUnloadRequest(model_name="tiny")
        metadata = [("api-key", slow)]
        found = refusal(channel, "RepositoryModelUnload", unload, metadata=metadata)
        assert "PERMISSION_DENIED" == found[0]
        calls = [begin(channel, INFER, infer(texts()), metadata=metadata) for _ in range(100)]
        refused = next(error for call in calls if (error := call.exception()))
        assert grpc.StatusCode.RESOURCE_EXHAUSTED == refused.code()
        after = dict(refused.trailing_metadata())
        assert ("1", "1000") == (after["retry-after"], after["grpc-retry-pushback-ms"])


EMPTY_INPUTS = b"\x2a\0" * 4_000_000


@pytest.mark.parametrize("compression", [grpc.Compression.Gzip, grpc.Compression.Deflate])
def test_messages_of_many_fields(tiny_bundle, tmp_path, compression):
    """A message of 8 MB in 8 KB is not inflated for a stranger, and not parsed for a tenant."""
    key, keys = make_key(), tmp_path / "keys.toml"
    keys.write_text(record("tenant", key))
    with (
        serving(tiny_bundle, "--api-keys", keys, "--grpc-port", 0) as server,
        grpc.insecure_channel(server.grpc_address, compression=compression) as channel,
    ):
        (http_process,) = children(server)["http"]
        own = [("api-key", key)]
        short = infer(texts(), outputs=[{"name": "topics"}]).SerializeToString()
        assert send(channel, short, metadata=own).result()
        assert "UNAUTHENTICATED" == send(channel, short).code().name  # the first takes memory
        before = resident_mb(http_process)
        for _ in range(3):
            assert "UNAUTHENTICATED" == send(channel, EMPTY_INPUTS).code().name
        assert resident_mb(http_process) - before < 4
        for _ in range(3):
            call = send(channel, EMPTY_INPUTS, metadata=own)
            assert ("INVALID_ARGUMENT", True) == (call.code().name, "fields" in call.details())
        assert resident_mb(http_process) - before < 40
        call = send(channel, b"\x3a" * 11_000_000, metadata=own)
        assert ("INVALID_ARGUMENT", True) == (call.code().name, "larger" in call.details())
        long = infer(texts([LONG]), outputs=[{"name": "topics"}]).SerializeToString()
        assert send(channel, long, metadata=own).result()


def test_calls_without_messages(tiny_bundle, tmp_path):
    """They end at once without a key, keep no other tenant out with one, and a drain does not wait for them."""
    one, other, keys = make_key(), make_key(), tmp_path / "keys.toml"
    keys.write_text(record("one", one) + record("other", other))
    options = ("--api-keys", keys, "--grpc-port", 0, "--max-connections", 20)
    asked = infer(texts(), outputs=[{"name": "topics"}])
    with serving(tiny_bundle, *options) as server, ExitStack() as stack:
        channels = [stack.enter_context(channel_to(server)) for _ in range(3)]
        # Beyond `STREAMS` calls that do not end, the library may reset calls in place of their refusal.
        calls = stack.enter_context(Waiting(channels[0], STREAMS))
        refused = {(call.code().name, call.details()[:80]) for call in calls}
        assert {"UNAUTHENTICATED"} == {name for name, _ in refused}, refused
        calls = stack.enter_context(Waiting(channels[1], 100, metadata=[("api-key", one)]))
        until(lambda: sum(not call.done() for call in calls) < BODIES)
        begin(channels[2], INFER, asked, metadata=[("api-key", other)]).result()
        left = [call for call in calls if not call.done()]
        assert left
        server.process.send_signal(signal.SIGTERM)
        # Calls beyond the tenant's share of memory may still wait for their refusal.
        assert {"UNAVAILABLE"} == {call.code().name for call in left} - {"RESOURCE_EXHAUSTED"}
        assert 0 == server.process.wait(60)
        assert "Traceback" not in "".join(server.log)


def test_a_slow_message(tiny_bundle):
    """A message has the time of a body, and a call without a message is refused."""
    options = ("--grpc-port", 0, "--body-timeout-s", 1)
    with serving(tiny_bundle, *options) as server, channel_to(server) as channel:
        with Waiting(channel, 1) as (call,):
            assert "DEADLINE_EXCEEDED" == call.code().name
            assert "within 1 s" in call.details()
        assert "INVALID_ARGUMENT" == send(channel).code().name


def test_refused_calls_take_turns(tiny_bundle, tmp_path):
    """A stranger gets refusals at the rate of HTTP, whatever it calls; no browser's HTTP/1.1 gets an answer at all."""
    keys = tmp_path / "keys.toml"
    keys.write_text(record("tenant", make_key()))
    names = ["/inference.Other/Call", "/a", f"/{SERVICE}/{INFER}", f"/{SERVICE}/Other"]
    names += [f"/{name}/ServerReflectionInfo" for name in REFLECTION]
    options = ("--api-keys", keys, "--grpc-port", 0)
    with serving(tiny_bundle, *options) as server, channel_to(server) as channel:
        began = time.monotonic()
        for _ in range(50):
            calls = [channel.unary_unary(name).future(b"", timeout=60) for name in names * 2]
            assert {"UNAUTHENTICATED"} == {call.code().name for call in calls}
        assert time.monotonic() - began > 50 * len(calls) / REFUSALS_PER_S - 1.2
        with socket.create_connection(server.grpc_address.rsplit(":", 1), timeout=10) as raw:
            raw.sendall(b"POST /v2/models/tiny/infer HTTP/1.1\r\nHost: a.org\r\n\r\n")
            assert b"HTTP/1.1" not in b"".join(iter(lambda: raw.recv(4096), b""))


def test_health(tiny_bundle, tmp_path):
    """The standard health checks need no key, answer for the server and each service, and report the drain."""
    key, keys = make_key(), tmp_path / "keys.toml"
    keys.write_text(record("tenant", key))
    options = ("--grpc-port", 0, "--api-keys", keys)
    with serving(tiny_bundle, *options) as server, channel_to(server) as channel:

        def status(service):
            asked = ASKED(service=service).SerializeToString()
            return ANSWER.FromString(
                channel.unary_unary(f"/{HEALTH}/Check")(asked, timeout=60)
            ).status

        assert [SERVING] * 3 == [status(service) for service in ("", SERVICE, HEALTH)]
        with pytest.raises(grpc.RpcError) as raised:
            status("other")
        assert grpc.StatusCode.NOT_FOUND == raised.value.code()
        watch = channel.unary_stream(f"/{HEALTH}/Watch", response_deserializer=ANSWER.FromString)
        states = watch(b"", timeout=60)
        assert SERVING == next(states).status
        assert SERVICE_UNKNOWN == next(watch(ASKED(service="other").SerializeToString())).status
        server.process.send_signal(signal.SIGTERM)
        assert [NOT_SERVING] == [state.status for state in states]
        assert 0 == server.process.wait(60)
        assert "Traceback" not in "".join(server.log)


@pytest.mark.parametrize("name", REFLECTION)
def test_reflection(channel, name):
    """A client that knows nothing learns the services, their calls and their messages, and can send a request."""
    asked, answer = (
        class_of(name.replace("ServerReflection", f"ServerReflection{kind}"))
        for kind in ("Request", "Response")
    )
    method = channel.stream_stream(
        f"/{name}/ServerReflectionInfo",
        request_serializer=asked.SerializeToString,
        response_deserializer=answer.FromString,
    )
    questions = [{"list_services": ""}]
    questions += [{"file_containing_symbol": service} for service in SERVICES]
    questions += [{"file_by_filename": "grpc_service.proto"}, {"file_containing_symbol": "a.B"}, {}]
    listed, *files, unknown, none = method(iter([asked(**one) for one in questions]), timeout=60)
    assert [*SERVICES] == [one.name for one in listed.list_services_response.service]
    assert 5 == unknown.error_response.error_code == none.error_response.error_code
    pool = DescriptorPool()
    for found in files[:-1]:
        (described,) = found.file_descriptor_response.file_descriptor_proto
        pool.AddSerializedFile(described)
    for service, rpcs in SERVICES.items():
        assert [*rpcs] == [call.name for call in pool.FindServiceByName(service).methods]
    infer = pool.FindServiceByName(SERVICE).FindMethodByName(INFER)
    request = GetMessageClass(infer.input_type)(model_name="tiny", inputs=[texts()])
    assert (
        request.SerializeToString()
        == messages.ModelInferRequest.FromString(request.SerializeToString()).SerializeToString()
    )


def test_pings(server):
    """A client may send pings every second, also without calls."""
    options = {"keepalive_time_ms": 1000, "keepalive_permit_without_calls": 1}
    options |= {"http2.max_pings_without_data": 0}
    named = [(f"grpc.{name}", value) for name, value in options.items()]
    with grpc.insecure_channel(server.grpc_address, options=named) as channel:
        states = []
        channel.subscribe(states.append, try_to_connect=True)
        begin(channel, "ServerReady", messages.ServerReadyRequest()).result()
        time.sleep(4)
        begin(channel, "ServerReady", messages.ServerReadyRequest()).result()
        ready = states.index(grpc.ChannelConnectivity.READY)
        assert [grpc.ChannelConnectivity.READY] == states[ready:]


@pytest.mark.parametrize("workers", [0, 1])
def test_drain(tiny_bundle, workers):
    """From SIGTERM on, accepted calls are answered, and new ones are refused."""
    options = ("--grpc-port", 0, "--http-workers", workers)
    with serving(tiny_bundle, *options) as server, channel_to(server) as channel:
        asked = infer(texts([LONG]), outputs=[{"name": "embeddings"}])
        calls = []
        while all(call.done() for call in calls):
            calls = [begin(channel, INFER, asked) for _ in range(3)]
            # On the same connection, this call arrives after the others. A busy machine may answer it last.
            begin(channel, "ServerReady", messages.ServerReadyRequest()).result()
        server.process.send_signal(signal.SIGTERM)
        until(lambda: any('"draining"' in line for line in server.log))
        with ThreadPoolExecutor() as pool:
            found = [*pool.map(lambda call: call.result(), calls)]
        assert [[1, 64]] * 3 == [[*one.outputs[0].shape] for one in found]
        assert 0 == server.process.wait(60)
        assert "Traceback" not in "".join(server.log)


def test_busy_port(tiny_bundle, server):
    """A port that another service has ends the start with one line."""
    port = server.url.rpartition(":")[2]
    process = start(tiny_bundle, "--port", "0", "--grpc-port", port)
    assert process.stderr is not None
    with process.stderr:
        said = process.stderr.read()
    assert 1 == process.wait(60)
    assert f"cannot listen on 127.0.0.1:{port}" in said

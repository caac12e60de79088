"""The Open Inference Protocol over gRPC, which needs the extra `grpc`.

Each call becomes a request to the path that it has over HTTP, without a connection: it passes the same checks, has the
same limits, and is counted and logged in the same way.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, NamedTuple

import grpc
import grpc.aio
from fastapi import FastAPI
from starlette.requests import Request as HttpRequest
from starlette.types import Message, Scope

from service import __version__
from service.api.admin import tenant_of
from service.api.dialects import open_inference_pb2 as messages
from service.api.dialects.inference_dialect import (
    EXTENSIONS,
    PREFIX,
    RepositoryRequest,
    describe,
    earlier,
    list_models,
)
from service.api.dialects.inference_protocol import (
    BYTES,
    InferRequest,
    OutputTensor,
    check_sizes,
    make_task,
    to_tensors,
)
from service.api.engine_call import (
    add_fields,
    deadline_of,
    engine_of,
    open_call,
    reserve_memory,
    service_of,
)
from service.api.request_body import VALUES
from service.api.schemas import most_parts, validate
from service.engines.commands import LoadModel, UnloadModel
from service.errors import InvalidInput, QuartetError, TooLarge
from service.middleware.refusals import log_internal_error
from service.middleware.request_context import CONTEXT, RequestContext, context_of
from service.middleware.request_lifecycle import RequestLifecycle
from service.middleware.service_state import TIMEOUT_HEADER
from service.observability.logs import NAMES, log_bug
from service.settings import Settings

SERVICE = "inference.GRPCInferenceService"
# The status of a failed call, by the status that the error has over HTTP.
STATUSES: Mapping[int, grpc.StatusCode] = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    409: grpc.StatusCode.FAILED_PRECONDITION,
    413: grpc.StatusCode.INVALID_ARGUMENT,
    422: grpc.StatusCode.INVALID_ARGUMENT,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
CONTENTS: Mapping[str, str] = {
    BYTES: "bytes_contents",
    "INT64": "int64_contents",
    "INT32": "int_contents",
    "UINT64": "uint64_contents",
    "UINT32": "uint_contents",
}  # the field of a datatype's elements


# -- answers --------------------------------------------------------------------------------------


async def live(request: HttpRequest, asked: Any) -> Any:
    service_of(request).check_alive()
    return messages.ServerLiveResponse(live=True)


async def ready(request: HttpRequest, asked: Any) -> Any:
    service_of(request).check_ready()
    return messages.ServerReadyResponse(ready=True)


async def model_ready(request: HttpRequest, asked: Any) -> Any:
    service = service_of(request)
    engine_of(request, served_name(asked.name, asked.version))
    service.check_ready()
    return messages.ModelReadyResponse(ready=True)


async def server_metadata(request: HttpRequest, asked: Any) -> Any:
    return messages.ServerMetadataResponse(
        name="quartet", version=__version__, extensions=EXTENSIONS
    )


async def model_metadata(request: HttpRequest, asked: Any) -> Any:
    engines = service_of(request).open_engines()
    found: dict[str, Any] = describe(
        engine_of(request, served_name(asked.name, asked.version)), engines.all()
    )
    for key in ("inputs", "outputs"):  # the message has no place for parameters
        found[key] = [
            {name: value for name, value in tensor.items() if name != "parameters"}
            for tensor in found[key]
        ]
    return messages.ModelMetadataResponse(**found)


async def infer(request: HttpRequest, asked: Any) -> Any:
    service = service_of(request)
    service.open_engines()
    reserve_memory(service, context_of(request.scope))(asked.ByteSize())
    most = service.settings.max_inputs_per_request
    body = add_fields(
        to_body(asked, most), {"model": served_name(asked.model_name, asked.model_version)}
    )
    check_sizes(body, most)
    call = open_call(request, InferRequest, body, earlier(deadline_of(request), body))
    reply = await call.compute(make_task(call.engine, call.body))
    manifest = call.engine.manifest
    answer = messages.ModelInferResponse(
        model_name=manifest.name, model_version=manifest.version, id=asked.id
    )

    def add_outputs() -> None:
        for tensor in to_tensors(call.engine, call.body, reply):
            add_output(answer, tensor, raw=bool(asked.raw_input_contents))

    await call.show(reply, add_outputs)
    return answer


async def index(request: HttpRequest, asked: Any) -> Any:
    refuse_repository(asked)
    models = list_models(service_of(request).open_engines().all())
    return messages.RepositoryIndexResponse(models=models)


async def load(request: HttpRequest, asked: Any) -> Any:
    check_repository(asked)
    command = LoadModel(path=asked.model_name, by=tenant_of(request))
    await service_of(request).open_engines().execute(command)
    return messages.RepositoryModelLoadResponse()


async def unload(request: HttpRequest, asked: Any) -> Any:
    check_repository(asked)
    engines = service_of(request).open_engines()
    command = UnloadModel(model=engines.get(asked.model_name).id, by=tenant_of(request))
    await engines.execute(command)
    return messages.RepositoryModelUnloadResponse()


def served_name(name: str, version: str) -> str:
    return f"{name}@{version}" if version else name


def refuse_repository(asked: Any) -> None:
    if asked.repository_name:
        raise InvalidInput("repository_name: there is one repository; leave it out")


def check_repository(asked: Any) -> None:
    """Raise InvalidInput for what a load or an unload does not have here."""
    refuse_repository(asked)
    validate(RepositoryRequest, {"parameters": plain(asked.parameters)})


# -- messages to bodies, and tensors to messages --------------------------------------------------


def plain(parameters: Mapping[str, Any]) -> dict[str, object]:
    """Return the values of parameters, by name."""
    found = {}
    for name, parameter in parameters.items():
        kind = parameter.WhichOneof("parameter_choice")
        found[name] = None if kind is None else getattr(parameter, kind)
    return found


def to_body(asked: Any, most: int) -> dict[str, object]:
    """Return the body that a call has over HTTP, with binary data in its tensors.

    most: the largest number of inputs. Raises InvalidInput and TooLarge.
    """
    raw = asked.raw_input_contents
    if raw and len(raw) != len(asked.inputs):
        counts = f"{len(raw)} items, inputs has {len(asked.inputs)}"
        raise InvalidInput(f"raw_input_contents has {counts}; they must align")
    contents: Iterator[object] = iter(raw) if raw else (elements(one, most) for one in asked.inputs)
    inputs = [
        {
            "name": tensor.name,
            "datatype": tensor.datatype,
            "shape": [*tensor.shape],
            "parameters": plain(tensor.parameters) or None,
            "data": data,
        }
        for tensor, data in zip(asked.inputs, contents, strict=True)
    ]
    outputs = [
        {"name": output.name, "parameters": plain(output.parameters) or None}
        for output in asked.outputs
    ]
    parameters = plain(asked.parameters)
    for given in (parameters, *(output["parameters"] or {} for output in outputs)):
        for name in ("binary_data", "binary_data_output"):
            if name in given:
                raise InvalidInput(f"{name}: is of HTTP; leave it out", param=name)
    return {
        "id": asked.id or None,
        "inputs": inputs,
        "outputs": outputs or None,
        "parameters": parameters or None,
    }


def elements(tensor: Any, most: int) -> list[Any]:
    """Return the elements of a tensor that are in its message, in place of raw contents. Raises TooLarge."""
    found = getattr(tensor.contents, CONTENTS.get(tensor.datatype, "bytes_contents"))
    if len(found) > VALUES * most_parts(most):
        raise TooLarge(
            f"{tensor.name[:64]} has {len(found)} elements; send them in raw_input_contents",
            param=tensor.name[:64],
        )
    return [*found]


def add_output(answer: Any, tensor: OutputTensor, *, raw: bool) -> None:
    """Add a tensor to a response. raw: in raw contents, as the request has its inputs"""
    output = answer.outputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
    if raw:
        answer.raw_output_contents.append(tensor.to_binary())
    elif isinstance(tensor.values, list):
        output.contents.bytes_contents.extend(tensor.values)
    else:
        for row in tensor.values:  # other threads run between two rows
            output.contents.fp32_contents.extend(row)


# -- server ---------------------------------------------------------------------------------------


class Labeled(NamedTuple):
    """A route as the log and the metrics name it."""

    path: str


class Rpc(NamedTuple):
    """A call of the protocol.

    method, path: of the request that it becomes, as far as checks need the path
    asked: the class of its message
    answer: returns the response, or raises a QuartetError
    """

    method: str
    path: str
    asked: Any
    answer: Callable[[HttpRequest, Any], Awaitable[Any]]


MODEL = f"/{PREFIX}/models/"
REPOSITORY = f"/{PREFIX}/repository"
RPCS: Mapping[str, Rpc] = {
    "ServerLive": Rpc("GET", f"/{PREFIX}/health/live", messages.ServerLiveRequest, live),
    "ServerReady": Rpc("GET", f"/{PREFIX}/health/ready", messages.ServerReadyRequest, ready),
    "ModelReady": Rpc("GET", MODEL, messages.ModelReadyRequest, model_ready),
    "ServerMetadata": Rpc("GET", f"/{PREFIX}", messages.ServerMetadataRequest, server_metadata),
    "ModelMetadata": Rpc("GET", MODEL, messages.ModelMetadataRequest, model_metadata),
    "ModelInfer": Rpc("POST", MODEL, messages.ModelInferRequest, infer),
    "RepositoryIndex": Rpc("POST", f"{REPOSITORY}/index", messages.RepositoryIndexRequest, index),
    "RepositoryModelLoad": Rpc(
        "POST", f"{REPOSITORY}/models/", messages.RepositoryModelLoadRequest, load
    ),
    "RepositoryModelUnload": Rpc(
        "POST", f"{REPOSITORY}/models/", messages.RepositoryModelUnloadRequest, unload
    ),
}


class GrpcServer:
    """The gRPC server of one process, on `grpc_port`. HTTP processes share the port; each gets its connections.

    most: connections, and calls at once. Further connections are closed at once. Without this limit, a flood would take
        every descriptor of the process, including those for health checks over HTTP.
    """

    def __init__(self, app: FastAPI, settings: Settings, most: int) -> None:
        # It logs a traceback for each client that leaves; unexpected errors are logged with their requests.
        logging.getLogger("grpc._cython.cygrpc").setLevel(logging.CRITICAL)
        self._app = app
        self._lifecycle: RequestLifecycle = app.state.lifecycle
        self._address = (settings.host, settings.grpc_port or 0)
        self._server = grpc.aio.server(
            maximum_concurrent_rpcs=most,
            options=[
                ("grpc.so_reuseport", 1),
                ("grpc.max_allowed_incoming_connections", most),
                ("grpc.max_connection_idle_ms", round(1000 * settings.keep_alive_s)),
                ("grpc.server_handshake_timeout_ms", round(1000 * settings.header_timeout_s)),
                ("grpc.max_receive_message_length", settings.max_body_bytes),
            ],
        )
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(
                self._handler(name, rpc),
                request_deserializer=rpc.asked.FromString,
                response_serializer=lambda answer: answer.SerializeToString(),
            )
            for name, rpc in RPCS.items()
        }
        generic = grpc.method_handlers_generic_handler(SERVICE, handlers)
        self._server.add_generic_rpc_handlers((generic,))

    @property
    def url(self) -> str:
        host, port = self._address
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    async def start(self) -> None:
        self._server.add_insecure_port(self.url)
        await self._server.start()

    async def stop(self, seconds: float) -> None:
        """Refuse new calls, and wait for the accepted ones for at most this time."""
        await self._server.stop(seconds)

    def _handler(self, name: str, rpc: Rpc) -> Callable[[Any, Any], Awaitable[Any]]:
        async def handle(asked: Any, context: Any) -> Any:
            scope = self._scope(rpc, asked, context)
            own = self._lifecycle.receive(scope)
            scope["state"][CONTEXT] = own
            if not scope["path"].startswith(f"/{PREFIX}/health/"):
                # In the log and the metrics. Health checks have the routes of HTTP, which are not logged.
                scope["path"] = f"/{SERVICE}/{name}"
                scope["route"] = Labeled(scope["path"])
            own.leaving = asyncio.get_running_loop().create_future()
            named = NAMES.set(own.names)
            try:
                answer, error = await run(rpc, HttpRequest(scope, no_body), asked, own)
            finally:
                self._lifecycle.record(rpc.method, scope, own)
                NAMES.reset(named)
            metadata = [("x-request-id", own.request_id)]
            if error is None:
                context.set_trailing_metadata((*metadata,))
                return answer
            if error.status == 429:
                await self._lifecycle.throttle.turn()
            metadata += [(key.lower(), value) for key, value in error.headers.items()]
            if after_s := error.headers.get("Retry-After"):
                metadata.append(("grpc-retry-pushback-ms", str(1000 * int(after_s))))
            status = STATUSES.get(error.status, grpc.StatusCode.INTERNAL)
            return await context.abort(status, error.message, (*metadata,))

        return handle

    def _scope(self, rpc: Rpc, asked: Any, context: Any) -> Scope:
        headers = [("content-length", str(asked.ByteSize()))]
        given = [(key, value) for key, value in context.invocation_metadata() or ()]
        remaining_s = context.time_remaining()
        if remaining_s is not None and TIMEOUT_HEADER.lower() not in dict(given):
            headers.append((TIMEOUT_HEADER.lower(), str(max(1, int(1000 * remaining_s)))))
        headers += [(key, value) for key, value in given if isinstance(value, str)]
        return {
            "type": "http",
            "app": self._app,
            "method": rpc.method,
            "scheme": "http",
            "path": rpc.path,
            "query_string": b"",
            "headers": [(key.encode("latin-1"), encode(value)) for key, value in headers],
            "server": self._address,
            "client": client_of(context.peer()),
            "state": {},
        }


def encode(value: str) -> bytes:
    return value.encode("latin-1", "replace")


def client_of(peer: str) -> tuple[str, int] | None:
    """Return host and port of `ipv4:HOST:PORT` or `ipv6:%5BHOST%5D:PORT`; None for another form."""
    kind, _, address = peer.partition(":")
    host, _, port = address.rpartition(":")
    if kind not in ("ipv4", "ipv6") or not port.isdecimal():
        return None
    return host.removeprefix("%5B").removesuffix("%5D").strip("[]"), int(port)


async def no_body() -> Message:
    """Return that the client has left; the message of a call is complete."""
    return {"type": "http.disconnect"}


async def run(
    rpc: Rpc, request: HttpRequest, asked: Any, own: RequestContext
) -> tuple[Any, QuartetError | None]:
    """Return the response of a call, or its error."""
    error: QuartetError
    try:
        if own.refusal is not None:
            raise own.refusal
        answer = await rpc.answer(request, asked)
        own.status = 200
        return answer, None
    except QuartetError as failure:
        log_bug(failure)
        error = failure
    except Exception:
        # Any other error is a bug. gRPC would send its text to the client.
        error = log_internal_error()
    own.code, own.status = error.code, error.status
    return None, error.with_traceback(None)

"""The Open Inference Protocol over HTTP, under `/v2`, with the extensions for binary data and classification."""

import time
from collections.abc import Mapping
from typing import Any, Literal

import orjson
from pydantic import BaseModel, Field
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from service import __version__
from service.api import openapi
from service.api.admin import tenant_of
from service.api.dialects.common import ErrorBody
from service.api.dialects.inference_protocol import (
    InferRequest,
    OutputTensor,
    TensorMetadata,
    check_sizes,
    describe_inputs,
    describe_outputs,
    make_task,
    to_tensors,
)
from service.api.engine_call import (
    Call,
    add_fields,
    deadline_of,
    engine_of,
    engines_of,
    json_response,
    open_call,
    receive_body,
    service_of,
)
from service.api.native_routes import make_router
from service.api.request_body import parse_limited
from service.api.schemas import most_parts, validate
from service.engines.commands import LoadModel, UnloadModel
from service.engines.engine import Engine
from service.errors import (
    BadRequest,
    ErrorForm,
    InvalidInput,
    QuartetError,
    UnknownModel,
    UnsupportedMediaType,
)
from service.middleware.request_context import context_of
from service.tasks.fields import Strict

PREFIX = "v2"
TAG = "Open Inference Protocol"
HEADER_LENGTH = "Inference-Header-Content-Length"
BINARY = "application/octet-stream"
MEDIA_TYPES = ("", "application/json", BINARY)
EXTENSIONS = ["binary_tensor_data", "classification", "model_repository"]
PLATFORM = "onnxruntime_onnx"

router = make_router(f"/{PREFIX}", "v2_")


class InferenceErrorResponse(ErrorBody):
    error: str


ERROR_MODEL = InferenceErrorResponse


def error_form(error: QuartetError) -> ErrorForm:
    status = 400 if isinstance(error, InvalidInput) else error.status
    return ErrorForm(status, {"error": error.message})


# -- responses ------------------------------------------------------------------------------------


class InferredTensor(BaseModel):
    name: str
    shape: list[int]
    datatype: str
    data: list[Any] | None = None
    parameters: dict[str, Any] | None = None


class InferResponse(BaseModel):
    model_name: str
    model_version: str
    id: str | None = None
    outputs: list[InferredTensor]


class ServerMetadata(BaseModel):
    name: str
    version: str
    extensions: list[str]


class ModelTensor(BaseModel):
    name: str
    datatype: str
    shape: list[int]
    parameters: dict[str, Any] = Field({}, description="the head's task, and its labels")


class ModelMetadata(BaseModel):
    name: str
    versions: list[str]
    platform: str
    inputs: list[ModelTensor]
    outputs: list[ModelTensor]


class LiveServer(BaseModel):
    live: bool


class ReadyServer(BaseModel):
    ready: bool


class ReadyModel(BaseModel):
    name: str
    ready: bool


class IndexRequest(Strict):
    ready: bool | None = None


class LoadParameters(Strict):
    """What clients send with a load or an unload; a configuration or files are refused."""

    unload_dependents: Literal[False] | None = None


class RepositoryRequest(Strict):
    parameters: LoadParameters | None = None


# -- inference ------------------------------------------------------------------------------------


@router.post(
    "/models/{model:path}/infer", **openapi.dialect(InferRequest, InferResponse, TAG, of="model")
)
async def infer(request: HttpRequest) -> Response:
    """The outputs of a model: one for each head."""
    service_of(request).open_engines()
    deadline = deadline_of(request)
    body = add_fields(await receive_infer(request, deadline), {"model": model_of(request)})
    call = open_call(request, InferRequest, body, earlier(deadline, body))
    reply = await call.compute(make_task(call.engine, call.body))

    def respond() -> Response:
        tensors = to_tensors(call.engine, call.body, reply)
        return infer_response(call, tensors, call.headers(reply))

    return await call.show(reply, respond)


async def receive_infer(request: HttpRequest, deadline: float) -> object:
    """Read a body: JSON, or JSON and the binary data of its tensors after it."""
    headers = context_of(request.scope).headers
    media_type = headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type not in MEDIA_TYPES:
        raise UnsupportedMediaType(
            f"Content-Type must be application/json or {BINARY}, not {media_type[:64]}",
            param="Content-Type",
        )
    data = await receive_body(request, deadline)
    size = header_length(headers, len(data))
    text = data[:size]
    most = service_of(request).settings.max_inputs_per_request
    body = await parse_limited(text, most_parts(most))
    add_binary(body, data[size:])
    check_sizes(body, most)
    return body


def header_length(headers: Mapping[str, str], size: int) -> int:
    """Return the bytes of the JSON of a body of `size` bytes. Raises BadRequest."""
    value = headers.get(HEADER_LENGTH.lower())
    if value is None:
        return size
    if not (value.isascii() and value.isdecimal() and len(value) < 19 and int(value) <= size):
        raise BadRequest(f"{HEADER_LENGTH}: must be a number up to {size}, the size of the body")
    return int(value)


def add_binary(body: object, data: bytes) -> None:
    """Put the binary data of each input that has some into its `data`. Raises InvalidInput."""
    inputs = body.get("inputs") if isinstance(body, dict) else None
    start = 0
    for tensor in inputs if isinstance(inputs, list) else ():
        parameters = tensor.get("parameters") if isinstance(tensor, dict) else None
        size = parameters.get("binary_data_size") if isinstance(parameters, dict) else None
        if size is None:
            continue
        if type(size) is not int or not 0 <= size <= len(data) - start or "data" in tensor:
            raise InvalidInput(
                f"binary_data_size: must be an integer, {len(data) - start} bytes are left",
                param="binary_data_size",
            )
        tensor["data"] = data[start : start + size]
        start += size
    if start != len(data):
        reason = f"the body has {len(data)} bytes after its JSON, its inputs have {start}"
        raise InvalidInput(f"binary_data_size: {reason}", param="binary_data_size")


def earlier(deadline: float, body: object) -> float:
    """Return the deadline of a body's `timeout` in microseconds, if it is earlier."""
    parameters = body.get("parameters") if isinstance(body, dict) else None
    timeout = parameters.get("timeout") if isinstance(parameters, dict) else None
    if type(timeout) is not int or timeout < 1:
        return deadline
    return min(deadline, time.monotonic() + timeout / 1e6)


def infer_response(
    call: Call[InferRequest], tensors: list[OutputTensor], headers: dict[str, str]
) -> Response:
    """Return a response as JSON, with the binary data of the tensors that the client wants in this form after it."""
    body, manifest = call.body, call.engine.manifest
    options = {output.name: output.parameters for output in body.outputs or ()}
    binary: list[bytes] = []
    outputs = []
    for tensor in tensors:
        shown: dict[str, object] = {
            "name": tensor.name,
            "datatype": tensor.datatype,
            "shape": tensor.shape,
        }
        own = options.get(tensor.name)
        wanted = own.binary_data if own else None
        if body.given.binary_data_output if wanted is None else wanted:
            binary.append(tensor.to_binary())
            shown["parameters"] = {"binary_data_size": len(binary[-1])}
        else:
            shown["data"] = tensor.to_json()
        outputs.append(shown)
    content = {
        "model_name": manifest.name,
        "model_version": manifest.version,
        **({} if body.id is None else {"id": body.id}),
        "outputs": outputs,
    }
    if not binary:
        return json_response(content, headers)
    text = orjson.dumps(content, option=orjson.OPT_SERIALIZE_NUMPY)
    headers[HEADER_LENGTH] = str(len(text))
    return Response(b"".join([text, *binary]), headers=headers, media_type=BINARY)


# -- server and models ----------------------------------------------------------------------------


@router.get("", **openapi.dialect_page(ServerMetadata, TAG))
async def server(request: HttpRequest) -> Response:
    """The server and its extensions of the protocol."""
    content = {"name": "quartet", "version": __version__, "extensions": EXTENSIONS}
    return json_response(content)


@router.get("/health/live", **openapi.dialect_page(LiveServer, TAG, open_to_all=True))
async def live(request: HttpRequest) -> Response:
    """The process answers."""
    service_of(request).check_alive()
    return json_response({"live": True})


@router.get("/health/ready", **openapi.dialect_page(ReadyServer, TAG, open_to_all=True))
async def ready(request: HttpRequest) -> Response:
    """New requests may be sent here."""
    service_of(request).check_ready()
    return json_response({"ready": True})


@router.get(
    "/models/{model:path}/ready",
    **openapi.dialect_page(ReadyModel, TAG, errors=(UnknownModel,), of="model"),
)
async def model_ready(request: HttpRequest) -> Response:
    """Requests for the model may be sent here."""
    service = service_of(request)
    engine = engine_of(request, model_of(request))
    service.check_ready()
    return json_response({"name": engine.manifest.name, "ready": True})


@router.get(
    "/models/{model:path}",
    **openapi.dialect_page(ModelMetadata, TAG, errors=(UnknownModel,), of="model"),
)
async def model(request: HttpRequest) -> Response:
    """The inputs and outputs of a model."""
    engines = engines_of(request)
    return json_response(describe(engine_of(request, model_of(request)), engines.all()))


def model_of(request: HttpRequest) -> str:
    """Return the served name of the path: `name`, or `name@version` for `name/versions/version`."""
    path: str = request.path_params["model"]
    name, _, version = path.rpartition("/versions/")
    return f"{name}@{version}" if name else path


def describe(engine: Engine, engines: list[Engine]) -> dict[str, object]:
    name = engine.manifest.name
    return {
        "name": name,
        "versions": [one.manifest.version for one in engines if one.manifest.name == name],
        "platform": PLATFORM,
        "inputs": [*map(described, describe_inputs(engine))],
        "outputs": [*map(described, describe_outputs(engine))],
    }


def described(tensor: TensorMetadata) -> dict[str, object]:
    return {name: value for name, value in tensor._asdict().items() if value != {}}


# -- repository -----------------------------------------------------------------------------------


@router.post("/repository/index", include_in_schema=False)
async def index(request: HttpRequest) -> Response:
    """The models that are served."""
    validate(IndexRequest, await receive_options(request))
    return json_response(list_models(engines_of(request).all()))


def list_models(engines: list[Engine]) -> list[dict[str, str]]:
    return [
        {
            "name": engine.manifest.name,
            "version": engine.manifest.version,
            "state": "READY",
            "reason": "",
        }
        for engine in engines
    ]


@router.post("/repository/models/{model:path}/load", include_in_schema=False)
async def load(request: HttpRequest) -> Response:
    """Load a bundle by the name of its directory in `models_dir`, as `POST /admin/models` does."""
    validate(RepositoryRequest, await receive_options(request))
    path, by = request.path_params["model"], tenant_of(request)
    return await execute(request, LoadModel(path=path, by=by))


@router.post("/repository/models/{model:path}/unload", include_in_schema=False)
async def unload(request: HttpRequest) -> Response:
    """Unload a model, as `DELETE /admin/models/{model}` does."""
    validate(RepositoryRequest, await receive_options(request))
    engine = engines_of(request).get(request.path_params["model"])
    return await execute(request, UnloadModel(model=engine.id, by=tenant_of(request)))


async def execute(request: HttpRequest, command: LoadModel | UnloadModel) -> Response:
    await service_of(request).open_engines().execute(command)
    return json_response({})


async def receive_options(request: HttpRequest) -> object:
    """Return the JSON of a body that may be absent."""
    data = await receive_body(request)
    return await parse_limited(data, most_parts(1)) if data.strip() else {}

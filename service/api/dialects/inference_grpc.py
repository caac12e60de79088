"""The calls of the Open Inference Protocol over gRPC."""

from collections.abc import Iterator, Mapping
from typing import Any

from starlette.requests import Request as HttpRequest

from service import __version__
from service.api.admin import tenant_of
from service.api.dialects import open_inference_pb2 as messages
from service.api.dialects.grpc_server import Rpc
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
    engines_of,
    open_call,
    service_of,
)
from service.api.schemas import validate
from service.engines.commands import LoadModel, UnloadModel
from service.errors import InvalidInput

SERVICE = "inference.GRPCInferenceService"
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
    engines = engines_of(request)
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
    model = served_name(asked.model_name, asked.model_version)
    body = add_fields(to_body(asked), {"model": model})
    check_sizes(body, service.settings.max_inputs_per_request)
    call = open_call(request, InferRequest, body, earlier(deadline_of(request), body))
    reply = await call.compute(make_task(call.engine, call.body))
    manifest = call.engine.manifest
    answer = messages.ModelInferResponse(
        model_name=manifest.name, model_version=manifest.version, id=asked.id
    )

    def serialize() -> bytes:
        for tensor in to_tensors(call.engine, call.body, reply):
            add_output(answer, tensor, raw=bool(asked.raw_input_contents))
        serialized: bytes = answer.SerializeToString()
        return serialized

    return await call.show(reply, serialize)


async def index(request: HttpRequest, asked: Any) -> Any:
    refuse_repository(asked)
    models = list_models(engines_of(request).all())
    return messages.RepositoryIndexResponse(models=models)


async def load(request: HttpRequest, asked: Any) -> Any:
    check_repository(asked)
    command = LoadModel(path=asked.model_name, by=tenant_of(request))
    await service_of(request).open_engines().execute(command)
    return messages.RepositoryModelLoadResponse()


async def unload(request: HttpRequest, asked: Any) -> Any:
    check_repository(asked)
    engines = engines_of(request)
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


def to_body(asked: Any) -> dict[str, object]:
    """Return the body that a call has over HTTP, with binary data in its tensors. Raises InvalidInput."""
    raw = asked.raw_input_contents
    if raw and len(raw) != len(asked.inputs):
        counts = f"{len(raw)} items, inputs has {len(asked.inputs)}"
        raise InvalidInput(f"raw_input_contents has {counts}; they must align")
    contents: Iterator[object] = iter(raw) if raw else map(elements, asked.inputs)
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


def elements(tensor: Any) -> list[Any]:
    """Return the elements of a tensor that are in its message, in place of raw contents."""
    return [*getattr(tensor.contents, CONTENTS.get(tensor.datatype, "bytes_contents"))]


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


# -- calls ----------------------------------------------------------------------------------------


MODEL = f"/{PREFIX}/models/"
REPOSITORY = f"/{PREFIX}/repository"
RPCS: Mapping[str, Rpc] = {
    "ServerLive": Rpc("GET", f"/{PREFIX}/health/live", None, live),
    "ServerReady": Rpc("GET", f"/{PREFIX}/health/ready", None, ready),
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

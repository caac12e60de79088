"""The standard services of gRPC: health checks, and reflection, by which generic clients learn the services.

Their messages are built here, because the packages of the grpc project would be two more dependencies.
"""

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from google.protobuf.descriptor_pb2 import FieldDescriptorProto as Field
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from starlette.requests import Request as HttpRequest

from service.api.dialects import open_inference_pb2
from service.api.dialects.grpc_server import STATUSES, Rpc, Services
from service.api.dialects.inference_dialect import PREFIX
from service.api.dialects.inference_grpc import RPCS, SERVICE
from service.api.engine_call import service_of
from service.errors import NotFound, NotReady

HEALTH = "grpc.health.v1.Health"
SERVING, NOT_SERVING, SERVICE_UNKNOWN = 1, 2, 3  # of HealthCheckResponse
WATCH_S = 1.0  # between two looks at the state of the service
REFLECTION = [f"grpc.reflection.{version}.ServerReflection" for version in ("v1", "v1alpha")]

POOL = (
    DescriptorPool()
)  # of its own, since a program may also import the packages of the grpc project


# -- descriptions ---------------------------------------------------------------------------------


def message(name: str, *fields: Mapping[str, object], **more: object) -> dict[str, object]:
    return {"name": name, "field": fields, **more}


def field(name: str, number: int, kind: int | str, **more: object) -> dict[str, object]:
    """Return a field; kind: a type, or the name of a message or, in `more`, of an enum."""
    typed = {"type": kind} if isinstance(kind, int) else {"type_name": kind}
    return {"name": name, "number": number, "label": Field.LABEL_OPTIONAL, **typed, **more}


def add_file(name: str, service: str, methods: Mapping[str, str], messages: Sequence[Any]) -> None:
    """Add a file with a service; methods: the beginning of the names of each method's messages"""
    package, _, own = service.rpartition(".")
    calls = [
        {
            "name": method,
            "input_type": f".{package}.{kind}Request",
            "output_type": f".{package}.{kind}Response",
            "server_streaming": method in STREAMS,
            "client_streaming": method in STREAMS and method != "Watch",
        }
        for method, kind in methods.items()
    ]
    file = FileDescriptorProto(
        name=name,
        package=package,
        syntax="proto3",
        message_type=messages,
        service=[{"name": own, "method": calls}],
    )
    POOL.AddSerializedFile(file.SerializeToString())


def public_messages() -> Sequence[Any]:
    """Return the messages of the Open Inference Protocol, in the protocol's own package."""
    text = FileDescriptorProto.FromString(open_inference_pb2.DESCRIPTOR.serialized_pb)
    rest = [*text.message_type]
    while rest:
        kind = rest.pop()
        rest += kind.nested_type
        for one in filter(lambda found: found.type_name, kind.field):
            one.type_name = one.type_name.replace(f".{text.package}.", ".inference.")
    return list(text.message_type)


def class_of(name: str) -> Any:
    return GetMessageClass(POOL.FindMessageTypeByName(name))


STREAMS = ("Watch", "ServerReflectionInfo")
TEXT, DATA, INTEGER = Field.TYPE_STRING, Field.TYPE_BYTES, Field.TYPE_INT32
STATES = ("UNKNOWN", "SERVING", "NOT_SERVING", "SERVICE_UNKNOWN")
CHECK = "HealthCheck"
add_file("grpc_service.proto", SERVICE, {name: name for name in RPCS}, public_messages())
add_file(
    "grpc/health/v1/health.proto",
    HEALTH,
    {"Check": CHECK, "Watch": CHECK},
    [
        message("HealthCheckRequest", field("service", 1, TEXT)),
        message(
            "HealthCheckResponse",
            field("status", 1, ".grpc.health.v1.HealthCheckResponse.ServingStatus"),
            enum_type=[
                {
                    "name": "ServingStatus",
                    "value": [{"name": name, "number": n} for n, name in enumerate(STATES)],
                }
            ],
        ),
    ],
)
for name in REFLECTION:
    package = name.rpartition(".")[0]
    one, many = {"oneof_index": 0}, {"label": Field.LABEL_REPEATED}
    add_file(
        package.replace(".", "/") + "/reflection.proto",
        name,
        {"ServerReflectionInfo": "ServerReflection"},
        [
            message(
                "ServerReflectionRequest",
                field("host", 1, TEXT),
                field("file_by_filename", 3, TEXT, **one),
                field("file_containing_symbol", 4, TEXT, **one),
                field("all_extension_numbers_of_type", 6, TEXT, **one),
                field("list_services", 7, TEXT, **one),
                oneof_decl=[{"name": "message_request"}],
            ),
            message(
                "ServerReflectionResponse",
                field("valid_host", 1, TEXT),
                field("original_request", 2, f".{package}.ServerReflectionRequest"),
                field("file_descriptor_response", 4, f".{package}.FileDescriptorResponse", **one),
                field("list_services_response", 6, f".{package}.ListServiceResponse", **one),
                field("error_response", 7, f".{package}.ErrorResponse", **one),
                oneof_decl=[{"name": "message_response"}],
            ),
            message("FileDescriptorResponse", field("file_descriptor_proto", 1, DATA, **many)),
            message(
                "ListServiceResponse", field("service", 1, f".{package}.ServiceResponse", **many)
            ),
            message("ServiceResponse", field("name", 1, TEXT)),
            message(
                "ErrorResponse", field("error_code", 1, INTEGER), field("error_message", 2, TEXT)
            ),
        ],
    )
ASKED, ANSWER = (
    class_of("grpc.health.v1.HealthCheckRequest"),
    class_of("grpc.health.v1.HealthCheckResponse"),
)


# -- answers --------------------------------------------------------------------------------------


async def check(request: HttpRequest, asked: Any) -> Any:
    status = status_of(request, asked.service)
    if status == SERVICE_UNKNOWN:
        raise NotFound(f"the service {asked.service[:64]!r} is unknown; the name of all is empty")
    return ANSWER(status=status)


async def watch(request: HttpRequest, asked: Any) -> AsyncIterator[Any]:
    """Yield the state of a service now, after each change, and when the process drains."""
    before = None
    while True:
        draining = service_of(request).draining
        status = status_of(request, asked.service)
        if status != before:
            yield ANSWER(status=status)
        if draining:
            return
        before = status
        await asyncio.sleep(WATCH_S)


def status_of(request: HttpRequest, service: str) -> int:
    if service and service not in SERVICES:
        return SERVICE_UNKNOWN
    try:
        service_of(request).check_ready()
    except NotReady:
        return NOT_SERVING
    return SERVING


async def reflect(request: HttpRequest, asked: Any) -> AsyncIterator[Any]:
    """Yield the answer to one question of a client: which services there are, or the file that describes a name."""
    answer = class_of(asked.DESCRIPTOR.full_name.replace("Request", "Response"))(
        valid_host=asked.host, original_request=asked
    )
    kind = asked.WhichOneof("message_request")
    try:
        if kind == "list_services":
            for name in SERVICES:
                answer.list_services_response.service.add(name=name)
        elif kind == "file_by_filename":
            add_description(answer, POOL.FindFileByName(asked.file_by_filename))
        elif kind == "file_containing_symbol":
            add_description(answer, POOL.FindFileContainingSymbol(asked.file_containing_symbol))
        else:
            raise KeyError("there are no extensions")
    except KeyError as error:
        code, _ = STATUSES[NotFound.status].value
        answer.error_response.error_code = code
        answer.error_response.error_message = str(error.args[0])[:256]
    yield answer


def add_description(answer: Any, file: Any) -> None:
    answer.file_descriptor_response.file_descriptor_proto.append(file.serialized_pb)


SERVICES: Services = {
    SERVICE: RPCS,
    HEALTH: {
        "Check": Rpc("GET", f"/{PREFIX}/health/ready", ASKED, check),
        "Watch": Rpc("GET", f"/{PREFIX}/health/ready", ASKED, watch, is_stream=True),
    },
    **{
        name: {
            "ServerReflectionInfo": Rpc(
                "GET",
                f"/{PREFIX}",
                class_of(name.replace("ServerReflection", "ServerReflectionRequest")),
                reflect,
                is_stream=True,
            )
        }
        for name in REFLECTION
    },
}

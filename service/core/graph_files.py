"""The files with external data that an ONNX graph names.

protobuf parses the graph, as onnxruntime does. Only the fields of ONNX's messages that lead to a tensor are
declared here, by their numbers in onnx.proto; protobuf skips the contents of all others.
"""

from collections.abc import Iterator
from functools import cache
from typing import Any

LOCATION = b"location"  # of an entry of external_data, whose value is a file name

# Messages by name: the number of each field, and its message or None for bytes. All are read as repeated, because
# protobuf merges the contents of a single message that occurs twice.
FIELDS: dict[str, dict[str, tuple[int, str | None]]] = {
    "Model": {"graph": (7, "Graph"), "training": (20, "Training"), "functions": (25, "Function")},
    "Training": {"initialization": (1, "Graph"), "algorithm": (2, "Graph")},
    "Function": {"node": (7, "Node"), "attribute": (11, "Attribute")},
    "Graph": {"node": (1, "Node"), "initializer": (5, "Tensor"), "sparse": (15, "Sparse")},
    "Node": {"attribute": (5, "Attribute")},
    "Attribute": {
        **{"tensor": (5, "Tensor"), "tensors": (10, "Tensor")},
        **{"graph": (6, "Graph"), "graphs": (11, "Graph")},
        **{"sparse": (22, "Sparse"), "sparses": (23, "Sparse")},
    },
    "Sparse": {"values": (1, "Tensor"), "indices": (2, "Tensor")},
    "Tensor": {"external_data": (13, "Entry")},
    "Entry": {"key": (1, None), "value": (2, None)},
}


def external_files(graph: bytes) -> set[str]:
    """Return the names of all files with external data. Raises ValueError for bytes that are not an ONNX model.

    graph: a serialized model
    """
    from google.protobuf.message import DecodeError

    try:
        return {value.decode(errors="replace") for value in _locations(_model().FromString(graph))}
    except DecodeError as error:
        raise ValueError(f"not an ONNX model: {error}") from None


def _locations(message: Any) -> Iterator[bytes]:
    for field, values in message.ListFields():
        if field.message_type is None:
            continue
        for value in values:
            if field.message_type.name == "Entry" and LOCATION in value.key:
                yield from value.value
            yield from _locations(value)


@cache
def _model() -> Any:
    """Return the class of a model. protobuf is imported here, because only a process that loads bundles needs it."""
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="graph_files.proto", package="quartet.onnx")
    for name, fields in FIELDS.items():
        message = file.message_type.add(name=name)
        for own, (number, kind) in fields.items():
            field = message.field.add(name=own, number=number, label=3)  # repeated
            field.type = 11 if kind else 12  # a message, or bytes
            if kind:
                field.type_name = f".{file.package}.{kind}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("quartet.onnx.Model"))

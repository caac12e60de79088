"""The messages of the Open Inference Protocol, and what a service without gRPC imports."""

import subprocess
import sys

import pytest

from tests import protobuf


def test_generated():
    """The module is what protoc generates from the description: `python -m tests.protobuf` renews it."""
    pytest.importorskip("grpc_tools")
    assert protobuf.generate() == protobuf.MODULE.read_text(encoding="utf-8")


def test_fields_are_those_of_the_protocol():
    """Our messages have the names, numbers and types of tritonclient's messages, which have more fields."""
    theirs = pytest.importorskip("tritonclient.grpc.service_pb2").DESCRIPTOR
    from service.api.dialects import open_inference_pb2 as ours

    def fields(message):
        found = {field.name: (field.number, field.type) for field in message.fields}
        for nested in message.nested_types:
            found[nested.name] = fields(nested)
        return found

    for name, message in ours.DESCRIPTOR.message_types_by_name.items():
        assert fields(message) == fields(theirs.message_types_by_name[name]), name


def test_imported_only_for_its_port():
    """The service imports neither grpc nor protobuf unless grpc_port is set."""
    code = "import sys, service.__main__, service.processes.single_process, service.processes.http_process;"
    code += "print(sorted(sys.modules.keys() & {'grpc', 'google.protobuf'}))"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "[]" == found.stdout.strip()

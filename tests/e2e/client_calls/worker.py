"""Make calls of a client in the client's environment: `python -m tests.e2e.client_calls.worker CLIENT`.

Each line of the input is a JSON object: `url` and `grpc_address` of the service, `field` and `index` of a record in the
client's module, and `arguments`. A line of the output has the `result` of the record's `run`; or `error`, a class, and
`message`.
"""

import json
import os
import sys
import urllib.request
from types import SimpleNamespace
from typing import Any

from tests.e2e.client_calls.records import Failure, KeyUse, error_class, key_uses, load


class Server:
    """The part of a service under test that records use."""

    def __init__(self, url: str, grpc_address: str) -> None:
        self.url = url
        self.grpc_address = grpc_address

    def get(self, path: str) -> SimpleNamespace:
        with urllib.request.urlopen(self.url + path) as reply:
            document = json.load(reply)
        return SimpleNamespace(json=lambda: document)

    def answer(self, path: str, body: object) -> Any:
        data, headers = json.dumps(body).encode(), {"Content-Type": "application/json"}
        request = urllib.request.Request(self.url + path, data, headers)
        with urllib.request.urlopen(request) as reply:
            return json.load(reply)


def answer(module: Any, request: Any) -> dict[str, Any]:
    server = Server(request["url"], request["grpc_address"])
    records = {"CALLS": module.CALLS, "FAILURES": module.FAILURES, "KEY_USE": key_uses(module)}
    record = records[request["field"]][request["index"]]
    try:
        return {"result": record.run(server, *request["arguments"])}
    except Exception as error:
        return {"error": class_name(error, record), "message": str(error)}


def class_name(error: Exception, record: Any) -> str:
    """Return the name of an error's class: as the record has it, or where the class is defined."""
    match record:
        case Failure():
            names = {record.error}
        case KeyUse():
            names = {record.unauthorized, record.limited, record.on_503}
        case _:
            names = set()
    known = [name for name in names if type(error) is error_class(name)]
    return known[0] if known else f"{type(error).__module__}.{type(error).__qualname__}"


def as_lists(value: Any) -> Any:
    """Return an array or a number of NumPy as JSON has it."""
    return value.tolist()


def main(client: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # clients may print
    module = load(client)
    for line in sys.stdin:
        found = answer(module, json.loads(line))
        print(json.dumps(found, default=as_lists), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])

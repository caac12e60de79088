"""Make calls of a client in the client's environment: `python -m tests.e2e.client_calls.worker CLIENT`.

Each line of the input is a JSON object: `url` of the service, `field` and `index` of a record in the client's module,
and `arguments`. A line of the output has the `result` of the record's `run`; or `error`, a class, and `message`.
"""

import json
import os
import sys
from types import SimpleNamespace
from typing import Any

from tests.e2e.client_calls.records import Failure, KeyUse, error_class, key_uses, load


def answer(module: Any, request: Any) -> dict[str, Any]:
    server = SimpleNamespace(url=request["url"])
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
            names = {record.unauthorized, record.limited}
        case _:
            names = set()
    known = [name for name in names if type(error) is error_class(name)]
    return known[0] if known else f"{type(error).__module__}.{type(error).__qualname__}"


def main(client: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # clients may print
    module = load(client)
    for line in sys.stdin:
        print(json.dumps(answer(module, json.loads(line))), file=answers, flush=True)


if __name__ == "__main__":
    main(sys.argv[1])

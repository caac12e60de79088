"""Clients that run in environments of their own: their records, each with a `run` that a worker process executes."""

import atexit
import json
import os
import re
import subprocess
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from types import SimpleNamespace
from typing import Any

from benchmarks.lib.environments import ROOT
from tests.e2e.client_calls.environments import environment
from tests.e2e.client_calls.records import ISOLATED, key_uses, load
from tests.e2e.conftest import Server

# The settings with which the clients send nothing but these calls.
NO_TELEMETRY = {
    "DO_NOT_TRACK": "1",
    "HAYSTACK_TELEMETRY_ENABLED": "false",
    "HF_HUB_DISABLE_TELEMETRY": "1",
    "LANGSMITH_TRACING": "false",
}
KEYS = {"HF_API_TOKEN", "HF_TOKEN", "HUGGINGFACEHUB_API_TOKEN", "OPENAI_API_KEY"}


class ClientError(Exception):
    """What a client raised. name: the exception class, by its module and name"""

    def __init__(self, name: str, message: str) -> None:
        super().__init__(message)
        self.name = name


class Worker:
    """A process that makes the calls of one client."""

    def __init__(self, client: str) -> None:
        """Start the process. Raises Unavailable for an environment that is not built."""
        python = environment(ISOLATED[client]).python()
        self._options = getattr(load(client), "OPTIONS", ())
        variables = {name: value for name, value in os.environ.items() if name not in KEYS}
        self._process = subprocess.Popen(
            [python, "-m", "tests.e2e.client_calls.worker", client],
            cwd=ROOT,
            env={**variables, **NO_TELEMETRY},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        atexit.register(self._process.communicate)

    def call(self, server: Server, field: str, index: int, *arguments: Any) -> Any:
        """Run a record, and return its result. Raises ClientError for what the client raises."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        request = {
            "url": server.url,
            "grpc_address": server.grpc_address if "--grpc-port" in self._options else "",
            "field": field,
            "index": index,
            "arguments": arguments,
        }
        print(json.dumps(request), file=self._process.stdin, flush=True)
        line = self._process.stdout.readline()
        assert line, "the worker has ended; its output says why"
        answer = json.loads(line)
        if "error" in answer:
            raise ClientError(answer["error"], answer["message"])
        return answer["result"]


worker = cache(Worker)


def isolated(client: str) -> SimpleNamespace:
    """Return the records of a client's module, each with a `run` in the environment of the client."""
    module = load(client)

    def run_of(field: str, index: int) -> Callable[..., Any]:
        return lambda server, *arguments: worker(client).call(server, field, index, *arguments)

    return SimpleNamespace(
        OPTIONS=getattr(module, "OPTIONS", ()),
        **{
            field: [replace(one, run=run_of(field, index)) for index, one in enumerate(records)]
            for field, records in (
                ("CALLS", module.CALLS),
                ("FAILURES", module.FAILURES),
                ("KEY_USE", key_uses(module)),
            )
        },
    )


def installed_version(client: str) -> str:
    """Return the version of a client's package, which its requirements have."""
    lines = environment(ISOLATED[client]).requirements.read_text()
    found = re.search(rf"^{load(client).PACKAGE}==(.+)$", lines, re.MULTILINE)
    assert found, f"{load(client).PACKAGE} is not in the requirements of {client}"
    return found[1]

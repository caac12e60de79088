"""Print a table of all calls by clients of other servers: the answer against the native API's, errors, and retries.

`python -m tests.e2e.client_calls` makes a tiny bundle with heads for all tasks and serves it.
"""

import sys
import tempfile
from contextlib import ExitStack, redirect_stdout
from functools import cache
from pathlib import Path

from tests.conftest import run_export
from tests.e2e.client_calls.records import Call
from tests.e2e.client_calls.table import clients
from tests.e2e.conftest import Server, serving
from tests.e2e.test_clients import OPTIONS, differs, not_ready, raised, unavailable_fault
from tests.tiny import save_tasks

HEAD = "| client | version | call | result |\n|---|---|---|---|"


def main(bundle: Path) -> bool:
    """Print the table. Returns whether all results are as expected."""
    print(HEAD)
    good = True
    with ExitStack() as stack:

        @cache
        def server(options: tuple[str, ...]) -> Server:
            return stack.enter_context(serving(bundle, *OPTIONS, *options))

        @cache
        def unready(options: tuple[str, ...]) -> Server:
            return stack.enter_context(not_ready(bundle, *OPTIONS, *options))

        for client in clients():
            if client.missing:
                print(f"| {client.name} | {client.version or '-'} | - | {client.missing} |")
                good = False
                continue
            for record in (*client.calls, *client.failures):
                if isinstance(record, Call):
                    fault = differs(server(client.options), record)
                    result = fault or "equal"
                else:
                    fault = raised(server(client.options), record)
                    result = fault or record.error
                print(
                    f"| {client.name} | {client.version} | {record.name} | {result} |", flush=True
                )
                good = good and not fault
            for use in client.key_uses:
                fault = unavailable_fault(server(client.options), unready(client.options), use)
                retry = "repeated after Retry-After" if use.retries else "not repeated"
                result = fault or f"{use.on_503}; {retry}"
                name = " ".join(["not ready (503)", *filter(None, [use.name])])
                print(f"| {client.name} | {client.version} | {name} | {result} |", flush=True)
                good = good and not fault
    return good


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        bundle = Path(folder) / "tasks"
        with redirect_stdout(sys.stderr):
            run_export(save_tasks(Path(folder) / "checkpoint"), bundle, "--precision", "fp32")
        sys.exit(not main(bundle))

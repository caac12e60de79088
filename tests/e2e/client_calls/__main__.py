"""Print a table of all calls by clients of other servers: the answer against the native API's, and the errors.

`python -m tests.e2e.client_calls` makes a tiny bundle with heads for all tasks and serves it.
"""

import importlib.util
import sys
import tempfile
from contextlib import redirect_stdout
from importlib.metadata import version
from pathlib import Path

from tests.conftest import run_export
from tests.e2e.client_calls.records import Call, Failure, modules
from tests.e2e.conftest import serving
from tests.e2e.test_clients import OPTIONS, differs, raised
from tests.tiny import save_tasks

HEAD = "| client | version | call | result |\n|---|---|---|---|"


def main(bundle: Path) -> bool:
    """Print the table. Returns whether all results are as expected."""
    print(HEAD)
    good = True
    with serving(bundle, *OPTIONS) as server:
        for client, module in modules():
            if importlib.util.find_spec(client) is None:
                print(f"| {client} | not installed | | |")
                good = False
                continue
            for record in (*module.CALLS, *module.FAILURES):
                fault = (
                    differs(server, record) if isinstance(record, Call) else raised(server, record)
                )
                result = fault or (record.error if isinstance(record, Failure) else "equal")
                print(f"| {client} | {version(client)} | {record.name} | {result} |", flush=True)
                good = good and not fault
    return good


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        bundle = Path(folder) / "tasks"
        with redirect_stdout(sys.stderr):
            run_export(save_tasks(Path(folder) / "checkpoint"), bundle, "--precision", "fp32")
        sys.exit(not main(bundle))

"""The standard descriptors are open before any of our processes opens a file."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

CLOSED = [(0,), (1,), (2,), (0, 1), (1, 2), (0, 1, 2)]


def run_without(numbers: Sequence[int], script: str, out: Path) -> list[object]:
    """Run a script of Python with these descriptors closed; returns what it writes to `out` as JSON."""
    closing = " ".join(f"{number}>&-" for number in numbers)
    command = ["sh", "-c", f'exec "$@" {closing}', "sh", sys.executable, "-c", script, str(out)]
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    found: list[object] = json.loads(out.read_text())
    return found


@pytest.mark.parametrize(
    ("module", "numbers"),
    [
        *(("service", numbers) for numbers in CLOSED),
        ("service.processes.child_main", (0, 1, 2)),
        ("export.passes.fold", (0, 1, 2)),
        ("model.tokenizer", (0, 1, 2)),
    ],
)
def test_a_closed_descriptor_is_the_null_device(module, numbers, tmp_path):
    """In every package: a file gets none of the three numbers, children inherit them, and printing is possible."""
    script = f"""
import json, os, sys
import {module}
file = open(sys.argv[1], "w")
print("to nowhere")
print("to nowhere", file=sys.stderr)
links = [os.readlink(f"/proc/self/fd/{{number}}") for number in {numbers}]
json.dump([file.fileno() > 2, links, [os.get_inheritable(number) for number in range(3)]], file)
"""
    expected = [True, [os.devnull] * len(numbers), [True] * 3]
    assert expected == run_without(numbers, script, tmp_path / "found")

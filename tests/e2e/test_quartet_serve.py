"""`quartet serve` as a process."""

import os
import signal
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_a_stop_signal_drains(tiny_bundle):
    """The service has its stop signals, although the command has used libraries with threads before."""
    command = [sys.executable, "-m", "quartet", "serve", tiny_bundle, "--port", "0"]
    threads = {"OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "2"}
    with subprocess.Popen(
        command,
        env=os.environ | threads,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        next(line for line in process.stdout if '"serving"' in line)
        process.send_signal(signal.SIGTERM)
        rest = process.stdout.read()
        assert (0, True) == (process.wait(20), '"stopped"' in rest), rest

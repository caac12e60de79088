"""The GPU's measurement, as far as a CPU can run it."""

import json
import subprocess
import sys

import pytest

from benchmarks import gpu
from service.core import bundle
from service.core.cpu import CPU
from service.core.cuda import CUDA
from service.core.session import device_problem
from tests.conftest import ROOT


@pytest.mark.skipif(device_problem(CUDA) is None, reason="there is a GPU")
def test_without_a_gpu():
    """One line has the reason, and the exit status is 1."""
    command = [sys.executable, "-m", "benchmarks.gpu"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (1, "") == (ended.returncode, ended.stdout)
    assert f"bench-gpu: nothing measured: {device_problem(CUDA)}\n" == ended.stderr


@pytest.mark.e2e
@pytest.mark.nightly
@pytest.mark.exclusive
def test_measure(gpu_bundle, tmp_path, capsys):
    """On the CPU, which runs fp32 alone: what it allows, bare sessions and HTTP, all as JSON and as a table."""
    opened = bundle.load(gpu_bundle)
    options = {"kind": CPU, "precisions": ("fp32",), "side": 64, "batches": (1, 4)}
    results = json.loads(json.dumps(gpu.measure(opened, tmp_path, 1, 1.0, **options)))
    found = results["precisions"]["fp32"]
    assert found["matmul_tflops"] > 0
    assert found["allowed_tokens_per_second"] > 0
    assert {"1", "4"} == {
        size for size, rate in found["bare_tokens_per_second"].items() if rate > 100
    }
    assert {"1", "4", "16"} == found["http_texts_per_second"].keys()
    assert found["http_texts_per_second"]["1"] > 0  # more may take longer than the window
    gpu.show(results)
    assert "bare, batches of 4 " in capsys.readouterr().out


def test_operations_are_those_of_fp32(gpu_bundle):
    """Both precisions do the same work for a token, whatever their attention is called."""
    opened = bundle.load(gpu_bundle)
    text = gpu.repeated(gpu.encode(opened, [""])[0], gpu.TOKENS)
    fp16, fp32 = (gpu.flops_per_token(opened, p, [text]) for p in ("fp16", "fp32"))
    assert fp16 == fp32 > 0

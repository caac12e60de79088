"""The memory that the service needs, against stand-in memory limits and against a real process."""

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from service.core import bundle
from service.core.bundle import FORMAT_VERSION, Bundle, Manifest
from service.engines import memory_need
from service.engines.device import RunsOn
from service.engines.memory_need import (
    HTTP,
    INFERENCE,
    MAIN,
    SINGLE,
    MemoryLimitError,
    check_memory,
    graph_needs,
    needed_memory,
)
from service.settings import Settings

MIB = 2**20
# Of one text of 128 tokens and more.
FP32 = {"opened": 100 * MIB, "batches": {"1024": 40 * MIB, "4096": 160 * MIB, "8192": 320 * MIB}}
INT8 = {"opened": 30 * MIB, "batches": {"1024": 20 * MIB, "8192": 160 * MIB}}
PROCESSES = MAIN + HTTP + INFERENCE


def make_bundle(
    folder: Path, fp32: Any = FP32, int8: Any = INT8, layout: str = "packed", max_length: int = 128
) -> Bundle:
    """A manifest of an fp32 and an int8 graph; fp32 is the default, and takes 10 MiB on disk."""
    folder.mkdir(exist_ok=True)
    with (folder / "fp32.onnx").open("wb") as file:
        file.truncate(10 * MIB)
    described = {"sha256": "0" * 64, "layout": layout, "provider": "any", "opset": 20}
    graphs = [
        {**described, "file": f"{precision}.onnx", "precision": precision, "memory": memory}
        for precision, memory in (("fp32", fp32), ("int8", int8))
    ]
    manifest = {
        "format_version": FORMAT_VERSION,
        "name": folder.name,
        "version": "1",
        "heads": {"a": {"task": "qa"}},
        "default_precision": "fp32",
        "max_length": max_length,
        "vocabulary": {"file": "t", "sha256": "0" * 64, "size": 9},
        "graphs": graphs,
        "goldens": {"file": "g", "sha256": "0" * 64, "tolerance": {"fp32": {}, "int8": {}}},
    }
    return Bundle(folder, Manifest.model_validate(manifest), "", None)


def limited(root: Path, size: int | None) -> Path:
    """A file system in which this process's cgroup has a memory limit, or none."""
    files = {
        "proc/self/cgroup": "0::/pod\n",
        "sys/fs/cgroup/pod/memory.max": "max\n" if size is None else f"{size}\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def need_of(settings: Settings, *bundles: Bundle) -> int:
    return needed_memory(settings, [n for b in bundles for n in graph_needs(settings, b)])


@pytest.mark.parametrize(
    ("fields", "expected_mib"),
    [
        # Two sessions, the warm-up's batch of 1,024 tokens, and two batches of 64 texts of 128 tokens.
        ({"threads": 2}, 200 + 40 + 2 * 320),
        ({"threads": 1}, 100 + 40 + 320),
        ({"threads": 4, "replicas": 3}, 100 + 40 + 3 * 320),
        ({"threads": 2, "max_batch_tokens": 2048}, 200 + 40 + 2 * 80),
        ({"threads": 2, "max_batch_size": 16}, 200 + 40 + 2 * 80),
        ({"threads": 2, "max_batch_tokens": 1}, 200 + 40 + 2 * 5),  # one text of 128 tokens
        ({"threads": 2, "precision": "int8"}, 60 + 20 + 2 * 160),
    ],
)
def test_the_need_is_the_sessions_and_the_largest_batches(fields, expected_mib, tmp_path):
    """A session for each width, the warm-up, and the largest batch on each slot."""
    need = need_of(Settings(**fields), make_bundle(tmp_path / "a"))
    assert PROCESSES + expected_mib * MIB == need


@pytest.mark.parametrize(("workers", "expected"), [(0, SINGLE), (3, MAIN + 3 * HTTP + INFERENCE)])
def test_each_process_counts(workers, expected, tmp_path):
    """The main process, each HTTP process and the inference process, or the only one."""
    settings = Settings(threads=1, http_workers=workers)
    assert expected + 460 * MIB == need_of(settings, make_bundle(tmp_path / "a"))


def test_bundles_share_the_slots(tmp_path):
    """Each bundle has sessions of its own; the largest batch of any of them counts on every slot."""
    small = make_bundle(tmp_path / "b", fp32=INT8)
    need = need_of(Settings(threads=2), make_bundle(tmp_path / "a"), small)
    assert PROCESSES + (130 + 40 + 2 * 320) * MIB == need  # one width: each has one thread


def test_an_unbatched_graph_runs_one_text(tmp_path):
    """Neither a batch nor the warm-up has more than one text."""
    alone = make_bundle(tmp_path / "a", layout="alone")
    assert PROCESSES + (100 + 5 + 5) * MIB == need_of(Settings(threads=1), alone)


def test_a_service_that_fits_starts(tmp_path):
    """Neither an error nor a warning, where the limit is the need, or where there is none."""
    settings, fits = Settings(threads=2), make_bundle(tmp_path / "a")
    need = PROCESSES + 880 * MIB
    with capture_logs() as logs:
        check_memory(settings, [fits], limited(tmp_path, need))
        check_memory(settings, [fits], limited(tmp_path, None))
        check_memory(settings, [fits], tmp_path / "none")
    assert [] == logs


@pytest.mark.parametrize(
    ("limit_mib", "changes"),
    [
        (
            184 + 640,
            ": set precision int8, or set max_batch_tokens 5120 (now 16384),"
            " or raise the memory limit to 1064 MiB",
        ),
        (184 + 260, "set max_batch_tokens 256 (now 16384), or raise the memory limit to 1064 MiB"),
        (184 + 200, ": set threads and replicas below 2, or raise the memory limit to 1064 MiB"),
    ],
)
def test_a_service_that_does_not_fit_ends(limit_mib, changes, tmp_path):
    """The line has limit, need and parts, and what would fit: a number of tokens, int8, or a larger limit."""
    root, made = limited(tmp_path, limit_mib * MIB), make_bundle(tmp_path / "a")
    with pytest.raises(MemoryLimitError) as caught:
        check_memory(Settings(threads=2), [made], root)
    message = str(caught.value)
    assert message.startswith(
        f"the memory limit is {limit_mib} MiB, but the service may need 1064 MiB (processes 184 MiB,"
        " sessions 200 MiB, warm-up and 2 batches at once 680 MiB): "
    )
    assert message.endswith(changes)
    assert "\n" not in message


def test_the_named_number_of_tokens_fits(tmp_path):
    """With the `max_batch_tokens` that the message names, the service starts; with 256 more it does not."""
    root, made = limited(tmp_path, (184 + 640) * MIB), make_bundle(tmp_path / "a")
    check_memory(Settings(threads=2, max_batch_tokens=5120), [made], root)
    with pytest.raises(MemoryLimitError):
        check_memory(Settings(threads=2, max_batch_tokens=5376), [made], root)


def test_unstated_memory_only_warns(tmp_path):
    """Where one bundle does not state its memory, the need is an estimate from its files, and the service starts."""
    unstated = make_bundle(tmp_path / "old", fp32=None, int8=None)
    bundles = [make_bundle(tmp_path / "a"), unstated]
    with capture_logs() as logs:
        check_memory(Settings(threads=2), bundles, limited(tmp_path, 300 * MIB))
        check_memory(Settings(threads=2), bundles, limited(tmp_path, 3000 * MIB))
    [line] = logs
    assert ("warning", "the memory limit may be too small", ["old@1"]) == (
        line["log_level"],
        line["event"],
        line["estimated_for"],
    )
    assert line["problem"].startswith("the memory limit is 300 MiB, but the service may need ")


def test_a_lacking_precision_is_left_to_the_start(tmp_path):
    """A bundle without the precision is refused when it is opened, with the reason."""
    settings = Settings(precision="fp16")
    check_memory(settings, [make_bundle(tmp_path / "a")], limited(tmp_path, 10**12))


@pytest.mark.parametrize(
    ("precision", "provider", "opened"),
    [
        ("int8", "CPUExecutionProvider", 30 * MIB),
        ("fp32", "CPUExecutionProvider", 100 * MIB),
        ("fp32", "CUDAExecutionProvider", None),
    ],
)
def test_the_running_graph_states_its_memory(precision, provider, opened, tmp_path):
    """`GET /models` shows the memory of the graph that runs, and none on a GPU."""
    runs_on = RunsOn(precision, "packed", provider, None, "onnxruntime 1")
    memory = runs_on.stated_memory(make_bundle(tmp_path / "a").manifest)
    assert opened == (None if memory is None else memory.opened)


PEAK = """
import asyncio, sys
from pathlib import Path
from export.measure_memory import read_status
from service.core import bundle
from service.engines.local_device import open_device
from service.observability.metrics import Metrics
from service.settings import Settings

async def main(path, tokens):
    settings = Settings(bundles=(path,), provider="cpu", threads=2, max_batch_tokens=tokens)
    loaded = bundle.load(path)
    async with open_device(settings, Metrics()) as device:
        opened = await asyncio.to_thread(device.open, loaded)
        length = loaded.manifest.max_length
        for _ in range(3):
            opened.runner.run_at_once(max(tokens // length, 1), length, 2)
    print(read_status("VmHWM"))

asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


@pytest.mark.nightly
@pytest.mark.exclusive
def test_the_need_is_near_the_peak_of_a_process(mini_bundle):
    """The inference process with the largest batches on all slots peaks within 20 % of the stated need.

    The median of three processes counts, since the C library's heap is fragmented otherwise in each.
    """
    tokens, file = 16384, "int8.onnx"
    measured = output_of("-m", "export.measure_memory", str(mini_bundle), file)
    peaks = [int(output_of("-c", PEAK, str(mini_bundle), str(tokens))) for _ in range(3)]
    loaded = bundle.load(mini_bundle)
    graph = loaded.manifest.graphs[0].model_dump() | {"memory": json.loads(measured)}
    changed = loaded.manifest.model_dump() | {"graphs": [graph]}
    stated = Bundle(mini_bundle, Manifest.model_validate(changed), "", loaded.golden)
    settings = Settings(threads=2, max_batch_tokens=tokens)

    need = need_of(settings, stated) - memory_need.process_memory(settings) + INFERENCE

    assert statistics.median(peaks) == pytest.approx(need, rel=0.2)


def output_of(*arguments: str) -> str:
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout

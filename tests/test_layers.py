"""The layers, read off every import: export -> model -> the leaves of service, and no way back."""

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from graphlib import TopologicalSorter
from importlib.metadata import packages_distributions
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LEAVES = {
    f"service.{name}"
    for name in ("bundle", "cuda", "encode", "words", "packing", "session", "decode", "tags")
}


def find_modules() -> dict[str, Path]:
    """The file of each of our modules, by dotted name."""
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for package in ("service", "model", "export")
        for path in (ROOT / package).rglob("*.py")
    }


MODULES = find_modules()


def imports(module: str) -> Iterator[str]:
    """Every module that one of ours imports, anywhere in its text, by its longest dotted name."""
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module, f"{module} has a relative import"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in MODULES else node.module


def crossings(importers: str, imported: str, allowed: set[str] = frozenset()) -> list[str]:
    """Imports from one package of another package, but for the allowed modules."""
    return [
        f"{module} imports {name}"
        for module in MODULES
        if module.split(".")[0] == importers
        for name in imports(module)
        if name.split(".")[0] == imported and name not in allowed
    ]


def declared(*extras: str) -> set[str]:
    """The import names of what pyproject.toml asks for with these extras."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    optional = project["optional-dependencies"]
    lines = project["dependencies"] + [line for extra in extras for line in optional[extra]]
    wanted = {normal(re.match(r"[\w.-]+", line)[0]) for line in lines}
    installed = packages_distributions().items()
    return {name for name, owners in installed if wanted & {normal(owner) for owner in owners}}


def normal(distribution: str) -> str:
    return re.sub(r"[-_.]+", "-", distribution).lower()


@pytest.mark.parametrize("trainer", ["model", "export", "torch"])
def test_service_knows_nothing_of_training(trainer):
    """No file of the service imports model, export or torch."""
    assert [] == crossings("service", trainer)


def test_service_imports_only_what_serving_installs():
    """Every library that the service imports is a declared serving dependency."""
    # FastAPI and pydantic each hand on their foundation, and choose its version themselves. What the extra for
    # spans brings shares its name with the API, and is imported only where spans are asked for.
    handed_on = {"starlette", "pydantic_core"}
    known = {"service"} | handed_on | declared("cpu") | sys.stdlib_module_names
    used = {
        name.split(".")[0]
        for module in MODULES
        if module.split(".")[0] == "service"
        for name in imports(module)
    }

    assert set() == used - known


def test_leaves_exist():
    """The leaves are modules of the service."""
    assert set() == LEAVES - MODULES.keys()


def test_leaves_import_only_leaves():
    """No leaf imports a module of the service that is not a leaf itself."""
    leaks = [
        f"{leaf} imports {name}"
        for leaf in sorted(LEAVES & MODULES.keys())
        for name in imports(leaf)
        if name.split(".")[0] == "service" and name not in LEAVES
    ]

    assert [] == leaks


@pytest.mark.parametrize("package", ["model", "export"])
def test_training_imports_only_the_leaves_of_the_service(package):
    """Training and export share the service's leaves with it, and nothing else."""
    assert [] == crossings(package, "service", allowed=LEAVES)


def test_model_does_not_know_export():
    """No file of model imports export."""
    assert [] == crossings("model", "export")


def test_only_the_session_imports_the_runtime():
    """ONNX Runtime is imported where its telemetry is switched off, and nowhere else in this repository."""
    folders = ("benchmarks", "deploy", "export", "model", "service", "tests")
    apart = {"peers"}  # which have environments of their own
    importing = re.compile(r"^\s*(import onnxruntime\b|from onnxruntime import)", re.MULTILINE)
    found = {
        str(path.relative_to(ROOT))
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")
        if not apart & {*path.parts} and importing.search(path.read_text(encoding="utf-8"))
    }

    assert {"service/session.py"} == found


def test_no_module_imports_itself_round_a_corner():
    """The import graph of all three packages has an order, so it has no cycle."""
    graph = {module: {name for name in imports(module) if name in MODULES} for module in MODULES}

    assert len(MODULES) == len([*TopologicalSorter(graph).static_order()])


def test_no_module_is_named_like_a_library():
    """A file never has the name of a standard module or of a library that we use."""
    libraries = sys.stdlib_module_names | declared("cpu", "train", "test")
    ours = {module: module.split(".")[-1] for module in MODULES}

    assert [] == [module for module, name in ours.items() if name in libraries]


def test_importing_the_app_loads_no_torch():
    """A fresh interpreter that imports the app has loaded neither torch nor our training code."""
    script = "import sys, service.app; print(*{name.split('.')[0] for name in sys.modules})"
    command = [sys.executable, "-c", script]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert "" == run.stderr
    assert set() == {"torch", "model", "export", "transformers"} & set(run.stdout.split())

"""The order of the rooms (`tests/rooms.py`), held against every import."""

import ast
import re
import subprocess
import sys
import tomllib
from graphlib import TopologicalSorter
from importlib.metadata import packages_distributions

from tests.rooms import BETWEEN, BLOCK, MODULES, ORDER, PAGE, ROOT, imports, render, room_of


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


def test_imports_go_up_the_order():
    """A module imports only its own room and rooms above it in `ORDER`."""
    against = [
        f"{module} imports {name}"
        for module in MODULES
        for name in imports(module)
        if name in MODULES and ORDER.index(room_of(name)) > ORDER.index(room_of(module))
    ]

    assert [] == against


def test_packages_meet_in_the_core():
    """`service` imports no other package of ours; `model` and `export` import only `service.core` of `service`."""
    crossings = [
        f"{module} imports {name}"
        for module in MODULES
        for name in imports(module)
        if name in MODULES
        and name.split(".")[0] != module.split(".")[0]
        and room_of(name) not in BETWEEN[module.split(".")[0]]
    ]

    assert [] == crossings


def test_service_imports_no_torch():
    """No module of the service imports torch."""
    importing = [m for m in MODULES if m.split(".")[0] == "service" and "torch" in imports(m)]

    assert [] == importing


def test_every_room_has_modules():
    """The order names no room that does not exist."""
    assert set(ORDER) == {room_of(module) for module in MODULES}


def test_every_room_is_described():
    """Each package's docstring has a line on what it is and one on what may be used from outside."""
    packages = [m for m, path in MODULES.items() if path.name == "__init__.py" and "." in m]
    docs = {
        m: ast.get_docstring(ast.parse(MODULES[m].read_text(encoding="utf-8"))) for m in packages
    }

    assert [] == [package for package, doc in docs.items() if len((doc or "").split("\n\n")) < 2]


def test_the_picture_of_the_rooms_is_current():
    """The picture in docs/explanation/architecture.md is drawn from the imports: `python -m tests.rooms` renews it."""
    block = BLOCK.search(PAGE.read_text(encoding="utf-8"))

    assert block is not None
    assert block[1] + render() + block[2] == block[0]


def test_service_imports_only_what_serving_installs():
    """Every library that the service imports is a declared serving dependency."""
    # FastAPI and pydantic each hand on their foundation, and choose its version themselves. What the extra for
    # spans brings shares its name with the API, and is imported only where spans are asked for. The packages of the
    # extra for gRPC are imported only where `grpc_port` is set: tests/service/api/dialects/test_open_inference.py.
    handed_on = {"starlette", "pydantic_core"}
    known = (
        {"service"} | handed_on | declared("cpu", "grpc", "hub", "bulk") | sys.stdlib_module_names
    )
    used = {
        name.split(".")[0]
        for module in MODULES
        if module.split(".")[0] == "service"
        for name in imports(module)
    }

    assert set() == used - known


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

    assert {"service/core/session.py"} == found


def test_no_module_imports_itself_round_a_corner():
    """The import graph of all three packages has an order, so it has no cycle."""
    graph = {module: {name for name in imports(module) if name in MODULES} for module in MODULES}

    assert len(MODULES) == len([*TopologicalSorter(graph).static_order()])


def test_no_module_is_named_like_a_library():
    """A file never has the name of a standard module or of a library that we use."""
    later = {
        "annotationlib",
        "compression",
        "profiling",
    }  # standard modules since Python 3.14 and 3.15
    libraries = sys.stdlib_module_names | later | declared("cpu", "train", "test")
    ours = {module: module.split(".")[-1] for module in MODULES}

    assert [] == [module for module, name in ours.items() if name in libraries]


def test_importing_the_app_loads_no_torch():
    """A fresh interpreter that imports the app has loaded neither torch nor our training code."""
    script = "import sys, service.api.app; print(*{name.split('.')[0] for name in sys.modules})"
    command = [sys.executable, "-c", script]
    run = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    assert "" == run.stderr
    assert set() == {"torch", "model", "export", "transformers"} & set(run.stdout.split())

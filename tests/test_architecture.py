"""The picture of a request in docs/explanation/architecture.md: each arrow is a call in the code."""

import ast
import re

from tests.rooms import MODULES, PAGE

BLOCK = re.compile(r"(<!-- request: begin -->\n).*?(<!-- request: end -->)", re.DOTALL)

# Caller and callee by module and qualified name; the callee's own name occurs in the caller's code.
CALLS = (
    (
        "service.server.connection:Connection.refuse_early",
        "service.middleware.request_lifecycle:RequestLifecycle.receive",
    ),
    ("service.api.native_routes:classify", "service.api.engine_call:receive_call"),
    ("service.api.engine_call:receive_call", "service.api.engine_call:open_call"),
    ("service.api.engine_call:open_call", "service.engines.registry:Engines.get"),
    ("service.api.native_routes:classify", "service.api.engine_call:Call.answer"),
    ("service.api.engine_call:Call.answer", "service.api.engine_call:Call.compute"),
    ("service.api.engine_call:Call.compute", "service.engines.engine:Engine.answer"),
    ("service.engines.engine:Engine.answer", "service.tasks.classification:Classification.plan"),
    ("service.tasks.classification:Classification.plan", "service.core.encode:Encoder.windows"),
    ("service.tasks.classification:Classification.plan", "service.core.decode:classify"),
    ("service.engines.engine:Engine.answer", "service.engines.device:Device.submit"),
    ("service.engines.engine:Engine.answer", "service.engines.result_collector:ResultCollector.add_all"),
    ("service.engines.local_device:LocalDevice", "service.scheduling.batcher:Batcher.submit"),
    ("service.scheduling.batcher:Batcher._admit", "service.scheduling.admission_control:AdmissionControl.check"),
    ("service.scheduling.batcher:Batcher._fill", "service.scheduling.planner:Planner.next"),
    ("service.scheduling.batcher:Batcher._fill", "service.scheduling.executor:Threads.run"),
    ("service.engines.local_device:Runner.run", "service.core.session:Session.run"),
    ("service.engines.local_device:Runner.run", "service.core.packing:split"),
)  # fmt: skip


def find(place: str) -> ast.AST:
    """Return the definition of MODULE:QUALIFIED.NAME. Raises KeyError."""
    module, _, name = place.partition(":")
    node: ast.AST = ast.parse(MODULES[module].read_text(encoding="utf-8"))
    for part in name.split("."):
        named = {n.name: n for n in ast.iter_child_nodes(node) if hasattr(n, "name")}
        node = named[part]
    return node


def names_in(node: ast.AST) -> set[str]:
    """Return the names and attributes that a definition uses."""
    names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
    return names | {n.attr for n in ast.walk(node) if isinstance(n, ast.Attribute)}


def render() -> str:
    """Return the picture: a Mermaid flowchart from caller to callee."""

    def box(place: str) -> str:
        module, _, name = place.partition(":")
        label = f"{module.removeprefix('service.')}<br>{name}"
        return f'{re.sub(r"[^a-zA-Z]", "_", place)}["{label}"]'

    arrows = [f"  {box(caller)} --> {box(callee)}" for caller, callee in CALLS]
    return "\n".join(["```mermaid", "flowchart TD", *arrows, "```", ""])


def test_each_arrow_is_a_call():
    """Both ends of an arrow exist, and the caller uses the callee's name."""
    missing = [
        (caller, callee)
        for caller, callee in CALLS
        if find(callee) is None
        or callee.rpartition(".")[2].rpartition(":")[2] not in names_in(find(caller))
    ]

    assert [] == missing


def test_the_picture_is_current():
    """The page shows these calls: `python -m tests.test_architecture` renews it."""
    block = BLOCK.search(PAGE.read_text(encoding="utf-8"))

    assert block is not None
    assert block[1] + render() + block[2] == block[0]


if __name__ == "__main__":
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(BLOCK.sub(lambda match: match[1] + render() + match[2], page), encoding="utf-8")

"""The rooms of the code: packages in their order, and the imports between them.

`python -m tests.rooms` renews the picture of the rooms in docs/explanation/architecture.md.
"""

import ast
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "explanation" / "architecture.md"
BLOCK = re.compile(r"(<!-- rooms: begin -->\n).*?(<!-- rooms: end -->)", re.DOTALL)

# Each room may import only rooms above it. A module belongs to the longest entry that is a prefix of its name.
ORDER = (
    "service.core",
    "service",
    "service.scheduling",
    "service.observability",
    "service.engines",
    "service.tasks",
    "service.middleware",
    "service.rollout",
    "service.api",
    "service.server",
    "service.processes",
    "service.__main__",
    "service.command",
    "service.embedded",
    "service.bulk",
    "service.predict",
    "model.network",
    "model.families",
    "model.heads",
    "model.static_embedding",
    "model.checkpoints",
    "model.data",
    "model.training",
    "model.report",
    "model",
    "export.passes",
    "export.trace_graphs",
    "export.external",
    "export",
    "quartet",
)
# Modules that lie in the folder of another room.
NETWORK = ("model.config", "model.run_settings", "model.attention", "model.pooling", "model.bert")
# What a room may import of another package: all of it, or the named rooms.
BETWEEN: Mapping[str, frozenset[str]] = {
    "service": frozenset(),
    "model": frozenset({"service.core"}),
    "export": frozenset({"service.core", *(room for room in ORDER if room.startswith("model"))}),
    "quartet": frozenset(ORDER),
}


def find_modules() -> dict[str, Path]:
    """Return the file of each module of the four packages, by dotted name."""
    return {
        ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
        for package in ("service", "model", "export", "quartet")
        for path in (ROOT / package).rglob("*.py")
    }


MODULES = find_modules()


def imports(module: str) -> Iterator[str]:
    """Yield every module that a module imports, anywhere in its text, by its longest dotted name."""
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.module, f"{module} has a relative import"
            for alias in node.names:
                name = f"{node.module}.{alias.name}"
                yield name if name in MODULES else node.module


def room_of(module: str) -> str:
    """Return the room of a module."""
    if module in NETWORK:
        return "model.network"
    return max((room for room in ORDER if module == room or module.startswith(f"{room}.")), key=len)


def room_imports() -> set[tuple[str, str]]:
    """Return each pair of rooms of which the first imports the second."""
    return {
        (room_of(module), room_of(name))
        for module in MODULES
        for name in imports(module)
        if name in MODULES and room_of(name) != room_of(module)
    }


def shortest_arrows() -> list[tuple[str, str]]:
    """Return the imports between rooms that no longer way of imports implies."""
    arrows = room_imports()
    reach: dict[str, set[str]] = {}
    for room in ORDER:
        below = {imported for importer, imported in arrows if importer == room}
        reach[room] = below.union(*(reach.get(other, set()) for other in below))
    return sorted(
        (importer, imported)
        for importer, imported in arrows
        if not any(
            imported in reach[other]
            for between, other in arrows
            if between == importer and other != imported
        )
    )


def render() -> str:
    """Return the picture of the rooms: a Mermaid flowchart whose arrows are imports."""
    label = {room: room for room in ORDER} | {
        "service": "service (settings, errors, keys)",
        "model": "model (scripts)",
        "model.network": "model (attention, bert)",
    }
    lines = ["```mermaid", "flowchart BT"]
    for package in ("service", "model", "export", "quartet"):
        lines.append(f"  subgraph {package}/")
        for room in ORDER:
            if room.split(".")[0] == package:
                lines.append(f'    {identifier(room)}["{label[room]}"]')
        lines.append("  end")
    lines += [f"  {identifier(a)} --> {identifier(b)}" for a, b in shortest_arrows()]
    return "\n".join([*lines, "```", ""])


def identifier(room: str) -> str:
    return room.replace(".", "_") + "_room"


def main() -> None:
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(BLOCK.sub(lambda match: match[1] + render() + match[2], page), encoding="utf-8")


if __name__ == "__main__":
    main()

"""The pages of the APIs whose parameters are nested in their requests."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

DOCS = Path(__file__).parents[4] / "docs" / "how-to"
PAGES = {
    "Hugging Face Inference API": "migrate_huggingface.md",
    "Open Inference Protocol": "migrate_triton.md",
}


def names(schema: dict[str, Any], components: dict[str, Any]) -> Iterator[str]:
    """Yield the name of each property of a schema and of the schemas that it refers to."""
    for reference in re.findall(r"'#/components/schemas/(\w+)'", str(schema)):
        yield from names(components[reference], components)
    yield from schema.get("properties", ())


@pytest.mark.parametrize("tag", PAGES)
def test_pages_have_every_parameter(document, tag):
    """A page has each property of each request of its API."""
    page = (DOCS / PAGES[tag]).read_text(encoding="utf-8")
    bodies = [
        operation["requestBody"]["content"]["application/json"]["schema"]
        for methods in document["paths"].values()
        for operation in methods.values()
        if operation["tags"] == [tag] and "requestBody" in operation
    ]
    found = {name for body in bodies for name in names(body, document["components"]["schemas"])}
    assert {"parameters", "inputs"} < found
    assert [] == [name for name in sorted(found) if not re.search(rf"`[^`]*\b{name}\b[^`]*`", page)]

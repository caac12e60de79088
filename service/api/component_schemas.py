"""The schemas of the OpenAPI document in a form that generators of clients read without loss.

Generators derive the names of types from titles and components. So properties have no titles, which would collide with
the components' names, and each enumeration is a component of its own.
"""

from collections.abc import Iterator, Mapping
from typing import Any

Schema = dict[str, Any]

REFERENCE = "#/components/schemas/{model}"
# The alternatives of QaRequest: each requires these fields, and has none of the other alternative's.
QA_ALTERNATIVES: Mapping[str, tuple[str, ...]] = {
    "QaQuestionRequest": ("question", "context"),
    "QaInputsRequest": ("inputs",),
}


def for_generators(schemas: Mapping[str, Schema]) -> dict[str, Schema]:
    """Return all components: those given without titles of properties, enumerations and alternatives of their own."""
    components = {**schemas, **alternatives(schemas["QaRequest"])}
    enumerations: dict[str, Schema] = {}
    for schema in components.values():
        for name, field in schema.get("properties", {}).items():
            field.pop("title", None)
            name_enumerations(name, field, enumerations)
            merge_null(field)
            if field.get("default", 0) is None:
                del field["default"]  # the same as absent
    return {**components, **enumerations}


def alternatives(qa: Schema) -> dict[str, Schema]:
    """Return QaRequest as a choice between one question and several, with the schemas of both."""
    fields = {name for required in QA_ALTERNATIVES.values() for name in required}
    found = {}
    for name, required in QA_ALTERNATIVES.items():
        properties = {}
        for field, schema in qa["properties"].items():
            if field in required:
                (kept,) = (kind for kind in schema["anyOf"] if kind != {"type": "null"})
                properties[field] = {**kept, "description": schema["description"]}
            elif field in fields:
                properties[field] = {"type": "null", "description": "absent or null"}
            else:
                properties[field] = {**schema}
        found[name] = {**qa, "title": name, "properties": properties, "required": [*required]}
    choice = [reference(name) for name in found]
    return {
        "QaRequest": {"title": qa["title"], "description": qa["description"], "anyOf": choice},
        **found,
    }


def name_enumerations(name: str, field: Schema, enumerations: dict[str, Schema]) -> None:
    """Replace the enumeration in a field by a reference to a component named after the field."""
    for schema in [field, *nested(field)]:
        if "enum" not in schema:
            continue
        component = "".join(part.capitalize() for part in name.split("_"))
        found = {"title": component, "type": schema.pop("type"), "enum": schema.pop("enum")}
        known = enumerations.setdefault(component, found)
        assert known == found, f"our bug: two fields {name} have different values"
        if schema:  # a reference next to a default or a description is lost on some generators
            schema["allOf"] = [reference(component)]
        else:
            schema.update(reference(component))


def merge_null(field: Schema) -> None:
    """Write a nullable field of one simple type as such, since generators make a type of its own of an alternative."""
    match field.get("anyOf"):
        case [{"type": str(kind)} as simple, {"type": "null"}]:
            del field["anyOf"]
            field.update(simple, type=[kind, "null"])


def nested(schema: Schema) -> Iterator[Schema]:
    """The alternatives and items of a schema, and theirs."""
    below = [*schema.get("anyOf", ()), *([schema["items"]] if "items" in schema else ())]
    for each in below:
        yield each
        yield from nested(each)


def reference(component: str) -> Schema:
    return {"$ref": REFERENCE.format(model=component)}

"""The schemas of the OpenAPI document in a form that client generators read without loss.

Generators derive type names from titles and components. Properties therefore have no titles, because such a title would
collide with the name of a component. Each enumeration is a component of its own.
"""

from collections.abc import Iterator, Mapping
from typing import Any

Schema = dict[str, Any]

REFERENCE = "#/components/schemas/{model}"
# The alternatives of QaRequest. Each requires these fields and excludes the fields of the other alternative.
QA_ALTERNATIVES: Mapping[str, tuple[str, ...]] = {
    "QaQuestionRequest": ("question", "context"),
    "QaInputsRequest": ("inputs",),
}


def for_generators(schemas: Mapping[str, Schema]) -> dict[str, Schema]:
    """Return all components: the given ones without property titles, plus enumerations and QaRequest's alternatives."""
    components = {**schemas, **alternatives(schemas["QaRequest"])}
    enumerations: dict[str, Schema] = {}
    for schema in components.values():
        for name, field in schema.get("properties", {}).items():
            field.pop("title", None)
            name_enumerations(name, field, enumerations)
            merge_null(field)
            if field.get("default", 0) is None:
                del field["default"]  # a default of null means the same as an absent field
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
        # Some generators drop a reference that has a default or a description next to it.
        if schema:
            schema["allOf"] = [reference(component)]
        else:
            schema.update(reference(component))


def merge_null(field: Schema) -> None:
    """Write a nullable field of one simple type as a type list.

    Generators would turn an `anyOf` into a type of its own.
    """
    match field.get("anyOf"):
        case [{"type": str(kind)} as simple, {"type": "null"}]:
            del field["anyOf"]
            field.update(simple, type=[kind, "null"])


def nested(schema: Schema) -> Iterator[Schema]:
    """Yield the alternatives and items of a schema, recursively."""
    below = [*schema.get("anyOf", ()), *([schema["items"]] if "items" in schema else ())]
    for each in below:
        yield each
        yield from nested(each)


def reference(component: str) -> Schema:
    return {"$ref": REFERENCE.format(model=component)}

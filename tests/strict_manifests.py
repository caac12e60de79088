"""Validate manifests strictly: each field is known to the schema of its kind. Runs in the environments of the packages.

    build/clients/kubernetes/bin/python tests/strict_manifests.py < manifest.yaml
    build/clients/kserve/bin/python tests/strict_manifests.py < runtime.yaml

Prints a line for each problem.
"""

import sys
from collections.abc import Iterator
from importlib import import_module
from typing import Any

import yaml

KUBERNETES = "1.37"
# The kinds of custom resources with a model in a package.
MODELS = {
    "ScaledObject": "cloudcoil.models.keda.v1alpha1",
    "ServiceMonitor": "cloudcoil.models.prometheus_operator.v1",
}
RUNTIME = "ClusterServingRuntime"


def find_problems(document: Any) -> Iterator[str]:
    kind = document["kind"]
    if kind in MODELS:
        import jsonschema

        schema = getattr(import_module(MODELS[kind]), kind).model_json_schema(by_alias=True)
        for error in jsonschema.Draft202012Validator(closed(schema)).iter_errors(document):
            yield f"{kind}: {error.json_path}: {error.message}"
    elif kind == RUNTIME:
        import kserve

        yield from unknown_fields(kserve, f"V1alpha1{RUNTIME}", document, kind)
    else:
        import kubernetes_validate

        try:
            kubernetes_validate.validate(document, KUBERNETES, strict=True)
        except kubernetes_validate.ValidationError as error:
            yield f"{kind}: {list(error.path)}: {error.message}"


def closed(schema: Any) -> Any:
    """Return a schema in which objects with named properties have no others, and no field is null."""
    if isinstance(schema, list):
        return [closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    found = {name: closed(value) for name, value in schema.items() if name != "default"}
    return {**found, "additionalProperties": False} if "properties" in schema else found


def unknown_fields(package: Any, kind: str, value: Any, place: str) -> Iterator[str]:
    """Yield the fields that a model of the OpenAPI generator does not have. kind: its name, or `list[...]` of it"""
    import kubernetes.client

    if kind.startswith("list[") and isinstance(value, list):
        for number, one in enumerate(value):
            yield from unknown_fields(package, kind[5:-1], one, f"{place}[{number}]")
        return
    model = getattr(package, kind, None) or getattr(kubernetes.client, kind, None)
    if model is None:
        return  # a string, a number or a map
    if not isinstance(value, dict):
        yield f"{place}: must be an object"
        return
    names = {name: field for field, name in model.attribute_map.items()}
    for name, inner in value.items():
        if name not in names:
            yield f"{place}.{name}: unknown field"
        else:
            kind = model.openapi_types[names[name]]
            yield from unknown_fields(package, kind, inner, f"{place}.{name}")


if __name__ == "__main__":
    print(*(p for one in yaml.safe_load_all(sys.stdin) for p in find_problems(one)), sep="\n")

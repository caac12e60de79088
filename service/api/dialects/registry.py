"""The dialects, the paths of each, and the form of its errors.

A dialect has its paths below its prefix at all times. One dialect can own the bare paths, too (`root_dialect`). The
native API has its paths below `/native` at all times, and the bare paths unless a dialect owns them.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from fastapi import APIRouter
from pydantic import BaseModel

from service.api.dialects import (
    cohere_dialect,
    huggingface_dialect,
    inference_dialect,
    infinity_dialect,
    jina_dialect,
    openai_dialect,
    tei_dialect,
    vllm_dialect,
)
from service.errors import ErrorForm, QuartetError, native_form
from service.settings import RootDialect

FormError = Callable[[QuartetError], ErrorForm]

NATIVE = "native"
# First segments of the paths that the native API keeps under every root dialect.
KEPT = frozenset({"admin", "docs", "health", "live", "metrics", "models", "openapi.json", "static"})
HEALTH = "/health"  # of other servers; the native API has paths below it


class Dialect(NamedTuple):
    """An API of another server.

    prefix: the start of all its paths, without the first "/"; a dialect may have one within another's
    tag: of its routes in the OpenAPI document
    error_model: the schema of the body that `error_form` returns
    """

    prefix: str
    tag: str
    router: APIRouter
    error_form: FormError
    error_model: type[BaseModel]


DIALECTS: Sequence[Dialect] = tuple(
    Dialect(module.PREFIX, module.TAG, module.router, module.error_form, module.ERROR_MODEL)
    for module in (
        openai_dialect,
        jina_dialect,
        tei_dialect,
        cohere_dialect,
        infinity_dialect,
        vllm_dialect,
        huggingface_dialect,
        inference_dialect,
    )
)
ROOTS: Mapping[RootDialect, str] = {
    "hf": huggingface_dialect.PREFIX,
    "infinity": infinity_dialect.PREFIX,
    "openai": openai_dialect.PREFIX,
    "tei": tei_dialect.PREFIX,
}  # the prefix of each dialect that can own the bare paths


class Paths:
    """Finds the route's own path and the form of errors for the path of a request."""

    def __init__(self, root_dialect: RootDialect) -> None:
        self._root = ROOTS.get(root_dialect, "")
        self._forms = {dialect.prefix: dialect.error_form for dialect in DIALECTS}
        self._firsts = KEPT | {prefix.partition("/")[0] for prefix in self._forms}

    def resolve(self, method: str, path: str) -> tuple[str, FormError]:
        first = path[1:].partition("/")[0]
        if first == NATIVE:
            return path[len(NATIVE) + 1 :] or "/", native_form
        is_kept = first in self._firsts and path != HEALTH
        if self._root and not is_kept and (first or method == "POST"):
            path = f"/{self._root}{path}".rstrip("/")
            first = self._root
        return path, self._forms.get(path[1:]) or self._forms.get(first, native_form)

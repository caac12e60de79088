"""The dialects by the first segment of their paths."""

from collections.abc import Callable, Mapping
from typing import NamedTuple

from fastapi import APIRouter

from service.api.dialects import openai_dialect, tei_dialect
from service.errors import ErrorForm, QuartetError


class Dialect(NamedTuple):
    router: APIRouter
    error_form: Callable[[QuartetError], ErrorForm]


DIALECTS: Mapping[str, Dialect] = {
    module.PREFIX: Dialect(module.router, module.error_form)
    for module in (openai_dialect, tei_dialect)
}

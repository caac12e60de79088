"""The ways in which servers make an answer from a text: the encoder and the request that make it in one of them."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from quartet.comparison.sides import Task
from service.core import encode
from service.core.decode import sigmoid
from service.core.encode import Cut, Encoder


@dataclass(frozen=True)
class Recipe:
    """How an answer is made; None: as the bundle says.

    token_type: of all tokens; padding: tokens up to which texts are filled up, and which are read like text
    offset_unit: code_point, utf16 or byte; labels: pairs of a label of the bundle and the label in its place
    """

    pooling: str | None = None
    normalize: bool | None = None
    dimensions: int | None = None
    prompt: str | None = None
    truncation: str | None = None
    max_length: int | None = None
    lower_case: bool | None = None
    token_type: int | None = None
    padding: int | None = None
    activation: str | None = None
    aggregation: str | None = None
    offset_unit: str | None = None
    labels: tuple[tuple[str, str], ...] | None = None
    precision: str | None = None


SERVED = Recipe()


def encoding_of(recipe: Recipe) -> Recipe:
    """Return a recipe with the fields that decide how a text becomes tokens."""
    names = ("truncation", "max_length", "lower_case", "token_type", "padding")
    return Recipe(**{name: getattr(recipe, name) for name in names})


class RecipeEncoder(Encoder):
    """The encoder of a bundle, changed as a recipe says."""

    def __init__(self, own: Encoder, recipe: Recipe) -> None:
        tokenizer = own.tokenizer
        if recipe.lower_case is not None:
            tokenizer = with_case(tokenizer, recipe.lower_case)
        super().__init__(tokenizer, recipe.max_length or own.max_length)
        self._recipe = recipe
        kind = recipe.token_type
        if kind is not None:
            self._single, self._pair = (
                replace(
                    frame,
                    types=tuple(np.full_like(part, kind) for part in frame.types),
                    text_types=(kind,) * len(frame.text_types),
                )
                for frame in (self._single, self._pair)
            )

    def windows(self, *texts: Any, **options: Any) -> list[Cut]:
        return [self._filled(cut) for cut in super().windows(*texts, **options)]

    def _filled(self, cut: Cut) -> Cut:
        if not self._recipe.padding:
            return cut
        pad = self.tokenizer.token_to_id("[PAD]") or self.tokenizer.token_to_id("<pad>") or 0
        length = min(self._recipe.padding, self.max_length)
        filled = (encode.expand(own, length, pad, attended=True) for own in cut.windows)
        return Cut(tuple(filled), cut.truncated)

    def _plan(
        self, lengths: Sequence[int], truncate: encode.Truncate, stride: int
    ) -> list[tuple[list[slice], bool]]:
        if self._recipe.truncation != "left":
            return super()._plan(lengths, truncate, stride)
        return [([slice(max(0, n - self._capacity), n)], n > self._capacity) for n in lengths]


def with_case(tokenizer: Tokenizer, lower: bool) -> Tokenizer:
    """Return a copy of a tokenizer that lowers the case of texts, or keeps it."""
    described = json.loads(tokenizer.to_str())
    normalizer = described.get("normalizer") or {"type": "Sequence", "normalizers": []}
    parts = normalizer["normalizers"] if normalizer["type"] == "Sequence" else [normalizer]
    parts = [part for part in parts if part["type"] != "Lowercase"]
    for part in parts:
        if "lowercase" in part:
            part["lowercase"] = lower
    if lower and not any("lowercase" in part for part in parts):
        parts.insert(0, {"type": "Lowercase"})
    described["normalizer"] = {"type": "Sequence", "normalizers": parts}
    return Tokenizer.from_str(json.dumps(described))


def options_of(task: Task, recipe: Recipe) -> dict[str, Any]:
    """Return the fields of a native request that a recipe sets."""
    options: dict[str, Any] = {"truncate": True}
    # Windows, of which the recipe's encoder makes only one, get all tokens of a text.
    has_windows = task in ("entities", "answers", "reranking") and not recipe.max_length
    if has_windows or recipe.truncation == "left":
        options["truncate"] = "window"
    match task:
        case "embeddings":
            options |= {"prompt": "", "normalize": recipe.normalize}
        case "labels":
            options["function_to_apply"] = recipe.activation
        case "entities":
            options["aggregation_strategy"] = recipe.aggregation or "first"
        case "reranking":
            options["raw_scores"] = recipe.activation is not None
    return options


def convert(task: Task, answer: Any, text: str, recipe: Recipe) -> Any:
    """Return an answer with what no request sets: dimensions, labels, offsets, scores of a ranking by sigmoid.

    text: that spans are of
    """
    if recipe.dimensions is not None:
        vector = answer[: recipe.dimensions]
        length = float(np.linalg.norm(vector))
        return vector if recipe.normalize is False or not length else vector / length
    if recipe.labels is not None:
        names = dict(recipe.labels)
        return [one._replace(label=names.get(one.label, one.label)) for one in answer]
    if recipe.offset_unit is not None:
        place = positions(text, recipe.offset_unit)
        return [one._replace(start=place[one.start], end=place[one.end]) for one in answer]
    if task == "reranking" and recipe.activation == "sigmoid":
        scores = sigmoid(np.array([one.score for one in answer], np.float32)).tolist()
        return [one._replace(score=score) for one, score in zip(answer, scores, strict=True)]
    return answer


def positions(text: str, unit: str) -> list[int]:
    """Return the position of each code point of a text, and of its end, in another unit: utf16 or byte."""
    encoding, size = ("utf-16-le", 2) if unit == "utf16" else ("utf-8", 1)
    sizes = [len(letter.encode(encoding, "surrogatepass")) // size for letter in text]
    return [0, *np.cumsum(sizes, dtype=int).tolist()]

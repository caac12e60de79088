"""The ways in which servers make an answer from a text, and tasks that an engine computes in one of these ways."""

import copy
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from quartet.comparison.sides import Item, Task
from service.core import encode
from service.core.decode import LabelScore, sigmoid
from service.core.encode import Cut, Encoder
from service.engines.engine import Engine, Reply
from service.engines.task_plan import TaskPlan
from service.scheduling.entries import Heads
from service.tasks.classification import Classification
from service.tasks.embedding import Embedding
from service.tasks.entity_recognition import EntityRecognition
from service.tasks.question_answering import QuestionAnswering
from service.tasks.reranking import Reranking, make_ranking, rank, select_ranking_head
from service.tasks.sparse_embedding import SparseEmbedding


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

    def one_with_each(self, *texts: Any, **options: Any) -> list[Cut]:
        return [self._filled(cut) for cut in super().one_with_each(*texts, **options)]

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


class RecipeTask:
    """A task on one item, made as a recipe says.

    encoders: known encoders by the bundle's own and the recipe, which take time to make
    """

    def __init__(
        self, task: Task, item: Item, recipe: Recipe, encoders: dict[Any, Encoder]
    ) -> None:
        self._task, self._item, self._recipe, self._encoders = task, item, recipe, encoders
        self._ranking: Any = None

    def plan(self, engine: Engine, heads: Heads) -> TaskPlan[Any, Any]:
        self.engine = copy.copy(engine)
        if self._recipe != SERVED:
            key = (engine.id, self._recipe)
            if key not in self._encoders:
                self._encoders[key] = RecipeEncoder(engine.encoder, self._recipe)
            self.engine.encoder = self._encoders[key]
        task = self._make(heads)
        if self._task == "reranking":
            name = heads[0] if heads else select_ranking_head(engine)
            self._ranking = task = make_ranking(self.engine, name, task)
            heads = (name,) if name else ()
        plan: TaskPlan[Any, Any] = task.plan(self.engine, heads)
        return plan

    def _make(self, heads: Heads) -> Any:
        recipe, (text, *more) = self._recipe, self._item
        # Windows, of which the recipe's encoder makes only one, get all tokens of a text.
        cut: Any = "window" if recipe.truncation == "left" else True
        if self._task in ("entities", "answers", "reranking") and not recipe.max_length:
            cut = "window"
        match self._task:
            case "embeddings":
                prompt = recipe.prompt
                if prompt is None:
                    _, head = self.engine.select_head("embedding", heads)
                    prompt = head.default_prompt_text
                together = [prompt + text]
                return Embedding(
                    inputs=together, prompt="", normalize=recipe.normalize, truncate=cut
                )
            case "labels":
                function: Any = recipe.activation
                return Classification(inputs=[text], function_to_apply=function, truncate=cut)
            case "entities":
                strategy: Any = recipe.aggregation or "first"
                return EntityRecognition(inputs=[text], aggregation_strategy=strategy, truncate=cut)
            case "answers":
                return QuestionAnswering(questions=[text], contexts=more, truncate=cut)
            case "reranking":
                raw = recipe.activation is not None
                return Reranking(query=text, documents=more, raw_scores=raw, truncate=cut)
            case "sparse":
                return SparseEmbedding(inputs=[text], truncate=cut)

    def read(self, reply: Reply[Any]) -> Any:
        """Return the answer in a reply, as `Side.answer` does."""
        if self._ranking is not None:
            scores = self._ranking.scores(self.engine, reply)
            if self._recipe.activation == "sigmoid":
                scores = sigmoid(np.array(scores, np.float32)).tolist()
            ranked = rank(scores)
            return [LabelScore(str(one.position), one.score) for one in ranked]
        return convert(reply.results[0], self._item[-1], self._recipe)


def convert(answer: Any, text: str, recipe: Recipe) -> Any:
    """Return an answer with the dimensions, labels and offsets of a recipe. text: that spans are of"""
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
    return answer


def positions(text: str, unit: str) -> list[int]:
    """Return the position of each code point of a text, and of its end, in another unit: utf16 or byte."""
    encoding, size = ("utf-16-le", 2) if unit == "utf16" else ("utf-8", 1)
    sizes = [len(letter.encode(encoding, "surrogatepass")) // size for letter in text]
    return [0, *np.cumsum(sizes, dtype=int).tolist()]

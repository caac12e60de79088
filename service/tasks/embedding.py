"""Embedding: one vector for each text."""

from collections.abc import Sequence
from dataclasses import dataclass

from service.core import decode
from service.core.decode import Floats
from service.core.encode import Cut, Truncate
from service.engines.engine import Engine
from service.engines.task_plan import TaskPlan, characters, one_head
from service.errors import InvalidInput
from service.scheduling.entries import Heads


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedding:
    """One vector `[D]` for each text.

    normalize: whether vectors have length 1; None for the default of the head
    dimensions: the number of first dimensions that are kept, None for all
    stride: tokens that neighboring windows share; None for the default
    """

    texts: Sequence[str]
    normalize: bool | None = None
    dimensions: int | None = None
    truncate: Truncate = True
    stride: int | None = None

    def plan(self, engine: Engine, heads: Heads) -> TaskPlan[Cut, Floats]:
        name, head = engine.select_head("embedding", heads)
        stride = engine.check_stride(self.stride)
        if self.dimensions and head.dimensions and self.dimensions > head.dimensions:
            reason = f"{name} has {head.dimensions} dimensions, {self.dimensions} were asked for"
            raise InvalidInput(reason, param="dimensions")

        def encode(part: slice) -> Sequence[Cut]:
            return engine.encoder.windows(self.texts[part], truncate=self.truncate, stride=stride)

        def vector(_: int, item: Cut, outputs: list[Floats]) -> Floats:
            return decode.embed(
                outputs,
                item.lengths,
                normalize=head.normalize if self.normalize is None else self.normalize,
                dimensions=self.dimensions,
            )

        return TaskPlan((name,), characters(self.texts), encode, one_head(name, vector))

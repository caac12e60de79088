"""Similarity: the cosines of one text's vector with the vectors of other texts."""

from typing import ClassVar

from pydantic import Field

from service.core import decode
from service.core.decode import Floats
from service.core.encode import Cut
from service.core.manifest import InputType
from service.engines.engine import Engine, Reply
from service.engines.task_plan import TaskPlan
from service.scheduling.entries import Heads
from service.tasks.embedding import Embedding
from service.tasks.fields import Inputs, TruncateField, Windowed
from service.tasks.source_texts import scores_of_texts, with_source


class Similarity(Inputs, Windowed):
    """The vector of each text and, last, of the text that they are compared with. See `scores`.

    truncate: of the texts; the source is cut if it is too long
    stride: tokens that neighboring windows share; None for the default
    source_type, texts_type: input types, which select prompts, and heads where there is one for each type
    """

    source_type: ClassVar[InputType | None] = None
    texts_type: ClassVar[InputType | None] = None

    source: str = Field(description="the text that each input is compared with")
    truncate: TruncateField = Field(
        True, description="cut a long text (true), refuse it (false), or pool its windows"
    )

    def plan(self, engine: Engine, heads: Heads) -> TaskPlan[Cut, Floats]:
        texts = Embedding(
            inputs=self.inputs,
            normalize=False,
            truncate=self.truncate,
            stride=self.stride,
            input_type=self.texts_type,
        ).plan(engine, _for_type(engine, heads, self.texts_type))
        source = Embedding(inputs=[self.source], normalize=False, input_type=self.source_type).plan(
            engine, _for_type(engine, heads, self.source_type)
        )
        return with_source(texts, source)

    def scores(self, engine: Engine, reply: Reply[Floats]) -> list[float | None]:
        """Return the cosine of each text's vector with the source's; None for a text that failed."""
        return scores_of_texts(reply, decode.cosines)


class VectorRanking(Similarity):
    """The similarity of documents with a query."""

    source_type = "query"
    texts_type = "document"


def _for_type(engine: Engine, heads: Heads, input_type: InputType | None) -> Heads:
    """Return the wanted heads, or none where the wanted head is for the other input type."""
    own = [
        engine.manifest.heads[name].input_type for name in heads if name in engine.manifest.heads
    ]
    is_other = input_type is not None and any(own) and input_type not in own
    return () if is_other else heads

"""Sparse embedding: a weight for each of a few tokens of the vocabulary, and documents ranked by them."""

from collections.abc import Sequence

from pydantic import Field

from service.core import decode
from service.core.decode import Floats, SparseVector
from service.core.encode import Cut
from service.engines.engine import Engine, Reply
from service.engines.task_plan import SCORED_BYTES, TaskPlan, characters, one_head
from service.scheduling.entries import Heads
from service.tasks.fields import (
    AtLeastOne,
    Documents,
    Inputs,
    TruncateField,
    Windowed,
    check_logits,
)
from service.tasks.source_texts import scores_of_texts, with_source

INLINE_WEIGHTS = 2**18  # of the vocabulary for all texts, which the event loop decodes
# Of {"index":250002,"value":1.4012984643248171e-45} with its comma, the longest form in our APIs.
WEIGHT_BYTES = 48


class SparseEmbedding(Inputs, Windowed):
    """The weights of each text's tokens, the largest over all its windows."""

    top_k: AtLeastOne | None = Field(
        None, description="the number of largest weights to return; all above 0 when absent"
    )
    truncate: TruncateField = Field(
        True, description="cut a long text (true), refuse it (false), or read it in windows"
    )

    def plan(self, engine: Engine, heads: Heads) -> TaskPlan[Cut, SparseVector]:
        name, head = engine.select_head("sparse-embedding", heads)
        sparse = head.sparse
        assert sparse is not None, "our bug: the head is for another task"
        size, skip = head.vocabulary_size or 0, sparse.skip_token_ids
        stride = engine.check_stride(self.stride)
        if sparse.source == "vocabulary":
            check_logits(len(self.inputs), "texts", size)

        def encode(part: slice) -> Sequence[Cut]:
            return engine.encoder.windows(self.inputs[part], truncate=self.truncate, stride=stride)

        def weigh(_: int, item: Cut, outputs: list[Floats]) -> SparseVector:
            if sparse.source == "tokens":
                ids = [window.input_ids for window in item.windows]
                outputs = decode.spread_token_weights(outputs, ids, size)
            return decode.sparse_vector(
                outputs, activation=sparse.activation, skip=skip, top_k=self.top_k
            )

        return TaskPlan(
            (name,),
            characters(self.inputs),
            encode,
            one_head(name, weigh),
            lambda *_: SCORED_BYTES,
            result_bytes=lambda found: WEIGHT_BYTES * len(found.indices),
            decodes_inline=len(self.inputs) * size <= INLINE_WEIGHTS,
        )


class SparseRanking(Documents):
    """The weights of each document's tokens and, last, of the query's. See `scores`."""

    def plan(self, engine: Engine, heads: Heads) -> TaskPlan[Cut, SparseVector]:
        documents = SparseEmbedding(
            inputs=self.documents, truncate=self.truncate, stride=self.stride
        ).plan(engine, heads)
        query = SparseEmbedding(inputs=[self.query]).plan(engine, heads)
        return with_source(documents, query)

    def scores(self, engine: Engine, reply: Reply[SparseVector]) -> list[float | None]:
        """Return the dot product of each document's weights with the query's; None for one that failed."""
        return scores_of_texts(reply, decode.sparse_products)

"""Late interaction: one vector for each token of a text, and documents ranked by them (MaxSim)."""

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from service.core import decode
from service.core.decode import Floats
from service.core.encode import Cut, expand
from service.core.manifest import Head, LateInteraction
from service.engines.engine import Engine, Reply
from service.engines.task_plan import NUMBER_BYTES, TaskPlan, characters, one_head
from service.errors import InvalidInput
from service.scheduling.entries import Heads
from service.tasks.fields import Documents, Inputs, TruncateField, Windowed
from service.tasks.source_texts import scores_of_texts, with_source


class TokenEmbedding(Inputs, Windowed):
    """The vectors `[n, D]` of each text's tokens, in all its windows, one window after the other.

    A query may be expanded, and has no windows. A document may lose tokens. Each has its prefix and its length.
    """

    input_type: Literal["query", "document"] = Field(
        "document", description="how the text is read: the prefix, the length and the tokens"
    )
    truncate: TruncateField = Field(
        True,
        description="cut a long text (true), refuse it (false), or read a long document in windows",
    )

    def plan(self, engine: Engine, heads: Heads) -> TaskPlan[Cut, Floats]:
        name, head = engine.select_head("late-interaction", heads)
        late = settings_of(head)
        stride = engine.check_stride(self.stride)
        is_query = self.input_type == "query"
        if is_query and self.truncate == "window":
            raise InvalidInput("queries have no windows: send true or false", param="truncate")

        def encode(part: slice) -> Sequence[Cut]:
            found = engine.encoder.prefixed(
                self.inputs[part],
                prefix=late.query_prefix if is_query else late.document_prefix,
                length=late.query_length if is_query else late.document_length,
                truncate=self.truncate,
                stride=stride,
            )
            return [expanded(cut, late) for cut in found] if is_query else found

        def vectors(_: int, item: Cut, outputs: list[Floats]) -> Floats:
            ids = [window.input_ids for window in item.windows]
            skip = late.query_skip_token_ids if is_query else late.skip_token_ids
            return decode.token_vectors(outputs, ids, normalize=head.normalize, skip=skip)

        row = NUMBER_BYTES * (head.dimensions or 0) + len("[],")
        sizes = characters(self.inputs)
        return TaskPlan(
            (name,), sizes, encode, one_head(name, vectors), lambda _, item: row * item.tokens
        )


class LateInteractionRanking(Documents):
    """The vectors of each document's tokens and, last, of the query's. See `scores`."""

    def plan(self, engine: Engine, heads: Heads) -> TaskPlan[Cut, Floats]:
        documents = TokenEmbedding(
            inputs=self.documents, truncate=self.truncate, stride=self.stride
        ).plan(engine, heads)
        query = TokenEmbedding(inputs=[self.query], input_type="query").plan(engine, heads)
        return with_source(documents, query)

    def scores(self, engine: Engine, reply: Reply[Floats]) -> list[float | None]:
        """Return the score of each document by the query's similarity; None for one that failed."""
        (name,) = reply.heads
        mean = settings_of(engine.manifest.heads[name]).similarity == "meanmaxsim"
        return scores_of_texts(reply, lambda query, all: decode.maxsim(query, all, mean=mean))


def settings_of(head: Head) -> LateInteraction:
    """Return the settings that every head of late interaction has."""
    assert head.late_interaction is not None, "our bug: the head is for another task"
    return head.late_interaction


def expanded(cut: Cut, late: LateInteraction) -> Cut:
    """Return a query with the tokens that fill it up, if the head expands queries."""
    if late.query_expansion is None or late.expansion_token_id is None:
        return cut
    windows = (
        expand(
            window, late.query_expansion, late.expansion_token_id, attended=late.attend_to_expansion
        )
        for window in cut.windows
    )
    return Cut(tuple(windows), cut.truncated)

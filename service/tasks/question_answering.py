"""Extractive question answering: the spans of contexts that answer questions."""

from collections.abc import Sequence
from dataclasses import dataclass

from service.core import decode
from service.core.decode import AnswerSpan, Floats, OffsetUnit
from service.core.encode import Encoded, Truncate
from service.engines.engine import Engine
from service.engines.task_plan import TaskPlan, characters, one_head
from service.scheduling.entries import Heads


@dataclass(frozen=True, slots=True, kw_only=True)
class QuestionAnswering:
    """The spans of each context that answer its question, by falling score.

    handle_impossible_answer: whether the null answer competes
    offset_unit: of the positions
    stride: tokens that neighboring windows share; None for the default
    max_answer_tokens, max_query_tokens: the longest answer, and the part of a question that is read; None for the
        head's own
    """

    questions: Sequence[str]
    contexts: Sequence[str]
    top_k: int = 1
    handle_impossible_answer: bool = False
    offset_unit: OffsetUnit = "code_point"
    truncate: Truncate = "window"
    stride: int | None = None
    max_answer_tokens: int | None = None
    max_query_tokens: int | None = None

    def plan(self, engine: Engine, heads: Heads) -> TaskPlan[Encoded, list[AnswerSpan]]:
        name, head = engine.select_head("qa", heads)
        stride = engine.check_stride(self.stride)

        def encode(part: slice) -> Sequence[Encoded]:
            return engine.encoder.questions(
                self.questions[part],
                self.contexts[part],
                truncate=self.truncate,
                stride=stride,
                max_query_tokens=self.max_query_tokens or head.max_query_tokens,
            )

        def answers(index: int, item: Encoded, outputs: list[Floats]) -> list[AnswerSpan]:
            context = self.contexts[index]
            found = decode.qa(
                item.windows,
                outputs,
                context,
                top_k=self.top_k,
                handle_impossible_answer=self.handle_impossible_answer,
                null_threshold=head.null_threshold,
                max_answer_tokens=self.max_answer_tokens or head.max_answer_tokens,
            )
            return decode.to_utf16(found, context) if self.offset_unit == "utf16" else found

        sizes = characters(self.questions, self.contexts)
        return TaskPlan((name,), sizes, encode, one_head(name, answers))

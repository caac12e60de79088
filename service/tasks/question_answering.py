"""Extractive question answering: the spans of contexts that answer questions."""

from collections.abc import Sequence

from pydantic import Field

from service.core import decode
from service.core.decode import AnswerSpan, Floats
from service.core.encode import Encoded
from service.engines.engine import Engine
from service.engines.task_plan import CHARACTER_BYTES, SCORED_BYTES, TaskPlan, characters, one_head
from service.scheduling.entries import Heads
from service.tasks.fields import Positions, TruncateField, UpToHundred, Windowed


class QaOptions(Windowed, Positions):
    """The options of questions that the native API has."""

    top_k: UpToHundred = Field(1, description="answers to return for each question")
    handle_impossible_answer: bool = Field(
        False, description='may answer "" (start 0, end 0) when the context holds no answer'
    )
    truncate: TruncateField = Field(
        "window", description="read a long context in windows, cut it (true) or refuse it (false)"
    )


class QuestionAnswering(QaOptions):
    """The spans of each context that answer its question, by falling score.

    max_answer_tokens, max_query_tokens: the longest answer, and the part of a question that is read; None for the
        head's own
    """

    questions: Sequence[str]
    contexts: Sequence[str]
    max_answer_tokens: int | None = None
    max_query_tokens: int | None = None

    def plan(self, engine: Engine, heads: Heads) -> TaskPlan[Encoded, list[AnswerSpan]]:
        name, head = engine.select_head("qa", heads)
        stride = engine.check_stride(self.stride)
        most_tokens = self.max_answer_tokens or head.max_answer_tokens

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
                max_answer_tokens=most_tokens,
            )
            return decode.to_utf16(found, context) if self.offset_unit == "utf16" else found

        def answer_bytes(_: int, item: Encoded) -> int:
            longest = decode.longest_answer(item.windows, most_tokens)
            return self.top_k * (CHARACTER_BYTES * longest + SCORED_BYTES)

        sizes = characters(self.questions, self.contexts)
        return TaskPlan((name,), sizes, encode, one_head(name, answers), answer_bytes)

"""Embedding: one vector for each text."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Self

from pydantic import Field, model_validator

from service.core import decode
from service.core.decode import Floats, Vector
from service.core.encode import Cut
from service.core.manifest import Head, InputType, OutputDtype, Ranges
from service.engines.engine import Engine
from service.engines.task_plan import (
    NUMBER_BYTES,
    SCORED_BYTES,
    TaskPlan,
    one_head,
    sum_of_answers,
    together,
)
from service.errors import InvalidInput
from service.scheduling.entries import Heads, Outputs
from service.tasks.fields import AtLeastOne, Inputs, ServedName, TruncateField, Windowed

LONGEST_PROMPT = (
    2048  # largest number of characters of a prompt, which is repeated before each input
)
NAMED = 32  # largest number of prompts or dimensions that a message lists


class Embedding(Inputs, Windowed):
    """One vector `[D]` for each text."""

    normalize: bool | None = Field(
        None, description="scale vectors to length 1; as the head says when absent"
    )
    dimensions: AtLeastOne | None = Field(
        None, description="keep only the first dimensions; all of them when absent"
    )
    truncate: TruncateField = Field(
        True, description="cut a long text (true), refuse it (false), or pool its windows"
    )
    prompt_name: ServedName | None = Field(
        None, description="the head's prompt before each text; its default prompt when absent"
    )
    prompt: Annotated[str, Field(max_length=LONGEST_PROMPT)] | None = Field(
        None, description="the text before each text, instead of a prompt of the head"
    )
    input_type: InputType | None = Field(
        None, description="what the texts are: selects the prompt, and the head where there are two"
    )
    output_dtype: OutputDtype = Field(
        "float",
        description="the type of the numbers; binary and ubinary have a bit for each dimension",
    )

    @model_validator(mode="after")
    def _one_prompt(self) -> Self:
        if self.prompt is not None and self.prompt_name is not None:
            raise InvalidInput("send prompt or prompt_name, not both", param="prompt")
        return self

    def plan(self, engine: Engine, heads: Heads) -> TaskPlan[Cut, Vector]:
        name, head = self._select_head(engine, heads)
        stride = engine.check_stride(self.stride)
        prompt = self._prompt(name, head)
        if prompt and self.truncate == "window":
            engine.check_prompt(prompt, "prompt" if self.prompt else "truncate")
        self._check_dimensions(name, head)
        normalize = head.normalize if self.normalize is None else self.normalize
        ranges = self._ranges(name, head, normalize)

        def encode(part: slice) -> Sequence[Cut]:
            return engine.encoder.windows(
                self.inputs[part], truncate=self.truncate, stride=stride, prompt=prompt
            )

        def vector(_: int, item: Cut, outputs: list[Floats]) -> Vector:
            embedded = decode.embed(
                outputs, item.lengths, normalize=normalize, dimensions=self.dimensions
            )
            return decode.quantize(embedded, self.output_dtype, ranges)

        def rows(outputs: Outputs) -> Sequence[Vector]:
            vectors = decode.embed_rows(
                outputs[name], normalize=normalize, dimensions=self.dimensions
            )
            return [decode.quantize(vector, self.output_dtype, ranges) for vector in vectors]

        sizes = [len(prompt) + len(text) for text in self.inputs]
        largest = NUMBER_BYTES * (self.dimensions or head.dimensions or 0) + SCORED_BYTES
        one = one_head(name, vector)
        return TaskPlan((name,), sizes, encode, one, lambda *_: largest, decode_rows=rows)

    def _select_head(self, engine: Engine, heads: Heads) -> tuple[str, Head]:
        """Return the requested head, or the first one that is for the input type. Raises UnknownHead, InvalidInput."""
        if self.input_type is not None and not heads:
            for name, head in engine.manifest.heads.items():
                if head.input_type == self.input_type:
                    return name, head
        name, head = engine.select_head("embedding", heads)
        if self.input_type is not None and head.input_type not in (None, self.input_type):
            reason = (
                f"head {name} is for {head.input_type}, not for {self.input_type}: leave out head"
            )
            raise InvalidInput(reason, param="input_type")
        return name, head

    def _prompt(self, name: str, head: Head) -> str:
        """Return the text before each input, as sentence-transformers' `encode`, `encode_query` or `encode_document`.

        Raises InvalidInput for an unknown prompt name.
        """
        if self.prompt is not None:
            if self.prompt and not head.include_prompt:
                reason = f"{name} excludes prompts from its pooling, which is not supported"
                raise InvalidInput(f"{reason}: leave out prompt", param="prompt")
            return self.prompt
        chosen = self.prompt_name or self.input_type
        if self.prompt_name is None and chosen is None:
            return head.default_prompt_text
        prompts = head.named_prompts
        if self.prompt_name is not None and self.prompt_name not in prompts:
            reason = f"{name} has no prompt {self.prompt_name!r}, only {_listed([*prompts])}"
            raise InvalidInput(reason, param="prompt_name")
        return prompts[chosen or ""]

    def _check_dimensions(self, name: str, head: Head) -> None:
        """Raise InvalidInput for more dimensions than the head has, and for a number that it was not trained for."""
        wanted, has, trained = self.dimensions, head.dimensions or 0, head.matryoshka_dimensions
        if not wanted:
            return
        if wanted > has:
            reason = f"{name} has {has} dimensions, {wanted} were asked for"
            raise InvalidInput(reason, param="dimensions")
        if trained and wanted not in (*trained, has):
            known = _listed(sorted({*trained, has}))
            reason = f"{name} was not trained for {wanted} dimensions, only for {known}"
            raise InvalidInput(reason, param="dimensions")

    def _ranges(self, name: str, head: Head, normalize: bool) -> Ranges | None:
        """Return the ranges of int8 and uint8. Raises InvalidInput where the head has none for this request."""
        if self.output_dtype not in ("int8", "uint8"):
            return None
        known, wanted = head.quantization_ranges, self.dimensions or head.dimensions or 0
        if not known:
            reason = f"{name} has no quantization ranges for {self.output_dtype}: export with --calibrate"
            raise InvalidInput(reason, param="output_dtype")
        if wanted not in known:
            reason = f"{name} has quantization ranges for {_listed(sorted(known))} dimensions, not for {wanted}"
            raise InvalidInput(reason, param="dimensions")
        if normalize != head.normalize:
            reason = (
                f"{name} has quantization ranges for normalize {str(head.normalize).lower()} only"
            )
            raise InvalidInput(reason, param="normalize")
        return known[wanted]


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingByType:
    """The vector of each text in several types of numbers, by type, from one pass of the encoder."""

    embedding: Embedding
    output_dtypes: Sequence[OutputDtype]

    def plan(self, engine: Engine, heads: Heads) -> TaskPlan[Cut, dict[OutputDtype, Vector]]:
        plans = {
            dtype: self.embedding.model_copy(update={"output_dtype": dtype}).plan(engine, heads)
            for dtype in self.output_dtypes
        }
        both = [*plans.values(), *plans.values()]  # numbers, and their base64
        return replace(together(plans), answer_bytes=sum_of_answers(both))


def _listed(names: Sequence[object]) -> str:
    shown = [str(name) for name in names[:NAMED]]
    return ", ".join(shown + ["..."] * (len(names) > NAMED))

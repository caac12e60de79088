"""Embedding: one vector for each text."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from service.core import decode
from service.core.bundle import Head, InputType, OutputDtype, Ranges
from service.core.decode import Floats, Vector
from service.core.encode import Cut, Truncate
from service.engines.engine import Engine
from service.engines.task_plan import TaskPlan, one_head
from service.errors import InvalidInput
from service.scheduling.entries import Heads, Outputs

NAMED = 32  # largest number of prompts or dimensions that a message lists


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedding:
    """One vector `[D]` for each text.

    normalize: whether vectors have length 1; None for the default of the head
    dimensions: the number of first dimensions that are kept, None for all
    stride: tokens that neighboring windows share; None for the default
    prompt_name: the name of the head's prompt that stands before each text
    prompt: the text before each text, instead of a prompt of the head; "" for none
    input_type: whether the texts are queries or documents; selects a head for them, and its prompt
    output_dtype: the type of the numbers; see `decode.quantize`
    """

    texts: Sequence[str]
    normalize: bool | None = None
    dimensions: int | None = None
    truncate: Truncate = True
    stride: int | None = None
    prompt_name: str | None = None
    prompt: str | None = None
    input_type: InputType | None = None
    output_dtype: OutputDtype = "float"

    def plan(self, engine: Engine, heads: Heads) -> TaskPlan[Cut, Vector]:
        name, head = self._select_head(engine, heads)
        stride = engine.check_stride(self.stride)
        prompt = self._prompt(name, head)
        self._check_prompt(engine, prompt)
        self._check_dimensions(name, head)
        normalize = head.normalize if self.normalize is None else self.normalize
        ranges = self._ranges(name, head, normalize)

        def encode(part: slice) -> Sequence[Cut]:
            return engine.encoder.windows(
                self.texts[part], truncate=self.truncate, stride=stride, prompt=prompt
            )

        def vector(_: int, item: Cut, outputs: list[Floats]) -> Vector:
            embedded = decode.embed(
                outputs, item.lengths, normalize=normalize, dimensions=self.dimensions
            )
            return decode.quantize(embedded, self.output_dtype, ranges)

        sizes = [len(prompt) + len(text) for text in self.texts]
        return TaskPlan((name,), sizes, encode, one_head(name, vector))

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

        Raises InvalidInput for an unknown prompt name, and for two prompts.
        """
        if self.prompt is not None and self.prompt_name is not None:
            raise InvalidInput("prompt and prompt_name exclude each other", param="prompt")
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

    def _check_prompt(self, engine: Engine, prompt: str) -> None:
        """Raise InvalidInput for a prompt that is too long for each window of a long text."""
        if not prompt or self.truncate != "window":
            return
        tokens, most = engine.encoder.count_tokens(prompt), engine.encoder.longest_prompt
        if tokens > most:
            reason = f'the prompt has {tokens} tokens; with truncate "window" it may have {most}'
            raise InvalidInput(reason, param="prompt" if self.prompt else "truncate")

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
            dtype: replace(self.embedding, output_dtype=dtype).plan(engine, heads)
            for dtype in self.output_dtypes
        }
        first = next(iter(plans.values()))

        def by_type(index: int, item: Cut, outputs: list[Outputs]) -> dict[OutputDtype, Vector]:
            return {dtype: plan.decode(index, item, outputs) for dtype, plan in plans.items()}

        return TaskPlan(first.heads, first.sizes, first.encode, by_type)


def _listed(names: Sequence[object]) -> str:
    shown = [str(name) for name in names[:NAMED]]
    return ", ".join(shown + ["..."] * (len(names) > NAMED))

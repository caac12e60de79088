"""Mask filling: the tokens that fit best in place of each mask token of texts."""

from collections.abc import Sequence

from pydantic import Field

from service.core import decode
from service.core.decode import Floats, MaskedText, TokenScore
from service.core.encode import TextError
from service.core.packing import MOST_MASKS
from service.engines.engine import Engine
from service.engines.task_plan import TaskPlan, characters, one_head
from service.errors import InvalidInput, TooLarge
from service.scheduling.entries import Heads
from service.tasks.fields import Inputs, Texts, TruncateField, UpToHundred, Windowed

MASK_TOKENS = ("[MASK]", "<mask>")  # of the families of encoders, to explain a wrong one
MOST_LOGITS = 2**25  # of a request; 128 MiB until they are decoded


class MaskFilling(Inputs, Windowed):
    """For each mask token of each text, the tokens to put there, by falling probability.

    A target is spelled as in the vocabulary, or as text that is one token.
    """

    top_k: UpToHundred = Field(5, description="tokens to return for each mask token")
    targets: Texts | None = Field(
        None, description="the only tokens to consider; the whole vocabulary when absent"
    )
    truncate: TruncateField = Field(
        "window", description="read a long text in windows, cut it (true) or refuse it (false)"
    )

    def plan(self, engine: Engine, heads: Heads) -> TaskPlan[MaskedText, list[list[TokenScore]]]:
        name, head = engine.select_head("fill-mask", heads)
        number, rows = head.mask_token_id or 0, head.vocabulary_size or 0
        stride, tokenizer = engine.check_stride(self.stride), engine.encoder.tokenizer
        mask = tokenizer.id_to_token(number) or ""
        masks, most = sum([text.count(mask) for text in self.inputs]), MOST_LOGITS // rows
        if masks > most:
            raise TooLarge(f"{masks} mask tokens; a request may have {most}", param="inputs")
        targets = None if self.targets is None else target_ids(engine, self.targets)

        def encode(part: slice) -> Sequence[MaskedText]:
            texts = self.inputs[part]
            encoded = engine.encoder.texts(texts, truncate=self.truncate, stride=stride)
            found = [decode.find_masks(item, number) for item in encoded]
            reasons = [_refusal(text, mask, item) for text, item in zip(texts, found, strict=True)]
            if reason := next(filter(None, reasons), ""):
                raise TextError([i for i, each in enumerate(reasons) if each == reason], reason)
            return found

        def fill(_: int, item: MaskedText, outputs: list[Floats]) -> list[list[TokenScore]]:
            filled = decode.fill_mask(item, outputs, top_k=self.top_k, targets=targets)
            # Several mask tokens stay in the text, with the special tokens, as in transformers' pipeline.
            single = len(item.places) == 1
            written = [
                [*item.ids[:place], token, *item.ids[place + 1 :]]
                for place, best in zip(item.places, filled, strict=True)
                for token, _ in best
            ]
            alone = [[token] for best in filled for token, _ in best]
            sequences = iter(tokenizer.decode_batch(written, skip_special_tokens=single))
            tokens = iter(tokenizer.decode_batch(alone, skip_special_tokens=False))
            return [
                [TokenScore(token, next(tokens), score, next(sequences)) for token, score in best]
                for best in filled
            ]

        sizes = characters(self.inputs)
        return TaskPlan((name,), sizes, encode, one_head(name, fill), decodes_inline=False)


def target_ids(engine: Engine, targets: Sequence[str]) -> list[int]:
    """Return the token id of each target, each once. Raises InvalidInput for a target that is not one token."""
    tokenizer = engine.encoder.tokenizer
    unknown = getattr(tokenizer.model, "unk_token", None)
    found: dict[int, None] = {}
    for index, target in enumerate(targets):
        number = tokenizer.token_to_id(target)
        if number is None:
            tokens = tokenizer.encode(target, add_special_tokens=False)
            if len(tokens) != 1 or tokens.tokens[0] == unknown:
                pieces = " ".join(map(repr, tokens.tokens[:8])) or "none"
                reason = f"{target[:64]!r} is not one token of {engine.id}; its tokens: {pieces}"
                raise InvalidInput(f"targets[{index}]: {reason}", param=f"targets[{index}]")
            number = tokens.ids[0]
        found[number] = None
    return [*found]


def _refusal(text: str, mask: str, item: MaskedText) -> str:
    """Return why a text cannot be filled in, or an empty string. mask: the spelling of the mask token"""
    if len(item.places) > MOST_MASKS:
        return f"more than {MOST_MASKS} mask tokens"
    if item.places:
        return ""
    if item.truncated and mask in text:
        return f'every {mask} is in the part that was cut: set truncate to "window" or shorten it'
    if other := next((other for other in MASK_TOKENS if other in text and other != mask), ""):
        return f"{other} is the mask token of other models: write {mask}"
    return f"no mask token: write {mask} in place of the token to fill in"

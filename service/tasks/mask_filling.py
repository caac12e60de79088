"""Mask filling: the tokens that fit best in place of each mask token of texts."""

from collections.abc import Sequence

import orjson
from pydantic import Field

from service.core import decode
from service.core.decode import Floats, MaskedText, TokenScore
from service.core.encode import TextError
from service.core.packing import MOST_MASKS
from service.engines.engine import Engine
from service.engines.task_plan import Shared, TaskPlan, characters, one_head
from service.errors import InvalidInput
from service.scheduling.entries import Heads
from service.tasks.fields import Inputs, Texts, TruncateField, UpToHundred, Windowed, check_logits

MASK_TOKENS = ("[MASK]", "<mask>")  # of the families of encoders, to explain a wrong one
PART_TOKENS = 2**16  # decoded at once
MOST_TOKEN_BYTES = 1024  # of a result, without the text around its token


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
        check_logits(sum([text.count(mask) for text in self.inputs]), "mask tokens", rows)
        wanted = self.targets
        targets = Shared(
            "targets[{}]",
            characters(wanted or ()),
            lambda part: target_ids(engine, (wanted or ())[part], part.start),
        )

        def encode(part: slice) -> Sequence[MaskedText]:
            texts = self.inputs[part]
            encoded = engine.encoder.texts(texts, truncate=self.truncate, stride=stride)
            found = [decode.find_masks(item, number) for item in encoded]
            reasons = [_refusal(text, mask, item) for text, item in zip(texts, found, strict=True)]
            if reason := next(filter(None, reasons), ""):
                raise TextError([i for i, each in enumerate(reasons) if each == reason], reason)
            return found

        def fill(_: int, item: MaskedText, outputs: list[Floats]) -> list[list[TokenScore]]:
            ids = None if wanted is None else [*dict.fromkeys(targets.items)]
            filled = decode.fill_mask(item, outputs, top_k=self.top_k, targets=ids)
            # Several mask tokens stay in the text, with the special tokens, as in transformers' pipeline.
            single = len(item.places) == 1
            results = []
            for place, best in zip(item.places, filled, strict=True):
                before, after = item.ids[:place], item.ids[place + 1 :]
                count = max(1, PART_TOKENS // len(item.ids))
                sequences: list[str] = []
                for start in range(0, len(best), count):  # other threads run between two parts
                    part = best[start : start + count]
                    written = [[*before, token, *after] for token, _ in part]
                    sequences += tokenizer.decode_batch(written, skip_special_tokens=single)
                alone = [[token] for token, _ in best]
                tokens = tokenizer.decode_batch(alone, skip_special_tokens=False)
                found = zip(best, tokens, sequences, strict=True)
                results.append(
                    [TokenScore(token, text, score, whole) for (token, score), text, whole in found]
                )
            return results

        def answer_bytes(_: int, item: MaskedText) -> int:
            count = len(item.places) * min(self.top_k, len(wanted or ()) or self.top_k)
            single = len(item.places) == 1
            (text,) = tokenizer.decode_batch([item.ids], skip_special_tokens=single)
            return count * (len(orjson.dumps(text)) + MOST_TOKEN_BYTES)

        return TaskPlan(
            (name,),
            characters(self.inputs),
            encode,
            one_head(name, fill),
            answer_bytes,
            shared=targets,
            decodes_inline=False,
        )


def target_ids(engine: Engine, targets: Sequence[str], start: int = 0) -> list[int]:
    """Return the token id of each target. Raises InvalidInput for a target that is not one token.

    start: the index of the first target in the request
    """
    tokenizer = engine.encoder.tokenizer
    unknown = getattr(tokenizer.model, "unk_token", None)
    ids = {target: tokenizer.token_to_id(target) for target in targets}
    texts = [target for target, number in ids.items() if number is None]
    encodings = tokenizer.encode_batch(texts, add_special_tokens=False)
    for target, tokens in zip(texts, encodings, strict=True):
        if len(tokens) != 1 or tokens.tokens[0] == unknown:
            pieces = " ".join(map(repr, tokens.tokens[:8])) or "none"
            reason = f"{target[:64]!r} is not one token of {engine.id}; its tokens: {pieces}"
            place = f"targets[{start + targets.index(target)}]"
            raise InvalidInput(f"{place}: {reason}", param=place)
        ids[target] = tokens.ids[0]
    return [number for number in ids.values() if number is not None]


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

"""The routes of the tokenizer: texts to tokens, and back."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from service.api import openapi
from service.api.engine_call import Call, json_response, receive_call
from service.api.native_routes import make_router
from service.api.responses import DetokenizeResponse, TokenizeResponse
from service.api.schemas import DetokenizeRequest, TokenizeRequest
from service.core import decode
from service.core.decode import OffsetUnit
from service.core.encode import Encoded
from service.engines.engine import Engine
from service.engines.task_plan import CHARACTER_BYTES, SCORED_BYTES
from service.errors import InvalidInput

router = make_router()


@router.post("/tokenize", **openapi.tokens(TokenizeRequest, TokenizeResponse))
async def tokenize(request: Request) -> Response:
    """The tokens of each text, or of each pair of texts, with their positions."""
    call = await receive_call(request, TokenizeRequest)
    body, engine = call.body, call.engine
    pairs = body.text_pair or [""] * len(body.inputs)

    def show(found: Sequence[Encoded]) -> object:
        results = [
            {
                "tokens": token_list(engine, item, texts, body.offset_unit),
                "count": item.tokens,
                "truncated": item.truncated,
            }
            for item, texts in zip(found, zip(body.inputs, pairs, strict=True), strict=True)
        ]
        return {"model": engine.id, "max_length": engine.encoder.max_length, "results": results}

    return await answer_tokens(call, body.inputs, body.text_pair, show)


async def answer_tokens(
    call: Call[Any],
    texts: Sequence[str],
    pairs: Sequence[str] | None,
    show: Callable[[Sequence[Encoded]], object],
) -> Response:
    """Split texts, or pairs, into tokens, and return them in the form that `show` gives them."""
    found = await call.within_deadline(call.engine.tokenize(texts, pairs, call.ticket))
    size = sum(map(len, [*texts, *(pairs or ())]))
    tokens = sum(item.tokens for item in found)
    call.context.answer_bytes = CHARACTER_BYTES * size + SCORED_BYTES * tokens
    return json_response(lambda: show(found))


def token_list(
    engine: Engine, item: Encoded, texts: tuple[str, str], unit: OffsetUnit
) -> list[dict[str, object]]:
    """Return the tokens of one input. texts: the text and its pair"""
    units = [decode.utf16_positions(text) if unit == "utf16" else None for text in texts]
    found: list[dict[str, object]] = []
    for token, (start, end), sequence in columns_of(item):
        own = units[sequence] if sequence >= 0 else None
        found.append(
            {
                "id": token,
                "token": engine.encoder.tokenizer.id_to_token(token),
                "start": start if own is None else own[start],
                "end": end if own is None else own[end],
                "sequence": sequence if sequence >= 0 else None,
            }
        )
    return found


def columns_of(item: Encoded) -> Iterator[tuple[int, tuple[int, int], int]]:
    """Return the id of each token of an input, its offsets, and the index of its text: -1 for a special token."""
    (window,) = item.windows
    columns = (window.input_ids.tolist(), window.offsets.tolist(), window.sequence.tolist())
    return zip(*columns, strict=True)


@router.post("/detokenize", **openapi.tokens(DetokenizeRequest, DetokenizeResponse))
async def detokenize(request: Request) -> Response:
    """The text of each list of token ids."""
    call = await receive_call(request, DetokenizeRequest)
    texts = await join_tokens(call, call.body.ids, call.body.skip_special_tokens)
    return json_response({"model": call.engine.id, "results": texts})


async def join_tokens(
    call: Call[Any], sequences: list[list[int]], skip_special_tokens: bool
) -> list[str]:
    """Return the text of each list of token ids. Raises InvalidInput for an id that the vocabulary does not have."""
    engine = call.engine
    size = engine.encoder.tokenizer.get_vocab_size()
    for index, ids in enumerate(sequences):
        if (largest := max(ids, default=0)) >= size:
            raise InvalidInput(
                f"ids[{index}]: {largest} is no token of {engine.id}; its vocabulary has {size}",
                param=f"ids[{index}]",
            )
    work = engine.detokenize(sequences, skip_special_tokens, call.ticket)
    texts = await call.within_deadline(work)
    call.context.answer_bytes = CHARACTER_BYTES * sum(map(len, texts))
    return texts

"""Attention weights equal transformers'; other models and longer texts are refused with the reason."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
import torch
import transformers

from service.engines.engine import Engine
from service.errors import InvalidInput, UnknownHead
from service.tasks.attention import Attention
from service.tasks.classification import Classification
from tests.served import opened
from tests.service.fakes import ticket
from tests.tiny import save_masked
from tests.workers import BuiltOnce

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXTS = ["the ferry to the harbour was late", "she sold the boat"]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(masked_bundle: Path, tiny_bundle: Path) -> AsyncIterator[dict[str, Engine]]:
    """Engines of a model with attention and of one without."""
    async with opened(masked_bundle, tiny_bundle) as found:
        yield {name: found.get(name) for name in ("masked", "tiny")}


async def test_as_transformers(engines: dict[str, Engine], built_once: BuiltOnce) -> None:
    """Both layers have transformers' weights to 1e-5, in batches of their own next to other requests."""
    others = [engines["masked"].answer(Classification(inputs=TEXTS), ticket()) for _ in range(4)]
    asked = [Attention(inputs=TEXTS[:1], text_pair=TEXTS[1:], layer=layer) for layer in (1, None)]
    replies = [engines["masked"].answer(task, ticket()) for task in asked]
    *_, first, last = await asyncio.gather(*others, *replies)

    checkpoint = built_once("checkpoints/masked", save_masked)
    peer = transformers.BertModel.from_pretrained(checkpoint, attn_implementation="eager").eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoint)
    with torch.no_grad():
        expected = peer(**tokenizer(*TEXTS, return_tensors="pt"), output_attentions=True)
    for reply, weights in zip((first, last), expected.attentions, strict=True):
        (found,) = reply.results
        assert 1 == reply.timing.batch_size
        assert tokenizer(*TEXTS).tokens() == found.tokens
        torch.testing.assert_close(torch.tensor(found.weights), weights[0], atol=1e-5, rtol=0)


@pytest.mark.parametrize(
    ("model", "task", "error", "reason"),
    [
        ("tiny", Attention(inputs=TEXTS), UnknownHead, "export its checkpoint with --attention"),
        ("masked", Attention(inputs=TEXTS, layer=3), InvalidInput, "has 2 layers"),
        ("masked", Attention(inputs=["a", "a " * 63]), InvalidInput, r"inputs\[1\]: longer than 64"),
    ],
)  # fmt: skip
async def test_what_has_no_weights(engines, model, task, error, reason):
    """A model without the graph, a layer that it lacks and a longer text are refused with the reason."""
    with pytest.raises(error, match=reason):
        await engines[model].answer(task, ticket())

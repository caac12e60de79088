"""Mask tokens are filled in by the model's own logits, wherever they are in a text and whatever else is in a batch."""

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
from numpy.typing import NDArray

from service.core import bundle
from service.core.bundle import Bundle
from service.core.decode import TokenScore, softmax
from service.core.packing import MOST_MASKS, pack
from service.core.session import Session, SessionOptions, open_session
from service.engines import engine as engine_module
from service.engines.engine import Engine, Reply
from service.errors import InvalidInput, TooLarge
from service.tasks import fields, mask_filling
from service.tasks.classification import Classification
from service.tasks.entity_recognition import EntityRecognition
from service.tasks.mask_filling import MaskFilling
from tests import samples
from tests.served import engine_of
from tests.service.fakes import ticket

pytestmark = pytest.mark.asyncio(loop_scope="module")

ONE = "the ferry to the [MASK] was late"
TWO = "[MASK] sold the boat to a [MASK] in the harbour"
PLAIN = samples.text(9, seed=1)


@pytest.fixture(scope="module")
def opened(masked_bundle: Path) -> Bundle:
    return bundle.load(masked_bundle)


@pytest.fixture(scope="module")
def session(opened: Bundle) -> Session:
    """The graph that is served, without a batcher."""
    return open_session(opened, precision="fp32", provider="cpu", options=SessionOptions(1))


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["fp32", "int8"])
async def engine(request: pytest.FixtureRequest, masked_bundle: Path) -> AsyncIterator[Engine]:
    """An engine with a fill-mask head, a classifier and a tagger."""
    async with engine_of(masked_bundle, precision=request.param) as engine:
        yield engine


async def fill(engine: Engine, *texts: str, **options: Any) -> Reply[Any]:
    return await engine.answer(MaskFilling(inputs=[*texts], **options), ticket())


def numbers(results: Any) -> NDArray[np.float32]:
    """The scores of all tokens of all mask tokens."""
    return np.array([found.score for masks in results for tokens in masks for found in tokens])


def same(one: Any, other: Any) -> None:
    """The same tokens and texts, with the same scores but for rounding."""
    plain = [
        [[[found._replace(score=0) for found in tokens] for tokens in masks] for masks in results]
        for results in (one, other)
    ]
    assert plain[0] == plain[1]
    np.testing.assert_allclose(numbers(one), numbers(other), rtol=0, atol=1e-5)


# -- results --------------------------------------------------------------------------------------


async def test_best_tokens(engine, session):
    """Each mask token gets the tokens of highest probability in the whole vocabulary, best first."""
    tokenizer = engine.encoder.tokenizer
    reply = await fill(engine, ONE, TWO, top_k=4)
    if engine.runs_on.precision == "fp32":
        windows = [item.windows[0] for item in engine.encoder.texts([ONE, TWO])]
        expected = softmax(session.run(pack(windows), ["masks"])["masks"])
        best = np.argsort(-expected, axis=1)[:, :4]
        found = [tokens for masks in reply.results for tokens in masks]
        assert best.tolist() == [[one.token for one in tokens] for tokens in found]
        scores = [[one.score for one in tokens] for tokens in found]
        np.testing.assert_allclose(scores, np.take_along_axis(expected, best, 1), atol=1e-5)
    assert ("masks",) == reply.heads
    assert [1, 2] == [len(masks) for masks in reply.results]
    for found in reply.results[0][0]:
        assert tokenizer.decode([found.token], skip_special_tokens=False) == found.token_str


async def test_sequences(engine):
    """The text has the token in place of its mask token; of several, the others stay, with the special tokens."""
    number = engine.encoder.tokenizer.token_to_id
    reply = await fill(engine, ONE, TWO, targets=["the"], top_k=1)
    (((first,),), ((second,), (third,))) = reply.results
    assert TokenScore(number("the"), "the", first.score, "the ferry to the the was late") == first
    assert "[CLS] the sold the boat to a [MASK] in the harbour [SEP]" == second.sequence
    assert "[CLS] [MASK] sold the boat to a the in the harbour [SEP]" == third.sequence


async def test_targets(engine):
    """Only the targets are returned, each once, with their probabilities in the whole vocabulary."""
    whole = (await fill(engine, ONE, top_k=100)).results[0][0]
    known = {found.token_str: found.score for found in whole}
    wanted = [found.token_str for found in whole[40:44] if found.token_str.isalpha()]
    assert wanted
    tokens = (await fill(engine, ONE, targets=[*wanted[::-1], *wanted])).results[0][0]
    assert sorted(wanted, key=lambda word: -known[word]) == [found.token_str for found in tokens]
    assert [found.score for found in tokens] == pytest.approx(
        [known[found.token_str] for found in tokens], abs=1e-6
    )
    (best,) = (await fill(engine, ONE, targets=wanted, top_k=1)).results[0][0]
    assert tokens[0].token == best.token


async def test_targets_are_texts(engine):
    """A target is spelled as in the vocabulary, or as text that the tokenizer reads as one token."""
    (tokens,) = (await fill(engine, ONE, targets=["THE", "##s"])).results[0]
    ids = {engine.encoder.tokenizer.token_to_id(token) for token in ("the", "##s")}
    assert ids == {found.token for found in tokens}


@pytest.mark.parametrize(
    ("target", "pieces"), [("the harbour", "'the'"), ("", "none"), ("\u2603", r"'\[UNK\]'")]
)
async def test_targets_that_are_no_token(target, pieces, engine):
    """They are refused by their index, with the tokens that they are."""
    with pytest.raises(InvalidInput, match=rf"targets\[1\]: .* is not one token .*{pieces}") as bad:
        await fill(engine, ONE, targets=["the", target])
    assert "targets[1]" == bad.value.param


# -- batches --------------------------------------------------------------------------------------


async def test_together_with_other_heads(engine):
    """Results are the same alone as in batches with texts for other heads, with or without mask tokens."""
    alone = (await fill(engine, ONE, TWO)).results
    texts = [PLAIN, TWO, "[MASK] " * 50, ONE]
    labels = (await engine.answer(Classification(inputs=texts), ticket())).results
    tags = (await engine.answer(EntityRecognition(inputs=texts), ticket())).results
    filled, classified, tagged = await asyncio.gather(
        asyncio.gather(*[fill(engine, ONE, TWO) for _ in range(6)]),
        asyncio.gather(*[engine.answer(Classification(inputs=texts), ticket()) for _ in range(6)]),
        asyncio.gather(
            *[engine.answer(EntityRecognition(inputs=texts), ticket()) for _ in range(6)]
        ),
    )
    assert max(reply.timing.batch_size for reply in [*filled, *classified, *tagged]) > 4
    for reply in filled:
        same(alone, reply.results)
    for found, expected in [*((r, labels) for r in classified), *((r, tags) for r in tagged)]:
        for one, other in zip(found.results, expected, strict=True):
            assert [item[0] for item in one] == [item[0] for item in other]
            scores = [[item.score for item in items] for items in (one, other)]
            np.testing.assert_allclose(*scores, rtol=0, atol=1e-5)


# -- long texts -----------------------------------------------------------------------------------


async def test_long_text(engine):
    """A mask token of a long text is read from one window, and windows without one are not computed."""
    words = samples.text(1500, seed=3)
    middle = f"{words} the [MASK] {words}"
    reply = await fill(engine, middle, stride=32, top_k=2)
    (item,) = engine.encoder.texts([middle], truncate="window", stride=32)
    mask = engine.manifest.mask_token_id
    holding = [window for window in item.windows if mask in window.input_ids]
    assert len(item.windows) > 2 * len(holding)
    assert 1 == reply.usage.windows
    places = [window.input_ids.tolist().index(mask) for window in holding]
    context = [
        min(place, len(window) - 1 - place) for place, window in zip(places, holding, strict=True)
    ]
    best = holding[int(np.argmax(context))]
    text = engine.encoder.tokenizer.decode(best.input_ids.tolist(), skip_special_tokens=False)
    alone = await fill(engine, text.removeprefix("[CLS] ").removesuffix(" [SEP]"), top_k=2)
    assert [found.token for found in alone.results[0][0]] == [
        found.token for found in reply.results[0][0]
    ]
    assert reply.results[0][0][0].sequence.startswith(reply.results[0][0][1].sequence[:50])
    assert len(reply.results[0][0][0].sequence) > 2 * len(words) * 0.9


async def test_masks_in_several_windows(engine):
    """Each mask token of a long text has its own tokens, in the order of the text."""
    words = samples.text(700, seed=3)
    text = f"[MASK] {words} [MASK] {words} [MASK]"
    reply = await fill(engine, text, top_k=1)
    assert 3 == len(reply.results[0])
    assert reply.usage.windows > 1
    for index, (found,) in enumerate(reply.results[0]):
        parts = found.sequence.split("[MASK]")
        assert 3 == len(parts)
        assert found.token_str.replace("##", "") in parts[min(index, 1)] + parts[-1]


async def test_truncated_text(engine):
    """A mask token within the part that is kept is filled in, and the text is reported as truncated."""
    reply = await fill(engine, f"a [MASK] b {samples.text(900, seed=3)}", truncate=True)
    assert (1, [0]) == (len(reply.results[0]), reply.usage.truncated)


# -- refusals -------------------------------------------------------------------------------------

CUT = f"{samples.text(900, seed=3)} [MASK]"
REFUSED = {
    "none": ("a plain text", {}, r"no mask token: write \[MASK\] in place"),
    "empty": ("", {}, r"no mask token: write \[MASK\] in place"),
    "lower case": ("a [mask] text", {}, r"no mask token: write \[MASK\]"),
    "another's": ("a <mask> text", {}, r"<mask> is the mask token of other models: write \[MASK\]"),
    "cut": (CUT, {"truncate": True}, r"every \[MASK\] is in the part that was cut"),
    "too long": (CUT, {"truncate": False}, "longer than 512 tokens, and truncate is false"),
    "many": ("[MASK] " * (MOST_MASKS + 1), {}, f"more than {MOST_MASKS} mask tokens"),
}


@pytest.mark.parametrize(("text", "options", "message"), REFUSED.values(), ids=REFUSED)
async def test_refused(text, options, message, engine):
    """A text that cannot be filled in fails the request, by its index and with the reason."""
    with pytest.raises(InvalidInput, match=rf"inputs\[1\], inputs\[3\]: {message}") as refused:
        await fill(engine, ONE, text, ONE, text, **options)
    assert "inputs[1]" == refused.value.param


async def test_refused_one_by_one(engine, monkeypatch):
    """With isolated errors each text has its own reason, in parts of any size, and the others have results."""
    bad = [CUT, "a <mask>", "plain", ONE, "plain", CUT, TWO, "a <mask>"]
    expected = (await fill(engine, ONE, TWO)).results
    task = MaskFilling(inputs=bad, truncate=False)
    for characters in (engine_module.PART_CHARACTERS, 8):
        monkeypatch.setattr(engine_module, "PART_CHARACTERS", characters)
        reply = await engine.answer(task, ticket(isolate_errors=True))
        assert [0, 1, 2, 4, 5, 7] == sorted(reply.errors)
        reasons = [reply.errors[index].message.split()[0] for index in sorted(reply.errors)]
        assert ["longer", "<mask>", "no", "no", "longer", "<mask>"] == reasons
        same(expected, [reply.results[3], reply.results[6]])


async def test_only_inputs_with_the_same_fault_are_named(engine, monkeypatch):
    """An error names the inputs that its reason is true of."""
    monkeypatch.setattr(engine_module, "PART_CHARACTERS", 8)
    with pytest.raises(InvalidInput, match=r"^inputs\[0\], inputs\[2\]: no mask token"):
        await fill(engine, "plain", "a <mask> text", "plain")


async def test_as_many_masks_as_allowed(engine):
    """The largest number of mask tokens has a result for each."""
    reply = await fill(engine, "[MASK] " * MOST_MASKS, top_k=1)
    assert MOST_MASKS == len(reply.results[0])


async def test_too_many_for_a_request(engine, monkeypatch):
    """The logits of a request are limited, whatever their texts."""
    rows = engine.manifest.vocabulary.size
    monkeypatch.setattr(fields, "MOST_LOGITS", 4 * rows)
    await fill(engine, TWO, TWO)
    with pytest.raises(TooLarge, match="5 mask tokens; a request may have 4"):
        await fill(engine, TWO, TWO, ONE)


async def test_description(engine):
    """A fill-mask head is described with its mask token as texts contain it."""
    heads = engine.describe()["heads"]
    size, mask = engine.manifest.vocabulary.size, engine.manifest.mask_token_id
    described = heads["masks"]
    assert ("[MASK]", mask, size) == tuple(
        described[name] for name in ("mask_token", "mask_token_id", "vocabulary_size")
    )
    assert "mask_token" not in heads["sentiment"]


async def test_decoding_leaves_the_event_loop(engine, monkeypatch):
    """Results are decoded in a helper thread, because a softmax over the vocabulary takes long."""
    threads = []
    whole = mask_filling.decode.fill_mask

    def decode(*arguments, **options):
        threads.append(threading.current_thread().name)
        return whole(*arguments, **options)

    monkeypatch.setattr(mask_filling.decode, "fill_mask", decode)
    await fill(engine, ONE)
    await engine.answer(MaskFilling(inputs=[ONE]), ticket(), on_result=lambda *_: None)
    assert 2 == len(threads)
    assert all(name.startswith("text-") for name in threads)

"""The life of all engines: opened in order, checked, observed, drained; and what is not opened."""

import asyncio
import json
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from service.core.bundle import BundleError, BundleTexts, load, read_texts
from service.core.session import ProviderError
from service.engines.device import Device, RunsOn
from service.engines.engine import Engine, Ticket
from service.engines.model_state import ServedModel, ServingState
from service.engines.registry import Engines
from service.errors import Draining, UnknownModel
from service.observability.metrics import Metrics
from service.processes.single_process import open_local_engines
from service.scheduling.batcher import TURNS_TO_SEND
from service.scheduling.load import Load
from service.settings import Settings
from service.tasks.embedding import Embedding
from tests import samples
from tests.json_files import edit_json
from tests.served import opened, settings_of

RUNS_ON = RunsOn("fp32", "packed", "CPUExecutionProvider", None, "onnxruntime 1")


@pytest.fixture
def second(tiny_bundle: Path, tmp_path: Path) -> Path:
    """The tiny bundle as version 2."""
    copy = shutil.copytree(tiny_bundle, tmp_path / "second")
    edit_json(copy / "manifest.json", version="2")
    return copy


async def embed(engine: Engine, *texts: str) -> np.ndarray:
    ticket = Ticket("a request", deadline=time.monotonic() + 60)
    return (await engine.answer(Embedding(inputs=[*texts]), ticket)).results


async def test_names(second, tiny_bundle):
    """The first bundle is the default; each is found by name@version, and by name the first of it."""
    async with opened(second, tiny_bundle) as engines:
        asked = [None, "tiny", "tiny@2", "tiny@1"]
        assert ["tiny@2", "tiny@2", "tiny@2", "tiny@1"] == [engines.get(m).id for m in asked]
        assert ["tiny@2", "tiny@1"] == [engine.id for engine in engines.all()]
        said = "no model 'tiny@3'; served here: tiny@2, tiny@1"
        with pytest.raises(UnknownModel, match=said):
            engines.get("tiny@3")


async def test_both_answer(second, tiny_bundle):
    """Bundles share the slots, and each answers for itself."""
    async with opened(second, tiny_bundle) as engines:
        one, two = [await embed(engine, "Ada drew a comet.") for engine in engines.all()]
    np.testing.assert_array_equal(one, two)


async def test_same_bundle_twice(tiny_bundle, tmp_path):
    """Two bundles of one name and version could not be told apart."""
    copy = shutil.copytree(tiny_bundle, tmp_path / "copy")
    with pytest.raises(BundleError, match=f"{copy}: tiny@1 is served already"):
        async with opened(tiny_bundle, copy):
            pytest.fail("it opened")


async def test_provider_before_bundles(tmp_path, monkeypatch):
    """An unavailable provider is reported before any bundle is read."""
    monkeypatch.setattr("service.core.session.device_problem", lambda kind: "there is none")
    with pytest.raises(ProviderError, match="there is none"):
        async with opened(tmp_path / "nowhere", provider="cuda"):
            pytest.fail("it opened")


async def test_replicas(tiny_bundle, monkeypatch):
    """One replica, several, and the default on two cores answer alike."""
    monkeypatch.setattr("service.engines.local_device.usable_cores", lambda: 2)
    texts = [samples.text(words, seed=words) for words in range(1, 40)]
    answers = []
    for layout in ({"replicas": 1}, {"replicas": 2}, {"threads": None}):
        async with opened(tiny_bundle, **layout) as engines:
            answers.append(await embed(engines.get(None), *texts))
            answers.append(await embed(engines.get(None), *texts[:1]))
    for alone, together in zip(answers[1::2], answers[::2], strict=True):
        np.testing.assert_allclose(together, answers[0], rtol=0, atol=1e-5)
        np.testing.assert_allclose(alone, answers[0][:1], rtol=0, atol=1e-5)


async def test_batches_reach_the_metrics(tiny_bundle):
    """The metrics count every batch, and read the queue."""
    metrics = Metrics()
    async with open_local_engines(metrics, settings_of(tiny_bundle)) as engines:
        await embed(engines.get(None), "Ada", "Emmy")
        for _ in range(TURNS_TO_SEND):
            await asyncio.sleep(0)  # the waiting request goes first
        page = metrics.render().decode()
    assert 'quartet_batch_size_sum{model="tiny@1"} 2.0' in page
    assert "quartet_queue_tokens 0.0" in page


async def test_life(tiny_bundle):
    """Engines are ready while they are open, and afterwards take nothing more."""
    async with opened(tiny_bundle) as engines:
        assert engines.load().ready
        assert all(rate > 0 for rate in engines.load().rates.values())
    assert not engines.load().ready
    with pytest.raises(Draining):
        await embed(engines.get(None), "Ada")


# -- coming and going ---------------------------------------------------------------------------------


@pytest.fixture
def texts(tiny_bundle: Path) -> BundleTexts:
    return read_texts(load(tiny_bundle))


def called(texts: BundleTexts, version: str, sha256: str = "") -> BundleTexts:
    """The same under another version."""
    manifest = texts.manifest.model_copy(update={"version": version})
    return BundleTexts(manifest, sha256 or f"hash of {version}", texts.tokenizer)


class Shelf:
    """Engines of no device, and the texts that they are to adopt."""

    def __init__(self, texts: BundleTexts) -> None:
        device = SimpleNamespace(load=Load, loads=dict, alive=lambda: True)
        self.engines = Engines(cast(Device, device), cast(Any, None), cast(Any, None), Settings())
        self.texts = texts

    async def adopt(self, *aliases: str, **states: ServingState) -> None:
        """Adopt versions, by their states."""
        texts = {f"tiny@{version}": called(self.texts, version) for version in states}
        models = tuple(
            ServedModel(
                f"tiny@{version}", "", f"hash of {version}", state, 0.0, RUNS_ON, aliases=aliases
            )
            for version, state in states.items()
        )
        await self.engines.adopt(models, texts)


@pytest.fixture
def shelf(texts: BundleTexts) -> Iterator[Shelf]:
    made = Shelf(texts)
    yield made
    made.engines.close()


async def test_the_current_one_answers_for_its_name(shelf):
    """Other versions answer by their full ids; an unloaded version does not answer."""
    await shelf.adopt(one="previous", two="current")
    get = shelf.engines.get
    assert ["tiny@two"] * 2 == [get(None).id, get("tiny").id]
    assert "tiny@one" == get("tiny@one").id
    assert ["tiny@two"] == shelf.engines.expected
    await shelf.adopt(three="current", two="previous")
    assert ["tiny@three", "tiny@two"] == [get("tiny").id, get("tiny@two").id]
    with pytest.raises(
        UnknownModel, match="no model 'tiny@one'; served here: tiny@three, tiny@two"
    ):
        get("tiny@one")


async def test_aliases_and_unknown_names(shelf):
    """An alias reaches the current version; names of models are never hidden; other names get what the rule says."""
    await shelf.adopt("BAAI/bge-m3", "tiny@one", one="previous", two="current")
    get = shelf.engines.get
    assert ["tiny@two", "tiny@one"] == [get("BAAI/bge-m3").id, get("tiny@one").id]
    with pytest.raises(UnknownModel, match="no model 'gpt'; served here: tiny@one, tiny@two, BAAI"):
        get("gpt")
    assert "tiny@two" == get("gpt", "default").id


async def test_engines_stay_what_they_are(shelf):
    """Of a bundle that stays only the state changes; versions share a tokenizer that they have in common."""
    await shelf.adopt(one="current")
    engine = shelf.engines.get("tiny")
    await shelf.adopt(two="current", one="previous")
    assert engine is shelf.engines.get("tiny@one")
    assert "previous" == engine.describe()["state"]
    assert engine.encoder.tokenizer is shelf.engines.get("tiny").encoder.tokenizer


async def test_an_engine_without_requests_is_closed(shelf):
    """Not while a request is with it, though no other can come."""
    await shelf.adopt(one="current")
    engine = shelf.engines.get("tiny")
    engine.acquire()
    engine.acquire()
    await shelf.adopt(two="current")
    leaving = asyncio.create_task(shelf.engines.left("tiny@one"))
    engine.release()
    await asyncio.sleep(0.01)
    assert not leaving.done()
    engine.release()
    await asyncio.wait_for(leaving, 30)
    assert not shelf.engines._leaving


async def test_a_missing_bundle_is_not_waited_for(shelf):
    """A bundle that was never adopted is left already."""
    await asyncio.wait_for(shelf.engines.left("tiny@none"), 30)


async def test_a_changed_bundle_of_the_same_name_is_another(shelf, texts):
    """After a restart that found other contents, they are what is answered from."""
    await shelf.adopt(one="current")
    engine = shelf.engines.get("tiny")
    model = ServedModel("tiny@one", "", "changed", "current", 0.0, RUNS_ON)
    await shelf.engines.adopt((model,), {"tiny@one": called(texts, "one", "changed")})
    assert "changed" == shelf.engines.get("tiny").sha256 != engine.sha256


async def test_a_tokenizer_that_fails_is_not_adopted(shelf, texts):
    """A readable tokenizer without any word and without an unknown token is refused."""
    document = json.loads(texts.tokenizer)
    special = {token["content"]: token["id"] for token in document["added_tokens"]}
    document["model"]["vocab"] = {t: i for t, i in special.items() if t in ("[CLS]", "[SEP]")}
    document["added_tokens"] = []
    vocabulary = texts.manifest.vocabulary.model_copy(update={"sha256": 64 * "0"})
    manifest = texts.manifest.model_copy(update={"vocabulary": vocabulary})
    unused = BundleTexts(manifest, "new", json.dumps(document).encode())
    with pytest.raises(ValueError, match="the tokenizer of tiny@two cannot be used: "):
        await shelf.engines.adopt(
            (ServedModel("tiny@two", "", "new", "current", 0.0, RUNS_ON),), {"tiny@two": unused}
        )
    assert [] == shelf.engines.all()


async def test_what_cannot_be_adopted_changes_nothing(shelf, texts):
    """All or none: a tokenizer that cannot be read keeps the others out, too."""
    await shelf.adopt(one="current")
    vocabulary = texts.manifest.vocabulary.model_copy(update={"sha256": 64 * "0"})
    manifest = texts.manifest.model_copy(update={"version": "two", "vocabulary": vocabulary})
    models = tuple(
        ServedModel(name, "", "new", state, 0.0, RUNS_ON)
        for name, state in (("tiny@three", "current"), ("tiny@two", "previous"))
    )
    unread = {"tiny@three": called(texts, "three"), "tiny@two": BundleTexts(manifest, "new", b"{}")}
    with pytest.raises(ValueError, match="the tokenizer cannot be read"):
        await shelf.engines.adopt(models, unread)
    assert ["tiny@one"] == [engine.id for engine in shelf.engines.all()]
    assert "tiny@one" == shelf.engines.get("tiny").id

"""Heads of their own bundles read the hidden states of an encoder that is served once."""

import asyncio
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from service.core import bundle
from service.core.bundle import BundleError, describe_file
from service.core.cpu import CPU
from service.core.decode import softmax
from service.core.encode import Encoder
from service.core.manifest import Head, Manifest
from service.core.packing import pack
from service.core.session import Session, SessionOptions
from service.core.state_heads import read_heads
from service.embedded import EmbeddedService
from service.errors import BadBundle, Conflict
from service.keys import Key, digest, make_key
from service.tasks.classification import Classification
from service.tasks.embedding import Embedding
from service.tasks.entity_recognition import EntityRecognition
from service.tasks.question_answering import QuestionAnswering
from tests.head_bundles import save_head
from tests.json_files import edit_json, editing
from tests.served import client_of

TEXTS = ["the gardener oiled the old shears", "moss", "clay and rust on a wheel, " * 9]
TASKS = ("classification", "ner", "qa", "embedding")


@pytest.fixture(scope="session")
def heads(states_bundle, built_once) -> Path:
    """A directory with a head bundle for each task, named after it, and two versions of `again`."""

    def build(path: Path) -> None:
        path.mkdir()
        for task in TASKS:
            save_head(states_bundle, path / task, task)
        for seed in (1, 2):
            save_head(states_bundle, path / "again", seed=seed)

    return built_once("bundles/heads", build)


@asynccontextmanager
async def serving(*bundles: Path, **settings: Any) -> AsyncIterator[EmbeddedService]:
    async with EmbeddedService(*bundles, **settings) as service:
        yield service


def states_of(encoder: Path, text: str) -> np.ndarray:
    """The states of a text, from the encoder's graph alone."""
    loaded = bundle.load(encoder)
    (graph,) = loaded.manifest.graphs_for(CPU, "fp32")[:1]
    session = Session(loaded, graph, CPU, SessionOptions(threads=1))
    (item,) = Encoder.from_file(encoder / "tokenizer.json", 512).texts([text])
    return session.run(pack(item.windows), ("last_hidden_state",))["last_hidden_state"]


async def test_a_head_answers_by_the_states_of_its_encoder(states_bundle, heads):
    """The response is that of the head's dense layers on the states that the encoder gives for the text alone."""
    weights = read_heads(bundle.load(heads / "classification"), 64)["classification"]
    expected = softmax(weights(states_of(states_bundle, TEXTS[0])))
    async with serving(heads / "classification", states_bundle) as service:
        [found] = await service.classify(TEXTS[0], model="classification")
    scores = {each.label: each.score for each in found}
    assert [scores[label] for label in ("rust", "moss", "clay")] == pytest.approx(
        expected, abs=1e-6
    )


async def test_requests_for_different_heads_share_batches(states_bundle, heads):
    """The results have the bytes of a request alone, and at least one batch holds entries of several requests."""
    async with serving(states_bundle, *(heads / task for task in TASKS)) as service:
        calls = [
            partial(service.answer, task, model=model)
            for text in TEXTS
            for model, task in (
                ("states", Classification(inputs=[text])),
                ("classification", Classification(inputs=[text])),
                ("ner", EntityRecognition(inputs=[text])),
                ("qa", QuestionAnswering(questions=["who oiled it?"], contexts=[text])),
                ("embedding", Embedding(inputs=[text])),
            )
        ]
        alone = [await call() for call in calls]
        found = await asyncio.gather(*(call() for call in calls))
    assert [repr(reply.results) for reply in alone] == [repr(reply.results) for reply in found]
    assert max(reply.timing.batch_size for reply in found) > 1


async def test_heads_come_and_go_while_their_encoder_is_served(states_bundle, heads, tmp_path):
    """A version replaces another and comes back; the encoder stays as long as a head needs it."""
    root = tmp_path / "models"
    shutil.copytree(heads, root)
    async with serving(states_bundle, models_dir=root) as service:
        for path in ("again", "again-v2", "classification"):
            await service.load_model(path)
        newest = await service.answer(Classification(inputs=TEXTS), model="again")
        await service.roll_back_model("again")
        former = await service.answer(Classification(inputs=TEXTS), model="again")
        pinned = await service.answer(Classification(inputs=TEXTS), model="again@2")
        assert newest.results == pinned.results != former.results
        with pytest.raises(Conflict, match=r"states@1 computes again@1, again@2, classification@1"):
            await service.unload_model("states@1")
        for model in ("again@1", "again@2", "classification@1"):
            await service.unload_model(model)
        models = (await service.models())["models"]
        assert [model["id"] for model in models] == ["states@1"]


async def test_a_candidate_head_gets_mirrored_requests(states_bundle, heads, tmp_path):
    """Its results are compared with those of the current version, which alone are returned."""
    root = tmp_path / "models"
    shutil.copytree(heads, root)
    async with serving(states_bundle, heads / "again", models_dir=root) as service:
        before = await service.classify(TEXTS, model="again")
        await service.load_model("again-v2", promote=False, shadow=1.0)
        assert before == await service.classify(TEXTS, model="again")

        async def compared() -> dict[str, dict[str, int]]:
            models = {model["id"]: model for model in (await service.models())["models"]}
            found: dict[str, dict[str, int]] = models["again@2"]["compared"]
            return found

        while not (counts := await compared()):
            await asyncio.sleep(0.01)
    assert ["classification"] == [*counts]
    assert len(TEXTS) == sum(counts["classification"].values())


async def test_a_head_without_its_encoder_is_refused(tiny_bundle, states_bundle, heads, tmp_path):
    """By the name and the hash of the encoder, also if another version has the name."""
    root = tmp_path / "models"
    shutil.copytree(heads / "qa", root / "qa")
    other = shutil.copytree(states_bundle, root / "states")
    edit_json(other / "manifest.json", weights_license="MIT")
    async with serving(tiny_bundle, models_dir=root) as service:
        with pytest.raises(Conflict, match=r"its encoder states@1 .* is not served here"):
            await service.load_model("qa")
        await service.load_model("states")
        with pytest.raises(Conflict, match=r"states@1 .* is served with other contents"):
            await service.load_model("qa")
    with pytest.raises(BundleError, match=r"its encoder states@1 .* is not served here"):
        async with serving(tiny_bundle, heads / "qa"):
            pass


async def test_other_weights_fail_the_goldens(states_bundle, heads, tmp_path):
    """Weights that compute other outputs are refused, even if the manifest has their hash."""
    root = tmp_path / "models"
    head = shutil.copytree(heads / "classification", root / "head")
    with np.load(head / "heads.npz") as arrays:
        changed = {name: array * np.float32(1.5) for name, array in arrays.items()}
    np.savez(head / "heads.npz", **changed)
    with editing(head / "manifest.json") as manifest:
        manifest["encoder"]["weights"] = describe_file(head / "heads.npz")
    async with serving(states_bundle, models_dir=root) as service:
        with pytest.raises(BadBundle, match="goldens disagree at fp32: classification differs"):
            await service.load_model("head")


def test_a_task_that_cannot_read_states_is_refused_by_name(heads):
    """A head that fills masks needs the embedding table, which is in the encoder's graph."""
    fields = Manifest.model_validate_json((heads / "qa" / "manifest.json").read_text()).model_dump()
    mask = Head(task="fill-mask", mask_token_id=4, vocabulary_size=fields["vocabulary"]["size"])
    with pytest.raises(ValueError, match="a fill-mask head cannot read the hidden states"):
        Manifest.model_validate({**fields, "heads": {"qa": mask}})


@pytest.mark.parametrize(
    ("method", "path", "body", "names"),
    [
        ("GET", "/models", None, True),
        ("GET", "/v1/models", None, True),
        ("GET", "/cohere/v1/models", None, True),
        ("GET", "/infinity/models", None, True),
        ("POST", "/v2/repository/index", {}, True),
        ("GET", "/tei/info", None, True),
        ("POST", "/classify", {"inputs": "moss"}, True),
        ("POST", "/classify", {"inputs": "moss", "model": "states"}, False),
        ("POST", "/v1/embeddings", {"input": "moss", "model": "embedding"}, False),
        ("GET", "/v2/models/states", None, False),
        ("POST", "/hf/models/states/sentiment", {"inputs": "moss"}, False),
    ],
)
async def test_a_key_sees_its_own_models_only(states_bundle, heads, method, path, body, names):
    """At every endpoint. Other models are unknown, and no message names them."""
    key = make_key()
    keys = {"acme": Key(sha256=digest(key).hex(), models=("class*",))}
    bundles = (states_bundle, heads / "embedding", heads / "classification")
    async with serving(*bundles, keys=keys) as service, client_of(service.app) as client:
        headers = {"Authorization": f"Bearer {key}"}
        found = await client.request(method, path, json=body, headers=headers)
    assert found.status_code == (200 if names else 404), found.text
    listed = {
        name
        for name in ("states", "embedding", "classification")
        if f"{name}@1" in found.text or f'"name":"{name}"' in found.text
    }
    of_head = {"states"} if path == "/models" else set()  # the model that computes the head
    assert listed == {"classification"} | of_head

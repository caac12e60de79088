"""`POST /embed` gives sentence-transformers' vectors: prompts, queries and documents, poolings, smaller types."""

import base64
import itertools
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sentence_transformers import SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize, Router, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from sentence_transformers.util import quantize_embeddings

from export.__main__ import main as export
from tests import hub, samples
from tests.e2e.conftest import Server, serving
from tests.json_files import edit_json

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

TEXTS = [samples.text(words, seed=words) for words in (1, 3, 9, 20, 50, 300)]
CALIBRATION = [samples.text(words, seed=100 + words) for words in range(2, 40)]
PROMPTS = {"query": "Represent this for search: ", "passage": "passage: ", "web": "search_web "}
FILE = "config_sentence_transformers.json"


@dataclass(frozen=True)
class Served:
    server: Server
    peers: dict[str, SentenceTransformer]

    def embed(self, name: str, **options: Any) -> np.ndarray:
        answer = self.server.answer("/embed", {"inputs": TEXTS, "model": name, **options})
        return np.asarray(answer["embeddings"])


def save_parts(folder: Path, parts: Any, **options: Any) -> Path:
    SentenceTransformer(modules=parts(folder), device="cpu", **options).save(str(folder))
    return folder


def transformer(folder: Path) -> Transformer:
    plain = folder.with_name(f"{folder.name}-plain")
    hub.save("bert", plain, hub.transformers.AutoModel, num_hidden_layers=1)
    return Transformer(str(plain))


def routed(folder: Path) -> list[Any]:
    """Queries and documents share an encoder, and have dense layers of their own."""
    torch.manual_seed(3)
    shared = transformer(folder)
    routes = [[shared, Pooling(32, "mean"), Dense(32, 20)] for _ in range(2)]
    return [Router.for_query_document(*routes), Normalize()]


def pooled(folder: Path) -> list[Any]:
    """Two poolings, concatenated, and vectors that are not normalized."""
    return [transformer(folder), Pooling(32, ("weightedmean", "lasttoken"))]


def save_all(folder: Path) -> dict[str, Path]:
    return {
        "routed": save_parts(folder / "routed", routed, prompts={"query": "find: "}),
        "pooled": save_parts(
            folder / "pooled", pooled, prompts=PROMPTS, default_prompt_name="passage"
        ),
    }


def serve(folder: Path, saved: dict[str, Path], flags: list[str]) -> Iterator[Served]:
    for name, path in saved.items():
        made = [str(path), str(folder / name), "--no-memory", "--precision", "fp32", *flags]
        assert 0 == export(made), name
    peers = {name: SentenceTransformer(str(path), device="cpu") for name, path in saved.items()}
    with serving(*(folder / name for name in saved)) as server:
        yield Served(server, peers)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Models of random weights."""
    saved = save_all(tmp_path_factory.mktemp("saved"))
    yield from serve(tmp_path_factory.mktemp("bundles"), saved, [])


@pytest.fixture(scope="module")
def minilm(tmp_path_factory: pytest.TempPathFactory, minilm_folder: Path) -> Iterator[Served]:
    """The real MiniLM, with prompts, trained dimensions and ranges."""
    folder = tmp_path_factory.mktemp("saved") / "minilm"
    shutil.copytree(minilm_folder, folder)
    edit_json(folder / FILE, prompts=PROMPTS, default_prompt_name="passage")
    texts = folder.with_name("texts.txt")
    texts.write_text("\n".join(CALIBRATION))
    flags = ["--dimensions", "64", "128", "--calibrate", str(texts)]
    yield from serve(tmp_path_factory.mktemp("bundles"), {"minilm": folder}, flags)


def check_prompts(served: Served, name: str) -> None:
    """Compare the vectors of each way to set a prompt; all of them differ."""
    peer = served.peers[name]
    expected = {
        "default": (peer.encode(TEXTS), {}),
        "name": (peer.encode(TEXTS, prompt_name="web"), {"prompt_name": "web"}),
        "text": (peer.encode(TEXTS, prompt="find: "), {"prompt": "find: "}),
        "none": (peer.encode(TEXTS, prompt=""), {"prompt": ""}),
        "query": (peer.encode_query(TEXTS), {"input_type": "query"}),
        "document": (peer.encode_document(TEXTS), {"input_type": "document"}),
    }
    for case, (vectors, options) in expected.items():
        found = served.embed(name, **options)
        np.testing.assert_allclose(found, vectors, rtol=0, atol=1e-4, err_msg=case)
    distinct = [vectors for case, (vectors, _) in expected.items() if case != "document"]
    for first, second in itertools.pairwise(distinct):
        assert np.abs(first[0] - second[0]).max() > 1e-3


def test_prompts(small):
    """Of random weights, with two poolings and vectors that are not normalized."""
    check_prompts(small, "pooled")


def test_prompts_of_minilm(minilm):
    """Of real weights, and of texts that are longer than a window."""
    check_prompts(minilm, "minilm")


def test_routes(small):
    """Queries and documents go through layers of their own; without an input type the default route answers."""
    peer = small.peers["routed"]
    queries, documents = peer.encode_query(TEXTS), peer.encode_document(TEXTS)
    assert np.abs(queries - documents).max() > 1e-2
    for expected, options in (
        (queries, {"input_type": "query"}),
        (documents, {"input_type": "document"}),
        (peer.encode(TEXTS), {}),
    ):
        found = small.embed("routed", **options)
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", ["binary", "ubinary"])
def test_bits(small, dtype):
    """Bits equal `encode(precision=...)`, except where a number is zero within rounding."""
    for name in small.peers:
        peer = small.peers[name]
        floats, expected = peer.encode(TEXTS), peer.encode(TEXTS, precision=dtype)
        clear = np.abs(floats).min(axis=1) > 1e-5
        found = small.embed(name, output_dtype=dtype)
        assert expected.shape == found.shape
        np.testing.assert_array_equal(expected[clear], found[clear])
        assert clear.any()


@pytest.mark.parametrize("dtype", ["int8", "uint8"])
@pytest.mark.parametrize("dimensions", [384, 64])
def test_levels_of_minilm(minilm, dtype, dimensions):
    """Levels equal `quantize_embeddings` with the calibration texts; rounding decides at the edge of two levels."""
    peer = minilm.peers["minilm"]

    def encode(texts, prompt=None):
        fields = {"truncate_dim": dimensions, "normalize_embeddings": True}
        return np.asarray(peer.encode(texts, prompt=prompt, **fields))

    sides = [encode(CALIBRATION, prompt) for prompt in (None, PROMPTS["query"], "")]
    calibration = np.concatenate(sides)
    ranges = np.stack([calibration.min(axis=0), calibration.max(axis=0)])
    expected = quantize_embeddings(encode(TEXTS), dtype, ranges=ranges).astype(int)
    answer = minilm.server.answer(
        "/embed",
        {
            **{"inputs": TEXTS, "output_dtype": dtype, "dimensions": dimensions},
            "encoding_format": "base64",
        },
    )
    read = [np.frombuffer(base64.b64decode(text), dtype) for text in answer["embeddings"]]
    difference = np.abs(np.stack(read).astype(int) - expected)
    assert difference.max() <= 1
    assert (difference > 0).mean() < 0.01


def test_refused_by_minilm(minilm):
    """Unknown prompts and untrained dimensions are refused with the choices."""
    for options, message in (
        ({"prompt_name": "none"}, "only query, document, passage, web"),
        ({"dimensions": 100}, "only for 64, 128, 384"),
    ):
        reply = minilm.server.post("/embed", {"inputs": "a", **options})
        assert 422 == reply.status
        assert message in reply.json()["error"]["message"]


def test_description_of_minilm(minilm):
    """`GET /models` shows what requests may ask for, and not the ranges."""
    (model,) = minilm.server.get("/models").json()["models"]
    head = model["heads"]["embedding"]
    assert {"document": "", **PROMPTS} == head["prompts"]
    assert ("passage", [64, 128]) == (head["default_prompt"], head["matryoshka_dimensions"])
    assert ["float", "int8", "uint8", "binary", "ubinary"] == head["output_dtypes"]
    assert "quantization_ranges" not in head

"""Static embeddings: directories of sentence-transformers and of model2vec, exported and computed by the engine."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from sentence_transformers import SentenceTransformer
from sentence_transformers.sentence_transformer.modules import (
    Dense,
    LayerNorm,
    Normalize,
    StaticEmbedding,
)
from tokenizers import Tokenizer

from model.checkpoints.errors import CheckpointError
from model.checkpoints.source import read_source
from model.static_embedding import START
from model.tokenizer import train
from service.tasks.embedding import Embedding
from tests import samples
from tests.conftest import run_export
from tests.e2e.conftest import serving
from tests.parity.test_sparse import compute

WIDTH = 24
TEXTS = ["", "Paris is the capital of France.", " ", "漢字 😀", samples.text(400, seed=4)]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train(samples.corpus(), vocab_size=300)


def table(tokenizer: Tokenizer) -> torch.Tensor:
    """Vectors that have a part in common, so that the mean of many is no small number."""
    torch.manual_seed(0)
    return torch.randn(tokenizer.get_vocab_size(), WIDTH) + torch.randn(WIDTH)


def test_static_embedding(tokenizer, tmp_path):
    """The vectors of `encode` to 1e-5, for texts without tokens, too; the same alone and over HTTP; close at int8."""
    torch.manual_seed(0)
    norm = LayerNorm(WIDTH)
    torch.nn.init.normal_(norm.norm.weight)
    parts = [StaticEmbedding(tokenizer, table(tokenizer)), norm, Dense(WIDTH, 16), Normalize()]
    made = SentenceTransformer(modules=parts, device="cpu")
    made.prompts = {"query": "find: ", "document": ""}
    made.save(str(tmp_path / "static"))
    run_export(tmp_path / "static", tmp_path / "bundle")

    asked = Embedding(inputs=TEXTS), Embedding(inputs=TEXTS, input_type="query")
    alone = [Embedding(inputs=[text]) for text in TEXTS]
    plain, queries, *apart = compute(tmp_path / "bundle", "fp32", *asked, *alone)

    expected = made.encode(TEXTS)
    np.testing.assert_allclose(plain, expected, atol=1e-5)
    np.testing.assert_allclose(queries, made.encode(TEXTS, prompt_name="query"), atol=1e-5)
    np.testing.assert_allclose([one for (one,) in apart], expected, atol=1e-5)
    (rounded,) = compute(tmp_path / "bundle", "int8", asked[0])
    assert (rounded * expected).sum(axis=1).min() > 0.999
    with serving(tmp_path / "bundle", "--precision", "fp32") as server:
        found = server.answer("/embed", {"inputs": TEXTS})["embeddings"]
    np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("folded", [False, True])
def test_model2vec(tokenizer, tmp_path, folded):
    """A directory without modules: unknown tokens do not count, and tokens may share weighted vectors."""
    vectors, weights = table(tokenizer), torch.rand(tokenizer.get_vocab_size())
    mapping = torch.arange(len(vectors)) // 2
    tensors: dict[str, Any] = {"embeddings": vectors}
    if folded:
        tensors = {"embeddings": vectors, "mapping": mapping, "weights": weights.double()}
        vectors = vectors[mapping] * weights[:, None]
    tokenizer = Tokenizer.from_str(tokenizer.to_str())
    tokenizer.enable_truncation(20)
    save_model2vec(tmp_path / "static", tokenizer, tensors)
    run_export(tmp_path / "static", tmp_path / "bundle", "--precision", "fp32")

    (found,) = compute(tmp_path / "bundle", "fp32", Embedding(inputs=TEXTS))

    unknown = tokenizer.token_to_id("[UNK]")
    for text, vector in zip(TEXTS, found, strict=True):
        ids = [i for i in tokenizer.encode(text, add_special_tokens=False).ids if i != unknown]
        expected = vectors[ids].mean(dim=0) if ids else torch.zeros(WIDTH)
        np.testing.assert_allclose(
            vector, torch.nn.functional.normalize(expected, dim=0), atol=1e-5
        )


def save_model2vec(folder: Path, tokenizer: Tokenizer, tensors: dict[str, torch.Tensor]) -> None:
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "config.json").write_text(json.dumps({"model_type": "model2vec", "normalize": True}))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"embeddings": torch.zeros(300, WIDTH, dtype=torch.int8)}, "dtype int8"),
        ({"embeddings": torch.zeros(300)}, r"shape \(300,\)"),
        ({"embeddings": torch.zeros(9, WIDTH)}, "have no row"),
        ({"mapping": torch.full((300,), 300)}, "mapping or weights do not fit"),
        ({"weights": torch.ones(9)}, "mapping or weights do not fit"),
        ({"other": torch.ones(9)}, "are no table"),
    ],
)
def test_refused(tokenizer, tmp_path, change, reason):
    """A table that does not fit is refused by its tensor."""
    save_model2vec(tmp_path / "static", tokenizer, {"embeddings": torch.ones(300, WIDTH), **change})
    with pytest.raises(CheckpointError, match=reason):
        read_source(tmp_path / "static")


def test_the_first_token(tokenizer, tmp_path):
    """A text with the characters of the token before each text changes nothing but its own vector."""
    save_model2vec(tmp_path / "static", tokenizer, {"embeddings": table(tokenizer)})
    source = read_source(tmp_path / "static")
    assert [START, "the"] == source.tokenizer.encode("the").tokens
    assert source.tokenizer.get_vocab_size() == source.model.config.vocab_size

"""Unmodified clients of other servers, against a real server."""

import base64
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.errors import HfHubHTTPError

from service.keys import make_key, record
from tests.e2e.conftest import Server, serving

openai = pytest.importorskip("openai", reason="the client openai is not installed")

pytestmark = pytest.mark.e2e

TEXTS = ["Ada drew a comet.", "It rained in Turin."]


@pytest.fixture(scope="module")
def server(tiny_bundle: Path) -> Iterator[Server]:
    with serving(tiny_bundle, "--max-inputs-per-request", 8, "--gzip-min-bytes", 0) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Any:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def test_openai_embeddings(client: Any, server: Server) -> None:
    """The vectors equal the native route's: by the client's own base64, as numbers, and cut."""
    expected = server.answer("/embed", {"inputs": TEXTS})
    for options in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
        found = client.embeddings.create(input=TEXTS, model="tiny", **options)
        vectors = [one.embedding for one in found.data]
        if options == {"encoding_format": "base64"}:
            vectors = [np.frombuffer(base64.b64decode(vector), "<f4") for vector in vectors]
        np.testing.assert_allclose(vectors, expected["embeddings"], atol=1e-6)
        assert [0, 1] == [one.index for one in found.data]
        assert expected["model"] == found.model
        assert expected["usage"]["tokens"] == found.usage.total_tokens

    short = client.embeddings.create(input=TEXTS[0], model="tiny@1", dimensions=8)
    assert 8 == len(short.data[0].embedding)


def test_openai_token_ids(client: Any, server: Server) -> None:
    """The ids of the model's own tokenizer give the vector of their text; ids of another are refused by name."""
    tokens = server.answer("/tokenize", {"inputs": TEXTS[0]})["results"][0]["tokens"]
    ids = [token["id"] for token in tokens if token["sequence"] is not None]
    expected = server.answer("/embed", {"inputs": TEXTS[0]})["embeddings"]
    for sent in (ids, [ids]):
        found = client.embeddings.create(input=sent, model="tiny", encoding_format="float")
        np.testing.assert_allclose([one.embedding for one in found.data], expected, atol=1e-6)
    with pytest.raises(openai.BadRequestError, match="check_embedding_ctx_length=False"):
        client.embeddings.create(input=[[100257]], model="tiny")


def test_openai_models(client: Any) -> None:
    """The models are listed, and found by name."""
    assert ["tiny@1"] == [model.id for model in client.models.list()]
    assert "tiny@1" == client.models.retrieve("tiny").id


@pytest.mark.parametrize(
    ("request_", "error"),
    [
        ({"input": TEXTS, "model": "huge"}, "NotFoundError"),
        ({"input": [], "model": "tiny"}, "BadRequestError"),
        ({"input": [""] * 9, "model": "tiny"}, "BadRequestError"),
        ({"input": "a", "model": "tiny", "dimensions": 65}, "BadRequestError"),
        ({"input": "a", "model": "tiny", "encoding_format": "hex"}, "BadRequestError"),
        ({"input": "a", "model": "tiny", "extra_body": {"temperature": 1}}, "BadRequestError"),
    ],
)
def test_openai_errors(client: Any, request_: dict[str, Any], error: str) -> None:
    """The client raises the classes that it raises against OpenAI, with message and code."""
    with pytest.raises(getattr(openai, error)) as raised:
        client.embeddings.create(**request_)
    assert raised.value.body["message"]
    assert raised.value.type == "invalid_request_error"


def test_openai_keys(tiny_bundle: Path, tmp_path: Path) -> None:
    """The client's key is the service's; without one, the client raises its own error."""
    key, keys = make_key(), tmp_path / "keys.toml"
    keys.write_text(record("visitor", key))
    with serving(tiny_bundle, "--api-keys", keys) as server:
        good = openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)
        assert 1 == len(good.embeddings.create(input="a", model="tiny").data)
        with pytest.raises(openai.AuthenticationError):
            good.with_options(api_key="wrong").models.list()


# text-embeddings-inference


@pytest.fixture
def hub(server: Server) -> InferenceClient:
    return InferenceClient(f"{server.url}/tei")


def test_tei_by_the_hub_client(hub: InferenceClient, server: Server) -> None:
    """huggingface_hub's client gets vectors, cut or not, and cosines."""
    expected = server.answer("/embed", {"inputs": TEXTS[0]})["embeddings"]
    np.testing.assert_allclose(hub.feature_extraction(TEXTS[0]), expected, atol=1e-6)
    plain = hub.feature_extraction(TEXTS[0], normalize=False, truncate=True)
    assert not np.isclose(np.linalg.norm(plain), 1)
    found = hub.sentence_similarity(TEXTS[0], other_sentences=TEXTS)
    assert found[0] == pytest.approx(1)
    assert found[1] < 1
    with pytest.raises(HfHubHTTPError, match="512 tokens"):
        hub.feature_extraction("word " * 600, truncate=False)


def tei(server: Server, path: str, body: object) -> Any:
    response = server.post(f"/tei{path}", body)
    return response.json()


def test_tei_embed(server: Server) -> None:
    """Always a list of vectors."""
    expected = server.answer("/embed", {"inputs": TEXTS})["embeddings"]
    for path in ("", "/embed"):
        np.testing.assert_allclose(tei(server, path, {"inputs": TEXTS}), expected, atol=1e-6)
    assert 1 == len(tei(server, "/embed", {"inputs": TEXTS[0], "truncation_direction": "Right"}))


def test_tei_predict(server: Server) -> None:
    """A list of two texts is a pair; a list of lists is a batch, of texts and pairs."""
    (one,) = server.answer("/classify", {"inputs": TEXTS[0]})["results"]
    (pair,) = server.answer("/classify", {"inputs": TEXTS[0], "text_pair": TEXTS[1]})["results"]
    assert one == tei(server, "/predict", {"inputs": TEXTS[0]})
    assert pair == tei(server, "/predict", {"inputs": TEXTS})
    batch = [TEXTS, [TEXTS[0]]]
    assert [pair, one] == tei(server, "/predict", {"inputs": batch})
    raw = tei(server, "/predict", {"inputs": TEXTS[0], "raw_scores": True})
    assert [label["label"] for label in one] == [label["label"] for label in raw]
    assert not 0.99 < sum(label["score"] for label in raw) < 1.01


def test_tei_tokens(server: Server) -> None:
    """Offsets are bytes of UTF-8, and special tokens have none."""
    text = "A café 🪁 Ada"
    (tokens,) = tei(server, "/tokenize", {"inputs": text})
    assert [True, True] == [tokens[0]["special"], tokens[-1]["special"]]
    assert None is tokens[0]["start"] is tokens[-1]["stop"]
    for token in tokens[1:-1]:
        own = text.encode()[token["start"] : token["stop"]].decode()
        assert token["text"] == own
    (short,) = tei(server, "/tokenize", {"inputs": text, "add_special_tokens": False})
    assert short == tokens[1:-1]
    ids = [token["id"] for token in tokens]
    assert (
        1
        == len(tei(server, "/decode", {"ids": ids}))
        == len(tei(server, "/decode", {"ids": [ids]}))
    )


def test_tei_errors(server: Server) -> None:
    """They have TEI's form, with our messages."""
    for path, body, status in (
        ("/embed", {"inputs": []}, 422),
        ("/embed", {"inputs": [""] * 9}, 413),
        ("/predict", {"inputs": [["a", "b", "c"]]}, 422),
        ("/rerank", {"query": "a", "texts": ["b"]}, 404),
        ("/embed_all", {"inputs": "a"}, 404),
        ("/decode", {"ids": [99999]}, 422),
        ("/embed", {"inputs": "a", "truncation_direction": "left"}, 422),
    ):
        response = server.post(f"/tei{path}", body)
        assert status == response.status, path
        assert {"error", "error_type"} == set(response.json())


def test_tei_info(server: Server) -> None:
    """What clients ask about the model."""
    found = server.get("/tei/info").json()
    assert ("tiny@1", 512, 8) == (
        found["model_id"],
        found["max_input_length"],
        found["max_client_batch_size"],
    )
    assert 200 == server.get("/tei/health").status

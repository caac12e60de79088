"""The APIs of other servers over HTTP, where no client of theirs reaches."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.e2e.client_calls.records import TEXTS
from tests.e2e.conftest import Server, serving

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def server(tiny_bundle: Path) -> Iterator[Server]:
    with serving(tiny_bundle, "--max-inputs-per-request", 8, "--gzip-min-bytes", 0) as running:
        yield running


def tei(server: Server, path: str, body: object) -> Any:
    response = server.post(f"/tei{path}", body)
    return response.json()


def test_tei_embed(server):
    """Always a list of vectors."""
    expected = server.answer("/embed", {"inputs": TEXTS})["embeddings"]
    for path in ("", "/embed"):
        np.testing.assert_allclose(tei(server, path, {"inputs": TEXTS}), expected, atol=1e-6)
    assert 1 == len(tei(server, "/embed", {"inputs": TEXTS[0], "truncation_direction": "Right"}))


def test_tei_predict(server):
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


def test_tei_tokens(server):
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


def test_tei_errors(server):
    """They have TEI's form, with our messages."""
    for path, body, status in (
        ("/embed", {"inputs": []}, 422),
        ("/embed", {"inputs": [""] * 9}, 413),
        ("/predict", {"inputs": [["a", "b", "c"]]}, 422),
        ("/embed_all", {"inputs": "a"}, 404),
        ("/decode", {"ids": [99999]}, 422),
        ("/embed", {"inputs": "a", "truncation_direction": "left"}, 422),
    ):
        response = server.post(f"/tei{path}", body)
        assert status == response.status, path
        assert {"error", "error_type"} == set(response.json())


def test_tei_info(server):
    """The response to the clients' request for the model's description."""
    found = server.get("/tei/info").json()
    assert ("tiny@1", 512, 8) == (
        found["model_id"],
        found["max_input_length"],
        found["max_client_batch_size"],
    )
    assert 200 == server.get("/tei/health").status

"""What a real server answers: the reference's vectors, base64, and the same to many at once."""

import base64
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tests import samples
from tests.e2e.calls import LONG, calls, same_answer
from tests.e2e.conftest import serving

pytestmark = pytest.mark.e2e


@pytest.mark.promise(
    "An answer does not depend on the batch composition (on a GPU at fp16: but for rounding)."
)
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_64_at_once_get_what_each_gets_alone(tiny_bundle, precision):
    """64 concurrent mixed requests are answered as the same requests one after the other."""
    with serving(tiny_bundle, "--precision", precision) as server:
        alone = [server.answer(*call) for call in calls()]
        with ThreadPoolExecutor(64) as clients:
            replies = list(clients.map(lambda call: server.post(*call), calls()))

    together = [reply.json() for reply in replies]
    sizes = [int(r.headers["x-quartet-batch"].split(";")[0].removeprefix("size=")) for r in replies]
    assert all(same_answer(a, b) for a, b in zip(alone, together, strict=True))
    assert max(sizes) > 1


@pytest.mark.slow
def test_embed_equals_sentence_transformers(minilm_folder, minilm_bundle):
    """MiniLM's vectors equal sentence-transformers' vectors, which truncates at the same token."""
    reference = pytest.importorskip("sentence_transformers").SentenceTransformer(
        str(minilm_folder), device="cpu"
    )
    words = (8, 40, 120, 200, 240, 260, 800, 1600)
    texts = [*samples.STRANGE.values(), *(samples.text(n, seed=n) for n in words)]
    expected = reference.encode(texts, normalize_embeddings=True)

    with serving(minilm_bundle, "--precision", "fp32") as server:
        answer = server.answer("/embed", {"inputs": texts})

    np.testing.assert_allclose(answer["embeddings"], expected, rtol=0, atol=1e-4)
    assert {len(texts) - 1, len(texts) - 2} <= set(answer["usage"]["truncated"])


def test_base64_holds_the_same_numbers(tiny):
    """Base64 is the vector's little-endian float32 bytes."""
    body = {"inputs": "Ada drew a comet.", "dimensions": 8}
    (numbers,) = tiny.answer("/embed", body)["embeddings"]
    (text,) = tiny.answer("/embed", {**body, "encoding_format": "base64"})["embeddings"]

    assert numbers == pytest.approx(np.frombuffer(base64.b64decode(text), dtype="<f4").tolist())


def test_windows_of_a_vector_are_pooled_by_their_tokens(tiny):
    """`truncate: "window"` reads all of a text, true reads its beginning and says so."""
    body = {"inputs": LONG, "normalize": False}
    whole = tiny.answer("/embed", {**body, "truncate": "window"})
    cut = tiny.answer("/embed", {**body, "truncate": True})

    assert whole["usage"]["windows"] > 1
    assert whole["usage"]["truncated"] == []
    assert cut["usage"] == {"tokens": 512, "windows": 1, "truncated": [0]}
    assert not np.allclose(whole["embeddings"], cut["embeddings"], atol=1e-3)

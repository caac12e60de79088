"""OpenAI's API: the tokens of OpenAI's tokenizer, by a small table in place of its own."""

import base64
from pathlib import Path
from types import SimpleNamespace

import httpx
import pytest
import tiktoken
from structlog.testing import capture_logs

from service.api.dialects.openai_dialect import cached_token_table, warn_of_ids
from service.core.token_table import SPECIAL_TOKENS
from service.tasks.embedding import Embedding
from tests.service.fakes import FakeEngine

WORDS = [b"Ad", b"Ada", b" d", b" dr", "é".encode(), "🪁".encode()]
RANKS = {bytes([byte]): byte for byte in range(256)} | {
    word: rank for rank, word in enumerate(WORDS, start=256)
}
TEXT = "Ada drew a café 🪁"


@pytest.fixture
def table(tmp_path: Path) -> Path:
    path = tmp_path / "small.tiktoken"
    lines = [f"{base64.b64encode(word).decode()} {rank}\n" for word, rank in RANKS.items()]
    path.write_text("".join(lines))
    cached_token_table.cache_clear()
    return path


def encode(text: str) -> list[int]:
    """Return the ids that a client of OpenAI's models sends."""
    tokenizer = tiktoken.Encoding(
        "small", pat_str=r"\S+|\s+\S*", mergeable_ranks=RANKS, special_tokens={}
    )
    return tokenizer.encode(text)


async def embedded(client: httpx.AsyncClient, engine: FakeEngine, body: object) -> object:
    """Return the texts that a request embeds."""
    response = await client.post("/v1/embeddings", json={"input": body})
    assert 200 == response.status_code, response.text
    assert isinstance(engine.asked, Embedding)
    return engine.asked.inputs


async def test_ids_of_the_table(client_with, engine, table):
    """Ids become the texts that they are of, without special tokens; a text cut inside a letter stays valid."""
    ids = encode(TEXT)
    assert len(ids) < len(TEXT.encode())
    async with client_with(tiktoken_file=table) as client:
        assert [TEXT] == await embedded(client, engine, ids)
        assert [TEXT, "a"] == await embedded(client, engine, [ids, encode("a")])
        assert ["a"] == await embedded(client, engine, [[*encode("a"), min(SPECIAL_TOKENS)]])
        assert ["a\ufffd"] == await embedded(client, engine, [[97, 0xC3]])
        assert ["plain"] == await embedded(client, engine, "plain")


async def test_ids_that_are_not_in_the_table(client_with, table):
    """They are refused by the id, the place and the file."""
    async with client_with(tiktoken_file=table) as client:
        response = await client.post("/v1/embeddings", json={"input": [[97], [70000]]})
    assert 400 == response.status_code
    message = response.json()["error"]["message"]
    for part in ("input[1]", "70000", "small.tiktoken", "QUARTET_TIKTOKEN_FILE"):
        assert part in message


async def test_texts_of_ids_are_limited(client_with, tmp_path):
    """A few bytes of ids can be many of text, but not more than a body may have."""
    path = tmp_path / "long.tiktoken"
    path.write_text(f"{base64.b64encode(b'a' * 128).decode()} 0\n")
    async with client_with(tiktoken_file=path, max_body_bytes=1000) as client:
        response = await client.post("/v1/embeddings", json={"input": [[0] * 4] * 2})
    assert 400 == response.status_code
    assert "1000 characters" in response.json()["error"]["message"]


async def test_ids_of_the_models_own_tokenizer(client_with, engine):
    """Without a table they are read as the model's own: the log has one warning, and larger ids name what to set."""
    warn_of_ids.cache_clear()
    own = SimpleNamespace(get_vocab_size=lambda: 100, decode_batch=lambda ids, **_: ["a"])
    engine.encoder = SimpleNamespace(tokenizer=own)
    async with client_with() as client:
        with capture_logs() as logs:
            for _ in range(2):
                await embedded(client, engine, [5, 6])
        response = await client.post("/v1/embeddings", json={"input": [[70000]]})
    [line] = [line for line in logs if "advice" in line]
    message = response.json()["error"]["message"]
    for part in ("check_embedding_ctx_length=False", "QUARTET_TIKTOKEN_FILE", "migrate_openai.md"):
        assert part in message
        assert part in line["advice"]


async def test_model_of_a_task(client_with, engine, engines, monkeypatch):
    """Jina's `task` selects the model with the name MODEL-TASK, and its prompt of this name; else the model itself."""
    names = ["tiny"]
    monkeypatch.setattr(engines, "serves", lambda name: name in names)
    found = []
    monkeypatch.setattr(engines, "get", lambda name, _: found.append(name) or engine)
    body = {"input": "a", "model": "tiny", "task": "text-matching"}
    head = engine.manifest.heads["embeddings"]
    async with client_with() as client:
        assert 200 == (await client.post("/v1/embeddings", json=body)).status_code
        assert (["tiny"], None) == (found, engine.asked.prompt_name)
        names.append("tiny-text-matching")
        heads = {"embeddings": head.model_copy(update={"prompts": {"text-matching": "Match: "}})}
        monkeypatch.setattr(engine, "manifest", SimpleNamespace(heads=heads))
        assert 200 == (await client.post("/v1/embeddings", json=body)).status_code
    assert ["tiny", "tiny-text-matching"] == found
    assert "text-matching" == engine.asked.prompt_name

"""The tokenizer's routes on the tiny model: what they answer, and where large answers are made."""

import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import pytest_asyncio

from service.api import token_routes
from service.api.dialects import tei_dialect
from tests.served import app_of, living

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def real(tiny_bundle: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the application with the tiny model."""
    async with living(app_of(tiny_bundle)) as client:
        yield client


async def ask(client: httpx.AsyncClient, path: str, **body: Any) -> Any:
    return (await client.post(path, json=body)).raise_for_status().json()


async def test_tokens_have_their_places(real):
    """A token's text is `text[start:end]`, in code points or UTF-16; special tokens have no sequence."""
    text = "A café 🪁 Ada"
    for unit, encode in (("code_point", "utf-32-le"), ("utf16", "utf-16-le")):
        (found,) = (await ask(real, "/tokenize", inputs=text, offset_unit=unit))["results"]
        width = 4 if unit == "code_point" else 2
        units = text.encode(encode)
        parts = [
            units[width * token["start"] : width * token["end"]].decode(encode)
            for token in found["tokens"]
            if token["sequence"] == 0
        ]
        assert "".join(text.split()) == "".join(parts)
        assert [None, None] == [found["tokens"][place]["sequence"] for place in (0, -1)]
        assert (len(found["tokens"]), False) == (found["count"], found["truncated"])


async def test_pairs(real):
    """Tokens of the second text have places in it; pairs align with inputs."""
    answer = await ask(real, "/tokenize", inputs=["Ada", "Lise"], text_pair=["drew", "sold"])
    for first, second, found in zip(
        ("Ada", "Lise"), ("drew", "sold"), answer["results"], strict=True
    ):
        places = {0: first, 1: second}
        for sequence, text in places.items():
            own = [token for token in found["tokens"] if token["sequence"] == sequence]
            assert text == "".join(text[token["start"] : token["end"]] for token in own)
    refused = await real.post("/tokenize", json={"inputs": ["a"], "text_pair": ["b", "c"]})
    assert (422, "text_pair") == (refused.status_code, refused.json()["error"]["param"])


async def test_long_texts_are_marked(real):
    """Nothing is cut, and an input that the model would cut is marked."""
    answer = await ask(real, "/tokenize", inputs="sea " * 600)
    (found,) = answer["results"]
    assert (True, 512) == (found["truncated"], answer["max_length"])
    assert 600 < found["count"] == len(found["tokens"])


async def test_there_and_back(real):
    """Ids become the text again; special tokens stay out unless asked for."""
    (found,) = (await ask(real, "/tokenize", inputs="the old engine"))["results"]
    ids = [token["id"] for token in found["tokens"]]
    assert ["the old engine"] == (await ask(real, "/detokenize", ids=ids))["results"]
    (whole,) = (await ask(real, "/detokenize", ids=[ids], skip_special_tokens=False))["results"]
    assert "[CLS]" in whole


@pytest.mark.parametrize(
    ("ids", "status"),
    [([], 422), ([[1], 2], 422), ([True], 422), ([-1], 422), ([10**9], 422), ("a", 422)],
)
async def test_ids_are_checked(real, ids, status):
    """Only ids of the vocabulary are accepted."""
    answer = await real.post("/detokenize", json={"ids": ids})
    assert status == answer.status_code
    assert "ids" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("module", "path"), [(token_routes, "/tokenize"), (tei_dialect, "/tei/tokenize")]
)
async def test_large_answers_are_made_in_a_helper_thread(real, monkeypatch, module, path):
    """A list of many tokens does not hold up the event loop."""
    threads = []
    made = module.token_list

    def token_list(*arguments):
        threads.append(threading.current_thread())
        return made(*arguments)

    monkeypatch.setattr(module, "token_list", token_list)
    await ask(real, path, inputs="sea")
    await ask(real, path, inputs="sea " * 5000)
    assert threads[0] is threading.current_thread()
    assert threads[1] is not threading.current_thread()

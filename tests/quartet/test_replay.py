"""An answer is made again from its receipt, and what differs is named."""

import asyncio
import hashlib
import json
import shutil
import sys
from typing import Any

import numpy as np
import orjson
import pytest

from quartet import replay
from service.api import receipts
from service.bulk.predictor import post
from service.core.agreement import outline
from service.core.decode import EntitySpan, LabelScore, SparseVector
from service.embedded import EmbeddedService
from tests.head_bundles import save_head

ASK = {receipts.HEADER.lower().encode(): b"1"}
NAME = receipts.HEADER.lower().encode()
KEY = "a key of sixteen".replace(" ", "-")
TEXT = "Ada drew a comet in Turin."
TENSOR = {"name": "text", "shape": [1], "datatype": "BYTES"}
LONG = "at dawn " * 999  # which fails
BODIES: dict[str, tuple[dict[str, Any], list[str]]] = {
    "/embed": ({"inputs": TEXT, "normalize": False}, [TEXT]),
    "/classify": ({"inputs": [TEXT, LONG], "top_k": 1, "truncate": False, "on_error": "null"}, [TEXT, LONG]),
    "/ner": ({"inputs": [TEXT, TEXT]}, [TEXT, TEXT]),
    "/qa": ({"question": "Who?", "context": TEXT}, ["Who?", TEXT]),
    "/rerank": ({"query": "Who?", "documents": [TEXT, "b"], "head": "embeddings"}, ["Who?", TEXT, "b"]),
    "/analyze": ({"inputs": TEXT}, [TEXT]),
    "/attention": ({"inputs": TEXT, "layer": 1}, [TEXT]),
    "/tei/embed": ({"inputs": [TEXT], "truncate": True}, [TEXT]),
    "/v1/embeddings": ({"input": [TEXT], "model": "tiny"}, [TEXT]),
    "/cohere/v2/embed": ({"inputs": [{"content": [{"type": "text", "text": TEXT}]}], "model": "tiny"}, ["text", TEXT]),
    "/cohere/v2/rerank": ({"query": "Ada", "documents": [{"text": TEXT}], "model": "tiny"}, ["Ada", TEXT]),
    "/tei/predict": ({"inputs": [[TEXT, "b"]]}, [TEXT, "b"]),
    "/vllm/score": ({"data_1": TEXT, "data_2": [TEXT]}, [TEXT, TEXT]),
    "/v2/models/tiny/infer": ({"inputs": [{**TENSOR, "data": [TEXT]}]}, [TEXT]),
}  # fmt: skip


async def get(bundle: Any, path: str, body: Any, key: str = "") -> str:
    """The receipt of an answer."""
    keys: dict[str, Any] = {"receipt_key": key} if key else {}
    async with EmbeddedService(bundle, **keys) as service:
        content = json.dumps(body).encode()
        assert NAME not in (await post(service.app, path, content))[2]
        status, answer, headers = await post(service.app, path, content, ASK)
    assert 200 == status, answer
    return headers[NAME].decode()


def run(monkeypatch: Any, capsys: Any, *arguments: Any) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["quartet replay", *map(str, arguments)])
    status = replay.main()
    captured = capsys.readouterr()
    return status, captured.out + captured.err


@pytest.mark.parametrize("path", BODIES)
async def test_an_answer_is_made_again(path, tiny_bundle, masked_bundle):
    """From the receipt and the texts, which the receipt does not have."""
    body, texts = BODIES[path]
    bundle = masked_bundle if path == "/attention" else tiny_bundle
    old, is_signed = receipts.unseal(await get(bundle, path, body), "")
    assert is_signed is None
    assert "Ada" not in json.dumps(old)
    new = await replay.answer_again(bundle, old, texts, "")
    lines, is_equal = replay.compare(old, new)
    assert is_equal, lines
    assert [] == [line for line in lines if "DIFFERENT" in line or "now" in line]


def test_the_command_names_what_differs(tiny_bundle, gpu_bundle, tmp_path, monkeypatch, capsys):
    """Another text, another runtime, another bundle, a wrong signature."""
    receipt = asyncio.run(get(tiny_bundle, "/embed", {"inputs": TEXT}, KEY))
    same = (receipt, TEXT, "--model", tiny_bundle)
    status, shown = run(monkeypatch, capsys, *same)
    assert (0, True) == (status, "signature: not checked" in shown)
    monkeypatch.setenv("QUARTET_RECEIPT_KEY", KEY)
    status, shown = run(monkeypatch, capsys, *same)
    assert (0, True) == (status, "signature: valid" in shown)
    status, shown = run(monkeypatch, capsys, receipt, "another text", *same[2:])
    assert 1 == status
    assert "texts: DIFFERENT" in shown
    assert "numbers: differ by" in shown
    assert "BEYOND" in shown
    record, _ = receipts.unseal(receipt, "")
    content = orjson.dumps({**record, "runtime": "onnxruntime 1.20.0"})
    older = receipts.seal(receipts.encode(content), "another key")
    status, shown = run(monkeypatch, capsys, older, *same[1:])
    assert 1 == status
    assert "signature: WRONG" in shown
    assert "runtime: onnxruntime 1.20.0, now onnxruntime" in shown
    status, shown = run(monkeypatch, capsys, receipt, TEXT, "--model", gpu_bundle)
    assert 0 == status, "the same weights"
    assert f"bundle: {record['bundle']}, now" in shown


@pytest.mark.parametrize(
    ("arguments", "status", "reason"),
    [
        (["x.y", TEXT], 2, "no receipt"),
        (["{receipt}", TEXT, "more"], 3, "had 1 texts, not 2"),
        (["{receipt}", TEXT, "--model", "absent"], 3, "absent"),
    ],
)
def test_what_cannot_be_replayed(arguments, status, reason, tiny_bundle, monkeypatch, capsys):
    receipt = asyncio.run(get(tiny_bundle, "/embed", {"inputs": TEXT}))
    made = [one.replace("{receipt}", receipt) for one in arguments]
    model = [] if "--model" in made else ["--model", tiny_bundle]
    assert status == (found := run(monkeypatch, capsys, *made, *model))[0]
    assert reason in found[1]


def sketch(results: list[Any]) -> Any:
    """The sums of their numbers."""
    return outline(results)[1]


def test_sketches_are_as_far_apart_as_the_numbers():
    """Of vectors of several sizes, also of the same vectors in another order."""
    random = np.random.default_rng(0)
    ones = [random.normal(size=size).astype(np.float32) for size in (384, 384, 5000)]
    others = [one + random.normal(scale=1e-3, size=len(one)).astype(np.float32) for one in ones]
    apart = np.linalg.norm(sketch(ones) - sketch(others)) / 4
    assert 0.5 < apart / np.linalg.norm(np.concatenate(ones) - np.concatenate(others)) < 2
    assert np.linalg.norm(sketch(ones) - sketch([ones[1], ones[0], ones[2]])) > 1


def test_the_sketch_of_an_old_receipt_is_made_again():
    """The signs never change: of numbers, of vectors after the first, and of places of sparse vectors."""
    sparse = SparseVector(np.array([3, 9000]), np.array([1, 4], np.float32))
    found = sketch([np.arange(5, dtype=np.int8), 0.5, {"b": [LabelScore("x", 16.0)]}, None, sparse])
    expected = [25, -53, -41, -37, -17, -31, 41, 35, 37, -5, 35, 49, -49, 45, -63, -41]
    assert expected == (2 * found).tolist()
    # Spans are in the order of their texts, so 12 is before 9.
    spans = [EntitySpan("LOC", score, "a", start, 20) for score, start in ((1, 9), (2, 12), (4, 1))]
    expected = [-3, -5, -3, -5, -7, -3, 3, 1, -3, 7, 1, -7, -5, -7, -7, -7]
    assert expected == sketch([spans]).tolist()


async def test_the_answer_finds_the_first_part_made(tiny_bundle, monkeypatch):
    """It is made while the model runs, so that only the rest delays the answer."""
    found, finish = [], receipts.Draft.finish

    def note(draft: receipts.Draft, reply: Any) -> str:
        found.append(draft.beginning)
        return finish(draft, reply)

    monkeypatch.setattr(receipts.Draft, "finish", note)
    receipt = await get(tiny_bundle, "/embed", {"inputs": TEXT})
    assert found[0]
    assert receipt.startswith(found[0])


def test_a_receipt_fits_a_header():
    """One of thousands of texts does; one of long options is left out."""
    taken: list[str] = []
    mark = receipts.take([["a", "b"]] * 9, taken)
    assert 18 == len(taken)
    assert [["a", "b"]] * 9 == receipts.put(mark, iter(taken))
    assert {receipts.TEXTS: 5000} == receipts.take(["a"] * 5000, [])


async def test_a_receipt_of_binary_tensors_has_their_hash(tiny_bundle):
    """So it has no text, and their answer cannot be made again."""
    data = len(TEXT).to_bytes(4, "little") + TEXT.encode()
    tensor = {**TENSOR, "parameters": {"binary_data_size": len(data)}}
    content = json.dumps({"inputs": [tensor]}).encode()
    sizes = {b"inference-header-content-length": str(len(content)).encode()}
    async with EmbeddedService(tiny_bundle) as service:
        path = "/v2/models/tiny/infer"
        status, answer, headers = await post(service.app, path, content + data, ASK | sizes)
    assert 200 == status, answer
    record, _ = receipts.unseal(headers[NAME].decode(), "")
    assert hashlib.sha256(data).hexdigest() == record["body"]["inputs"][0]["data"]
    with pytest.raises(replay.ReplayError, match="answers 4"):
        await replay.answer_again(tiny_bundle, record, [], "")


async def test_an_answer_of_a_head_bundle_is_made_again(states_bundle, tmp_path, monkeypatch):
    """Its encoder is a bundle next to it; the receipt has the hash of the head, which has that of the encoder."""
    head = save_head(states_bundle, tmp_path / "head")
    content = json.dumps({"inputs": TEXT, "model": "head"}).encode()
    async with EmbeddedService(states_bundle, head) as service:
        _, _, headers = await post(service.app, "/classify", content, ASK)
    old, _ = receipts.unseal(headers[NAME].decode(), "")
    with pytest.raises(replay.ReplayError, match="no bundle in bundles/"):
        await replay.answer_again(head, old, [TEXT], "")
    shutil.copytree(states_bundle, tmp_path / "encoder")
    new = await replay.answer_again(head, old, [TEXT], "")
    assert replay.compare(old, new)[1]

"""Graphs of encoders that are not written here, exported by others' tools, are served and answer as in transformers."""

import json
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from export.__main__ import main as export
from service.core import decode
from service.core.encode import Encoder
from tests import samples
from tests.e2e.calls import close
from tests.e2e.conftest import Server, serving
from tests.given import INPUTS, LABELS, OUTPUTS, POSITIONS, TAGS, save_given, save_graph

pytestmark = pytest.mark.e2e

WORDS = (1, 3, 9, 2, 20, 35, 5, 12)
TEXTS = [samples.text(words, seed=words) for words in WORDS]
QUESTIONS = [f"Who {verb} it?" for verb in samples.VERBS]

Said = Callable[..., dict[str, np.ndarray]]  # what transformers' model gives for one text or pair
Call = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class Case:
    """An encoder with a task; `layout` is how its graph is to be served."""

    model_type: str
    task: str
    layout: str = "padded"
    place: str = "model.onnx"
    inputs: tuple[str, ...] = INPUTS
    shape: dict[str, Any] = field(default_factory=dict)
    dynamo: bool = False

    @property
    def name(self) -> str:
        return f"{self.model_type}-{self.task}"


CASES = [
    Case("squeezebert", "classification"),
    Case("ernie", "ner", place="onnx/model.onnx"),
    # Its positions begin behind the padding token's id, which the graph counts from its tokens.
    Case("data2vec-text", "ner", shape={"max_position_embeddings": POSITIONS + 1}),
    Case("megatron-bert", "qa"),
    Case("rembert", "embedding", shape={"eos_token_id": 3}),
    # These mix padding into what they compute.
    Case("convbert", "classification", "alone"),
    Case("fnet", "embedding", "alone", inputs=("input_ids", "token_type_ids"), dynamo=True),
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A directory of each, by name."""
    root = tmp_path_factory.mktemp("given")
    for case in CASES:
        model = save_given(root / case.name, case.model_type, case.task, **case.shape)
        path = root / case.name / case.place
        save_graph(path, model, OUTPUTS[case.task], case.inputs, dynamo=case.dynamo)
    return {case.name: root / case.name for case in CASES}


@pytest.fixture(scope="module")
def server(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """All of them in one service."""
    bundles = tmp_path_factory.mktemp("bundles")
    for name, folder in folders.items():
        assert 0 == export(["--onnx", "--no-memory", str(folder), str(bundles / name)]), name
    with serving(*(bundles / name for name in folders)) as server:
        yield server


def transformers_model(folder: Path) -> tuple[Said, Any]:
    """The model that a directory's graph was made from, fed as transformers feeds it; and its tokenizer."""
    config = json.loads((folder / "config.json").read_text())
    model = getattr(transformers, config["architectures"][0]).from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)

    def said(*texts: str) -> dict[str, np.ndarray]:
        encoded = tokenizer(*texts, return_tensors="pt")
        if config["model_type"] == "fnet":
            del encoded["attention_mask"]
        with torch.no_grad():
            found = model(**encoded)
        return {name: value.numpy()[0] for name, value in found.items()}

    return said, tokenizer


def classes(folder: Path) -> list[Any]:
    said, _ = transformers_model(folder)
    scores = [decode.softmax(said(text)["logits"]) for text in TEXTS]
    named = [zip(LABELS, map(float, own), strict=True) for own in scores]
    return [
        [{"label": label, "score": score} for label, score in sorted(own, key=lambda one: -one[1])]
        for own in named
    ]


def entities(folder: Path) -> list[Any]:
    """Every token whose likeliest tag is not O."""
    said, tokenizer = transformers_model(folder)
    expected = []
    for text in TEXTS:
        spans = tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
        scores = decode.softmax(said(text)["logits"])
        expected.append(
            [
                {
                    "entity": TAGS[own.argmax()],
                    "score": float(own.max()),
                    "word": text[start:end],
                    "start": start,
                    "end": end,
                }
                for own, (start, end) in zip(scores, spans, strict=True)
                if end > start and own.argmax() > 0
            ]
        )
    return expected


def answers(folder: Path) -> list[Any]:
    """Spans that transformers' logits stand for."""
    said, _ = transformers_model(folder)
    encoder = Encoder.from_file(folder / "tokenizer.json", POSITIONS)
    expected = []
    for question, text in zip(QUESTIONS, TEXTS, strict=True):
        found = said(question, text)
        logits = np.stack([found["start_logits"], found["end_logits"]], axis=-1)
        spans = decode.qa(
            encoder.questions([question], [text])[0].windows,
            [logits],
            text,
            top_k=3,
            handle_impossible_answer=False,
            null_threshold=0.0,
            max_answer_tokens=30,
        )
        expected.append([span._asdict() for span in spans])
    return expected


def vectors(folder: Path) -> list[Any]:
    said, _ = transformers_model(folder)
    means = [said(text)["last_hidden_state"].mean(axis=0) for text in TEXTS]
    return [(mean / np.linalg.norm(mean)).tolist() for mean in means]


EXPECTED = {"classification": classes, "ner": entities, "qa": answers, "embedding": vectors}


def call_for(case: Case, indices: list[int]) -> Call:
    """A request of some of the texts."""
    texts = [TEXTS[index] for index in indices]
    match case.task:
        case "classification":
            return "/classify", {"model": case.name, "inputs": texts}
        case "ner":
            asked = {"inputs": texts, "aggregation_strategy": "none"}
            return "/ner", {"model": case.name, **asked}
        case "qa":
            pairs = [{"question": QUESTIONS[i], "context": TEXTS[i]} for i in indices]
            asked = {"inputs": pairs, "top_k": 3, "handle_impossible_answer": False}
            return "/qa", {"model": case.name, **asked}
    return "/embed", {"model": case.name, "inputs": texts}


def results(answer: dict[str, Any]) -> list[Any]:
    return answer.get("results") or answer["embeddings"]


def assert_near(expected: Any, found: Any) -> None:
    """Equal, numbers to 1e-4."""
    if isinstance(expected, float):
        assert found == pytest.approx(expected, abs=1e-4)
    elif isinstance(expected, list):
        assert len(expected) == len(found)
        for one, other in zip(expected, found, strict=True):
            assert_near(one, other)
    elif isinstance(expected, dict):
        assert expected.keys() == found.keys()
        for key, one in expected.items():
            assert_near(one, found[key])
    else:
        assert expected == found


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_answers_are_those_of_transformers(server, folders, case):
    """Each text of one request has the expected values, to 1e-4; the values differ between texts."""
    expected = EXPECTED[case.task](folders[case.name])
    found = results(server.answer(*call_for(case, [*range(len(TEXTS))])))
    assert_near(expected, found)
    assert not close(found[3], found[4])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_many_at_once_get_what_each_gets_alone(server, case):
    """In batches, or in spite of them where a batch would change the answers."""
    every = [*range(len(TEXTS))]
    alone = [server.answer(*call_for(case, [index])) for index in every]
    many = call_for(case, every * 8)  # texts of one length wait for each other, so a batch forms
    with ThreadPoolExecutor(32) as clients:
        singles = clients.map(lambda index: server.post(*call_for(case, [index])), every * 8)
        together = server.post(*many)
        replies = [together, *singles]
    expected = [results(answer)[0] for answer in alone] * 8
    assert_near(expected, results(together.json()))
    assert all(close(a, b.json()) for a, b in zip(alone * 8, replies[1:], strict=True))
    sizes = [int(r.headers["x-quartet-batch"].split(";")[0].removeprefix("size=")) for r in replies]
    assert (max(sizes) > 1) is (case.layout == "padded")


def test_models_say_how_they_are_computed(server):
    """Each of its layout, on fp32."""
    said = {m["name"]: m for m in json.loads(server.get("/models").body)["models"]}
    assert {case.name: case.layout for case in CASES} == {n: m["layout"] for n, m in said.items()}
    assert {"fp32"} == {model["precision"] for model in said.values()}


@pytest.mark.slow
def test_the_real_minilm(minilm_folder, tmp_path):
    """Its graph, pooled as `modules.json` says, gives the vectors of sentence-transformers, padded."""
    peer = pytest.importorskip("sentence_transformers").SentenceTransformer(
        str(minilm_folder), device="cpu"
    )
    skipped = shutil.ignore_patterns("*.safetensors")
    folder = shutil.copytree(minilm_folder, tmp_path / "minilm", ignore=skipped)
    model = transformers.AutoModel.from_pretrained(minilm_folder).eval()
    save_graph(folder / "onnx" / "model.onnx", model, OUTPUTS["embedding"])
    assert 0 == export(["--onnx", "--no-memory", str(folder), str(tmp_path / "bundle")])
    texts = [*samples.STRANGE.values(), *TEXTS, samples.text(800)]
    with serving(tmp_path / "bundle") as server:
        (said,) = json.loads(server.get("/models").body)["models"]
        found = server.answer("/embed", {"inputs": texts})["embeddings"]
    assert "padded" == said["layout"]
    expected = peer.encode(texts, normalize_embeddings=True)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)

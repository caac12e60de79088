"""Sides that answer alike are found equal; each planted difference is found, and named."""

import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from quartet import compare
from quartet.comparison import figures, report, servers
from quartet.comparison.bundle_side import BundleSide
from quartet.comparison.causes import explain
from quartet.comparison.recipes import Recipe, positions
from quartet.comparison.sides import SideError
from service.core.agreement import distance
from service.core.decode import EntitySpan, LabelScore, SparseVector
from service.embedded import EmbeddedService
from tests import samples
from tests.conftest import run_export
from tests.e2e.conftest import serving
from tests.http_thread import QuietHandler, serving_in_thread
from tests.json_files import edit_json, editing

TEXTS = [samples.text(1 + index * 7 % 60, seed=index) for index in range(12)]
LONG = [samples.text(words, seed=words) for words in (150, 260, 400)]
NAMED = ["🚀 Angela Merkel went to Paris.", "The café of Zürich, 🎉 says Bob.", "Nothing here."]


def pool(mode: str) -> Callable[[Path], None]:
    return lambda folder: edit_json(
        folder / "1_Pooling" / "config.json", pooling_mode_mean_tokens=False, **{mode: True}
    )


def keep_length(folder: Path) -> None:
    modules = json.loads((folder / "modules.json").read_text())
    (folder / "modules.json").write_text(json.dumps(modules[:2]))


def keep_case(folder: Path) -> None:
    with editing(folder / "tokenizer.json") as described:
        described["normalizer"]["lowercase"] = False
    edit_json(folder / "tokenizer_config.json", do_lower_case=False)
    edit_json(folder / "sentence_bert_config.json", do_lower_case=False)


def setting(file: str, **fields: Any) -> Callable[[Path], None]:
    return lambda folder: edit_json(folder / file, **fields)


# Changes to the files of a checkpoint that sentence-transformers runs, and the cause and value that must be named.
CHECKPOINTS: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "cls": (pool("pooling_mode_cls_token"), "pooling", "cls"),
    "max": (pool("pooling_mode_max_tokens"), "pooling", "max"),
    "last": (pool("pooling_mode_lasttoken"), "pooling", "lasttoken"),
    "weighted": (pool("pooling_mode_weightedmean_tokens"), "pooling", "weightedmean"),
    "length": (keep_length, "normalize", "False"),
    "prompt": (
        setting(
            "config_sentence_transformers.json",
            prompts={"query": "query: "},
            default_prompt_name="query",
        ),
        "prompt",
        "'query: '",
    ),
    "short": (setting("sentence_bert_config.json", max_seq_length=64), "max_length", "64"),
    "long": (setting("sentence_bert_config.json", max_seq_length=512), "max_length", "512"),
    "left": (setting("tokenizer_config.json", truncation_side="left"), "truncation", "left"),
    "case": (keep_case, "lower_case", "False"),
    "fp16": (setting("config.json", dtype="float16", torch_dtype="float16"), "precision", "fp16"),
    "bf16": (setting("config.json", dtype="bfloat16", torch_dtype="bfloat16"), "precision", "bf16"),
}


def run(monkeypatch: Any, tmp_path: Path, a: Any, b: Any, *options: str, texts: Any = None) -> Any:
    """The exit status of the command, and its report."""
    rows = TEXTS if texts is None else texts
    is_text = isinstance(rows[0], str)
    file = tmp_path / ("texts.txt" if is_text else "texts.jsonl")
    file.write_text("\n".join(row if is_text else json.dumps(row) for row in rows))
    output = tmp_path / "report.json"
    made = [str(a), str(b), "--texts", str(file), "--json", str(output), *options]
    monkeypatch.setattr(sys, "argv", ["quartet compare", *made])
    status = compare.main()
    return status, json.loads(output.read_text()) if output.exists() else None


def causes(report: Any, side: str = "b") -> dict[str, str]:
    found: dict[str, str] = report["explanations"][side]["causes"]
    return found


# -- servers with planted differences -------------------------------------------------------------


@contextmanager
def answering(answer: Callable[[Any], Any]) -> Iterator[str]:
    """The URL of a server with the paths of the native API, which answers each body by a function."""

    class Handler(QuietHandler):
        def do_POST(self) -> None:
            self.reply(json.dumps(answer(json.loads(self.read_body()))).encode())

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    with serving_in_thread(server):
        yield f"http://127.0.0.1:{server.server_port}"


@pytest.fixture(scope="module")
def mini_server(mini_bundle: Path) -> Iterator[Any]:
    with serving(mini_bundle) as server:
        yield server


def other_labels(server: Any, body: Any) -> Any:
    names = {"negative": "positive", "positive": "negative", "neutral": "neutral"}
    [found] = server.answer("/classify", body)["results"]
    return [{**one, "label": names[one["label"]]} for one in found]


def in_bytes(server: Any, body: Any) -> Any:
    [found] = server.answer("/ner", body)["results"]
    text = body["inputs"]
    places = [len(text[:n].encode()) for n in range(len(text) + 1)]
    return [{**one, "start": places[one["start"]], "end": places[one["end"]]} for one in found]


def asked(path: str, **options: Any) -> Callable[[Any, Any], Any]:
    return lambda server, body: server.answer(path, {**body, **options})


HEADS: dict[str, tuple[str, Callable[[Any, Any], Any], str, str]] = {
    "sigmoid": ("labels", asked("/classify", function_to_apply="sigmoid"), "activation", "sigmoid"),
    "logits": ("labels", asked("/classify", function_to_apply="none"), "activation", "none"),
    "order": ("labels", other_labels, "labels", "positive"),
    "utf16": ("entities", asked("/ner", offset_unit="utf16"), "offset_unit", "utf16"),
    "bytes": ("entities", in_bytes, "offset_unit", "byte"),
    "joined": ("entities", asked("/ner", aggregation_strategy="none"), "aggregation", "none"),
}


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize("name", HEADS)
def test_a_difference_of_a_head_is_named(name, mini_bundle, mini_server, monkeypatch, tmp_path):
    """Of activation, names of labels, offsets and joined tokens."""
    task, answer, cause, value = HEADS[name]
    with answering(lambda body: answer(mini_server, body)) as url:
        options = ["--task", task, "--dialect-b", "plain"]
        texts = NAMED if task == "entities" else TEXTS
        _, report = run(monkeypatch, tmp_path, mini_bundle, url, *options, texts=texts)
    assert [cause] == [*causes(report)]
    assert value in causes(report)[cause]
    assert "fp32" == report["explanations"]["b"]["equal"]


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.parametrize(
    ("task", "prefix", "texts"),
    [
        ("labels", "", TEXTS),
        ("labels", "/tei", TEXTS),
        ("entities", "", NAMED),
        ("answers", "", [{"question": "Who went?", "context": text} for text in NAMED]),
        ("reranking", "", [{"query": TEXTS[0], "documents": TEXTS[1:6]}]),
        ("embeddings", "/infinity", TEXTS),
        ("embeddings", "/v1", TEXTS),
    ],
)
def test_a_bundle_and_its_server_are_equal(
    task, prefix, texts, mini_bundle, mini_server, monkeypatch, tmp_path, capsys
):
    """In the dialect that the server is found to speak."""
    url = mini_server.url + prefix
    head = ["--head", "embeddings"] if task == "reranking" else []
    status, report = run(
        monkeypatch,
        tmp_path,
        mini_bundle,
        url,
        "--task",
        task,
        "--html",
        str(tmp_path / "page"),
        *head,
        texts=texts,
    )
    assert 0 == status, capsys.readouterr()
    assert ({}, 1) == (report["explanations"], report["figures"]["same"])
    assert "A and B answer alike at fp32" in (tmp_path / "page").read_text()


# -- checkpoints with planted differences, with real weights ---------------------------------------


@pytest.fixture(scope="module")
def changed(minilm_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Make a copy of MiniLM's files with a change."""
    pytest.importorskip("sentence_transformers")

    def make(name: str) -> Path:
        folder = tmp_path_factory.mktemp("changed") / name
        shutil.copytree(minilm_folder, folder)
        CHECKPOINTS[name][0](folder)
        return folder

    return make


@pytest.mark.nightly
@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_difference_of_a_checkpoint_is_named(name, minilm_bundle, changed, monkeypatch, tmp_path):
    """sentence-transformers runs it with another pooling, prompt, truncation, tokenizer or precision."""
    _, cause, value = CHECKPOINTS[name]
    bundle = f"{minilm_bundle}:fp32"
    _, report = run(monkeypatch, tmp_path, bundle, changed(name), texts=TEXTS + LONG)
    assert [cause] == [*causes(report)]
    assert value in causes(report)[cause]
    expected = value if cause == "precision" else "fp32"
    assert expected == report["explanations"]["b"]["equal"]


@pytest.fixture(scope="module")
def torch_model(minilm_folder: Path) -> Any:
    transformers = pytest.importorskip("transformers")
    return (
        transformers.AutoTokenizer.from_pretrained(minilm_folder),
        transformers.AutoModel.from_pretrained(minilm_folder),
    )


def torch_vector(model: Any, text: str, change: str) -> list[float]:
    """MiniLM's vector of a text by transformers, with a fault of its inputs or its output."""
    import torch

    tokenizer, network = model
    padding = {"padding": "max_length"} if change == "padding" else {}
    inputs = tokenizer(text, return_tensors="pt", truncation=True, max_length=256, **padding)
    if change == "padding":
        inputs["attention_mask"][:] = 1
    if change == "token_type":
        inputs["token_type_ids"][:] = 1
    with torch.no_grad():
        vector = network(**inputs).last_hidden_state[0].mean(dim=0).numpy()
    vector = vector[:128] if change == "dimensions" else vector
    return [float(number) for number in vector / np.linalg.norm(vector)]


@pytest.mark.nightly
@pytest.mark.parametrize("change", ["", "padding", "token_type", "dimensions"])
def test_a_fault_of_inputs_is_named(change, minilm_bundle, torch_model, monkeypatch, tmp_path):
    """A server that passes other tensors to transformers; without a fault, it is equal."""
    with answering(
        lambda body: {"embeddings": [torch_vector(torch_model, body["inputs"], change)]}
    ) as url:
        made = f"{minilm_bundle}:fp32"
        status, report = run(monkeypatch, tmp_path, made, url, "--dialect-b", "plain")
    assert (not change) == (status == 0)
    if change:
        assert [change] == [*causes(report)]
        assert "fp32" == report["explanations"]["b"]["equal"]
    else:
        assert {} == report["explanations"]


@pytest.mark.slow
def test_answers_of_a_checkpoint_are_equal(monkeypatch, tmp_path):
    """transformers runs it, also on contexts of several windows."""
    pytest.importorskip("transformers")
    from tests.given import save_given

    save_given(tmp_path / "qa", "bert", "qa")
    run_export(tmp_path / "qa", tmp_path / "bundle", "--precision", "fp32")
    rows = [{"question": "Who went?", "context": text} for text in (*NAMED[:2], *TEXTS, *LONG)]
    status, report = run(monkeypatch, tmp_path, tmp_path / "bundle", tmp_path / "qa", texts=rows)
    assert (0, 17, {}) == (status, report["figures"]["texts"], report["explanations"])


@pytest.mark.slow
async def test_sparse_vectors_of_a_checkpoint_in_bf16(tmp_path):
    """They are read, although numpy has no bf16, and differ from those at fp32 by rounding."""
    pytest.importorskip("sentence_transformers")
    import torch
    import transformers

    from quartet.comparison.reference import Reference
    from tests import hub

    kind = transformers.AutoModelForMaskedLM
    folder = hub.save("bert", tmp_path / "fp32", kind, positions=128)
    rounded = Path(shutil.copytree(folder, tmp_path / "bf16"))
    kind.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(rounded)
    one, other = map(Reference, (str(folder), str(rounded)))
    for text in TEXTS[:4]:
        found = await other.answer("sparse", (text,))
        assert np.float32 == found.values.dtype
        apart = distance(await one.answer("sparse", (text,)), found)
        assert figures.EQUAL < apart < figures.ROUNDING["bf16"]


@pytest.mark.slow
def test_int8_is_recognized(minilm_bundle, changed, monkeypatch, tmp_path):
    """The bundle's own int8 graph makes the answers equal; two causes are found together."""
    bundle, other = f"{minilm_bundle}:fp32", f"{minilm_bundle}:int8"
    _, report = run(monkeypatch, tmp_path, bundle, other)
    assert ["precision"] == [*causes(report)]
    assert "fp32" == report["explanations"]["b"]["equal"]
    _, report = run(monkeypatch, tmp_path, other, changed("cls"))
    assert {"pooling", "precision"} == {*causes(report)}


@pytest.mark.slow
def test_an_unknown_difference_is_not_named(minilm_bundle, monkeypatch, tmp_path, capsys):
    """Other weights have no cause, and the report says how many ways were tried."""
    shuffled = np.random.default_rng(0)
    with answering(lambda _: {"embeddings": [shuffled.normal(size=384).tolist()]}) as url:
        status, report = run(monkeypatch, tmp_path, minilm_bundle, url, "--dialect-b", "plain")
    assert 1 == status
    found = report["explanations"]["b"]
    assert ({}, "") == (found["causes"], found["equal"])
    assert "is not explained" in capsys.readouterr().out


# -- parts ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "response", "answer"),
    [
        ("embeddings", [[0.5, 1.0]], [0.5, 1.0]),
        ("embeddings", {"data": [{"embedding": [0.5, 1.0]}]}, [0.5, 1.0]),
        ("embeddings", {"data": [{"embedding": "AAAAPwAAgD8="}]}, [0.5, 1.0]),
        ("embeddings", {"embeddings": {"float": [[0.5, 1.0]]}}, [0.5, 1.0]),
        ("embeddings", {"outputs": [{"name": "e", "data": [0.5, 1.0]}]}, [0.5, 1.0]),
        ("labels", [[{"label": "a", "score": 1}]], [LabelScore("a", 1)]),
        ("labels", {"data": [{"label": "a", "probs": [0.3, 0.7]}]}, [LabelScore("a", 0.7)]),
        ("entities", {"results": [[]]}, []),
        (
            "entities",
            [{"entity": "B-PER", "score": 0.5, "word": "Ada", "start": 0, "end": 3}],
            [EntitySpan("B-PER", 0.5, "Ada", 0, 3)],
        ),
        (
            "reranking",
            {"results": [{"index": 1, "relevance_score": 0.1}, {"index": 0, "relevance_score": 2}]},
            [LabelScore("0", 2), LabelScore("1", 0.1)],
        ),
    ],
)
def test_answers_of_any_dialect_are_read(task, response, answer):
    found = servers.READERS[task](response)
    assert answer == (found.tolist() if task == "embeddings" else found)


@pytest.mark.parametrize(
    "response",
    [
        [[{"index": 7, "value": 1}, {"index": 3, "value": 2}]],
        {"embeddings": [{"indices": [3, 7], "values": [2, 1]}]},
    ],
)
def test_sparse_answers_are_read(response):
    found = servers.sparse(response)
    assert ([3, 7], [2, 1]) == (found.indices.tolist(), found.values.tolist())


def test_figures_of_vectors():
    """An interval that contains the share; neighbors that are the same, or the opposite."""
    ones = [np.float32([np.cos(n), np.sin(n)]) for n in np.linspace(0, 1, 30)]
    found = figures.compare("embeddings", [*zip(ones, ones, strict=True)])
    assert (1, 1, 1) == (found["same"], found["cosine_min"], found["top10"])
    assert 0.88 < found["same_low"] < 1 == found["same_high"]
    assert figures.compare("embeddings", [*zip(ones, ones[::7] + ones, strict=False)])["top10"] < 1
    vectors = [SparseVector(np.array([n, n + 1]), np.float32([1, 0.5])) for n in range(4)]
    assert 1 == figures.compare("sparse", [*zip(vectors, vectors, strict=True)])["top10"]


def test_figures_of_rankings():
    one = [LabelScore(name, score) for name, score in (("0", 3.0), ("1", 2.0), ("2", 1.0))]
    found = figures.compare("reranking", [(one, one), (one, [one[0], one[2], one[1]])])
    assert (1, 0.5) == (found["same"], found["order_same"])
    assert 1 / 6 == pytest.approx(found["pairs_swapped"])


def test_positions_in_other_units():
    assert [0, 1, 3, 4] == positions("a🚀b", "utf16")
    assert [0, 1, 5, 7] == positions("a🚀é", "byte")


def test_limits_decide():
    found = {"same": 0.5, "failed": 0.0}
    assert [] == report.check(found, {"min": {"same": 0.5}, "max": {"failed": 0}})
    assert ["same is 0.5, at least 0.9"] == report.check(found, {"min": {"same": 0.9}})
    with pytest.raises(ValueError, match="--limits: no figure cosine"):
        report.check(found, {"min": {"cosine": 0.9}})


@pytest.mark.parametrize(
    ("b", "status", "reason"),
    [("http://127.0.0.1:9", 3, "refused"), ("./absent", 3, "./absent: no such directory")],
)
def test_sides_that_cannot_be_opened(b, status, reason, tiny_bundle, monkeypatch, tmp_path, capsys):
    assert (status, None) == run(monkeypatch, tmp_path, tiny_bundle, b)
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "causes"),
    [({}, []), ({"normalize": False}, ["normalize"]), ({"prompt": "query: "}, ["prompt"])],
)
async def test_a_difference_of_a_small_model_is_named(options, causes, tiny_bundle):
    """The vectors of the service with other options, of which a default one changes nothing."""
    texts = TEXTS[:5]
    async with EmbeddedService(tiny_bundle) as service:
        theirs = await service.embed(texts, **options)
    async with BundleSide(str(tiny_bundle)) as lab:
        found = await explain(lab, "embeddings", [(text,) for text in texts], theirs)
    assert (causes, "fp32") == ([*found.causes], found.equal)


@pytest.mark.slow
async def test_differences_of_pairs_and_of_sparse_vectors_are_named(tasks_bundle):
    """Of scores by another function, and of pairs without types of tokens; cut texts are not explained."""
    pairs: list[Any] = [(TEXTS[0], *TEXTS[4:9]), (TEXTS[1], *TEXTS[5:9])]
    async with EmbeddedService(tasks_bundle) as service, BundleSide(str(tasks_bundle)) as lab:

        async def causes_of(task: Any, items: Any, theirs: Any) -> Any:
            found = await explain(lab, task, items, theirs)
            assert "fp32" == found.equal
            return [*found.causes]

        ranked = [await service.rerank(query, list(own)) for query, *own in pairs]
        raw = [await service.rerank(q, list(own), raw_scores=True) for q, *own in pairs]
        for made, expected in ((ranked, []), (raw, ["activation"])):
            theirs = [[LabelScore(str(one.position), one.score) for one in own] for own in made]
            assert expected == await causes_of("reranking", pairs, theirs)
        untyped = [await lab.answer("reranking", own, Recipe(token_type=0)) for own in pairs]
        assert ["token_type"] == await causes_of("reranking", pairs, untyped)
        items = [(text,) for text in TEXTS]
        same = await service.embed_sparse(TEXTS)
        assert [] == await causes_of("sparse", items, same)
        first = await service.embed_sparse([" ".join(text.split()[:20]) for text in TEXTS])
        found = await explain(lab, "sparse", items, first)
        assert ([], "") == ([*found.causes], found.equal), "it is no cause that is tried"


@pytest.mark.parametrize(
    ("name", "content", "options", "reason"),
    [
        ("t.jsonl", '{"query": "a"}', ["--task", "reranking"], "row 1: reranking need query and"),
        ("t.jsonl", "{", [], "Expecting"),
        ("t.txt", "", [], "no texts"),
        ("t.txt", "a", ["--task", "answers"], "answers need .jsonl"),
        ("t.txt", "a", ["--header", "none"], "--header: 'none' is not NAME:VALUE"),
        ("t.txt", "a", ["--dialect-b", "none"], "--dialect-b: none is none of quartet, tei"),
    ],
)
def test_wrong_arguments(
    name, content, options, reason, tiny_bundle, monkeypatch, tmp_path, capsys
):
    (tmp_path / name).write_text(content)
    made = [str(tiny_bundle), "http://127.0.0.1:9", "--texts", str(tmp_path / name)]
    monkeypatch.setattr(sys, "argv", ["quartet compare", *made, "--dialect-b", "plain", *options])
    assert 2 == compare.main()
    assert reason in capsys.readouterr().err


async def test_the_dialect_of_a_server_can_be_named():
    """The errors of a server that the command does not understand name options that the command has."""
    known = compare.parser().format_help()
    with answering(lambda _: "text") as url:
        with pytest.raises(SideError, match="no known dialect") as unknown:
            servers.Server(url)
        with pytest.raises(SideError, match="returned no embeddings") as unread:
            await servers.Server(url, "plain").answer("embeddings", ("a",))
    for error in (unknown, unread):
        named = re.findall(r"--[a-z-]+", str(error.value))
        assert 2 == len(named) == sum(f"{name} " in known for name in named)


async def test_a_bundle_has_its_tasks(tiny_bundle):
    side = BundleSide(str(tiny_bundle))
    assert {"labels", "entities", "answers", "embeddings", "reranking"} == {*side.tasks}

"""Late interaction: vectors of tokens and scores equal the results of sentence-transformers' MultiVectorEncoder."""

import json
import shutil
import string
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from sentence_transformers import MultiVectorEncoder
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from tokenizers import Tokenizer

from export.__main__ import main as export
from export.external.onnx_source import read_external
from export.goldens import run_torch
from model.checkpoints import writer
from model.checkpoints.errors import CheckpointError
from model.checkpoints.source import MASKED_QUERIES, Source, read_source
from model.families.registry import FAMILIES
from service.core import decode
from service.core.decode import Floats
from service.core.encode import Encoder
from service.tasks.late_interaction import LateInteractionRanking, expanded, settings_of
from tests import hub, samples
from tests.conftest import run_export
from tests.e2e.conftest import serving
from tests.json_files import edit_json, editing
from tests.served import engine_of
from tests.service.fakes import ticket

HEAD = "late-interaction"
DIMENSIONS = 16
QUERIES = ["Who drew the map, and why?", samples.text(3, seed=3), samples.text(60, seed=4)]
DOCUMENTS = [samples.text(words, seed=words) for words in (1, 9, 20, 200)] + ["Ada (again), drew!"]
ROOT, SENTENCE = "config_sentence_transformers.json", "sentence_bert_config.json"
EXPANSIONS: dict[str, Any] = {
    "none": None,
    "fixed": {"strategy": "fixed", "length": 14},
    "attended": {"strategy": "fixed", "length": 14, "attend": True},
    "a floor": {"strategy": "min", "length": 14},
    "an attended floor": {"strategy": "min", "length": 14, "attend": True, "token": None},
}


def save(folder: Path, model_type: str = "bert", expansion: Any = None, **fields: Any) -> Path:
    """Write a small MultiVectorEncoder of random weights as sentence-transformers does; returns the folder."""
    plain = folder.with_name(f"{folder.name}-plain")
    hub.save(model_type, plain, transformers.AutoModel, num_hidden_layers=2)
    torch.manual_seed(2)
    width = hub.SHAPE["hidden_size"]
    dense = Dense(
        width,
        DIMENSIONS,
        bias=False,
        activation_function=torch.nn.Identity(),
        module_input_name="token_embeddings",
    )
    torch.nn.init.normal_(dense.linear.weight)
    lengths = {"query_length": None, "document_length": 24, **fields.pop("lengths", {})}
    modules = [
        Transformer(str(plain), query_expansion=expansion, **lengths),
        dense,
        MultiVectorMask(skiplist_words=fields.pop("skip", [*string.punctuation])),
        Normalize(module_input_name="token_embeddings"),
    ]
    prompts = fields.pop("prompts", {"query": "[Q] ", "document": "[D] "})
    model = MultiVectorEncoder(modules=modules, prompts=prompts, device="cpu", **fields)
    model.save(str(folder))
    return folder


def ours(source: Source, texts: Sequence[str], *, is_query: bool) -> list[Floats]:
    """The vectors that serving returns, from PyTorch."""
    head = source.model.described[HEAD]
    late = settings_of(head)
    encoder = Encoder(source.tokenizer, source.max_length)
    if is_query:
        cuts = encoder.prefixed(texts, prefix=late.query_prefix, length=late.query_length)
        cuts = [expanded(cut, late) for cut in cuts]
    else:
        cuts = encoder.prefixed(texts, prefix=late.document_prefix, length=late.document_length)
    windows = [cut.windows[0] for cut in cuts]
    outputs = [output[HEAD] for output in run_torch(source.model, windows)]
    skip = () if is_query else late.skip_token_ids
    return [
        decode.token_vectors([output], [window.input_ids], normalize=head.normalize, skip=skip)
        for output, window in zip(outputs, windows, strict=True)
    ]


def check(folder: Path) -> Source:
    """Vectors and scores are the reference's; returns the source."""
    source, reference = read_source(folder), MultiVectorEncoder(str(folder), device="cpu")
    # One by one: beyond the floor of "min", rows of the reference's batches contain padding.
    queries = [reference.encode_query(text, convert_to_numpy=True) for text in QUERIES]
    documents = reference.encode_document(DOCUMENTS, convert_to_numpy=True)
    found = ours(source, QUERIES, is_query=True), ours(source, DOCUMENTS, is_query=False)
    for one, other in zip([*found[0], *found[1]], [*queries, *documents], strict=True):
        assert one.shape == other.shape
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5)
    mean = settings_of(source.model.described[HEAD]).similarity == "meanmaxsim"
    expected = reference.similarity(queries, documents).numpy()
    scores = [decode.maxsim(query, found[1], mean=mean) for query in found[0]]
    np.testing.assert_allclose(scores, expected, rtol=0, atol=1e-5)
    assert np.ptp(expected) > 0.01  # the model tells the texts apart
    return source


@pytest.mark.parametrize("expansion", EXPANSIONS)
def test_expansion(expansion, tmp_path):
    """Queries are expanded as the reference does it, with tokens that others attend to or not."""
    source = check(save(tmp_path / "model", expansion=EXPANSIONS[expansion]))
    assert 24 == source.model.described[HEAD].late_interaction.document_length


@pytest.mark.parametrize("model_type", FAMILIES)
def test_families(model_type, tmp_path):
    """Every family; DeBERTa's attention hides masked tokens as queries, too, which is refused by name."""
    folder = save(tmp_path / "model", model_type, EXPANSIONS["fixed"])
    if model_type not in MASKED_QUERIES:
        check(folder)
        return
    with pytest.raises(CheckpointError, match=f"not supported for {model_type}"):
        read_source(folder)
    shutil.rmtree(folder)
    check(save(folder, model_type, EXPANSIONS["attended"]))


VARIANTS: dict[str, dict[str, Any]] = {
    "other lengths": {"lengths": {"query_length": 9, "document_length": 17}},
    "no lengths": {"lengths": {"document_length": None}},
    "the mean": {"similarity_fn_name": "meanmaxsim"},
    "no skipped words": {"skip": []},
    "an unknown word": {"skip": ["Ada", "no such token"]},
    "no prompts": {"prompts": {}},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants(variant, tmp_path):
    """Every setting has the reference's meaning."""
    check(save(tmp_path / "model", **VARIANTS[variant]))


@pytest.mark.parametrize("expansion", ["fixed", "a floor", "none"])
def test_written_again(expansion, tmp_path):
    """What is written here gives the reference's vectors there."""
    fields = {"lengths": {"query_length": 20}} if expansion == "a floor" else {}
    source = check(save(tmp_path / "theirs", expansion=EXPANSIONS[expansion], **fields))
    (tmp_path / "ours").mkdir()
    source.tokenizer.save(str(tmp_path / "ours" / "tokenizer.json"))
    writer.save_head(tmp_path / "ours", source.model, HEAD, tmp_path / "ours" / "tokenizer.json")
    assert source.model.described == check(tmp_path / "ours").model.described


PYLATE: dict[str, dict[str, Any]] = {
    "defaults": {},
    "attended": {"attend_to_expansion_tokens": True, "query_length": 12},
    "no expansion": {"do_query_expansion": False, "query_length": 12},
    "other words": {"skiplist_words": ["Ada", "."]},
    "a prompt": {"prompts": {"query": "search: ", "document": ""}},
    "before it named its models": {"model_type": None},
}


def save_pylate(folder: Path, prefixes: tuple[str, str], **fields: Any) -> Path:
    """Write a directory as PyLate does: Transformer and Dense, and all settings in one file."""
    hub.save("bert", folder, transformers.AutoModel, num_hidden_layers=2)
    weight = torch.randn(DIMENSIONS, hub.SHAPE["hidden_size"], generator=torch.manual_seed(3))
    (folder / "1_Dense").mkdir()
    save_file({"linear.weight": weight}, folder / "1_Dense" / "model.safetensors")
    root = {
        "model_type": "ColBERT",
        "query_prefix": prefixes[0],
        "document_prefix": prefixes[1],
        "query_length": 16,
        "document_length": 30,
        "attend_to_expansion_tokens": False,
        "similarity_fn_name": "MaxSim",
        **fields,
    }
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Dense", "type": "pylate.models.Dense.Dense"},
    ]
    dense = {"in_features": weight.shape[1], "out_features": DIMENSIONS, "bias": False}
    documents: dict[str, Any] = {
        ROOT: {name: value for name, value in root.items() if value is not None},
        SENTENCE: {"max_seq_length": 29, "do_lower_case": False},
        "modules.json": modules,
        "1_Dense/config.json": {**dense, "activation_function": "torch.nn.modules.linear.Identity"},
    }
    for name, document in documents.items():
        (folder / name).write_text(json.dumps(document), encoding="utf-8")
    return folder


@pytest.mark.parametrize("case", PYLATE)
def test_pylate(case, tmp_path):
    """The settings of PyLate, with punctuation as the words without a vector by default."""
    check(save_pylate(tmp_path / "model", ("[Q] ", "[D] "), **PYLATE[case]))


@pytest.mark.parametrize("added", [(), ("[unused0]", "[unused1]"), ("[unused0] ", "[unused1] ")])
def test_prefixes_of_the_vocabulary(added, tmp_path):
    """A prefix that is a token is one token before a text, although the tokenizer would split it."""
    folder = save_pylate(tmp_path / "model", ("[unused0] ", "[unused1] "))
    path = folder / "tokenizer.json"
    state = json.loads(path.read_text(encoding="utf-8"))
    vocabulary = state["model"]["vocab"]
    if added:  # rows that exist take other names
        replaced = [word for word, _ in sorted(vocabulary.items(), key=lambda item: -item[1])][:2]
        for word, token in zip(replaced, added, strict=True):
            vocabulary[token] = vocabulary.pop(word)
        path.write_text(json.dumps(state), encoding="utf-8")
    source = check(folder)
    encoder = Encoder(source.tokenizer, source.max_length)
    (cut,) = encoder.prefixed(["Ada"], prefix="[unused0] ")
    plain = len(encoder.prefixed(["Ada"])[0].windows[0])
    assert bool(added) == (len(cut.windows[0]) == plain + 1)
    assert Tokenizer.from_file(str(path)).encode("[unused0] ").tokens != list(added[:1])


def save_first(folder: Path, **metadata: Any) -> Path:
    """Write a checkpoint as the first ColBERT code does: the projection is a tensor next to those of the encoder."""
    hub.save("bert", folder, transformers.AutoModel, num_hidden_layers=2)
    weights = load_file(folder / "model.safetensors")
    weights = {f"bert.{name}": tensor for name, tensor in weights.items()}
    weight = torch.randn(DIMENSIONS, hub.SHAPE["hidden_size"], generator=torch.manual_seed(3))
    save_file({**weights, "linear.weight": weight}, folder / "model.safetensors", {"format": "pt"})
    with editing(folder / "config.json") as config:
        config["architectures"] = ["HF_ColBERT"]
    if metadata:
        (folder / "artifact.metadata").write_text(json.dumps(metadata), encoding="utf-8")
    return folder


FIRST: dict[str, dict[str, Any]] = {
    "no file": {},
    "lengths": {"query_maxlen": 16, "doc_maxlen": 30, "attend_to_mask_tokens": False},
    "no skip list": {"doc_maxlen": 30, "mask_punctuation": False, "attend_to_mask_tokens": True},
    "markers": {"query_token_id": "[unused2]", "doc_token_id": "[unused3]", "dim": DIMENSIONS},
}


@pytest.mark.parametrize("case", FIRST)
def test_first_code(case, tmp_path):
    """Checkpoints of the first ColBERT code: markers, expansion of queries, lengths and punctuation."""
    late = settings_of(check(save_first(tmp_path / "first", **FIRST[case])).model.described[HEAD])
    given = FIRST[case]
    assert given.get("query_maxlen", 32) == late.query_length == late.query_expansion
    assert given.get("attend_to_mask_tokens", False) is not late.hides_expansion
    assert given.get("mask_punctuation", True) is bool(late.skip_token_ids)


def test_first_code_is_refused(tmp_path):
    """Another task, and a checkpoint without its projection."""
    folder = save_first(tmp_path / "first")
    with pytest.raises(CheckpointError, match="leave out --task"):
        read_source(folder, "embedding")
    weights = load_file(folder / "model.safetensors")
    del weights["linear.weight"]
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"linear\.weight"):
        read_source(folder)


REFUSED: list[tuple[str, str, Any]] = [
    (SENTENCE, "query_expansion", {"strategy": "other", "length": 8}),
    (SENTENCE, "query_expansion", {"strategy": "fixed"}),
    (SENTENCE, "query_expansion", {"strategy": "fixed", "length": 8, "token": "no such token"}),
    (SENTENCE, "query_expansion", {"strategy": "fixed", "length": 8, "attend": "yes"}),
    (SENTENCE, "query_expansion", {"strategy": "fixed", "length": 8, "more": 1}),
    (SENTENCE, "query_length", "9"),
    (SENTENCE, "document_length", 0),
    ("2_MultiVectorMask/config.json", "skiplist_tasks", ["query", "document"]),
    ("2_MultiVectorMask/config.json", "keep_only_token_ids", [3]),
    ("2_MultiVectorMask/config.json", "skiplist_words", "!?"),
    ("1_Dense/config.json", "module_input_name", "sentence_embedding"),
    ("1_Dense/config.json", "module_output_name", "scores"),
    ("3_Normalize/config.json", "module_input_name", "sentence_embedding"),
]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("late") / "model")


@pytest.mark.parametrize(("file", "name", "value"), REFUSED)
def test_refused(file, name, value, saved, tmp_path):
    """A value that is not served is named in one line."""
    folder = shutil.copytree(saved, tmp_path / "model")
    edit_json(folder / file, **{name: value})
    with pytest.raises(CheckpointError, match=rf"^[^\n]*{name}[^\n]*$"):
        read_source(folder)


def test_precisions(saved, tmp_path, capsys):
    """CUDA's graph cannot hide the tokens that fill a query up, which is refused before anything is traced."""
    folder = save(tmp_path / "model", expansion=EXPANSIONS["fixed"])
    out = tmp_path / "bundle"
    assert 1 == export([str(folder), str(out), "--precision", "fp32", "fp16"])
    assert "--precision: fp16 cannot hide the query expansion" in capsys.readouterr().err
    assert not out.exists()


def test_what_has_no_such_head(saved, tmp_path):
    """The task alone makes no head, and neither does a graph."""
    plain = saved.with_name(f"{saved.name}-plain")
    with pytest.raises(CheckpointError, match=r"modules\.json is missing: late interaction needs"):
        read_source(plain, "late-interaction")
    with pytest.raises(CheckpointError, match="task late-interaction, and --task embedding"):
        read_source(saved, "embedding")
    folder = shutil.copytree(saved, tmp_path / "model")
    (folder / "model.onnx").write_bytes(b"")
    with pytest.raises(CheckpointError, match="cannot be served from an ONNX graph"):
        read_external(folder)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "expansion"),
    [("bert", "fixed"), ("bert", "attended"), ("mpnet", "fixed"), ("modernbert", "fixed")],
)
async def test_exported(model_type, expansion, tmp_path):
    """Exported and served, at either precision and over HTTP, a model gives the reference's vectors and scores.

    The attention of MPNet and ModernBERT has a bias, which hides the tokens that fill a query up.
    """
    folder = save(tmp_path / "model", model_type, EXPANSIONS[expansion])
    run_export(folder, tmp_path / "bundle", "--no-memory")
    reference = MultiVectorEncoder(str(folder), device="cpu")
    queries = reference.encode_query(QUERIES, convert_to_numpy=True)
    documents = reference.encode_document(DOCUMENTS, convert_to_numpy=True)
    expected = reference.similarity(queries, documents).numpy()
    limits = {"fp32": 1e-5, "int8": 1.0}

    for precision, limit in limits.items():
        async with engine_of(tmp_path / "bundle", precision=precision) as engine:
            for number, query in enumerate(QUERIES):
                task = LateInteractionRanking(query=query, documents=DOCUMENTS, truncate=True)
                reply = await engine.answer(task, ticket())
                scores = task.scores(engine, reply)
                np.testing.assert_allclose(scores, expected[number], rtol=0, atol=limit)
                for one, other in zip(reply.results, [*documents, queries[number]], strict=True):
                    assert one.shape == other.shape
                    np.testing.assert_allclose(one, other, rtol=0, atol=limit)
    with serving(tmp_path / "bundle", "--precision", "fp32") as server:
        body = {"query": QUERIES[0], "documents": DOCUMENTS, "head": HEAD, "truncate": True}
        results = server.answer("/rerank", body)["results"]
    scores = [one["score"] for one in sorted(results, key=lambda one: one["index"])]
    np.testing.assert_allclose(scores, expected[0], rtol=0, atol=1e-4)

"""Sparse heads: a small masked language model, and a small bge-m3."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import transformers
from sentence_transformers import SentenceTransformer, SparseEncoder

from export.goldens import run_torch
from model.checkpoints.errors import CheckpointError
from model.checkpoints.source import read_source
from model.families.registry import PRETRAINABLE
from service.core import decode
from service.core.encode import Encoder
from service.engines.engine import Engine, EngineTask
from service.tasks.analysis import Analysis
from service.tasks.late_interaction import LateInteractionRanking, TokenEmbedding
from service.tasks.reranking import HybridRanking
from service.tasks.similarity import VectorRanking
from service.tasks.sparse_embedding import SparseEmbedding, SparseRanking
from tests import hub, samples
from tests.conftest import run_export
from tests.e2e.conftest import serving
from tests.json_files import edit_json
from tests.served import engine_of
from tests.service.fakes import ticket

TEXTS = [
    "Paris is the capital of France.",
    "",
    "Café owners in São Paulo paid 3,50 € for it 😀.",
    samples.text(60, seed=3),
    samples.text(400, seed=4),
]


def compute(bundle: Path, precision: str, *tasks: EngineTask[Any]) -> list[list[Any]]:
    """Return the results of each task, or the scores of a ranking."""

    async def run() -> list[list[Any]]:
        async with engine_of(bundle, precision=precision) as engine:
            return [await results(engine, task) for task in tasks]

    return asyncio.run(run())


async def results(engine: Engine, task: EngineTask[Any]) -> list[Any]:
    heads = ("sparse-embedding",) if isinstance(task, SparseEmbedding | SparseRanking) else ()
    reply = await engine.answer(task, ticket(), heads)
    return [*task.scores(engine, reply)] if hasattr(task, "scores") else reply.results


def rows(found: Sequence[Any], size: int) -> Any:
    dense = np.zeros((len(found), size))
    for row, one in zip(dense, found, strict=True):
        row[one.indices] = one.values
    return dense


# -- SPLADE ---------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("activation", ["relu", "log1p_relu"])
def test_splade(tmp_path, activation):
    """A SparseEncoder's weights to 1e-5 at fp32, close at int8, the same in any company, from one stored table."""
    kind = transformers.AutoModelForMaskedLM
    plain = hub.save("bert", tmp_path / "checkpoint", kind, positions=128, hidden_size=128)
    encoder = SparseEncoder(str(plain))
    encoder[1].activation_function = activation
    encoder.max_seq_length = 128
    encoder.save_pretrained(str(tmp_path / "encoder"))
    run_export(tmp_path / "encoder", tmp_path / "bundle")
    expected = encoder.encode(TEXTS, convert_to_sparse_tensor=False).numpy()
    best = encoder.encode(TEXTS, max_active_dims=9, convert_to_sparse_tensor=False).numpy()

    for precision in ("fp32", "int8"):
        together, few, *alone = compute(
            tmp_path / "bundle",
            precision,
            SparseEmbedding(inputs=TEXTS),
            SparseEmbedding(inputs=TEXTS, top_k=9),
            *(SparseEmbedding(inputs=[text]) for text in TEXTS),
        )
        found = rows(together, expected.shape[1])
        assert np.array_equal(found, rows([one for (one,) in alone], expected.shape[1]))
        if precision == "fp32":
            np.testing.assert_allclose(found, expected, atol=1e-5)
            np.testing.assert_allclose(rows(few, expected.shape[1]), best, atol=1e-5)
        else:
            cosines = (found * expected).sum(1) / np.linalg.norm(found, axis=1)
            assert (cosines / np.linalg.norm(expected, axis=1)).min() > 0.98

    graph = onnx.load(tmp_path / "bundle" / "int8.onnx", load_external_data=False)
    tables = [one for one in graph.graph.initializer if [*one.dims] == [expected.shape[1], 128]]
    assert 1 == len(tables)


@pytest.mark.parametrize("model_type", PRETRAINABLE)
def test_masked_language_model_as_sparse(tmp_path, model_type):
    """A plain masked language model of any family has SparseEncoder's weights; one is exported and served."""
    folder = hub.save(model_type, tmp_path / "checkpoint", transformers.AutoModelForMaskedLM)
    expected = SparseEncoder(str(folder)).encode(TEXTS[:3], convert_to_sparse_tensor=False)
    source = read_source(folder, "sparse-embedding")
    (head,) = source.model.described.values()
    encoded = Encoder(source.tokenizer, source.max_length).texts(TEXTS[:3])
    outputs = run_torch(source.model, [text.windows[0] for text in encoded])
    activation = head.sparse.activation
    found = [decode.sparse_vector([*one.values()], activation=activation) for one in outputs]
    np.testing.assert_allclose(rows(found, expected.shape[1]), expected.numpy(), atol=1e-5)
    if model_type == "bert":
        run_export(folder, tmp_path / "bundle", "--task", "sparse-embedding", "--precision", "fp32")
        (found,) = compute(tmp_path / "bundle", "fp32", SparseEmbedding(inputs=TEXTS[:3]))
        np.testing.assert_allclose(rows(found, expected.shape[1]), expected.numpy(), atol=1e-5)


@pytest.mark.parametrize(
    ("file", "change", "named"),
    [
        ("1_SpladePooling/config.json", {"pooling_strategy": "sum"}, "pooling_strategy"),
        ("1_SpladePooling/config.json", {"activation_function": "gelu"}, "activation_function"),
        ("config_sentence_transformers.json", {"prompts": {"query": "q: "}}, "prompts"),
    ],
)
def test_refused_settings(tmp_path, file, change, named):
    """What would change the weights is refused by name."""
    plain = hub.save("bert", tmp_path / "checkpoint", transformers.AutoModelForMaskedLM)
    folder = tmp_path / "encoder"
    SparseEncoder(str(plain)).save_pretrained(str(folder))
    edit_json(folder / file, **change)
    with pytest.raises(CheckpointError, match=named):
        read_source(folder)


# -- bge-m3 ---------------------------------------------------------------------------------------


WIDTH = hub.SHAPE["hidden_size"]


@pytest.fixture(scope="module")
def bge(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the files of bge-m3, small and random: three heads on one XLM-R."""
    folder = tmp_path_factory.mktemp("bge") / "bge-m3"
    hub.save_sentence_transformer("xlm-roberta", folder, "cls", positions=128)
    torch.save(torch.nn.Linear(WIDTH, 1).state_dict(), folder / "sparse_linear.pt")
    torch.save(torch.nn.Linear(WIDTH, WIDTH).state_dict(), folder / "colbert_linear.pt")
    return folder


def bge_outputs(folder: Path, texts: Sequence[str]) -> list[tuple[dict[int, float], Any]]:
    """Return the weights and the vectors of each text, after the equations of the paper and FlagEmbedding's choices."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModel.from_pretrained(folder).eval()
    layers = {}
    for name, width in (("sparse", 1), ("colbert", WIDTH)):
        layers[name] = torch.nn.Linear(WIDTH, width)
        layers[name].load_state_dict(torch.load(folder / f"{name}_linear.pt", weights_only=True))
    unweighed = {tokenizer.cls_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id}
    unweighed.add(tokenizer.unk_token_id)
    found = []
    for text in texts:
        inputs = tokenizer(text, return_tensors="pt", truncation=True, max_length=128)
        with torch.no_grad():
            states = model(**inputs).last_hidden_state[0]
            weights = torch.relu(layers["sparse"](states))[:, 0].tolist()
            vectors = torch.nn.functional.normalize(layers["colbert"](states[1:]), dim=-1)
        own: dict[int, float] = {}
        for token, weight in zip(inputs["input_ids"][0].tolist(), weights, strict=True):
            if token not in unweighed and weight > 0:
                own[token] = max(weight, own.get(token, 0))
        found.append((own, vectors.numpy()))
    return found


def test_bge_m3(bge, tmp_path):
    """One bundle has the dense, the sparse and the token head, each with the reference's numbers, also together."""
    run_export(bge, tmp_path / "bundle")
    texts, query = [text for text in TEXTS if text], "Who painted the old engine?"
    expected = bge_outputs(bge, [query, *texts])

    rankings = {
        "sparse-embedding": SparseRanking(query=query, documents=texts, truncate=True),
        "late-interaction": LateInteractionRanking(query=query, documents=texts, truncate=True),
        "embedding": VectorRanking(source=query, inputs=texts),
    }
    weights = {"sparse-embedding": 0.2, "late-interaction": 0.8, "embedding": 1.0}
    tasks = [
        SparseEmbedding(inputs=[query, *texts]),
        TokenEmbedding(inputs=[query, *texts]),
        Analysis(inputs=[query, *texts], truncate=True),
        HybridRanking(rankings, weights),
        *rankings.values(),
    ]
    sparse, tokens, together, by_all, by_weights, by_tokens, by_vectors = compute(
        tmp_path / "bundle", "fp32", *tasks
    )

    vectors = SentenceTransformer(str(bge)).encode([query, *texts])
    for index, found in enumerate(together):
        np.testing.assert_allclose(found["embedding"], vectors[index], atol=1e-5)
        np.testing.assert_allclose(found["late-interaction"], tokens[index], atol=1e-5)
        assert found["sparse-embedding"].indices.tolist() == sparse[index].indices.tolist()
    np.testing.assert_allclose(by_vectors, vectors[1:] @ vectors[0], atol=1e-5)
    mean = 0.1 * np.array(by_weights) + 0.4 * np.array(by_tokens) + 0.5 * np.array(by_vectors)
    np.testing.assert_allclose(by_all, mean, atol=1e-5)
    assert 3 == len(compute(tmp_path / "bundle", "int8", tasks[2])[0][0])
    with serving(tmp_path / "bundle", "--precision", "fp32") as server:
        answer = server.answer("/analyze", {"inputs": query, "truncate": True})["results"][0]
        body = {"query": query, "documents": texts, "weights": weights, "truncate": True}
        ranked = server.answer("/rerank", body)["results"]
    for name in ("embedding", "late-interaction"):
        np.testing.assert_allclose(answer[name], together[0][name], atol=1e-4)
    values = answer["sparse-embedding"]["values"]
    np.testing.assert_allclose(values, sparse[0].values, atol=1e-4)
    scores = [one["score"] for one in sorted(ranked, key=lambda one: one["index"])]
    np.testing.assert_allclose(scores, by_all, atol=1e-4)

    for one, vectors, (weights, states) in zip(sparse, tokens, expected, strict=True):
        assert dict(zip(one.indices.tolist(), one.values.tolist(), strict=True)) == pytest.approx(
            weights, abs=1e-5
        )
        np.testing.assert_allclose(vectors, states, atol=1e-5)
    (asked, question), *others = expected
    for (weights, states), by_weight, by_token in zip(others, by_weights, by_tokens, strict=True):
        product = sum(weight * weights.get(token, 0) for token, weight in asked.items())
        assert by_weight == pytest.approx(product, abs=1e-5)
        assert by_token == pytest.approx((question @ states.T).max(1).mean(), abs=1e-5)


def test_bge_shapes_are_checked(bge, tmp_path):
    """A layer of another shape is refused with its file."""
    folder = tmp_path / "bge"
    folder.mkdir()
    for path in bge.iterdir():
        (folder / path.name).symlink_to(path)
    (folder / "sparse_linear.pt").unlink()
    torch.save(torch.nn.Linear(WIDTH, 2).state_dict(), folder / "sparse_linear.pt")
    with pytest.raises(CheckpointError, match=r"sparse_linear.pt: has the tensors"):
        read_source(folder)

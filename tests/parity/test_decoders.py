"""Decoders as encoders: directories in the layouts of their releases, exported and computed by the engine."""

import asyncio
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.base.modules import Dense, Normalize, Transformer
from sentence_transformers.sentence_transformer.modules import Pooling
from tokenizers.processors import ByteLevel

from export.goldens import run_torch
from model.checkpoints.source import read_source
from model.data import examples
from model.data.labelled_rows import Text
from service.core import decode
from service.core.encode import Encoder
from service.engines.engine import EngineTask
from service.tasks.classification import Classification
from service.tasks.embedding import Embedding
from service.tasks.reranking import Reranking
from tests import hub, samples
from tests.conftest import run_export
from tests.e2e.conftest import serving
from tests.json_files import edit_json
from tests.model.helpers import perturb
from tests.served import engine_of
from tests.service.fakes import ticket

pytestmark = pytest.mark.slow

TOLERANCE = {"rtol": 0.0, "atol": 1e-5}
TEXTS = [samples.text(words, seed=words) for words in (1, 3, 9, 20, 40)]
PROMPTS = {
    "query": "Instruct: Given a web search query, retrieve passages that answer it\nQuery:",
    "document": "",
}


def compute(bundle: Path, precision: str, *tasks: EngineTask[Any]) -> list[Sequence[Any]]:
    """Return the results of each task, or the scores of a ranking."""

    async def run() -> list[Sequence[Any]]:
        async with engine_of(bundle, precision=precision) as engine:
            found = []
            for task in tasks:
                reply = await engine.answer(task, ticket(), ())
                scores = hasattr(task, "scores")
                found.append(task.scores(engine, reply) if scores else reply.results)
            return found

    return asyncio.run(run())


def check_vectors(folder: Path, least: float) -> None:
    """Vectors of texts and of queries equal `encode`'s, batched, unbatched and over HTTP; int8's are close.

    least: the cosine at int8
    """
    run_export(folder, folder.with_name("bundle"), "--precision", "fp32", "int8")
    reference = SentenceTransformer(str(folder), device="cpu")
    expected = reference.encode(TEXTS), reference.encode(TEXTS, prompt_name="query")
    assert np.abs(expected[0] - expected[1]).max() > 1e-2
    tasks = [Embedding(inputs=TEXTS), Embedding(inputs=TEXTS, prompt_name="query")]
    alone = [Embedding(inputs=[text]) for text in TEXTS]
    for precision in ("fp32", "int8"):
        plain, asked, *ones = compute(folder.with_name("bundle"), precision, *tasks, *alone)
        np.testing.assert_allclose(np.stack(plain), [one for (one,) in ones], **TOLERANCE)
        for vectors, own in zip((plain, asked), expected, strict=True):
            if precision == "fp32":
                np.testing.assert_allclose(np.stack(vectors), own, **TOLERANCE)
            assert np.einsum("bd,bd->b", np.stack(vectors), own).min() > least
    with serving(folder.with_name("bundle"), "--precision", "fp32") as server:
        answer = server.answer("/embed", {"inputs": TEXTS, "prompt_name": "query"})
    np.testing.assert_allclose(answer["embeddings"], expected[1], atol=1e-4)


def test_qwen3_embedding(tmp_path):
    """A causal model's last token; `architectures` names a language model, without its output matrix."""
    folder = tmp_path / "model"
    hub.save_sentence_transformer("qwen3", folder, "lasttoken", PROMPTS, num_hidden_layers=1)
    edit_json(folder / "config.json", architectures=["Qwen3ForCausalLM"])
    check_vectors(folder, 0.99)


def test_embedding_gemma(tmp_path):
    """Attention in both directions, the mean, two dense layers without activations, and prompts for all texts."""
    folder = tmp_path / "model"
    fields = {"use_bidirectional_attention": True, "sliding_window": 6, "num_hidden_layers": 2}
    hub.save("gemma3_text", tmp_path / "plain", transformers.AutoModel, **fields)
    torch.manual_seed(0)
    wide, narrow = ({"bias": False, "activation_function": torch.nn.Identity()} for _ in range(2))
    parts = [Transformer(str(tmp_path / "plain")), Pooling(32, "mean")]
    parts += [Dense(32, 64, **wide), Dense(64, 32, **narrow), Normalize()]
    prompts = {"query": "task: search result | query: ", "document": "title: none | text: "}
    SentenceTransformer(modules=parts, device="cpu", prompts=prompts).save(str(folder))
    check_vectors(folder, 0.99)


QUESTIONS = [("What is a tram?", text) for text in TEXTS] + [("?", TEXTS[2]), ("", "tram\n\n yes")]
CHAT = ("<|im_start|>", "<|im_end|>", "<think>", "</think>")


def save_language_model(folder: Path, tied: bool) -> Path:
    """A small causal language model with tokens of chats, and with words for yes and no."""
    kind, fields = transformers.AutoModelForCausalLM, {"num_hidden_layers": 1}
    hub.save("qwen3", folder, kind, 1024, tie_word_embeddings=tied, **fields)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": [*CHAT]})
    tokenizer.add_tokens(["yes", "no"])
    tokenizer.backend_tokenizer.post_processor = ByteLevel(trim_offsets=False)
    tokenizer.save_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model.resize_token_embeddings(len(tokenizer))
    perturb(model, scale=0.2).save_pretrained(folder)
    return folder


def card_scores(folder: Path, pairs: Sequence[tuple[str, str]]) -> list[float]:
    """The scores of Qwen3-Reranker's model card: the probability of yes among yes and no."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    task = "Given a web search query, retrieve relevant passages that answer the query"
    start = (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct"
        ' provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
    )
    end = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    found = []
    for query, document in pairs:
        text = f"<Instruct>: {task}\n<Query>: {query}\n<Document>: {document}"
        parts = [tokenizer.encode(part, add_special_tokens=False) for part in (start, text, end)]
        with torch.no_grad():
            logits = model(torch.tensor([[*itertools.chain(*parts)]])).logits[0, -1]
        ids = tokenizer.convert_tokens_to_ids(["no", "yes"])
        found.append(torch.softmax(logits[ids], 0)[1].item())
    return found


CHAT_TEMPLATE = """<|im_start|>user
<Query>: {{ messages | selectattr("role", "eq", "query") | map(attribute="content") | first }}
<Document>: {{ messages | selectattr("role", "eq", "document") | map(attribute="content") | first }}<|im_end|>
<|im_start|>assistant
<think></think>
"""


@pytest.mark.parametrize("false_token", [True, False])
def test_logit_score(tmp_path, false_token):
    """A CrossEncoder of a language model has the scores of `predict`, by its own chat template."""
    plain = save_language_model(tmp_path / "plain", tied=True)
    (plain / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    reference = CrossEncoder(str(plain), device="cpu")
    if not false_token:
        reference[1].false_token_id = None
    reference.save_pretrained(str(tmp_path / "model"))
    source = read_source(tmp_path / "model")
    head = source.model.described["classification"]
    rows = [Text("", query, document) for query, document in QUESTIONS]  # as training reads them
    encoded = examples.encode(rows, head, Encoder(source.tokenizer, source.max_length), stride=0)
    outputs = run_torch(source.model, [text.windows[0] for (text,) in encoded])
    settings = {"problem_type": head.problem_type, "raw": False}
    found = [decode.relevance([one["classification"]], **settings) for one in outputs]
    np.testing.assert_allclose(found, reference.predict(QUESTIONS), **TOLERANCE)


@pytest.mark.parametrize("tied", [True, False])
def test_qwen3_reranker(tmp_path, tied):
    """A language model ranks by yes and no, as its model card does, for /rerank and for pairs of /classify."""
    folder = save_language_model(tmp_path / "model", tied)
    run_export(folder, tmp_path / "bundle", "--task", "classification", "--precision", "fp32")
    expected = card_scores(folder, QUESTIONS)
    assert np.ptp(expected) > 0.01
    queries, documents = ([*side] for side in zip(*QUESTIONS, strict=True))
    tasks = [Reranking(query=query, documents=[text]) for query, text in QUESTIONS]
    ranked = Reranking(query=queries[0], documents=TEXTS)
    pairs, ranking, *alone = compute(
        tmp_path / "bundle",
        "fp32",
        Classification(inputs=queries, text_pair=documents),
        ranked,
        *tasks,
    )
    np.testing.assert_allclose([label.score for (label,) in pairs], expected, **TOLERANCE)
    np.testing.assert_allclose(ranking, expected[: len(TEXTS)], **TOLERANCE)
    np.testing.assert_allclose([score for (score,) in alone], expected, **TOLERANCE)
    with serving(tmp_path / "bundle") as server:
        answer = server.answer("/rerank", {"query": queries[0], "documents": TEXTS})
    scores = [one["score"] for one in sorted(answer["results"], key=lambda one: one["index"])]
    np.testing.assert_allclose(scores, expected[: len(TEXTS)], atol=1e-4)

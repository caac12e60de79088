"""Decoders as encoders: directories in the layouts of their releases, exported and computed by the engine."""

import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sentence_transformers import SentenceTransformer

from service.engines.engine import EngineTask, Ticket
from service.observability.metrics import Metrics
from service.processes.single_process import open_local_engines
from service.settings import Settings
from service.tasks.embedding import Embedding
from tests import hub, samples
from tests.conftest import run_export

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
        settings = Settings(bundles=(bundle,), provider="cpu", threads=1, precision=precision)
        async with open_local_engines(Metrics(), settings) as engines:
            engine, found = engines.get(None), []
            for task in tasks:
                reply = await engine.answer(task, Ticket("a", deadline=time.monotonic() + 60), ())
                scores = hasattr(task, "scores")
                found.append(task.scores(engine, reply) if scores else reply.results)
            return found

    return asyncio.run(run())


def edit(path: Path, **fields: Any) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def check_vectors(folder: Path, least: float) -> None:
    """Vectors of texts and of queries equal `encode`'s, batched and unbatched; int8's are close. least: cosine"""
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


def test_qwen3_embedding(tmp_path):
    """A causal model's last token; `architectures` names a language model, without its output matrix."""
    folder = tmp_path / "model"
    hub.save_sentence_transformer("qwen3", folder, "lasttoken", PROMPTS, num_hidden_layers=1)
    edit(folder / "config.json", architectures=["Qwen3ForCausalLM"])
    check_vectors(folder, 0.99)

"""Adapters of peft are merged into the weights as transformers' modules would compute with them."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from sentence_transformers import SentenceTransformer

from export.goldens import run_torch
from model.checkpoints.adapters import merge_adapter
from model.checkpoints.errors import CheckpointError
from model.checkpoints.source import read_source
from service.core import decode
from service.core.encode import Encoder
from tests import hub
from tests.conftest import run_export
from tests.e2e.conftest import serving
from tests.json_files import edit_json

TASK = "retrieval_query"
TEXTS = ["Ada drew a comet.", "It rained in Turin, and nobody went out."]
SETTINGS = {"peft_type": "LORA", "r": 2, "lora_alpha": 1, "bias": "none", "use_dora": False}
# The names that peft gives the parts of an adapter, by transformers' class of the module.
PARTS = {
    torch.nn.Linear: ("lora_A.weight", "lora_B.weight"),
    torch.nn.Embedding: ("lora_embedding_A", "lora_embedding_B"),
}


def add_adapter(model: torch.nn.Module, folder: Path) -> None:
    """Write an adapter of all matrices of transformers' model, and add its products to the model."""
    parts = {}
    for name, module in model.named_modules():
        if kind := PARTS.get(type(module)):
            rows, columns = module.weight.shape
            is_table = isinstance(module, torch.nn.Embedding)
            inputs, outputs = (rows, columns) if is_table else (columns, rows)
            first, second = torch.randn(2, inputs), torch.randn(outputs, 2)
            for part, value in zip(kind, (first, second), strict=True):
                parts[f"base_model.model.{name}.{part}"] = value
            change = SETTINGS["lora_alpha"] / SETTINGS["r"] * second @ first
            module.weight.data += change.T if is_table else change
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(SETTINGS))
    save_file(parts, folder / "adapter_model.safetensors")


@pytest.fixture(scope="module", params=["jina_embeddings_v3", "bert"])
def adapted(request, tmp_path_factory) -> tuple[SentenceTransformer, Path]:
    """A checkpoint with an adapter in a folder, and the reference that computes with it."""
    folder = tmp_path_factory.mktemp("adapted") / "theirs"
    prompts = {"retrieval.query": "Find what answers: "}
    reference = hub.save_sentence_transformer(request.param, folder, prompts=prompts)
    with torch.random.fork_rng():
        torch.manual_seed(1)
        add_adapter(reference[0].auto_model, folder / TASK)
    return reference, folder


def test_vectors(adapted):
    """Vectors with the adapter equal those of the changed reference; the checkpoint does not change."""
    reference, folder = adapted
    found = {}
    for adapter in (None, TASK):
        source = read_source(folder, adapter=adapter)
        encoder = Encoder(source.tokenizer, source.max_length)
        outputs = run_torch(source.model, [one.windows[0] for one in encoder.texts(TEXTS)])
        found[adapter] = np.stack(
            [
                decode.embed([one["embedding"]], [1], normalize=True, dimensions=None)
                for one in outputs
            ]
        )
    expected = reference.encode(TEXTS)
    np.testing.assert_allclose(found[TASK], expected, rtol=0.0, atol=1e-5)
    assert np.abs(found[None] - expected).max() > 1e-2


@pytest.mark.e2e
@pytest.mark.slow
def test_served(adapted, tmp_path):
    """A request's `task` selects the bundle that was exported with its adapter, and the prompt of the task."""
    reference, folder = adapted
    names = "theirs", "theirs-retrieval.query"
    for name, flags in zip(names, ([], ["--adapter", TASK]), strict=True):
        run_export(folder, tmp_path / name, "--precision", "fp32", *flags)
    body = {"input": TEXTS, "model": "theirs"}
    with serving(*(tmp_path / name for name in names)) as server:
        plain, adapted_too = (
            server.answer("/v1/embeddings", {**body, "task": task})
            for task in ("separation", "retrieval.query")
        )
    assert ["theirs@1", "theirs-retrieval.query@1"] == [plain["model"], adapted_too["model"]]
    found, other = ([one["embedding"] for one in reply["data"]] for reply in (adapted_too, plain))
    expected = reference.encode(TEXTS, prompt_name="retrieval.query")
    np.testing.assert_allclose(found, expected, rtol=0.0, atol=1e-4)
    for others in (other, reference.encode(TEXTS)):
        assert np.abs(np.subtract(others, expected)).max() > 1e-2


@pytest.mark.parametrize(
    ("fields", "name", "message"),
    [
        ({}, "passage", f"adapters here: {TASK}"),
        ({"use_dora": True}, TASK, "use_dora"),
        ({"peft_type": "IA3"}, TASK, "LORA"),
    ],
)
def test_refusals(fields, name, message, adapted, tmp_path):
    """A folder without an adapter, and an adapter of another kind, are refused by name."""
    copy = tmp_path / "copy"
    copy.symlink_to(adapted[1])
    file = adapted[1] / TASK / "adapter_config.json"
    before = file.read_text()
    edit_json(file, **fields)
    try:
        with pytest.raises(CheckpointError, match=message):
            merge_adapter(copy, name)
    finally:
        file.write_text(before)


def test_other_modules(adapted):
    """An adapter of a module that the checkpoint does not have is refused by the module's name."""
    _, folder = adapted
    other = folder / "other"
    other.mkdir()
    (other / "adapter_config.json").write_text(json.dumps(SETTINGS))
    parts = {"a.lora_A.weight": torch.zeros(2, 3), "a.lora_B.weight": torch.zeros(3, 2)}
    save_file(parts, other / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=r"that of a$"):
        merge_adapter(folder, "other")

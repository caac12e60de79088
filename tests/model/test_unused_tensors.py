"""No tensor of a checkpoint is left out silently."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from model.checkpoints import reader
from model.checkpoints.errors import CheckpointError
from model.families.registry import FAMILIES, PRETRAINABLE
from tests.model.helpers import TOLERANCE, batch, ours, perturb, real, theirs
from tests.parity.test_config_settings import edit, fields_of

PACKED = batch([9, 1, 4])


def save(folder: Path, kind: Any, model_type: str = "bert", **fields: Any) -> Any:
    config = transformers.AutoConfig.for_model(model_type, **fields_of(model_type, **fields))
    make = kind if isinstance(kind, type) and hasattr(kind, "config_class") else kind.from_config
    peer = perturb(make(config)).eval()
    peer.save_pretrained(folder)
    return peer


def add(folder: Path, **tensors: torch.Tensor) -> None:
    path = folder / "model.safetensors"
    named = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    save_file({**load_file(path), **named}, path, metadata={"format": "pt"})


def test_quantized_weights(tmp_path):
    """Eight-bit weights with their scales in other tensors are refused by the method's name."""
    save(tmp_path, transformers.BertModel)
    edit(tmp_path, quantization_config={"quant_method": "bitsandbytes"})
    with pytest.raises(
        CheckpointError, match=r"config\.json: quantization_config = .*bitsandbytes"
    ):
        reader.load_model(tmp_path)


def test_unknown_tensor(tmp_path):
    """A tensor that no part uses is refused by name, for every reader of weights."""
    save(tmp_path, transformers.BertForPreTraining)
    add(tmp_path, bert__encoder__layer__0__output__dense__SCB=torch.ones(32))
    message = r"no part of a bert model uses the tensor bert\.encoder\.layer\.0\.output\.dense\.SCB"
    for load in (reader.load_encoder, reader.load_pretraining):
        with pytest.raises(CheckpointError, match=message):
            load(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        reader.load_model(tmp_path, "embedding")


PRETRAINED = [
    ("bert", transformers.AutoModelForPreTraining),
    ("albert", transformers.AutoModelForPreTraining),
    ("electra", transformers.AutoModelForPreTraining),
    *((name, transformers.AutoModelForMaskedLM) for name in PRETRAINABLE),
    *((name, transformers.AutoModelForCausalLM) for name in ("qwen3", "gemma3_text")),
]


@pytest.mark.parametrize(("model_type", "kind"), PRETRAINED)
def test_heads_of_pretraining(model_type, kind, tmp_path):
    """The heads of pretraining are left out of embedding models, as in transformers."""
    save(tmp_path, kind, model_type)
    add(tmp_path, embeddings__position_ids=torch.arange(64)[None])
    peer = transformers.AutoModel.from_pretrained(tmp_path).eval()
    packed = batch([9, 1, 4], seed=2)
    packed.input_ids[packed.input_ids < 2] = 5
    packed.token_type_ids[:] = 0
    arguments = {name: value for name, value in theirs(packed).items() if name != "token_type_ids"}
    with torch.no_grad():
        states = real(peer(**arguments).last_hidden_state, packed)
        expected = torch.stack([part.mean(0) for part in states.split(packed.lengths.tolist())])
        found = reader.load_model(tmp_path, "embedding")(*ours(packed))["embedding"]
    torch.testing.assert_close(found, expected, **TOLERANCE)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_pooler(model_type, tmp_path):
    """The pooler of an encoder with a head for tokens is left out, as transformers leaves it."""
    family = FAMILIES[model_type]
    if not family.encoder.has_pooler:
        pytest.skip("the family has no pooler")
    save(tmp_path, transformers.AutoModelForTokenClassification, model_type)
    (stem,) = family.encoder_names[r"pooler\.dense"]
    path = tmp_path / "model.safetensors"
    name = f"{family.prefix}{stem}.weight"
    save_file({**load_file(path), name: torch.ones(32, 32)}, path, metadata={"format": "pt"})
    peer = transformers.AutoModelForTokenClassification.from_pretrained(tmp_path).eval()
    assert not any(name.startswith(f"{family.prefix}pooler") for name in peer.state_dict())
    assert {"ner"} == reader.load_model(tmp_path).described.keys()


class TestTask:
    @pytest.mark.parametrize("architectures", [None, [], ["BertModel"]])
    def test_unnamed_head(self, architectures, tmp_path):
        """A head that `architectures` does not name is read by its task, and not left out without it."""
        peer = save(tmp_path, transformers.BertForSequenceClassification, num_labels=3)
        edit(tmp_path, architectures=architectures)
        with pytest.raises(CheckpointError, match=r"classifier\.bias is of a head .* --task"):
            reader.load_model(tmp_path)

        with torch.no_grad():
            expected = peer(**theirs(PACKED)).logits
            found = reader.load_model(tmp_path, "classification")(*ours(PACKED))
        torch.testing.assert_close(found["classification"], expected, **TOLERANCE)
        assert {"embedding"} == reader.load_model(tmp_path, "embedding").described.keys()

    def test_unknown_architecture(self, tmp_path):
        """The encoder of a class that Quartet does not have is read as an embedding model."""
        save(tmp_path, transformers.BertForNextSentencePrediction)
        with pytest.raises(
            CheckpointError, match=r"BertForNextSentencePrediction is none of .*--task"
        ):
            reader.load_model(tmp_path)
        assert {"embedding"} == reader.load_model(tmp_path, "embedding").described.keys()
        with pytest.raises(CheckpointError, match=r"tensors are missing: classifier"):
            reader.load_model(tmp_path, "ner")

    def test_contradiction(self, tmp_path):
        """A task that is not the one in `architectures` is refused."""
        save(tmp_path, transformers.BertForTokenClassification)
        with pytest.raises(
            CheckpointError, match="BertForTokenClassification, a ner head, and --task qa"
        ):
            reader.load_model(tmp_path, "qa")

    def test_joint(self, tmp_path):
        """The heads of a joint checkpoint are in `heads.json`, and no task is needed."""
        save(tmp_path, transformers.BertModel)
        (tmp_path / "heads.json").write_text("{}")
        with pytest.raises(
            CheckpointError, match=r"heads\.json names the heads .*leave out --task"
        ):
            reader.load_model(tmp_path, "ner")

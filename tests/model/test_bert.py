"""Our BERT is BERT: transformers' own, on random and on real weights, packed or not."""

import ast
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

import model
from model.bert import Bert
from model.checkpoints import reader
from model.config import preset
from model.training.capture import capture
from service.core import packing
from service.core.encode import Encoder
from service.core.packing import Packed
from tests.model.helpers import TOLERANCE, batch, ours, real, shape, theirs

TEXTS = [
    "What is the capital of France?",
    "Paris.",
    "A café in Zürich serves 漢字 and 😀, at 7.50 a cup, to whoever asks in three languages.",
    "",
    "the the the the the",
]


def states(encoder: Bert, packed: Packed) -> tuple[list[Tensor], Tensor]:
    """Every hidden state `[T, H]` and the pooler's output `[B, H]`."""
    arguments = ours(packed)
    with torch.no_grad(), capture(encoder) as captured:
        last = encoder(*arguments)
        assert encoder.pooler is not None
        return captured.hidden_states, encoder.pooler(last, arguments[-1])


def assert_parity(encoder: Bert, peer: transformers.BertModel, packed: Packed) -> None:
    """Every hidden state and the pooler's output agree at real tokens."""
    with torch.no_grad():
        expected = peer(**theirs(packed), output_hidden_states=True)
    found, pooled = states(encoder, packed)
    assert len(found) == encoder.config.num_hidden_layers + 1
    for hidden_states, peers in zip(found, expected.hidden_states, strict=True):
        torch.testing.assert_close(hidden_states, real(peers, packed), **TOLERANCE)
    torch.testing.assert_close(pooled, expected.pooler_output, **TOLERANCE)


@pytest.fixture(scope="module")
def real_pair(minilm: Path) -> tuple[Bert, transformers.BertModel]:
    """MiniLM, read by us and by transformers."""
    return reader.load_encoder(minilm), transformers.BertModel.from_pretrained(minilm).eval()


def windows(minilm: Path, texts: Sequence[str]) -> Packed:
    encoder = Encoder.from_file(minilm / "tokenizer.json", 512)
    encoded = encoder.texts(texts) + encoder.pairs(texts, texts[::-1])
    return packing.pack([window for item in encoded for window in item.windows])


def test_parity_on_real_weights(minilm, real_pair):
    """With the real MiniLM, real texts and pairs, all hidden states equal transformers' hidden states."""
    assert_parity(*real_pair, windows(minilm, TEXTS))


def test_parity_at_full_length(minilm, real_pair):
    """Every position of the real MiniLM, up to 512 tokens, is transformers'."""
    packed = windows(minilm, ["so it goes " * 300])

    assert packed.layout.longest == 512
    assert_parity(*real_pair, packed)


@pytest.mark.parametrize(("name", "count"), [("base", 109_482_240), ("large", 335_141_888)])
def test_parameter_counts(name, count):
    """BERT-base and BERT-large have as many parameters as Google's (uncased, with pooler)."""
    with torch.device("meta"):
        encoder = Bert(preset(name))

    assert sum(parameter.numel() for parameter in encoder.parameters()) == count


def test_initial_weights():
    """Weights start normal with the config's standard deviation, biases at zero, norms at one."""
    torch.manual_seed(0)
    encoder = Bert(shape(hidden_size=128, initializer_range=0.05))

    for name, parameter in encoder.named_parameters():
        if parameter.dim() == 2 and parameter.numel() > 1000:
            assert parameter.mean().abs() < 0.005, name
            assert parameter.std().item() == pytest.approx(0.05, rel=0.05), name
        elif parameter.dim() == 1:
            assert set(parameter.tolist()) == {float(name.endswith("norm.weight"))}, name


def test_dropout_is_for_training_only():
    """In training mode every pass has another dropout; in eval mode all passes give the same result."""
    encoder = Bert(shape(hidden_dropout_prob=0.3, attention_probs_dropout_prob=0.3))
    arguments = ours(batch([8, 3]))

    training = [encoder.train()(*arguments) for _ in range(2)]
    asked = [encoder.eval()(*arguments) for _ in range(2)]

    assert not torch.equal(*training)
    assert torch.equal(*asked)


@pytest.mark.parametrize("field", ["hidden_dropout_prob", "attention_probs_dropout_prob"])
def test_both_dropouts_work(field):
    """Either dropout alone changes a training pass."""
    none = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    encoder = Bert(shape(**{**none, field: 0.5})).train()
    arguments = ours(batch([8, 3]))

    assert not torch.equal(encoder(*arguments), encoder(*arguments))


def test_without_pooler():
    """An encoder without a pooler has none of its parameters."""
    encoder = Bert(shape(), pooler=False)

    assert encoder.pooler is None
    assert not [name for name in encoder.state_dict() if "pooler" in name]


def test_written_from_scratch():
    """No file of ours uses torch's ready-made transformer or attention modules."""
    ready_made = ("Transformer", "MultiheadAttention")
    files = sorted(Path(next(iter(model.__path__))).rglob("*.py"))
    assert "bert.py" in {file.name for file in files}

    hub_names = {
        (file.name, name)
        for file in files
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        for name in (getattr(node, "attr", None), getattr(node, "name", None))
        if isinstance(name, str) and name.startswith(ready_made)
    }

    assert hub_names == set()

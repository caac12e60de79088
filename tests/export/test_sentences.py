"""Bi-encoders and cross-encoders of every family are read from sentence-transformers and written for it."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from numpy.typing import NDArray
from sentence_transformers import CrossEncoder, SentenceTransformer

from export.__main__ import read_request
from export.from_checkpoint import choose_pooling
from export.goldens import run_torch
from model.checkpoints import head_config, writer
from model.checkpoints.errors import CheckpointError
from model.checkpoints.source import Source, read_source
from model.families.registry import FAMILIES
from service.core import decode
from service.core.encode import Encoder
from tests import hub, samples
from tests.json_files import edit_json

TOLERANCE = {"rtol": 0.0, "atol": 1e-5}
TEXTS = [*samples.STRANGE.values(), *(samples.text(words, seed=words) for words in (1, 9, 200))]
PAIRS = [*zip(TEXTS, reversed(TEXTS), strict=True), (TEXTS[-1], TEXTS[-1])]
ACTIVATIONS = {"sigmoid": torch.nn.Sigmoid(), "identity": torch.nn.Identity()}
PLAIN = "config_sentence_transformers.json", "modules.json", "sentence_bert_config.json"

every_family = pytest.mark.parametrize("model_type", FAMILIES)


def vectors(source: Source) -> NDArray[np.float32]:
    """What serving would answer to the texts."""
    head = source.model.described["embedding"]
    encoded = Encoder(source.tokenizer, source.max_length).texts(TEXTS)
    outputs = run_torch(source.model, [item.windows[0] for item in encoded])
    pooled = [output["embedding"] for output in outputs]
    return np.stack(
        [decode.embed([v], [1], normalize=head.normalize, dimensions=None) for v in pooled]
    )


def scores(source: Source) -> list[float]:
    """What serving would answer to the pairs."""
    head = source.model.described["classification"]
    firsts, seconds = ([*side] for side in zip(*PAIRS, strict=True))
    encoded = Encoder(source.tokenizer, source.max_length).pairs(firsts, seconds)
    outputs = run_torch(source.model, [item.windows[0] for item in encoded])
    read = {"labels": head.labels, "problem_type": head.problem_type, "top_k": None}
    return [decode.classify([o["classification"]], [1], **read)[0].score for o in outputs]


def save_ours(source: Source, task: str, folder: Path) -> str:
    """The one head of a source, written as training writes it."""
    source.tokenizer.save(str(folder / "tokenizer.json"))
    writer.save_head(folder, source.model, task, folder / "tokenizer.json")
    return str(folder)


@every_family
@pytest.mark.parametrize("pooling", ["mean", "cls", "lasttoken"])
def test_bi_encoders(model_type, pooling, tmp_path):
    """Vectors equal the vectors of `encode`, also after our checkpoint is read by sentence-transformers."""
    reference = hub.save_sentence_transformer(model_type, tmp_path / "theirs", pooling)
    source = read_source(tmp_path / "theirs")
    expected = reference.encode(TEXTS)
    assert source.max_length == reference.max_seq_length
    np.testing.assert_allclose(vectors(source), expected, **TOLERANCE)
    assert np.abs(expected[0] - expected[1]).max() > 1e-2

    (tmp_path / "ours").mkdir()
    again = SentenceTransformer(save_ours(source, "embedding", tmp_path / "ours"), device="cpu")
    np.testing.assert_allclose(again.encode(TEXTS), expected, **TOLERANCE)


def test_a_requested_pooling(tmp_path):
    """Without the files of sentence-transformers, `--pooling` gives the vectors of a model that had them."""
    reference = hub.save_sentence_transformer("bert", tmp_path / "theirs", "cls")
    expected = reference.encode(TEXTS)
    (tmp_path / "theirs" / "modules.json").unlink()
    shutil.rmtree(tmp_path / "theirs" / "1_Pooling")
    source = read_source(tmp_path / "theirs")
    assert np.abs(vectors(source) - expected).max() > 1e-2

    flags = [str(tmp_path / "theirs"), str(tmp_path / "out"), "--pooling", "cls"]
    choose_pooling(read_request(flags), source)

    np.testing.assert_allclose(vectors(source), expected, **TOLERANCE)


@every_family
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_cross_encoders(model_type, activation, tmp_path):
    """Scores equal the scores of `predict`, for long pairs and for the checkpoint that we write."""
    folder = tmp_path / "theirs"
    reference = hub.save_cross_encoder(model_type, folder, ACTIVATIONS[activation])
    source = read_source(folder)
    expected = reference.predict(PAIRS)
    np.testing.assert_allclose(scores(source), expected, **TOLERANCE)
    assert np.ptp(expected) > 1e-2

    (tmp_path / "ours").mkdir()
    again = CrossEncoder(save_ours(source, "classification", tmp_path / "ours"), device="cpu")
    np.testing.assert_allclose(again.predict(PAIRS), expected, **TOLERANCE)


# -- how a CrossEncoder says what becomes of its scores -------------------------------------------


IDENTITY, SIGMOID = head_config.IDENTITY, head_config.SIGMOID


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"sentence_transformers": {"activation_fn": IDENTITY, "version": "4.1.0"}},
        {"sentence_transformers": {"activation_fn": SIGMOID, "version": "5.0.0"}},
        {"sbert_ce_default_activation_function": IDENTITY},
        {"sbert_ce_default_activation_function": SIGMOID, "problem_type": "regression"},
        {
            "sentence_transformers": {"activation_fn": SIGMOID},
            "sbert_ce_default_activation_function": IDENTITY,
        },
    ],
    ids=["nothing", "identity", "sigmoid", "old identity", "old sigmoid", "both"],
)
def test_older_cross_encoders(said, tmp_path):
    """Checkpoints without modules.json state the activation in config.json; the default is a sigmoid."""
    hub.save("bert", tmp_path, transformers.AutoModelForSequenceClassification, num_labels=1)
    edit_json(tmp_path / "config.json", **said)
    expected = CrossEncoder(str(tmp_path), device="cpu").predict(PAIRS)
    np.testing.assert_allclose(scores(read_source(tmp_path)), expected, **TOLERANCE)


@pytest.mark.parametrize("activation", ["Identity", "Sigmoid"])
def test_cross_encoders_of_several_labels(activation, tmp_path):
    """Scores are a softmax, where `predict` returns logits by default, or a sigmoid."""
    kind = transformers.AutoModelForSequenceClassification
    plain = hub.save("roberta", tmp_path / "plain", kind, num_labels=3)
    reference = CrossEncoder(str(plain), activation_fn=getattr(torch.nn, activation)())
    reference.save(str(tmp_path / "saved"))
    expected = reference.predict(PAIRS, apply_softmax=activation == "Identity")
    np.testing.assert_allclose(
        scores(read_source(tmp_path / "saved")), expected.max(axis=1), **TOLERANCE
    )


def test_other_activations_are_refused(tmp_path):
    """The error has the activation's name, from every file that may state it."""
    hub.save_cross_encoder("bert", tmp_path / "a", torch.nn.Tanh())
    with pytest.raises(CheckpointError, match=r"cannot serve the activation torch.*\.Tanh"):
        read_source(tmp_path / "a")
    edit_json(tmp_path / "a/config_sentence_transformers.json", activation_fn=IDENTITY)
    read_source(tmp_path / "a")
    for name in PLAIN:
        (tmp_path / "a" / name).unlink()
    edit_json(tmp_path / "a/config.json", sentence_transformers={"activation_fn": "my.Scale"})
    with pytest.raises(CheckpointError, match=r"cannot serve the activation my\.Scale"):
        read_source(tmp_path / "a")


def test_other_cross_encoders_are_refused(tmp_path):
    """Those that are made of modules, and those that are no text classifiers."""
    hub.save_cross_encoder("bert", tmp_path / "a", torch.nn.Sigmoid())
    modules = json.loads((tmp_path / "a/modules.json").read_text())
    pooling = {
        "idx": 1,
        "name": "1",
        "path": "1_Pooling",
        "type": "sentence_transformers.models.Pooling",
    }
    (tmp_path / "a/modules.json").write_text(json.dumps([*modules, pooling]))
    with pytest.raises(CheckpointError, match="cannot serve Transformer, Pooling: they must be Tr"):
        read_source(tmp_path / "a")
    (tmp_path / "a/modules.json").write_text(json.dumps(modules))
    edit_json(tmp_path / "a/config.json", architectures=["BertForTokenClassification"])
    with pytest.raises(CheckpointError, match="a CrossEncoder that is no text classifier"):
        read_source(tmp_path / "a")

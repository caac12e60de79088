"""Checkpoints and models that several tests of this folder start from."""

from pathlib import Path

import pytest

from model.bert import Bert
from model.checkpoints import writer
from model.heads import EncoderWithHeads
from tests.model.checkpoints.helpers import HEADS
from tests.model.helpers import perturb, shape


@pytest.fixture
def joint() -> EncoderWithHeads:
    """A model with every kind of head."""
    heads = {kind.replace(" ", "_"): head for kind, head in HEADS.items()}
    return perturb(EncoderWithHeads(shape(), heads))


@pytest.fixture
def saved(tmp_path: Path, tokenizer_file: Path) -> Path:
    """A saved encoder whose files a test changes."""
    writer.save_encoder(tmp_path / "saved", perturb(Bert(shape())), tokenizer_file)
    return tmp_path / "saved"

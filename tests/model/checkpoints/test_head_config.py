"""The head that a checkpoint's files describe."""

import json

import pytest

from model.checkpoints import reader
from model.checkpoints.errors import CheckpointError


@pytest.mark.parametrize(
    ("config", "pooling"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode": "cls"}, "cls"),
        ({"pooling_mode_max_tokens": True}, "max"),
        ({"pooling_mode": ["lasttoken"]}, "lasttoken"),
        ({"pooling_mode": ["mean", "cls"]}, ("mean", "cls")),
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True}, ("cls", "mean")),
    ],
)
def test_pooling(config, pooling, saved):
    """How sentence-transformers pools a checkpoint is how we do, in both of its spellings."""
    (saved / "1_Pooling").mkdir()
    (saved / "1_Pooling" / "config.json").write_text(json.dumps(config))

    head = reader.read_heads(saved)["embedding"]
    assert pooling == head.pooling
    assert reader.read_config(saved).hidden_size * len(head.pooling_modes) == head.dimensions


@pytest.mark.parametrize(
    "config",
    [{"pooling_mode": "median"}, {"pooling_mode": ["mean", "median"]}],
)
def test_unknown_pooling(config, saved):
    """A pooling that is not ours is refused, not replaced."""
    (saved / "1_Pooling").mkdir()
    (saved / "1_Pooling" / "config.json").write_text(json.dumps(config))

    with pytest.raises(CheckpointError, match="cannot serve pooling median: mean, cls, max, "):
        reader.load_model(saved)

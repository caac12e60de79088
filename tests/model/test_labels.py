from pathlib import Path

import pytest
import transformers

from model.checkpoints.errors import CheckpointError
from model.checkpoints.head_config import read_labels

PATH = Path("folder/config.json")


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"num_labels": 3},
        {"id2label": {"1": "bad", "0": "good"}},
        {"id2label": {"0": "a", "1": "b"}, "num_labels": 2},
        {"id2label": {str(n): f"label {n}" for n in range(12)}},
        {"id2label": None, "num_labels": None} | {"num_labels": 1},
    ],
)
def test_labels_are_transformers(config):
    """Each index has the label that transformers reads for it."""
    theirs = transformers.BertConfig(**config)
    expected = tuple(theirs.id2label[index] for index in range(theirs.num_labels))
    assert expected == read_labels(PATH, config)


def test_numbers_become_text():
    """Labels that are numbers are answered as text."""
    assert ("1", "2.5") == read_labels(PATH, {"id2label": {"0": 1, "1": 2.5}})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"id2label": ["neg", "pos"]}, r"id2label = \['neg', 'pos'\] must be an object"),
        ({"id2label": "neg"}, "id2label = 'neg' must be an object"),
        ({"id2label": {}}, "id2label has the indices of no labels: number"),
        ({"id2label": {"1": "a", "2": "b"}}, "id2label has the indices 1, 2: number the labels"),
        ({"id2label": {"neg": "0", "pos": "1"}}, "id2label has the indices neg, pos"),
        ({"id2label": {"0": None}}, "id2label: label 0 = None must be text"),
        ({"id2label": {"0": ["a"]}}, r"id2label: label 0 = \['a'\] must be text"),
        ({"id2label": {"0": True}}, "id2label: label 0 = True must be text"),
        ({"id2label": {"0": "a", "1": "b"}, "num_labels": 3}, "num_labels = 3, but .* 2 labels"),
    ],
)
def test_other_labels(config, message):
    """Labels that cannot be numbered, or that disagree with their count, are refused by file and field."""
    with pytest.raises(CheckpointError, match=rf"^folder/config\.json: {message}"):
        read_labels(PATH, config)

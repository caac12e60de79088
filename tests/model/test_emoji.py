"""Emoji have tokens of their own, which begin as the words of their names."""

import json
import sys
from pathlib import Path

import pytest
import torch

from model import emoji
from model.checkpoints.source import read_source

ENCODER = Path(__file__).parents[2] / "encoders" / "quartet-base"


def test_a_checkpoint_gets_tokens_for_emoji(tmp_path, monkeypatch):
    """Next to a word, too; offsets are those of the text, and other text has the same tokens as before."""
    monkeypatch.setattr(sys, "argv", ["emoji", str(ENCODER), str(tmp_path / "out")])
    emoji.main()
    before, after = read_source(str(ENCODER)), read_source(str(tmp_path / "out"))
    encoded = after.tokenizer.encode("great😡!", add_special_tokens=False)
    assert encoded.tokens == ["great", "😡", "!"]
    assert encoded.offsets == [(0, 5), (5, 6), (6, 7)]
    text = "A café, unlike others: 3.5 stars"
    assert after.tokenizer.encode(text).ids == before.tokenizer.encode(text).ids
    words = before.model.encoder.embeddings.word.weight
    ids = before.tokenizer.encode("pouting", add_special_tokens=False).ids
    new = after.model.encoder.embeddings.word.weight[encoded.ids[1]]
    torch.testing.assert_close(new, words[ids].mean(dim=0), atol=1e-3, rtol=0)


def test_too_few_unused_tokens_are_an_error():
    tokenizer = {"model": {"vocab": {"[unused0]": 0, "a": 1}}, "added_tokens": []}
    assert emoji.add_tokens(json.loads(json.dumps(tokenizer)), {"😡": [], "a": []}) == {"😡": 0}
    with pytest.raises(ValueError, match="1 unused tokens for 2 emoji"):
        emoji.add_tokens(tokenizer, {"😡": [], "👍": []})

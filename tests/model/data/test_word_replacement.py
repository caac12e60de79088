"""Whole words become similar words, everywhere in a batch, and less often the further a run is."""

from pathlib import Path

import numpy as np
import pytest
import torch

from model.data import examples
from model.data.head_rows import HeadSettings
from model.data.losses import Batch
from model.data.word_replacement import Replacement, find_neighbors
from model.training import distillation
from service.core.encode import Encoder, load_tokenizer
from service.core.manifest import Head

CLASSES = Head(task="classification", labels=("a", "b"), problem_type="single_label_classification")


@pytest.fixture
def encoder(tokenizer_file: Path) -> Encoder:
    return Encoder(load_tokenizer(tokenizer_file), 64)


def ids(encoder: Encoder, word: str) -> list[int]:
    return encoder.tokenizer.encode(word, add_special_tokens=False).ids


def whole_words(encoder: Encoder) -> list[int]:
    return [
        i
        for token, i in encoder.tokenizer.get_vocab().items()
        if len(token) > 1 and token.isalpha()
    ]


def test_neighbors_are_the_most_similar_other_words(encoder):
    """By cosine, so the length of an embedding does not count; special tokens and pieces stay themselves."""
    size = encoder.tokenizer.get_vocab_size()
    embeddings = torch.randn(size, 16, generator=torch.Generator().manual_seed(1))
    first, second, *others = sorted(whole_words(encoder))
    embeddings[second] = 5 * embeddings[first]
    found = find_neighbors(encoder.tokenizer, embeddings, count=3)
    assert found.shape == (size, 3)
    assert (found[first][0], found[second][0]) == (second, first)
    assert set(found[others[0]]) <= {first, second, *others} - {others[0]}
    pieces = sorted(set(range(size)) - {first, second, *others})
    assert pieces
    assert (found[pieces] == np.asarray(pieces)[:, None]).all()


def test_a_small_vocabulary_has_no_neighbors(encoder):
    """Where there are fewer words than neighbors, all tokens stay."""
    size = encoder.tokenizer.get_vocab_size()
    found = find_neighbors(encoder.tokenizer, torch.randn(size, 4), count=size)
    assert (found == np.arange(size)[:, None]).all()


def shifted(encoder: Encoder, rate: float) -> Replacement:
    """Every token's only neighbor is the next one."""
    size = encoder.tokenizer.get_vocab_size()
    return Replacement(((np.arange(size) + 1) % size)[:, None], rate)


def test_whole_words_are_replaced_and_labels_stay(encoder):
    """Pieces of longer words and special tokens stay, and so does all but the ids of an encoding."""
    (pair,) = encoder.pairs(["Ada drew Noetherianism"], ["Noetherianism drew a comet"])
    (window,) = pair.windows
    labels = [np.asarray(1)]
    changed = shifted(encoder, 1.0).apply(Batch([window], labels), [1, 2], progress=0.0)
    (found,) = changed.encodings
    assert changed.labels is labels
    counted = [
        (window.words == word) & (window.sequence == text)
        for word, text in zip(window.words, window.sequence, strict=True)
    ]
    alone = np.asarray([np.sum(places) == 1 for places in counted]) & (window.words >= 0)
    assert 0 < alone.sum() < (window.words >= 0).sum()
    np.testing.assert_array_equal(found.input_ids, window.input_ids + alone)
    np.testing.assert_array_equal(found.offsets, window.offsets)
    np.testing.assert_array_equal(found.token_type_ids, window.token_type_ids)


def test_equal_words_stay_equal_in_a_batch(encoder):
    """So a question still shares its words with the text, and a pair its words with each other."""
    windows = [text.windows[0] for text in encoder.texts(["Ada drew a comet near the river"] * 8)]
    replacement = shifted(encoder, 0.5)
    changed = [
        replacement.apply(Batch(windows, []), [1, step], progress=0.0).encodings
        for step in range(8)
    ]
    for drawn in changed:
        assert all((window.input_ids == drawn[0].input_ids).all() for window in drawn)
    assert len({tuple(drawn[0].input_ids) for drawn in changed}) > 1


def test_replacement_follows_from_seed_and_ends_with_the_run(encoder):
    """The same seed replaces the same words, fewer as the run goes on and none at its end."""
    windows = [text.windows[0] for text in encoder.texts(["Ada drew a comet near the river"])]
    replacement = shifted(encoder, 0.5)

    def count(progress):
        drawn = [
            replacement.apply(Batch(windows, []), [1, step], progress).encodings[0]
            for step in range(100)
        ]
        return sum(int((window.input_ids != windows[0].input_ids).sum()) for window in drawn)

    assert count(0.0) == count(0.0)
    assert count(0.0) > count(0.5) > count(1.0) == 0


def test_words_are_replaced_where_a_teacher_answers(tokenizer_file):
    """Without a teacher, an altered text would have the label of another."""
    encoder = Encoder(load_tokenizer(tokenizer_file), 32)
    settings = HeadSettings(task="classification", train=[], replace_words=0.3)
    rows = [examples.Text("here", "Ada drew a comet.", None, (label,)) for label in "ab"]
    with pytest.raises(ValueError, match=r"heads\.mood: replace_words requires a teacher"):
        distillation.training_tasks(rows, "mood", CLASSES, settings, encoder, None)


def test_a_share_of_words_is_from_0_to_1():
    with pytest.raises(
        ValueError, match=r"replace_words: Input should be less than or equal to 1, not 1\.5"
    ):
        HeadSettings(task="classification", train=[], replace_words=1.5)

"""Replacement of words by similar words, as data augmentation for distillation (Jiao et al. 2020, TinyBERT).

A small data set has few texts, and a teacher can label many more. A word of one token is replaced by another of one
token, so the labels of tokens and the positions of answers remain valid.

V vocabulary, W words that one token spells, K neighbors, H hidden
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import tokenizers
import torch
import torch.nn.functional as F
from torch import Tensor

from model.data.losses import Batch
from service.core.encode import Encoding
from service.core.packing import Ints

NEIGHBORS = 8
CHUNK = 1024  # words whose similarities are computed at once


@dataclass(frozen=True)
class Replacement:
    """The neighbors of each token, and the share of a batch's different words that are replaced.

    neighbors: `[V, K]`; the row of a token that is no word contains the token itself
    rate: at the first step of a run; it falls linearly to zero at the last
    """

    neighbors: Ints
    rate: float

    def apply(self, batch: Batch, seed: Sequence[int], progress: float) -> Batch:
        """Replace words of a batch as a pure function of the seed.

        A word becomes the same word everywhere in the batch, so a question still shares its words with the text.
        progress: from 0 at the first step to 1 at the last
        """
        rng = np.random.default_rng(seed)
        size, choices = self.neighbors.shape
        chosen = self.neighbors[np.arange(size), rng.integers(choices, size=size)]
        replaced = rng.random(size) < self.rate * (1 - progress)
        table = np.where(replaced, chosen, np.arange(size))  # [V]
        encodings = [_replace_words(encoding, table) for encoding in batch.encodings]
        return replace(batch, encodings=encodings)


def _replace_words(encoding: Encoding, table: Ints) -> Encoding:
    """Exchange the tokens that are a whole word; pieces of longer words stay."""
    ids, words = encoding.input_ids, encoding.words
    # A word has an index and a text: both texts of a pair count from 0.
    places = np.where(words >= 0, words + (words.max(initial=0) + 1) * (encoding.sequence == 1), -1)
    whole = (places >= 0) & (np.bincount(places + 1)[places + 1] == 1)
    return replace(encoding, input_ids=np.where(whole, table[ids], ids))


def find_neighbors(
    tokenizer: tokenizers.Tokenizer, embeddings: Tensor, count: int = NEIGHBORS
) -> Ints:
    """Find the words whose embeddings are most similar to each word's, by cosine: `[V, K]`.

    embeddings: `[V, H]`, of the tokenizer's tokens
    """
    vocabulary = tokenizer.get_vocab()
    words = np.asarray(sorted(i for token, i in vocabulary.items() if _is_word(token)))
    found = np.repeat(np.arange(len(embeddings))[:, None], count, axis=1)
    if len(words) <= count:
        return found
    vectors = F.normalize(embeddings.detach().float().cpu()[torch.as_tensor(words)], dim=1)
    for start in range(0, len(words), CHUNK):
        similar = vectors[start : start + CHUNK] @ vectors.T  # [CHUNK, W]
        rows = torch.arange(len(similar))
        similar[rows, start + rows] = -torch.inf  # the word itself
        found[words[start : start + CHUNK]] = words[similar.topk(count, dim=1).indices.numpy()]
    return found


def _is_word(token: str) -> bool:
    """Whether a token is a word of two letters or more and not a later piece of one."""
    return len(token) > 1 and token.isalpha()

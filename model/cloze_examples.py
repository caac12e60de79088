"""Sentences with one masked token, whose predictions show the progress of pretraining."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import tokenizers
import torch
from torch import nn

from model import attention_map
from model.data import examples
from model.data.corpus import Corpus
from model.data.pretraining_batches import Specials
from model.report import page
from model.report.page import Figure, Section
from service.core.encode import Window
from service.core.packing import Ints

SENTENCES = 6
LENGTHS = (8, 24)  # tokens of a sentence
MOST_COLUMNS = 6  # evaluations in the table
MOST_LAYERS, MOST_HEADS = 3, 4  # of the picture of attention
TOP = 3  # predictions


@dataclass(frozen=True)
class ClozeExample:
    """A sentence with one masked token."""

    text: str  # with the mask in its place
    window: Window  # its tokens and segments
    place: int  # index of the masked token in the window
    answer: int  # the masked token's id


def choose(
    text: Corpus, specials: Specials, tokenizer: tokenizers.Tokenizer, longest: int, seed: int
) -> list[ClozeExample]:
    """Return sentences of a corpus, each with a masked token of letters. longest: tokens of a window"""
    rng = np.random.default_rng(seed)
    lengths = np.diff(text.sentence_starts)
    most = min(LENGTHS[1], specials.room(longest))
    fitting = np.flatnonzero((lengths >= min(LENGTHS[0], most)) & (lengths <= most))
    chosen: list[ClozeExample] = []
    for sentence in rng.permutation(fitting).tolist():
        ids = text.tokens(sentence, sentence + 1)
        words = [at for at, token in enumerate(ids) if _is_word(tokenizer, int(token))]
        if not words:
            continue
        at = int(rng.choice(words))
        chosen.append(_mask(ids, at, specials, tokenizer))
        if len(chosen) == SENTENCES:
            break
    return chosen


def _is_word(tokenizer: tokenizers.Tokenizer, token: int) -> bool:
    name = tokenizer.id_to_token(token)
    return not name.startswith("##") and sum(map(str.isalpha, name)) >= 3


def _mask(ids: Ints, at: int, specials: Specials, tokenizer: tokenizers.Tokenizer) -> ClozeExample:
    masked = ids.copy()
    masked[at] = specials.mask
    window = Window(*specials.around(masked))
    place = int(np.flatnonzero(window.input_ids == specials.mask)[0])
    text = " ".join(
        filter(
            None,
            (tokenizer.decode(ids[:at].tolist()), "▢", tokenizer.decode(ids[at + 1 :].tolist())),
        )
    )
    return ClozeExample(text, window, place, int(ids[at]))


@torch.no_grad()
def predict(
    model: nn.Module, chosen: Sequence[ClozeExample], tokenizer: tokenizers.Tokenizer
) -> list[list[tuple[str, float]]]:
    """Return the best tokens for each example, with their probabilities, and last the right one."""
    training = model.training
    model.eval()
    device = next(model.parameters()).device
    found = []
    with torch.random.fork_rng():
        for example in chosen:
            masked = torch.tensor([example.place], device=device)
            labels = torch.tensor([example.answer], device=device)
            inputs = examples.pack([example.window], device)
            pair = torch.zeros(1, dtype=torch.long, device=device)
            logits, _ = model.predictions(inputs, masked, labels, pair)["mlm"]  # [1, V]
            shares = logits[0].float().softmax(-1)
            best = shares.topk(min(TOP, len(shares)))
            pairs = [*zip(best.indices.tolist(), best.values.tolist(), strict=True)]
            pairs.append((example.answer, shares[example.answer].item()))
            found.append([(tokenizer.id_to_token(token), share) for token, share in pairs])
    model.train(training)
    return found


def describe(
    chosen: Sequence[ClozeExample],
    over_time: Sequence[tuple[int, list[list[tuple[str, float]]]]],
    what: str,
) -> Section:
    """Return the predictions as a table: a row for each sentence of `what`, a column for some steps of `over_time`."""
    places = np.unique(
        np.linspace(0, len(over_time) - 1, min(MOST_COLUMNS, len(over_time))).round()
    )
    columns = [over_time[int(place)] for place in places]
    rows: list[list[Any]] = []
    for number, example in enumerate(chosen):
        cells = [_cell(found[number]) for _, found in columns]
        answer = columns[-1][1][number][-1][0] if columns else ""
        rows.append([example.text, answer, *cells])
    head = ["sentence", "masked token", *(f"step {step:,}" for step, _ in columns)]
    body = page.note(f"Sentences of {what}; the color is the probability of the masked token.")
    return Section(
        "cloze", "Cloze examples", body + page.table(head, rows, [0, *range(2, len(head))])
    )


def _cell(found: list[tuple[str, float]]) -> Figure:
    *best, (_, right) = found
    lines = [f"{token} {share:.1%}" for token, share in best]
    return Figure("\n".join([*lines, f"(right: {right:.1%})"]), right)


def attention(model: nn.Module, example: ClozeExample, tokenizer: tokenizers.Tokenizer) -> Section:
    """Return a picture of the attention of some layers and heads for an example, by a model on any device."""
    encoder = model.parts()[""].encoder
    device = next(encoder.parameters()).device
    training = encoder.training
    encoder.eval()
    maps = attention_map.attention_maps(encoder.cpu(), example.window)
    encoder.to(device).train(training)
    layers = spread(maps.shape[0], MOST_LAYERS)
    heads = spread(maps.shape[1], MOST_HEADS)
    tokens = [tokenizer.id_to_token(int(token)) for token in example.window.input_ids]
    some = maps[[layer - 1 for layer in layers]][:, [head - 1 for head in heads]]
    figure = attention_map.draw(some, tokens, example.text, layers, heads)
    more = page.note(
        "All layers and heads: python -m model.attention_map TEXT -o map.png --checkpoint CHECKPOINT"
    )
    return Section("attention", "Attention", page.picture(figure, "attention weights") + more)


def spread(count: int, most: int) -> list[int]:
    """Return at most `most` numbers from 1 to `count`, evenly spaced, with the first and the last."""
    return sorted({int(number) for number in np.linspace(1, count, min(most, count)).round()})

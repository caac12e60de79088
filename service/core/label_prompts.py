"""Labels that a request names, as the beginning or the end of what an encoder reads (GLiNER, GLiClass)."""

import itertools
from collections.abc import Sequence

import numpy as np

from service.core.decode import Floats, LabelScore, sigmoid, softmax
from service.core.encode import Cut, Encoder, TextError, TextIds, Window
from service.core.manifest import LabelPrompt
from service.core.packing import LABEL, TEXT, WORD, Ints


class LabelsError(ValueError):
    """Labels that leave too little of a window for the text."""


def prompt_tokens(
    encoder: Encoder, labels: Sequence[list[int]], prompt: LabelPrompt
) -> tuple[Ints, Ints]:
    """Return the token ids and types of all labels and the separator after them.

    labels: the ids of each. Raises LabelsError where the labels fill more than half a window.
    """
    parts = [[prompt.label_token_id, *own] for own in labels]
    ids = [*itertools.chain.from_iterable(parts), prompt.separator_id]
    if len(ids) > encoder.longest_prompt:
        most = encoder.longest_prompt
        raise LabelsError(
            f"labels of {len(ids)} tokens do not fit: at most {most}, half of a window"
        )
    types = np.zeros(len(ids), np.int64)
    places = np.cumsum([0, *(len(part) for part in parts[:-1])])
    types[places + prompt.after_label_token] = LABEL
    return np.array(ids), types


def label_ids(encoder: Encoder, labels: Sequence[str], prompt: LabelPrompt) -> list[TextIds]:
    """Return the token ids of each label, as they are after the token before it."""
    return _after(encoder, prompt.label_token_id, labels)


def classified_texts(
    encoder: Encoder,
    texts: Sequence[str],
    labels: Sequence[list[int]],
    prompt: LabelPrompt,
    *,
    truncate: bool = True,
) -> list[Cut]:
    """Encode texts, each with all labels, as one window (GLiClass).

    labels: see `label_ids`. Raises LabelsError and, where `truncate` is False, TextError.
    """
    first, last = encoder.single_frame
    ids, types = prompt_tokens(encoder, labels, prompt)
    types[-1] = WORD
    capacity = encoder.max_length - len(first) - len(ids) - len(last)
    before = None if prompt.text_first else prompt.separator_id
    found = encoder.text_ids(texts) if before is None else _after(encoder, before, texts)
    too_long = [index for index, text in enumerate(found) if text.length > capacity]
    if too_long and not truncate:
        reason = f"longer than {encoder.max_length} tokens with its labels, and truncate is false"
        raise TextError(too_long, reason)

    def window(text: TextIds) -> Window:
        own = np.array(text.ids[:capacity], np.int64)
        parts = [(ids, types), (own, np.full(len(own), 0 if prompt.text_first else TEXT))]
        parts = parts[::-1] if prompt.text_first else parts
        parts = [(first, np.zeros(len(first))), *parts, (last, np.full(len(last), TEXT))]
        both = zip(*parts, strict=True)
        return Window(*(np.concatenate(one).astype(np.int64) for one in both))

    return [Cut((window(text),), text.length > capacity) for text in found]


def _after(encoder: Encoder, token_id: int, texts: Sequence[str]) -> list[TextIds]:
    """Tokenize texts as they follow a special token: their pieces may differ there from the beginning of a text."""
    token = encoder.tokenizer.id_to_token(token_id)
    found = encoder.text_ids([f"{token}{text}" for text in texts])
    return [TextIds(own.ids[1:], own.length - 1) for own in found]


def label_scores(logits: Floats, labels: Sequence[str], *, multi_label: bool) -> list[LabelScore]:
    """Return all labels by falling score, from logits `[C, 1]`.

    multi_label: each label has a score of its own, as a single one always has. Otherwise the scores are one softmax.
    """
    row = logits[:, 0]
    scores = sigmoid(row) if multi_label or len(labels) == 1 else softmax(row)
    order = np.argsort(-scores, kind="stable")
    return [LabelScore(labels[index], float(scores[index])) for index in order]

"""Golden inputs: a few texts of every kind that a served model gets, with PyTorch's outputs for them."""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from service.core.encode import Cut, Encoder, Window, expand
from service.core.goldens import Golden
from service.core.label_prompts import classified_texts, label_ids
from service.core.labelled_entities import label_windows, word_ids
from service.core.manifest import Head, find_mask_token_id
from service.core.packing import Packed, mask_positions, pack, row_starts, split, word_label_pairs
from service.core.session import BatchOutputs

if TYPE_CHECKING:
    from model.heads import EncoderWithHeads

TEXTS = (
    "The ferry to the island was late again, but nobody on the quay seemed to mind.",
    "In 1998 Marta Lindqvist left Volvo in Gothenburg and opened a bakery near Lake Siljan.",
    "Terrible sound, a broken hinge and no reply from support: send it back.",
    "What does this cost?",
    "Überraschung! Café owners in São Paulo paid 3,50 € (≈ US$ 3.80) for it 😀.",
    "",
)
PAIR = (
    "Who built the bridge?",
    "The bridge over the gorge was built by the engineer Elena Duarte between 1921 and 1924.",
)
LABELS = ("person", "company", "location or country")
MASKED = (
    "The {mask} of the museum is closed on Mondays.",
    "{mask} carried the {mask} up the stairs and did not say a word, although it was heavy.",
)
LONG = "The committee met on the first Monday of every month and wrote down what it had agreed. "


def golden_encodings(encoder: Encoder, heads: Mapping[str, Head]) -> list[Window]:
    """Encode short and empty texts, a pair, and one text of the model's maximum length.

    For fill-mask heads, texts with mask tokens are added. Raises ValueError where the tokenizer reads no mask token.
    """
    texts = [*TEXTS, LONG * (encoder.max_length // 8), *_masked_texts(encoder, heads)]
    (pair,) = encoder.pairs([PAIR[0]], [PAIR[1]])
    return [*first_windows(encoder, texts, heads), pair.windows[0]]


def first_windows(
    encoder: Encoder, texts: Sequence[str], heads: Mapping[str, Head]
) -> list[Window]:
    """Return the first window of each text; for labels of a request with one label more, or with one, in turn."""
    head = next((head for head in heads.values() if head.label_prompt), None)
    if head is None or head.label_prompt is None:
        return [item.windows[0] for item in encoder.texts(texts)]
    prompt = head.label_prompt
    encode: Callable[..., Sequence[Cut]] = label_windows
    labels = word_ids(encoder, LABELS)
    if head.scores_texts:
        encode, labels = classified_texts, [own.ids for own in label_ids(encoder, LABELS, prompt)]
    return [
        encode(encoder, [text], labels[: 1 + number % len(labels)], prompt)[0].windows[0]
        for number, text in enumerate(texts)
    ]


def _masked_texts(encoder: Encoder, heads: Mapping[str, Head]) -> list[str]:
    number = find_mask_token_id(heads)
    if number is None:
        return []
    mask = encoder.tokenizer.id_to_token(number)
    if mask is None or number not in encoder.tokenizer.encode(mask).ids:
        raise ValueError(
            f"the tokenizer does not read its mask token {mask!r} as the token {number}"
        )
    return [text.format(mask=mask) for text in MASKED]


def expanded_queries(encoder: Encoder, heads: Mapping[str, Head]) -> list[Window]:
    """Return a query of each head that expands queries. Goldens cannot contain it, as they state lengths only."""
    late = [head.late_interaction for head in heads.values() if head.late_interaction is not None]
    return [
        expand(window, length, own.expansion_token_id or 0, attended=own.attend_to_expansion)
        for own in late
        if (length := own.query_expansion) is not None
        for item in encoder.prefixed([TEXTS[3]], prefix=own.query_prefix, length=own.query_length)
        for window in item.windows
    ]


def torch_outputs(model: "EncoderWithHeads", packed: Packed) -> BatchOutputs:
    """Compute every head's output with PyTorch in fp32, the reference of the graphs."""
    import torch  # here, because goldens of an external graph need none

    from model.attention import PackedLayout
    from model.heads import WordLabels

    arrays = (packed.input_ids, packed.token_type_ids, packed.position_ids)
    inputs = (*map(torch.from_numpy, arrays), PackedLayout.of(packed.layout))
    number = find_mask_token_id(model.described)
    masks = None if number is None else torch.from_numpy(mask_positions(packed, number))
    of = None
    if any(head.per_pair for head in model.described.values()):
        of = WordLabels(*map(torch.from_numpy, word_label_pairs(packed)[:3]))
    with torch.no_grad():
        outputs = model.eval()(*inputs, positions=masks, of=of)
    return {name: value.numpy().astype(np.float32) for name, value in outputs.items()}


def join_golden(encodings: Sequence[Window], outputs: Sequence[BatchOutputs]) -> Golden:
    """Join each encoding's outputs, rows per token or one row each, to goldens."""
    packed = pack(encodings)
    joined = {
        name: np.concatenate([own[name] for own in outputs])
        if outputs[0][name].ndim == 2
        else np.stack([own[name] for own in outputs])
        for name in outputs[0]
    }
    return Golden(packed.input_ids, packed.token_type_ids, packed.lengths, joined)


def run_torch(model: "EncoderWithHeads", encodings: Sequence[Window]) -> list[BatchOutputs]:
    """Compute the outputs of each encoding with PyTorch, in one packed batch."""
    packed = pack(encodings)
    starts = row_starts(packed, model.described)
    return split(torch_outputs(model, packed), encodings, starts)

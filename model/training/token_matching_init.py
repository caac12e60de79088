"""Heads that begin by looking at tokens like their own.

Where a text has the words of a question stands its answer; to find that by gradient descent alone takes an encoder more
text than a small one ever reads. A head whose queries and keys are the same projection of a token looks at equal tokens
from the start, and has only to learn what to make of them (Trockman & Kolter 2023, arXiv 2305.09828). That wants an
encoder whose tokens do not carry where they stand but are rotated by it, and which has segments: without them what the
question says and what the text says again look the same.
"""

import torch
from torch import nn

from model.config import BertConfig
from model.families.modernbert import slow_dimensions

REACH = 128  # tokens; an equal one farther away scores less and less, a mere half at twice as many
SURE = 8.0  # the score of an equal token near by, where others' are about 0 and some 2 apart


def begin_matching(encoder: nn.Module, layers: int, seed: int) -> None:
    """Let half of the heads of the first `layers` layers look at equal tokens, near and some `REACH` tokens away.

    What these heads asked and were asked by is lost; their values and all other heads stay. Of queries and keys the
    numbers are used that hardly turn over so many tokens.
    Raises ValueError for an encoder that does not rotate by position, or has not so many layers, or heads too few or
    too small.
    """
    config: BertConfig = encoder.config
    parts = dict(encoder.named_modules())
    generator = torch.Generator().manual_seed(seed)
    heads, size, width = config.num_attention_heads, config.head_size, config.hidden_size
    for layer in range(layers):
        qkv = parts.get(f"layers.{layer}.attention.qkv")
        theta = config.theta_of(layer) if qkv else None
        slow = slow_dimensions(size, theta, REACH) if theta else []
        if not (isinstance(qkv, nn.Linear) and slow and heads > 1):
            raise ValueError(
                f"matching_layers: layer {layer + 1} of this {config.model_type} has no heads that can match tokens"
            )
        scale = (
            SURE * size**0.5 / len(slow)
        ) ** 0.5  # for the part that is left of a normalised token
        with torch.no_grad():
            weight = qkv.weight.view(3, heads, size, width)
            weight[:2, : heads // 2] *= (
                0.1  # not nothing, or the rest of their numbers would never learn
            )
            for head in range(heads // 2):
                alike = torch.empty(len(slow), width)
                nn.init.orthogonal_(alike, generator=generator)
                weight[:2, head, slow] = scale * alike
            if qkv.bias is not None:
                qkv.bias.view(3, heads, size)[:2, : heads // 2] = 0

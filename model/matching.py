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

REACH = 128  # tokens, within which equal ones are surely found
SURE = 8.0  # the score of an equal token; another's is about 0, seldom above 3


def begin_matching(encoder: nn.Module, config: BertConfig, layers: int, seed: int) -> None:
    """Let half of the heads of the first `layers` layers look at equal tokens, wherever they stand.

    What these heads asked and were asked by is lost; their values and all other heads stay. Of queries and keys that
    are rotated by position, the numbers that hardly turn are used.
    Raises ValueError for an encoder that has not so many layers of its own.
    """
    parts = dict(encoder.named_modules())
    names = [f"layers.{layer}.attention.qkv" for layer in range(layers)]
    if not parts.keys() >= {*names}:
        raise ValueError(f"matching: this {config.model_type} has not {layers} layers of its own")
    generator = torch.Generator().manual_seed(seed)
    heads, size, width = config.num_attention_heads, config.head_size, config.hidden_size
    for layer, name in enumerate(names):
        still = [*config.still(layer, REACH)]
        scale = (
            SURE * size**0.5 / len(still)
        ) ** 0.5  # a normalised token has `still` of its square here
        weight = parts[name].weight.detach().view(3, heads, size, width)
        for head in range(heads // 2):
            alike = torch.empty(len(still), width)
            nn.init.orthogonal_(alike, generator=generator)
            weight[:2, head] *= 0.1  # not nothing, or they would never learn
            weight[:2, head, still] = scale * alike

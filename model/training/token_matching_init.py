"""Token-matching initialization of attention heads.

Answers are near the words of the question, but a small encoder reads too little text to learn such matching by gradient
descent alone. A head whose queries and keys are the same projection attends to equal tokens from the start, and only
learns to use them (Trockman & Kolter 2023, arXiv 2305.09828). This requires rotary positions, because position
embeddings would make equal tokens differ, and segments, which separate the question from the text.
"""

import torch
from torch import nn

from model.config import BertConfig
from model.families.modernbert import slow_dimensions

REACH = 128  # tokens; the score of an equal token falls with the distance, to a half at twice this
MATCH_SCORE = 8.0  # of an equal token nearby; others have about 0 with a deviation of 2


def init_token_matching(encoder: nn.Module, layers: int, seed: int) -> None:
    """Initialize half of the heads of the first `layers` layers to attend to equal tokens within about REACH tokens.

    The queries and keys of these heads are replaced; their values and all other heads are kept. Queries and keys use
    the dimensions that rotate little over REACH tokens.
    Raises ValueError for an encoder without rotary positions, with fewer layers, or with too few or too small heads.
    """
    config: BertConfig = encoder.config
    parts = dict(encoder.named_modules())
    generator = torch.Generator().manual_seed(seed)
    heads, size, width = config.num_attention_heads, config.head_size, config.hidden_size
    for layer in range(layers):
        qkv = parts.get(f"layers.{layer}.attention.qkv")
        theta = config.theta_of(layer) if qkv else None
        slow = slow_dimensions(size, theta, REACH) if theta else []
        if not (
            isinstance(qkv, nn.Linear) and slow and heads > 1 and config.num_key_heads == heads
        ):
            raise ValueError(
                f"matching_layers: layer {layer + 1} of this {config.model_type} has no heads that can match tokens"
            )
        # For the projected part of a normalized token.
        scale = (MATCH_SCORE * size**0.5 / len(slow)) ** 0.5
        with torch.no_grad():
            weight = qkv.weight.view(3, heads, size, width)
            weight[:2, : heads // 2] *= 0.1  # not 0, or the other dimensions would get no gradient
            for head in range(heads // 2):
                projection = torch.empty(len(slow), width)
                nn.init.orthogonal_(projection, generator=generator)
                weight[:2, head, slow] = scale * projection
            if qkv.bias is not None:
                qkv.bias.view(3, heads, size)[:2, : heads // 2] = 0

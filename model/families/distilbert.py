"""DistilBERT (Sanh et al. 2019): BERT with half the layers, no segments and no pooler, distilled from BERT.

Shapes as in `model/bert.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch.nn.functional as F

from model.bert import Bert
from model.config import BertConfig
from model.families.bert_names import BERT


@dataclass(frozen=True)
class DistilBertConfig(BertConfig):
    """Defaults are the values of `distilbert-base-uncased`; `words` has the names in its `config.json`."""

    model_type: ClassVar[str] = "distilbert"
    words: ClassVar[Mapping[str, str | None]] = {
        "hidden_size": "dim",
        "num_hidden_layers": "n_layers",
        "num_attention_heads": "n_heads",
        "intermediate_size": "hidden_dim",
        "hidden_act": "activation",
        "hidden_dropout_prob": "dropout",
        "attention_probs_dropout_prob": "attention_dropout",
        "type_vocab_size": None,
        "layer_norm_eps": None,
    }

    num_hidden_layers: int = 6
    type_vocab_size: int = 0

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> Self:
        """Read a hub `config.json`, with BERT's names for sizes before the family's, as in transformers."""
        names = ("hidden_size", "num_hidden_layers", "num_attention_heads")
        sizes = {cls.words[name]: config[name] for name in names if config.get(name) is not None}
        return super().from_dict({**config, **sizes})


class DistilBert(Bert):
    """The encoder. `input_ids`, `token_type_ids`, `position_ids` [T] -> last hidden state [T, H]."""

    has_pooler = False


DISTILBERT = replace(
    BERT,
    config=DistilBertConfig,
    encoder=DistilBert,
    architecture="DistilBert",
    prefix="distilbert.",
    encoder_names={
        **BERT.encoder_names,
        r"layers\.(\d+)\.attention\.qkv": [
            r"transformer.layer.\1.attention.q_lin",
            r"transformer.layer.\1.attention.k_lin",
            r"transformer.layer.\1.attention.v_lin",
        ],
        r"layers\.(\d+)\.attention\.output": [r"transformer.layer.\1.attention.out_lin"],
        r"layers\.(\d+)\.attention_norm": [r"transformer.layer.\1.sa_layer_norm"],
        r"layers\.(\d+)\.feed_forward\.up": [r"transformer.layer.\1.ffn.lin1"],
        r"layers\.(\d+)\.feed_forward\.down": [r"transformer.layer.\1.ffn.lin2"],
        r"layers\.(\d+)\.feed_forward_norm": [r"transformer.layer.\1.output_layer_norm"],
    },
    heads=BERT.heads
    | {"classification": {"pooler.dense": "pre_classifier", "classifier": "classifier"}},
    objectives={
        "masked_lm": "vocab_projector",
        "masked_lm.dense": "vocab_transform",
        "masked_lm.norm": "vocab_layer_norm",
    },
    decoder="vocab_projector",
    activation=F.relu,
)

"""Jina embeddings v3 (Sturua et al. 2024): XLM-R with rotary positions, for embeddings of up to 8,192 tokens.

Post-norm, segments and heads as in XLM-R; rotary positions as in ModernBERT instead of a table. An adapter of
a task is merged into the weights (`model/checkpoints/adapters.py`).

Shapes as in `model/bert.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from model.bert import Layer
from model.config import BertConfig
from model.families.gte import GteEmbeddings
from model.families.modernbert import ModernBertSelfAttention, read_theta
from model.families.nomic_bert import LAYER, NOMIC_BERT, NomicBert
from model.families.roberta import XLM_ROBERTA


@dataclass(frozen=True)
class JinaConfig(BertConfig):
    """Defaults are the values of transformers and of `jinaai/jina-embeddings-v3-hf`."""

    model_type: ClassVar[str] = "jina_embeddings_v3"
    words: ClassVar[Mapping[str, str | None]] = {"rope_theta": None}

    vocab_size: int = 250002
    hidden_size: int = 1024
    num_hidden_layers: int = 24
    num_attention_heads: int = 16
    intermediate_size: int = 4096
    max_position_embeddings: int = 8194
    type_vocab_size: int = 1
    layer_norm_eps: float = 1e-5
    pad_token_id: int = 1
    rope_theta: float = 20_000.0

    # A setting of ModernBERT that is fixed here.
    attention_bias: ClassVar[bool] = True

    def theta_of(self, layer: int) -> float:
        return self.rope_theta

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> Self:
        read = super().from_dict(config)
        if config.get("head_dim") not in (None, read.head_size):
            raise ValueError(f"head_dim {config['head_dim']!r} is not {read.head_size}")
        rope = config.get("rope_parameters") or {}
        return replace(
            read, rope_theta=read_theta(rope, config.get("rope_theta")) or cls.rope_theta
        )

    def to_dict(self) -> dict[str, Any]:
        fields = super().to_dict()
        del fields["position_embedding_type"]
        return {
            **fields,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
        }


class JinaLayer(Layer):
    make_attention = ModernBertSelfAttention


class Jina(NomicBert):
    """The encoder. `input_ids`, `token_type_ids`, `position_ids` [T] -> last hidden state [T, H]."""

    make_embeddings = GteEmbeddings  # token + segment
    make_layer = JinaLayer


JINA = replace(
    XLM_ROBERTA,
    config=JinaConfig,
    encoder=Jina,
    architecture="JinaEmbeddingsV3",
    encoder_names={
        **NOMIC_BERT.encoder_names,
        r"layers\.(\d+)\.attention\.qkv": [f"{LAYER}.mixer.Wqkv"],
        r"layers\.(\d+)\.attention\.output": [f"{LAYER}.mixer.out_proj"],
        r"layers\.(\d+)\.feed_forward\.up": [f"{LAYER}.mlp.fc1"],
    },
    module_names={
        r"encoder\.(layers\.\d+)\.mixer\.Wqkv": [rf"\1.self_attn.{part}_proj" for part in "qkv"],
        r"encoder\.(layers\.\d+)\.mixer\.out_proj": [r"\1.self_attn.o_proj"],
        r"encoder\.(layers\.\d+\.mlp\.fc\d)": [r"\1"],
    },
)

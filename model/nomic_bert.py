"""NomicBERT (Nussbaum et al. 2024): BERT with rotated positions and a gated feed-forward, made for embeddings.

Post-norm like BERT, with segments like BERT; positions are rotated like ModernBERT's, all layers look at everything,
and the matrices of the layers have no biases.

T tokens, H hidden, N heads, D head size
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from torch import Tensor, nn

from model.attention import Layout, Padded, attention
from model.bert import BERT, Bert, Layer
from model.config import BertConfig
from model.modernbert import FeedForward, Rotation, rotate, rotation, still_pairs


@dataclass(frozen=True)
class NomicBertConfig(BertConfig):
    """Defaults are those of `nomic-ai/nomic-embed-text-v1.5`.

    rope_theta: how slowly the slowest rotation goes
    """

    model_type: ClassVar[str] = "nomic_bert"
    activations: ClassVar[tuple[str, ...]] = ("silu",)

    vocab_size: int = 30528
    hidden_act: str = "silu"
    hidden_dropout_prob: float = 0.0
    attention_probs_dropout_prob: float = 0.0
    max_position_embeddings: int = 2048
    rope_theta: float = 1000.0

    mlp_bias: ClassVar[bool] = False

    def still(self, layer: int, reach: int) -> Sequence[int]:
        return still_pairs(self.head_size, self.rope_theta, reach)

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> Self:
        """Raises ValueError, too, for the variants that its first code had and no release of it uses."""
        said = dict(config)
        for name, usual in USUAL.items():
            if said.get(name, usual) != usual:
                raise ValueError(f"{name} {said[name]!r} is not {usual!r}")
        rope = said.get("rope_parameters") or {}
        if rope.get("rope_type", "default") != "default":
            raise ValueError(f"rope_type {rope['rope_type']!r} is not 'default'")
        said["rope_theta"] = rope.get("rope_theta", said.get("rotary_emb_base"))
        said |= {ours: said[first] for first, ours in AT_FIRST.items() if first in said}
        found = super().from_dict(said)
        if said.get("head_dim") not in (None, found.head_size):
            raise ValueError(f"head_dim {said['head_dim']!r} is not {found.head_size}")
        return found

    def to_dict(self) -> dict[str, Any]:
        said = super().to_dict()
        del said["position_embedding_type"]
        theta = said.pop("rope_theta")
        return {**said, "rope_parameters": {"rope_type": "default", "rope_theta": theta}}


# What the words were before transformers had it, and what else could be said.
AT_FIRST = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
    "resid_pdrop": "hidden_dropout_prob",
    "attn_pdrop": "attention_probs_dropout_prob",
}
USUAL: dict[str, Any] = {
    "activation_function": "swiglu",
    "prenorm": False,
    "parallel_block": False,
    "use_rms_norm": False,
    "qkv_proj_bias": False,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_interleaved": False,
    "rotary_emb_scale_base": None,
    "moe_every_n_layers": 0,
}


class Embeddings(nn.Module):
    """Token + segment, normalised. Where it stands, attention will know."""

    def __init__(self, config: NomicBertConfig):
        super().__init__()
        self.word = nn.Embedding(config.vocab_size, config.hidden_size)
        self.token_type = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor, position_ids: Tensor) -> Tensor:
        return self.dropout(self.norm(self.word(input_ids) + self.token_type(token_type_ids)))


class SelfAttention(nn.Module):
    """Query, key and value in one projection; the first two are turned."""

    def __init__(self, config: NomicBertConfig):
        super().__init__()
        self.num_heads = config.num_attention_heads
        self.dropout = config.attention_probs_dropout_prob
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size, bias=False)
        self.output = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor, layout: Layout | Padded, by: Rotation) -> Tensor:
        dropout = self.dropout if self.training else 0.0
        turned = rotate(self.qkv(x), self.num_heads, by)
        return self.output(attention(turned, self.num_heads, layout, dropout))  # [T, H]


class NomicBertLayer(Layer):
    make_attention = SelfAttention
    make_feed_forward = FeedForward


class NomicBert(Bert):
    """The encoder. `input_ids`, `token_type_ids`, `position_ids` [T] -> last hidden state [T, H]."""

    make_embeddings = Embeddings
    make_layer = NomicBertLayer

    def shared(self, position_ids: Tensor, layout: Layout | Padded) -> Rotation:
        return rotation(position_ids, self.config.head_size, self.config.rope_theta)


LAYER = r"encoder.layers.\1"

NOMIC_BERT = replace(
    BERT,
    config=NomicBertConfig,
    encoder=NomicBert,
    architecture="NomicBert",
    prefix="nomic_bert.",
    trunk={
        r"embeddings\.word": ["embeddings.word_embeddings"],
        r"embeddings\.token_type": ["embeddings.token_type_embeddings"],
        r"embeddings\.norm": ["emb_ln"],
        r"layers\.(\d+)\.attention\.qkv": [f"{LAYER}.attn.Wqkv"],
        r"layers\.(\d+)\.attention\.output": [f"{LAYER}.attn.out_proj"],
        r"layers\.(\d+)\.attention_norm": [f"{LAYER}.norm1"],
        r"layers\.(\d+)\.feed_forward\.up": [f"{LAYER}.mlp.fc12", f"{LAYER}.mlp.fc11"],
        r"layers\.(\d+)\.feed_forward\.down": [f"{LAYER}.mlp.fc2"],
        r"layers\.(\d+)\.feed_forward_norm": [f"{LAYER}.norm2"],
        r"pooler\.dense": ["pooler.dense"],
    },
    heads={
        **BERT.heads,
        "classification": {"pooler.dense": "nomic_bert.pooler.dense", "classifier": "classifier"},
    },
    objectives={
        "masked_lm": "cls.predictions",
        "masked_lm.dense": "cls.predictions.transform.dense",
        "masked_lm.norm": "cls.predictions.transform.layer_norm",
    },
)

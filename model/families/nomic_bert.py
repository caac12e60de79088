"""NomicBERT (Nussbaum et al. 2024): BERT with rotated positions and a gated feed-forward, made for embeddings.

Post-norm like BERT, with segments like BERT; positions are rotated like ModernBERT's, all layers look at everything,
and the matrices of the layers have no biases.

T tokens, H hidden, N heads, D head size
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from torch import Tensor, nn

from model.attention import AnyLayout
from model.bert import Bert, Layer
from model.config import BertConfig
from model.families.bert_names import BERT
from model.families.modernbert import (
    ModernBertFeedForward,
    ModernBertSelfAttention,
    Rotation,
    read_theta,
    rotation,
)


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

    # Where ModernBERT has a choice.
    attention_bias: ClassVar[bool] = False
    mlp_bias: ClassVar[bool] = False

    def theta_of(self, layer: int) -> float:
        return self.rope_theta

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> Self:
        """In transformers' words or in those of its first code. Raises ValueError for variants that are not written.

        Beyond the lengths that it was trained on, the first code stretches the rotations: it reads as far as those.
        """
        known = {name: value for name, value in config.items() if value is not None}
        said = {ours: known[first] for first, ours in AT_FIRST.items() if first in known} | known
        for name, usual in USUAL.items():
            if said.get(name, usual) != usual:
                raise ValueError(f"{name} {said[name]!r} is not {usual!r}")
        if said.get("rotary_scaling_factor"):
            longest = said.get("max_position_embeddings", cls.max_position_embeddings)
            trained = said.get("max_trained_positions") or cls.max_position_embeddings
            said["max_position_embeddings"] = min(longest, trained)
        rope = said.get("rope_scaling") or said.get("rope_parameters") or {}
        said["rope_theta"] = read_theta(rope, said.get("rope_theta"))
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
    "rotary_emb_base": "rope_theta",
}
USUAL: dict[str, Any] = {
    "activation_function": "swiglu",
    "causal": False,
    "scale_attn_weights": True,
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


class NomicBertEmbeddings(nn.Module):
    """Token + segment, normalised. Where it stands, attention will know."""

    def __init__(self, config: NomicBertConfig):
        super().__init__()
        self.word = nn.Embedding(config.vocab_size, config.hidden_size)
        self.token_type = nn.Embedding(config.type_vocab_size, config.hidden_size)
        self.norm = nn.LayerNorm(config.hidden_size, eps=config.layer_norm_eps)
        self.dropout = nn.Dropout(config.hidden_dropout_prob)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor, position_ids: Tensor) -> Tensor:
        return self.dropout(self.norm(self.word(input_ids) + self.token_type(token_type_ids)))


class GatedFeedForward(ModernBertFeedForward):
    """Dropout comes after it, as in BERT, and not within."""

    def __init__(self, config: NomicBertConfig):
        super().__init__(config)
        self.dropout = nn.Identity()


class NomicBertLayer(Layer):
    make_attention = ModernBertSelfAttention
    make_feed_forward = GatedFeedForward


class NomicBert(Bert):
    """The encoder. `input_ids`, `token_type_ids`, `position_ids` [T] -> last hidden state [T, H]."""

    make_embeddings = NomicBertEmbeddings
    make_layer = NomicBertLayer

    def shared(self, position_ids: Tensor, layout: AnyLayout) -> Rotation:
        return rotation(position_ids, self.config.head_size, self.config.rope_theta)


LAYER = r"encoder.layers.\1"

NOMIC_BERT = replace(
    BERT,
    config=NomicBertConfig,
    encoder=NomicBert,
    architecture="NomicBert",
    mask_rate=0.3,
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

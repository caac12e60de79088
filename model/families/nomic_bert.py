"""NomicBERT (Nussbaum et al. 2024): BERT with rotary positions and a gated feed-forward, for embeddings.

Post-norm and segments as in BERT; rotary positions as in ModernBERT. All layers have global attention, and their
matrices have no biases.

Shapes as in `model/bert.py`.
"""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from torch import Tensor, nn

from model.attention import PackedLayout
from model.bert import Bert, Embeddings, Layer
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
    """Defaults are the values of `nomic-ai/nomic-embed-text-v1.5`. rope_theta: base of the RoPE frequencies"""

    model_type: ClassVar[str] = "nomic_bert"
    activations: ClassVar[tuple[str, ...]] = ("silu",)

    vocab_size: int = 30528
    hidden_act: str = "silu"
    hidden_dropout_prob: float = 0.0
    attention_probs_dropout_prob: float = 0.0
    max_position_embeddings: int = 2048
    rope_theta: float = 1000.0

    # Settings of ModernBERT that are fixed here.
    attention_bias: ClassVar[bool] = False
    mlp_bias: ClassVar[bool] = False

    def theta_of(self, layer: int) -> float:
        return self.rope_theta

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> Self:
        """Read `config.json` with transformers' or the original names. Raises ValueError for unsupported variants.

        The original code scales the rotations beyond the training length; here the maximum length ends there.
        """
        known = {name: value for name, value in config.items() if value is not None}
        fields = {ours: known[old] for old, ours in ORIGINAL_NAMES.items() if old in known} | known
        for name, value in REQUIRED_VALUES.items():
            if fields.get(name, value) != value:
                raise ValueError(f"{name} {fields[name]!r} is not {value!r}")
        if fields.get("rotary_scaling_factor"):
            longest = fields.get("max_position_embeddings", cls.max_position_embeddings)
            trained = fields.get("max_trained_positions") or cls.max_position_embeddings
            fields["max_position_embeddings"] = min(longest, trained)
        rope = fields.get("rope_scaling") or fields.get("rope_parameters") or {}
        fields["rope_theta"] = read_theta(rope, fields.get("rope_theta"))
        read = super().from_dict(fields)
        if fields.get("head_dim") not in (None, read.head_size):
            raise ValueError(f"head_dim {fields['head_dim']!r} is not {read.head_size}")
        return read

    def to_dict(self) -> dict[str, Any]:
        fields = super().to_dict()
        del fields["position_embedding_type"]
        theta = fields.pop("rope_theta")
        return {**fields, "rope_parameters": {"rope_type": "default", "rope_theta": theta}}


# Names in the original code, and settings whose other values are not implemented.
ORIGINAL_NAMES = {
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
REQUIRED_VALUES: dict[str, Any] = {
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


class NomicBertEmbeddings(Embeddings):
    """Token + segment, normalized. Attention adds positions, by rotation."""

    has_positions = False


class GatedFeedForward(ModernBertFeedForward):
    """ModernBERT's, without inner dropout: `Layer` applies dropout after it, as in BERT."""

    def __init__(self, config: NomicBertConfig):
        super().__init__(config)
        self.dropout = nn.Identity()


class NomicBertLayer(Layer):
    make_attention = ModernBertSelfAttention
    make_feed_forward = GatedFeedForward


class NomicBert(Bert):
    """The encoder. `input_ids`, `token_type_ids`, `position_ids` [T] -> last hidden state [T, H]."""

    make_embeddings: type[nn.Module] = NomicBertEmbeddings
    make_layer: type[nn.Module] = NomicBertLayer

    def shared_inputs(self, position_ids: Tensor, layout: PackedLayout) -> Rotation:
        """The rotations of all positions."""
        return rotation(position_ids, self.config.head_size, self.config.rope_theta)


LAYER = r"encoder.layers.\1"

NOMIC_BERT = replace(
    BERT,
    config=NomicBertConfig,
    encoder=NomicBert,
    architecture="NomicBert",
    mask_rate=0.3,
    prefix="nomic_bert.",
    encoder_names={
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

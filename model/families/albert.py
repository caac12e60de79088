"""ALBERT (Lan et al. 2019): BERT with one layer applied repeatedly, and narrow embeddings.

Several depths share a group of layers. Pretraining predicts the order of two texts (sentence order prediction), which
is harder than detecting a random second text.

Shapes as in `model/bert.py`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

from torch import Tensor, nn

from model.bert import Bert, Layer
from model.bert import Embeddings as BertEmbeddings
from model.config import BertConfig
from model.families.bert_names import BERT


@dataclass(frozen=True)
class AlbertConfig(BertConfig):
    """Defaults are the values of `albert-base-v2`."""

    model_type: ClassVar[str] = "albert"
    absent: ClassVar[Mapping[str, Any]] = {
        "hidden_size": 4096,
        "num_attention_heads": 64,
        "intermediate_size": 16384,
    }
    activations: ClassVar[tuple[str, ...]] = ("gelu_new", "gelu")

    vocab_size: int = 30000
    embedding_size: int = 128
    num_hidden_groups: int = 1  # groups of layers, each shared by consecutive depths
    inner_group_num: int = 1  # layers of a group
    hidden_act: str = "gelu_new"
    hidden_dropout_prob: float = 0.0
    attention_probs_dropout_prob: float = 0.0

    @property
    def embedding_width(self) -> int:
        return self.embedding_size

    def keeping(self, layers: Sequence[int]) -> Self:
        if self.num_hidden_groups > 1:
            raise ValueError(f"layers: {self.num_hidden_groups} groups of layers share them")
        return super().keeping(layers)


class AlbertEmbeddings(BertEmbeddings):
    """BERT's embeddings of width E, projected to H."""

    def __init__(self, config: AlbertConfig):
        super().__init__(config)
        self.project = nn.Linear(config.embedding_size, config.hidden_size)

    def forward(self, input_ids: Tensor, token_type_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = super().forward(input_ids, token_type_ids, position_ids)  # [T, E]
        return self.project(x)  # [T, H]


class Albert(Bert):
    """The encoder. `input_ids`, `token_type_ids`, `position_ids` [T] -> last hidden state [T, H]."""

    make_embeddings = AlbertEmbeddings

    def make_layers(self, config: AlbertConfig) -> nn.ModuleList:
        groups = range(config.num_hidden_groups)
        return nn.ModuleList(
            nn.ModuleList(Layer(config) for _ in range(config.inner_group_num)) for _ in groups
        )

    def layers_in_order(self) -> Iterator[nn.Module]:
        depths = self.config.num_hidden_layers
        for depth in range(depths):
            yield from self.layers[depth * len(self.layers) // depths]


GROUP, LAYER = r"layers\.(\d+)\.(\d+)", r"encoder.albert_layer_groups.\1.albert_layers.\2"

ALBERT = replace(
    BERT,
    config=AlbertConfig,
    encoder=Albert,
    architecture="Albert",
    prefix="albert.",
    encoder_names={
        **BERT.encoder_names,
        r"embeddings\.project": ["encoder.embedding_hidden_mapping_in"],
        rf"{GROUP}\.attention\.qkv": [
            f"{LAYER}.attention.query",
            f"{LAYER}.attention.key",
            f"{LAYER}.attention.value",
        ],
        rf"{GROUP}\.attention\.output": [f"{LAYER}.attention.dense"],
        rf"{GROUP}\.attention_norm": [f"{LAYER}.attention.LayerNorm"],
        rf"{GROUP}\.feed_forward\.up": [f"{LAYER}.ffn"],
        rf"{GROUP}\.feed_forward\.down": [f"{LAYER}.ffn_output"],
        rf"{GROUP}\.feed_forward_norm": [f"{LAYER}.full_layer_layer_norm"],
        r"pooler\.dense": ["pooler"],
    },
    heads=BERT.heads
    | {"classification": {"pooler.dense": "albert.pooler", "classifier": "classifier"}},
    objectives={
        "masked_lm": "predictions",
        "masked_lm.dense": "predictions.dense",
        "masked_lm.norm": "predictions.LayerNorm",
        "next_sentence.pooler.dense": "albert.pooler",
        "next_sentence.classifier": "sop_classifier.classifier",
    },
    pair_objective="sop",
    decoder="predictions.decoder",
    tokenizer="unigram",
    special_tokens={
        "pad": "<pad>",
        "unk": "<unk>",
        "cls": "[CLS]",
        "sep": "[SEP]",
        "mask": "[MASK]",
    },
)

"""ELECTRA (Clark et al. 2020): BERT with narrower embeddings, pretrained to detect replaced tokens.

A small generator, a masked language model, fills in masked tokens. The discriminator, whose encoder is the result of
pretraining, predicts for each token whether the generator replaced it. So it learns from every token, not only from the
few that were masked.

Shapes as in `model/bert.py`.
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.attention import PackedLayout
from model.bert import ACTIVATIONS, Bert, MaskedLM
from model.bert import Embeddings as BertEmbeddings
from model.config import BertConfig
from model.families.bert_names import BERT
from model.families.roberta import ROBERTA


@dataclass(frozen=True)
class ElectraConfig(BertConfig):
    """Defaults are the values of `google/electra-small-discriminator`."""

    model_type: ClassVar[str] = "electra"

    embedding_size: int = 128
    hidden_size: int = 256
    num_attention_heads: int = 4
    intermediate_size: int = 1024
    # Width of the generator as a share of the encoder's, rounded to whole heads; not in transformers.
    generator_size: float = 0.25

    @property
    def embedding_width(self) -> int:
        return self.embedding_size

    def generator(self) -> Self:
        """Return the configuration of the generator: the same layers and embedding width, fewer heads."""
        heads = max(1, round(self.generator_size * self.num_attention_heads))
        return replace(
            self,
            hidden_size=heads * self.hidden_size // self.num_attention_heads,
            num_attention_heads=heads,
            intermediate_size=heads * self.intermediate_size // self.num_attention_heads,
        )


class ElectraEmbeddings(BertEmbeddings):
    """BERT's embeddings of width E, projected to H where they differ."""

    def __init__(self, config: ElectraConfig):
        super().__init__(config)
        differ = config.embedding_size != config.hidden_size
        self.project = (
            nn.Linear(config.embedding_size, config.hidden_size) if differ else nn.Identity()
        )

    def forward(self, input_ids: Tensor, token_type_ids: Tensor, position_ids: Tensor) -> Tensor:
        x = super().forward(input_ids, token_type_ids, position_ids)  # [T, E]
        return self.project(x)  # [T, H]


class Electra(Bert):
    """The encoder. `input_ids`, `token_type_ids`, `position_ids` [T] -> last hidden state [T, H]."""

    make_embeddings = ElectraEmbeddings
    has_pooler = False


# -- pretraining -------------------------------------------------------------------------------------------------------

ElectraInputs = tuple[Tensor, Tensor, Tensor, PackedLayout]  # ids, segments, positions [T]


class Generator(nn.Module):
    """A small encoder with a masked language model."""

    architecture = "ForMaskedLM"

    def __init__(self, config: ElectraConfig):
        super().__init__()
        self.config = config
        self.encoder = Electra(config)
        self.masked_lm = MaskedLM(config)
        self.masked_lm.apply(self.encoder.init_weights)

    def forward(
        self,
        input_ids: Tensor,
        token_type_ids: Tensor,
        position_ids: Tensor,
        layout: PackedLayout,
        masked: Tensor,
    ) -> Tensor:
        """Token logits [M, V] at the packed indices `masked` [M]."""
        hidden_states = self.encoder(input_ids, token_type_ids, position_ids, layout)  # [T, H]
        at_masked = hidden_states.index_select(0, masked)  # [M, H]
        return self.masked_lm(at_masked, self.encoder.embeddings.word.weight)  # [M, V]


class Judge(nn.Module):
    """A logit per token, `[T]`: above zero where the generator replaced the token."""

    def __init__(self, config: ElectraConfig):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = ACTIVATIONS[config.hidden_act]
        self.verdict = nn.Linear(config.hidden_size, 1)

    def forward(self, hidden_states: Tensor) -> Tensor:
        x = self.activation(self.dense(hidden_states))  # [T, H]
        return self.verdict(x).squeeze(-1)  # [T, 1] -> [T]


class Discriminator(nn.Module):
    """The resulting encoder, with a classifier of every token."""

    architecture = "ForPreTraining"

    def __init__(self, config: ElectraConfig):
        super().__init__()
        self.config = config
        self.encoder = Electra(config)
        self.replaced = Judge(config)
        self.replaced.apply(self.encoder.init_weights)

    def forward(
        self, input_ids: Tensor, token_type_ids: Tensor, position_ids: Tensor, layout: PackedLayout
    ) -> Tensor:
        return self.replaced(self.encoder(input_ids, token_type_ids, position_ids, layout))  # [T]


class ReplacedTokens(nn.Module):
    """Generator and discriminator, which share their embeddings only. weights: of each loss, by name"""

    def __init__(self, config: ElectraConfig, next_sentence: bool = False):
        super().__init__()
        self.config = config
        self.discriminator = Discriminator(config)
        self.generator = Generator(config.generator())
        shared, own = self.discriminator.encoder.embeddings, self.generator.encoder.embeddings
        for name in ("word", "position", "token_type", "norm"):
            setattr(own, name, getattr(shared, name))
        self.weights = {"mlm": 1.0, "rtd": 50.0}

    def parts(self) -> dict[str, nn.Module]:
        """Return the modules of a checkpoint, by folder in it."""
        return {"": self.discriminator, "generator": self.generator}

    def replace(self, inputs: ElectraInputs, masked: Tensor, token_logits: Tensor) -> ElectraInputs:
        """Return the inputs with a token sampled from the logits [M, V] at each masked index; no gradient passes."""
        input_ids, *others = inputs
        probabilities = token_logits.detach().float().softmax(-1)  # [M, V]
        sampled = torch.multinomial(probabilities, 1).squeeze(1)  # [M]
        return (input_ids.index_copy(0, masked, sampled), *others)

    def predictions(
        self, inputs: ElectraInputs, masked: Tensor, labels: Tensor, is_next: Tensor
    ) -> dict[str, tuple[Tensor, Tensor]]:
        """Return logits and targets of masked tokens [M] and of all [T]; a correct replacement counts as original."""
        token_logits = self.generator(*inputs, masked)  # [M, V]
        corrupted = self.replace(inputs, masked, token_logits)
        replaced = corrupted[0] != inputs[0].index_copy(0, masked, labels)  # [T]
        return {"mlm": (token_logits, labels), "rtd": (self.discriminator(*corrupted), replaced)}


ELECTRA = replace(
    BERT,
    config=ElectraConfig,
    encoder=Electra,
    architecture="Electra",
    prefix="electra.",
    encoder_names={**BERT.encoder_names, r"embeddings\.project": ["embeddings_project"]},
    heads=ROBERTA.heads,
    objectives={
        "masked_lm": "generator_lm_head",
        "masked_lm.dense": "generator_predictions.dense",
        "masked_lm.norm": "generator_predictions.LayerNorm",
        "replaced.dense": "discriminator_predictions.dense",
        "replaced.verdict": "discriminator_predictions.dense_prediction",
    },
    make_heads={"pretraining": ReplacedTokens},
    decoder="generator_lm_head",
    activation=F.gelu,
)

"""ELECTRA (Clark et al. 2020): BERT with narrower embeddings, taught to tell replaced tokens from real ones.

A small generator, a masked language model, fills in blanks; the encoder that is kept says of each token whether the
generator put it there. So it learns from every token and not only from the few that were masked.

T tokens, M masked tokens, H hidden, E embedding, V vocabulary
"""

from dataclasses import dataclass, replace
from typing import ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.attention import AnyLayout
from model.bert import ACTIVATIONS, Bert, MaskedLM
from model.bert import Embeddings as BertEmbeddings
from model.config import BertConfig
from model.families.bert_names import BERT
from model.families.roberta import ROBERTA


@dataclass(frozen=True)
class ElectraConfig(BertConfig):
    """Defaults are those of `google/electra-small-discriminator`.

    generator_size: how wide the generator of its pretraining is, of its own width, in whole heads; a word of ours
    """

    model_type: ClassVar[str] = "electra"

    embedding_size: int = 128
    hidden_size: int = 256
    num_attention_heads: int = 4
    intermediate_size: int = 1024
    generator_size: float = 0.25

    @property
    def embedding_width(self) -> int:
        return self.embedding_size

    def generator(self) -> Self:
        """Of as many layers, and as wide an embedding."""
        heads = max(1, round(self.generator_size * self.num_attention_heads))
        return replace(
            self,
            hidden_size=heads * self.hidden_size // self.num_attention_heads,
            num_attention_heads=heads,
            intermediate_size=heads * self.intermediate_size // self.num_attention_heads,
        )


class ElectraEmbeddings(BertEmbeddings):
    """BERT's, E wide, and brought to H where that differs."""

    def __init__(self, config: ElectraConfig):
        super().__init__(config)
        differ = config.embedding_size != config.hidden_size
        self.project = (
            nn.Linear(config.embedding_size, config.hidden_size) if differ else nn.Identity()
        )

    def forward(self, input_ids: Tensor, token_type_ids: Tensor, position_ids: Tensor) -> Tensor:
        return self.project(super().forward(input_ids, token_type_ids, position_ids))  # [T, H]


class Electra(Bert):
    """The encoder. `input_ids`, `token_type_ids`, `position_ids` [T] -> last hidden state [T, H]."""

    make_embeddings = ElectraEmbeddings
    has_pooler = False


# -- what it is pretrained with ----------------------------------------------------------------------------------------

ElectraInputs = tuple[Tensor, Tensor, Tensor, AnyLayout]  # ids, segments, positions [T]


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
        layout: AnyLayout,
        masked: Tensor,
    ) -> Tensor:
        """Token logits [M, V] at the packed indices `masked`."""
        hidden_states = self.encoder(input_ids, token_type_ids, position_ids, layout)
        at = hidden_states.index_select(0, masked)
        return self.masked_lm(at, self.encoder.embeddings.word.weight)


class Judge(nn.Module):
    """Was this token put here by the generator? Above zero says yes."""

    def __init__(self, config: ElectraConfig):
        super().__init__()
        self.dense = nn.Linear(config.hidden_size, config.hidden_size)
        self.activation = ACTIVATIONS[config.hidden_act]
        self.verdict = nn.Linear(config.hidden_size, 1)

    def forward(self, hidden_states: Tensor) -> Tensor:
        return self.verdict(self.activation(self.dense(hidden_states))).squeeze(-1)  # [T]


class Discriminator(nn.Module):
    """The encoder that is kept, with a judge of every token."""

    architecture = "ForPreTraining"

    def __init__(self, config: ElectraConfig):
        super().__init__()
        self.config = config
        self.encoder = Electra(config)
        self.replaced = Judge(config)
        self.replaced.apply(self.encoder.init_weights)

    def forward(
        self,
        input_ids: Tensor,
        token_type_ids: Tensor,
        position_ids: Tensor,
        layout: AnyLayout,
    ) -> Tensor:
        return self.replaced(self.encoder(input_ids, token_type_ids, position_ids, layout))  # [T]


class ReplacedTokens(nn.Module):
    """Generator and discriminator side by side: they share what they embed tokens with, and nothing else.

    weights: how much each loss counts, by name
    """

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
        """What a checkpoint has, by the folder in it."""
        return {"": self.discriminator, "generator": self.generator}

    def replace(self, inputs: ElectraInputs, masked: Tensor, token_logits: Tensor) -> ElectraInputs:
        """The inputs with a token drawn from the logits [M, V] at each masked index; nothing is learnt from drawing."""
        input_ids, *others = inputs
        probabilities = token_logits.detach().float().softmax(-1)
        drawn = torch.multinomial(probabilities, 1).squeeze(1)
        return (input_ids.index_copy(0, masked, drawn), *others)

    def losses(
        self, inputs: ElectraInputs, masked: Tensor, labels: Tensor, is_next: Tensor
    ) -> dict[str, Tensor]:
        """The mean over masked tokens [M] of the generator's, and over all tokens [T] of the discriminator's.

        A token counts as replaced if it is another than stood there, not if the generator guessed right.
        """
        token_logits = self.generator(*inputs, masked)
        seen = self.replace(inputs, masked, token_logits)
        replaced = seen[0] != inputs[0].index_copy(0, masked, labels)
        verdicts = self.discriminator(*seen)
        return {
            "mlm": F.cross_entropy(token_logits.float(), labels),
            "rtd": F.binary_cross_entropy_with_logits(verdicts.float(), replaced.float()),
        }


ELECTRA = replace(
    BERT,
    config=ElectraConfig,
    encoder=Electra,
    architecture="Electra",
    prefix="electra.",
    trunk={**BERT.trunk, r"embeddings\.project": ["embeddings_project"]},
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

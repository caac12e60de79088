"""Every family: on random weights it computes what transformers does, and its checkpoints are the hub's."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn

from model import checkpoint
from model.families import FAMILIES, family_of
from model.heads import Model, Pretraining
from service.bundle import Head
from service.packing import Packed
from tests.model.helpers import LENGTHS, TOLERANCE, batch, each, ours, padded, perturb, real, theirs

SMALL = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
}


@dataclass(frozen=True)
class Case:
    """A family in one shape, in the words of its configuration."""

    model_type: str
    fields: Mapping[str, Any] = field(default_factory=dict)

    def config(self, **more: Any) -> transformers.PreTrainedConfig:
        words = FAMILIES[self.model_type].config.words
        small = {words.get(name, name): value for name, value in SMALL.items()}
        return transformers.AutoConfig.for_model(
            self.model_type, **{**small, **self.fields, **more}
        )


CASES = {
    "bert": Case("bert"),
    "bert, wide": Case("bert", {"hidden_size": 48, "num_attention_heads": 2, "type_vocab_size": 3}),
    "roberta": Case("roberta", {"pad_token_id": 1}),
    "roberta, two segments": Case("roberta", {"pad_token_id": 1, "type_vocab_size": 2}),
    "roberta, another padding": Case("roberta", {"pad_token_id": 3, "layer_norm_eps": 1e-5}),
    "xlm-roberta": Case("xlm-roberta", {"pad_token_id": 1}),
    "camembert": Case("camembert", {"pad_token_id": 1}),
    "distilbert": Case("distilbert"),
    "distilbert, sinusoidal": Case("distilbert", {"sinusoidal_pos_embds": True}),
    "albert": Case("albert", {"embedding_size": 16}),
    "albert, groups": Case(
        "albert",
        {
            "embedding_size": 16,
            "num_hidden_layers": 6,
            "num_hidden_groups": 2,
            "inner_group_num": 2,
        },
    ),
    "albert, erf": Case("albert", {"embedding_size": 16, "hidden_act": "gelu"}),
    "electra": Case("electra", {"embedding_size": 16}),
    "electra, as wide": Case("electra", {"embedding_size": 32}),
    "mpnet": Case("mpnet", {"pad_token_id": 1}),
    "mpnet, far": Case("mpnet", {"pad_token_id": 1, "max_position_embeddings": 300}),
    "modernbert": Case("modernbert", {"pad_token_id": 1}),
    "modernbert, near": Case(
        "modernbert",
        {
            "pad_token_id": 1,
            "local_attention": 6,
            "num_hidden_layers": 5,
            "global_attn_every_n_layers": 2,
            "classifier_pooling": "mean",
            "max_position_embeddings": 80,
        },
    ),
    "modernbert, biased": Case(
        "modernbert",
        {
            "pad_token_id": 1,
            "norm_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
            "classifier_bias": True,
            "global_rope_theta": 500.0,
            "local_attention": 4,
        },
    ),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)

TASKS = {
    "classification": transformers.AutoModelForSequenceClassification,
    "ner": transformers.AutoModelForTokenClassification,
    "qa": transformers.AutoModelForQuestionAnswering,
}
LABELS = {0: "A", 1: "B", 2: "C"}


def sample(case: Case, lengths: Any = LENGTHS["mixed"], seed: int = 0) -> Packed:
    """A batch without padding tokens; the last sequence is as long as the case has positions for."""
    config = family_config(case)
    lengths = (
        [*lengths, config.max_length] if case.fields.get("max_position_embeddings") else lengths
    )
    packed = batch(lengths, seed=seed)
    types = packed.token_type_ids if config.type_vocab_size > 1 else 0 * packed.token_type_ids
    ids = np.where(packed.input_ids == config.pad_token_id, 5, packed.input_ids)
    return Packed(ids, types, packed.position_ids, packed.layout)


def family_config(case: Case) -> Any:
    return FAMILIES[case.model_type].config.from_dict(case.config().to_dict())


def asked(case: Case, packed: Packed) -> dict[str, Tensor]:
    """What transformers is called with."""
    config = family_config(case)
    arguments = theirs(packed)
    mask = arguments["attention_mask"].bool()
    arguments["input_ids"][~mask] = config.pad_token_id
    if case.model_type not in ("bert", "albert", "electra"):
        del arguments["token_type_ids"]
    return arguments


def states(encoder: nn.Module, arguments: tuple[Any, ...]) -> list[Tensor]:
    kept: list[Tensor] = []
    with torch.no_grad():
        encoder(*arguments, keep=kept)
    return kept


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_family_is_a_case(model_type: str) -> None:
    """None is left out of what follows."""
    assert model_type in {case.model_type for case in CASES.values()}


@every_case
def test_hidden_states(case: Case, tmp_path: Path) -> None:
    """All hidden states are those of transformers, for every batch, and the same packed, alone and padded."""
    peer = perturb(transformers.AutoModel.from_config(case.config()))
    peer.save_pretrained(tmp_path)
    encoder = checkpoint.load_encoder(tmp_path, pooler=False)
    for seed, lengths in enumerate(LENGTHS.values()):
        packed = sample(case, lengths, seed)
        with torch.no_grad():
            expected = peer(**asked(case, packed), output_hidden_states=True).hidden_states
        found = states(encoder, ours(packed))
        assert len(found) == len(expected)
        for own, peers in zip(found, expected, strict=True):
            torch.testing.assert_close(own, real(peers, packed), **TOLERANCE)
        alone = [states(encoder, ours(one)) for one in each(packed)]
        in_slots = states(encoder, padded(packed))
        for depth, own in enumerate(found):
            torch.testing.assert_close(own, torch.cat([kept[depth] for kept in alone]), **TOLERANCE)
            torch.testing.assert_close(own, real(in_slots[depth], packed), **TOLERANCE)


@every_case
@pytest.mark.parametrize("task", TASKS)
def test_heads(case: Case, task: str, tmp_path: Path) -> None:
    """The logits of every head are those of transformers, and a round trip leaves the files as they were."""
    more = {} if task == "qa" else {"num_labels": 3, "id2label": LABELS}
    peer = perturb(TASKS[task].from_config(case.config(**more)))
    peer.save_pretrained(tmp_path / "theirs")
    model = checkpoint.load_model(tmp_path / "theirs")
    packed = sample(case)
    with torch.no_grad():
        found = model(*ours(packed))[task]
        expected = peer(**asked(case, packed))
    if task == "qa":
        starts, ends = (
            real(logits, packed) for logits in (expected.start_logits, expected.end_logits)
        )
        torch.testing.assert_close(found, torch.cat([starts, ends], dim=1), **TOLERANCE)
    else:
        logits = expected.logits if task == "classification" else real(expected.logits, packed)
        torch.testing.assert_close(found, logits, **TOLERANCE)

    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text("{}")
    checkpoint.save_head(tmp_path / "ours", model, task, tokenizer)
    again = TASKS[task].from_pretrained(tmp_path / "ours").eval()
    with torch.no_grad():
        repeated = again(**asked(case, packed))
    for one, other in zip(expected.to_tuple(), repeated.to_tuple(), strict=True):
        torch.testing.assert_close(one, other, **TOLERANCE)


@every_case
def test_masked_language_model(case: Case, tmp_path: Path) -> None:
    """It is read with what it was pretrained with, gives those logits, and is read by transformers again."""
    peer = perturb(transformers.AutoModelForMaskedLM.from_config(case.config()))
    peer.save_pretrained(tmp_path / "theirs")
    model = checkpoint.load_pretraining(tmp_path / "theirs")
    assert isinstance(model, Pretraining)
    packed = sample(case)
    with torch.no_grad():
        found, _ = model(*ours(packed))
        expected = real(peer(**asked(case, packed)).logits, packed)
    torch.testing.assert_close(found, expected, **TOLERANCE)

    tokenizer = tmp_path / "tokenizer.json"
    tokenizer.write_text("{}")
    checkpoint.save_pretraining(tmp_path / "ours", model, tokenizer)
    again = transformers.AutoModelForMaskedLM.from_pretrained(tmp_path / "ours").eval()
    with torch.no_grad():
        repeated = real(again(**asked(case, packed)).logits, packed)
    torch.testing.assert_close(repeated, expected, **TOLERANCE)


@every_case
def test_a_head_begins_with_the_pooler(case: Case, tmp_path: Path) -> None:
    """Where the family has one, and by whatever name."""
    peer = perturb(transformers.AutoModel.from_config(case.config()))
    peer.save_pretrained(tmp_path)
    described = {"a": Head(task="classification", labels=("x", "y"))}
    model = Model(family_config(case), described)
    before = {name: tensor.clone() for name, tensor in model.heads.state_dict().items()}
    checkpoint.init_from(model, tmp_path)
    changed = {
        name.removeprefix("a.")
        for name, tensor in model.heads.state_dict().items()
        if not torch.equal(tensor, before[name])
    }
    pooler = {n for n, _ in peer.named_parameters() if n.startswith("pooler.")}
    assert changed == ({"pooler.dense.weight", "pooler.dense.bias"} if pooler else set())


@every_case
def test_config(case: Case) -> None:
    """What is written is what transformers would have written, where we have a word for it."""
    config = family_config(case)
    theirs_ = case.config().to_dict()
    own = config.to_dict()
    assert own | {key: theirs_[key] for key in own if key in theirs_} == own
    assert family_of(config).config.from_dict(own) == config

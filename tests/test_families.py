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
from model.heads import Model, Pretraining, make_pretraining
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


Taught = tuple[Tensor, Tensor, Tensor]


def taught(packed: Packed) -> Taught:
    """Masked indices, the tokens that stood there, and what to say about the pairs, at random."""
    rng = np.random.default_rng(0)
    masked = np.sort(rng.choice(len(packed.input_ids), 8, replace=False))
    words, answers = rng.integers(5, 96, size=8), rng.integers(2, size=len(packed.lengths))
    return (torch.as_tensor(masked), torch.as_tensor(words), torch.as_tensor(answers))


def in_slots(values: Tensor, packed: Packed) -> Tensor:
    """Values of tokens [T] as transformers takes labels: [B, S], -100 for padding."""
    mask = theirs(packed)["attention_mask"].bool()
    return torch.full(mask.shape, -100).masked_scatter(mask, values)


def hidden_words(packed: Packed, masked: Tensor, words: Tensor) -> Tensor:
    """The labels of a masked language model, in transformers' way."""
    everywhere = torch.full((len(packed.input_ids),), -100)
    return in_slots(everywhere.index_copy(0, masked, words), packed)


PAIR_LABELS = {"bert": "next_sentence_label", "albert": "sentence_order_label"}
PRETRAINED = {
    name: case
    for name, case in CASES.items()
    if "pretraining" not in FAMILIES[case.model_type].make_heads
}


@pytest.mark.parametrize("case", PRETRAINED.values(), ids=PRETRAINED)
def test_pretraining(case: Case, tmp_path: Path) -> None:
    """What a family is pretrained with has the logits and the loss of transformers, there and back."""
    family = FAMILIES[case.model_type]
    auto = (
        transformers.AutoModelForPreTraining if family.pairs else transformers.AutoModelForMaskedLM
    )
    perturb(auto.from_config(case.config())).save_pretrained(tmp_path / "theirs")
    model = make_pretraining(family_config(case), next_sentence=family.pairs is not None)
    checkpoint.init_pretraining(model, tmp_path / "theirs")
    (tmp_path / "tokenizer.json").write_text("{}")
    checkpoint.save_pretraining(tmp_path / "ours", model, tmp_path / "tokenizer.json")

    packed = sample(case)
    masked, words, answers = taught(packed)
    labels = {"labels": hidden_words(packed, masked, words)}
    if family.pairs:
        labels[PAIR_LABELS[case.model_type]] = answers
    with torch.no_grad():
        logits = [found for found in model.eval()(*ours(packed)) if found is not None]
        losses = model.losses(ours(packed), masked, words, answers)
        assert losses.keys() == model.weights.keys()
        for folder in ("theirs", "ours"):
            peer, report = auto.from_pretrained(tmp_path / folder, output_loading_info=True)
            assert not report["missing_keys"]
            assert not report["unexpected_keys"]
            expected = peer.eval()(**asked(case, packed), **labels)
            torch.testing.assert_close(sum(losses.values()), expected.loss, **TOLERANCE)
            of_tokens, *of_pairs = expected.to_tuple()[1:]
            torch.testing.assert_close(logits[0], real(of_tokens, packed), **TOLERANCE)
            assert len(of_pairs) == len(logits) - 1
            for own, peers in zip(logits[1:], of_pairs, strict=True):
                torch.testing.assert_close(own, peers, **TOLERANCE)


@pytest.mark.parametrize("name", [name for name in CASES if name not in PRETRAINED])
def test_replaced_tokens(name: str, tmp_path: Path) -> None:
    """Generator and discriminator have the logits and the losses of transformers' two, there and back."""
    case = CASES[name]
    model = make_pretraining(family_config(case), next_sentence=False)
    beside = transformers.AutoConfig.for_model(**model.generator.config.to_dict())
    kinds = {
        "": transformers.AutoModelForPreTraining,
        "generator": transformers.AutoModelForMaskedLM,
    }
    peer = perturb(kinds[""].from_config(case.config()))
    other = perturb(kinds["generator"].from_config(beside))
    other.electra.embeddings.load_state_dict(peer.electra.embeddings.state_dict())
    peer.save_pretrained(tmp_path / "theirs")
    other.save_pretrained(tmp_path / "theirs" / "generator")
    checkpoint.init_pretraining(model, tmp_path / "theirs")
    (tmp_path / "tokenizer.json").write_text("{}")
    checkpoint.save_pretraining(tmp_path / "ours", model, tmp_path / "tokenizer.json")

    packed = sample(case)
    masked, words, answers = taught(packed)
    with torch.no_grad():
        logits = model.eval().generator(*ours(packed), masked)
        torch.manual_seed(0)
        losses = model.losses(ours(packed), masked, words, answers)
        torch.manual_seed(0)
        seen = model.replace(ours(packed), masked, logits)
        verdicts = model.discriminator(*seen)
        real_ids = ours(packed)[0].index_copy(0, masked, words)
        replaced = Packed(
            seen[0].numpy(), packed.token_type_ids, packed.position_ids, packed.layout
        )
        labels = in_slots((seen[0] != real_ids).long(), packed)
        assert losses.keys() == model.weights.keys()
        assert 0 < (labels == 1).sum() <= len(masked)
        for folder in ("theirs", "ours"):
            peers = {}
            for part, kind in kinds.items():
                peers[part], report = kind.from_pretrained(
                    tmp_path / folder / part, output_loading_info=True
                )
                assert not report["missing_keys"]
                assert not report["unexpected_keys"]
            hidden = hidden_words(packed, masked, words)
            filled = peers["generator"].eval()(**asked(case, packed), labels=hidden)
            judged = peers[""].eval()(**asked(case, replaced), labels=labels)
            torch.testing.assert_close(losses["mlm"], filled.loss, **TOLERANCE)
            torch.testing.assert_close(losses["rtd"], judged.loss, **TOLERANCE)
            torch.testing.assert_close(logits, real(filled.logits, packed)[masked], **TOLERANCE)
            torch.testing.assert_close(verdicts[:, None], real(judged.logits, packed), **TOLERANCE)


def test_what_electra_shares(tmp_path: Path) -> None:
    """Generator and discriminator embed alike, so that a checkpoint of two tables is refused, not read wrong."""
    model = make_pretraining(family_config(CASES["electra"]), next_sentence=False)
    own, shared = (part.encoder.embeddings for part in (model.generator, model.discriminator))
    assert own.word is shared.word
    assert own.position is shared.position
    assert own.project is not shared.project
    assert model.generator.config.hidden_size == 8  # one head of four
    (tmp_path / "tokenizer.json").write_text("{}")
    checkpoint.save_pretraining(tmp_path / "ours", model, tmp_path / "tokenizer.json")
    other = make_pretraining(family_config(CASES["electra"]), next_sentence=False)
    checkpoint.save_pretraining(tmp_path / "other", other, tmp_path / "tokenizer.json")
    (tmp_path / "other" / "generator").replace(tmp_path / "ours" / "theirs")
    (tmp_path / "ours" / "generator").rename(tmp_path / "ours" / "first")
    (tmp_path / "ours" / "theirs").rename(tmp_path / "ours" / "generator")

    with pytest.raises(checkpoint.CheckpointError, match="is not tied to the word embeddings"):
        checkpoint.init_pretraining(model, tmp_path / "ours")


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

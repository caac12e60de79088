"""Every family: on random weights it computes what transformers does, its checkpoints are the hub's, and a checkpoint
that transformers wrote is exported, in all its graphs, and served with transformers' answers.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
import transformers
from onnx import TensorProto
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor, nn

from export import cuda_emulator
from export.goldens import torch_outputs
from model.checkpoints import reader, writer
from model.checkpoints.errors import CheckpointError
from model.families.registry import FAMILIES, PRETRAINABLE, family_of
from model.heads import EncoderWithHeads, Pretraining, losses_of, make_pretraining
from model.tokenizer import train
from model.training.capture import capture
from service.core import bundle
from service.core.bundle import Bundle
from service.core.cpu import CPU
from service.core.goldens import cosine
from service.core.manifest import Head, Precision
from service.core.packing import Packed, each
from service.core.session import BatchOutputs, Session, SessionOptions
from tests import hub, samples
from tests.conftest import chosen, run_export
from tests.e2e.conftest import Server, serving
from tests.model.helpers import LENGTHS, TOLERANCE, batch, ours, perturb, real, theirs

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


RELATIVE = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"]}
THIRD = {
    **RELATIVE,
    "position_biased_input": False,
    "position_buckets": 8,
    "max_position_embeddings": 60,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
}
EURO = {"pad_token_id": 1, "tie_word_embeddings": True}
QWEN = {"pad_token_id": 1, "num_key_value_heads": 2, "head_dim": 16, "use_cache": False}
GEMMA = {
    "num_key_value_heads": 2,
    "head_dim": 16,
    "use_cache": False,
    "use_bidirectional_attention": True,
    "sliding_window": 6,
    "sliding_window_pattern": 3,
}
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
    "nomic_bert": Case("nomic_bert"),
    "nomic_bert, slower": Case(
        "nomic_bert",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 50.0}, "type_vocab_size": 3},
    ),
    "gte": Case("gte"),
    "gte, scaled": Case(
        "gte",
        {
            "rope_parameters": {"rope_type": "linear", "rope_theta": 50.0, "factor": 1.5},
            "type_vocab_size": 2,
            "pad_token_id": 3,
        },
    ),
    "gte, no segments": Case("gte", {"type_vocab_size": 0}),
    "jina_embeddings_v3": Case("jina_embeddings_v3"),
    "jina_embeddings_v3, faster": Case(
        "jina_embeddings_v3",
        {
            "rope_parameters": {"rope_type": "default", "rope_theta": 50.0},
            "type_vocab_size": 2,
            "pad_token_id": 3,
        },
    ),
    "eurobert": Case("eurobert", EURO),
    "eurobert, grouped": Case(
        "eurobert",
        {
            **EURO,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "classifier_pooling": "mean",
            "rope_parameters": {"rope_type": "default", "rope_theta": 250.0},
        },
    ),
    "eurobert, biased": Case(
        "eurobert",
        {
            **EURO,
            "num_key_value_heads": 1,
            "attention_bias": True,
            "mlp_bias": True,
            "classifier_pooling": "bos",
            "rms_norm_eps": 0.1,
        },
    ),
    "qwen3": Case("qwen3", QWEN),
    "qwen3, local": Case(
        "qwen3",
        {
            **QWEN,
            "head_dim": 8,
            "num_key_value_heads": 1,
            "attention_bias": True,
            "use_sliding_window": True,
            "sliding_window": 4,
            "max_window_layers": 1,
            "rope_parameters": {"rope_type": "default", "rope_theta": 250.0},
        },
    ),
    "gemma3_text": Case("gemma3_text", GEMMA),
    "gemma3_text, causal": Case(
        "gemma3_text",
        {
            **GEMMA,
            "use_bidirectional_attention": False,
            "attention_bias": True,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "query_pre_attn_scalar": 9,
        },
    ),
    "deberta": Case("deberta", {"position_biased_input": False, **RELATIVE}),
    "deberta, with all": Case(
        "deberta",
        {**RELATIVE, "type_vocab_size": 2, "embedding_size": 16, "max_relative_positions": 5},
    ),
    "deberta, from tokens": Case("deberta", {**RELATIVE, "pos_att_type": ["c2p"]}),
    "deberta, absolute": Case("deberta"),
    "deberta-v2, as v3": Case("deberta-v2", THIRD),
    "deberta-v2, convolution": Case(
        "deberta-v2", {**THIRD, "share_att_key": False, "conv_kernel_size": 3, "conv_act": "gelu"}
    ),
    "deberta-v2, wider": Case(
        "deberta-v2",
        {
            **RELATIVE,
            "conv_kernel_size": 5,
            "conv_groups": 2,
            "embedding_size": 16,
            "type_vocab_size": 2,
            "pos_att_type": "p2c",
        },
    ),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
MASKED = {name: case for name, case in CASES.items() if case.model_type in PRETRAINABLE}

TASKS = {
    "classification": transformers.AutoModelForSequenceClassification,
    "ner": transformers.AutoModelForTokenClassification,
    "qa": transformers.AutoModelForQuestionAnswering,
}
LABELS = {0: "A", 1: "B", 2: "C"}
NOT_THERE = {
    ("nomic_bert", "qa"),
    ("gte", "qa"),
    ("eurobert", "qa"),
    ("qwen3", "qa"),
    ("gemma3_text", "ner"),
    ("gemma3_text", "qa"),
}  # in transformers


# Families whose reference takes token types.
SEGMENTED = {
    *("bert", "albert", "electra", "nomic_bert", "gte", "deberta", "deberta-v2"),
    "jina_embeddings_v3",
}


def sample(case: Case, lengths: Any = LENGTHS["mixed"], seed: int = 0) -> Packed:
    """A batch with padding tokens as text; the last sequence is as long as the case has positions for."""
    config = family_config(case)
    lengths = (
        [*lengths, config.max_length] if case.fields.get("max_position_embeddings") else lengths
    )
    packed = batch(lengths, seed=seed)
    types = packed.token_type_ids if config.type_vocab_size > 1 else 0 * packed.token_type_ids
    ids = packed.input_ids.copy()
    ids[4::9] = config.pad_token_id
    return Packed(ids, types, packed.position_ids, packed.layout)


def family_config(case: Case) -> Any:
    return FAMILIES[case.model_type].config.from_dict(case.config().to_dict())


def asked(case: Case, packed: Packed) -> dict[str, Tensor]:
    """What transformers is called with."""
    config = family_config(case)
    arguments = theirs(packed)
    mask = arguments["attention_mask"].bool()
    arguments["input_ids"][~mask] = config.pad_token_id
    if case.model_type not in SEGMENTED:
        del arguments["token_type_ids"]
    return arguments


def states(encoder: nn.Module, arguments: tuple[Any, ...]) -> list[Tensor]:
    with torch.no_grad(), capture(encoder) as captured:
        encoder(*arguments)
    return captured.hidden_states


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_family_is_a_case(model_type):
    """None is left out of what follows."""
    assert model_type in {case.model_type for case in CASES.values()}


@every_case
def test_hidden_states(case, tmp_path):
    """All hidden states equal transformers', for every batch, and are the same packed and alone."""
    peer = perturb(transformers.AutoModel.from_config(case.config()))
    peer.save_pretrained(tmp_path)
    encoder = reader.load_encoder(tmp_path, pooler=False)
    for seed, lengths in enumerate(LENGTHS.values()):
        packed = sample(case, lengths, seed)
        with torch.no_grad():
            expected = peer(**asked(case, packed), output_hidden_states=True).hidden_states
        found = states(encoder, ours(packed))
        assert len(found) == len(expected)
        for own, peers in zip(found, expected, strict=True):
            torch.testing.assert_close(own, real(peers, packed), **TOLERANCE)
        alone = [states(encoder, ours(one)) for one in each(packed)]
        for depth, own in enumerate(found):
            torch.testing.assert_close(own, torch.cat([kept[depth] for kept in alone]), **TOLERANCE)


@every_case
def test_attention_weights(case, tmp_path):
    """The weights of every layer and head equal transformers' weights."""
    peer = transformers.AutoModel.from_config(case.config(), attn_implementation="eager")
    perturb(peer).save_pretrained(tmp_path)
    encoder = reader.load_encoder(tmp_path, pooler=False)
    packed = sample(case, [12])
    with torch.no_grad(), capture(encoder, attention_weights=True) as captured:
        encoder(*ours(packed))
        expected = peer(**asked(case, packed), output_attentions=True).attentions
    found = captured.attention_weights
    assert len(found) == len(expected)
    longest = -1  # without padding, which transformers gives weights too
    for own, peers in zip(found, expected, strict=True):
        torch.testing.assert_close(own[longest], peers[longest], **TOLERANCE)


@every_case
@pytest.mark.parametrize("task", TASKS)
def test_heads(case, task, tmp_path):
    """The logits of every head equal transformers' logits, and a round trip does not change the files."""
    if (case.model_type, task) in NOT_THERE:
        pytest.skip(f"transformers has no {task} head for {case.model_type}")
    more = {} if task == "qa" else {"num_labels": 3, "id2label": LABELS}
    peer = perturb(TASKS[task].from_config(case.config(**more)))
    peer.save_pretrained(tmp_path / "theirs")
    generator = torch.get_rng_state()
    model = reader.load_model(tmp_path / "theirs")
    assert torch.equal(generator, torch.get_rng_state())  # no initial values were drawn
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
    Tokenizer(WordLevel({}, unk_token="")).save(str(tokenizer))
    writer.save_head(tmp_path / "ours", model, task, tokenizer)
    again = TASKS[task].from_pretrained(tmp_path / "ours").eval()
    again.config.use_cache = False  # of a decoder
    with torch.no_grad():
        repeated = again(**asked(case, packed))
    for one, other in zip(expected.to_tuple(), repeated.to_tuple(), strict=True):
        torch.testing.assert_close(one, other, **TOLERANCE)


@every_case
def test_gradients(case, tmp_path):
    """The gradient of every parameter equals transformers' gradient."""
    task = "classification" if (case.model_type, "ner") in NOT_THERE else "ner"
    peer = perturb(TASKS[task].from_config(case.config(num_labels=3, id2label=LABELS)))
    peer.save_pretrained(tmp_path)
    model, packed = reader.load_model(tmp_path), sample(case)
    # transformers does not train the embedding of padding
    packed.input_ids[packed.input_ids == model.config.pad_token_id] = 5
    found = model(*ours(packed))[task]
    weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(0)) / len(found)
    (found * weights).sum().backward()
    logits = peer(**asked(case, packed)).logits
    expected = logits if task == "classification" else real(logits, packed)
    (expected * weights).sum().backward()
    for parameter in (*model.parameters(), *peer.parameters()):
        own = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        parameter.data = own
    peer.save_pretrained(tmp_path)  # the gradients, in place of the parameters
    gradients = dict(reader.load_model(tmp_path).named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, gradients[name], **TOLERANCE, msg=name)


@pytest.mark.parametrize(("model_type", "task"), sorted(NOT_THERE))
def test_a_head_that_transformers_has_not(model_type, task, tmp_path):
    """It is read again as it was written."""
    torch.manual_seed(0)
    config = family_config(CASES[model_type])
    labels = ("A", "B") if task == "ner" else ()
    model = perturb(EncoderWithHeads(config, {task: Head(task=task, labels=labels)}))
    Tokenizer(WordLevel({}, unk_token="")).save(str(tmp_path / "tokenizer.json"))
    writer.save_head(tmp_path / "ours", model, task, tmp_path / "tokenizer.json")
    again = reader.load_model(tmp_path / "ours").eval()
    packed = ours(sample(CASES[model_type]))
    with torch.no_grad():
        assert torch.equal(again(*packed)[task], model(*packed)[task])


def test_the_original_layout_of_gte(tmp_path):
    """The first checkpoints have other names, and scale the rotations by the NTK rule of their own code."""
    peer = perturb(TASKS["classification"].from_config(CASES["gte"].config(num_labels=3)))
    peer.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    former = {re.sub(r"^gte\.", "new.", name): tensor for name, tensor in tensors.items()}
    save_file(former, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((tmp_path / "config.json").read_text())
    del config["rope_parameters"]
    config |= {
        "model_type": "new",
        "architectures": ["NewForSequenceClassification"],
        "auto_map": {"AutoModel": "Alibaba-NLP/new-impl--modeling.NewModel"},
        "position_embedding_type": "rope",
        "rope_theta": 20,
        "rope_scaling": {"type": "ntk", "factor": 8.0},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = reader.load_model(tmp_path)
    size, factor = 8, 8.0
    frequencies = 1 / (20 * factor) ** (torch.arange(0, size, 2) / size) / factor ** (2 / size)
    peer.gte.rotary_emb.inv_freq.copy_(frequencies)
    packed = sample(CASES["gte"], [60, 3])
    with torch.no_grad():
        expected = peer(**asked(CASES["gte"], packed)).logits
        found = model(*ours(packed))["classification"]
    torch.testing.assert_close(found, expected, **TOLERANCE)


def test_nomic_bert_drops_where_transformers_does():
    """After the embeddings and after each half of a layer, and nowhere else."""
    rates = {"hidden_dropout_prob": 0.1}
    encoder = FAMILIES["nomic_bert"].encoder(
        FAMILIES["nomic_bert"].config(num_hidden_layers=1, vocab_size=9, **rates)
    )
    dropping = [name for name, part in encoder.named_modules() if isinstance(part, nn.Dropout)]
    assert dropping == ["embeddings.dropout", "layers.0.dropout"]


def test_modernbert_may_tell_two_texts_apart(tmp_path):
    """A learnt vector is added to the second text's tokens only, and transformers reads the checkpoint."""
    torch.manual_seed(0)
    config = replace(family_config(CASES["modernbert"]), type_vocab_size=2)
    model = EncoderWithHeads(config, {"ner": Head(task="ner", labels=("A", "B", "C"))}).eval()
    Tokenizer(WordLevel({}, unk_token="")).save(str(tmp_path / "tokenizer.json"))
    writer.save_head(tmp_path / "ours", model, "ner", tmp_path / "tokenizer.json")
    again = reader.load_model(tmp_path / "ours")
    assert again.config == config
    peer, report = TASKS["ner"].from_pretrained(tmp_path / "ours", output_loading_info=True)
    assert report["unexpected_keys"] == {"model.embeddings.token_type_embeddings.weight"}

    packed = sample(CASES["modernbert"])
    input_ids, first, *rest = ours(packed)
    second = torch.as_tensor(np.arange(len(first)) % 2)
    with torch.no_grad():
        expected = real(peer.eval()(**asked(CASES["modernbert"], packed)).logits, packed)
    torch.testing.assert_close(again(input_ids, first, *rest)["ner"], expected, **TOLERANCE)
    found = again(input_ids, second, *rest)["ner"]
    assert (found - expected).abs().max() > 1e-3

    found.sum().backward()
    embeddings = again.encoder.embeddings
    assert not embeddings.token_type.weight[0].any()
    assert not embeddings.token_type.weight.grad[0].any()
    assert embeddings.token_type.weight.grad[1].any()
    both = embeddings.word(input_ids) + embeddings.token_type.weight[second]
    torch.testing.assert_close(
        embeddings(input_ids, second, rest[0]), embeddings.norm(both), **TOLERANCE
    )


@pytest.mark.parametrize("case", MASKED.values(), ids=MASKED)
def test_masked_language_model(case, tmp_path):
    """It is read with what it was pretrained with, gives those logits, and is read by transformers again."""
    peer = perturb(transformers.AutoModelForMaskedLM.from_config(case.config()))
    peer.save_pretrained(tmp_path / "theirs")
    model = reader.load_pretraining(tmp_path / "theirs")
    assert isinstance(model, Pretraining)
    packed = sample(case)
    with torch.no_grad():
        found, _ = model(*ours(packed))
        expected = real(peer(**asked(case, packed)).logits, packed)
    torch.testing.assert_close(found, expected, **TOLERANCE)

    tokenizer = tmp_path / "tokenizer.json"
    Tokenizer(WordLevel({}, unk_token="")).save(str(tokenizer))
    writer.save_pretraining(tmp_path / "ours", model, tokenizer)
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
    for name, case in MASKED.items()
    if "pretraining" not in FAMILIES[case.model_type].make_heads
}


@pytest.mark.parametrize("case", PRETRAINED.values(), ids=PRETRAINED)
def test_pretraining(case, tmp_path):
    """What a family is pretrained with has the logits and the loss of transformers, there and back."""
    family = FAMILIES[case.model_type]
    auto = (
        transformers.AutoModelForPreTraining if family.pairs else transformers.AutoModelForMaskedLM
    )
    perturb(auto.from_config(case.config())).save_pretrained(tmp_path / "theirs")
    model = make_pretraining(family_config(case), next_sentence=family.pairs is not None)
    reader.init_pretraining(model, tmp_path / "theirs")
    Tokenizer(WordLevel({}, unk_token="")).save(str(tmp_path / "tokenizer.json"))
    writer.save_pretraining(tmp_path / "ours", model, tmp_path / "tokenizer.json")

    packed = sample(case)
    masked, words, answers = taught(packed)
    labels = {"labels": hidden_words(packed, masked, words)}
    if family.pairs:
        labels[PAIR_LABELS[case.model_type]] = answers
    with torch.no_grad():
        logits = [found for found in model.eval()(*ours(packed)) if found is not None]
        losses = losses_of(model.predictions(ours(packed), masked, words, answers))
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


@pytest.mark.parametrize("name", [name for name in MASKED if name not in PRETRAINED])
def test_replaced_tokens(name, tmp_path):
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
    reader.init_pretraining(model, tmp_path / "theirs")
    Tokenizer(WordLevel({}, unk_token="")).save(str(tmp_path / "tokenizer.json"))
    writer.save_pretraining(tmp_path / "ours", model, tmp_path / "tokenizer.json")

    packed = sample(case)
    masked, words, answers = taught(packed)
    with torch.no_grad():
        logits = model.eval().generator(*ours(packed), masked)
        torch.manual_seed(0)
        losses = losses_of(model.predictions(ours(packed), masked, words, answers))
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


def test_what_electra_shares(tmp_path):
    """Generator and discriminator embed alike, so that a checkpoint of two tables is refused, not read wrong."""
    model = make_pretraining(family_config(CASES["electra"]), next_sentence=False)
    own, shared = (part.encoder.embeddings for part in (model.generator, model.discriminator))
    assert own.word is shared.word
    assert own.position is shared.position
    assert own.project is not shared.project
    assert model.generator.config.hidden_size == 8  # one head of four
    Tokenizer(WordLevel({}, unk_token="")).save(str(tmp_path / "tokenizer.json"))
    writer.save_pretraining(tmp_path / "ours", model, tmp_path / "tokenizer.json")
    other = make_pretraining(family_config(CASES["electra"]), next_sentence=False)
    writer.save_pretraining(tmp_path / "other", other, tmp_path / "tokenizer.json")
    (tmp_path / "other" / "generator").replace(tmp_path / "ours" / "theirs")
    (tmp_path / "ours" / "generator").rename(tmp_path / "ours" / "first")
    (tmp_path / "ours" / "theirs").rename(tmp_path / "ours" / "generator")

    with pytest.raises(CheckpointError, match="is not tied to the word embeddings"):
        reader.init_pretraining(model, tmp_path / "ours")


@every_case
def test_a_head_begins_with_the_pooler(case, tmp_path):
    """The pooler is part of the head if the family has one, under any name."""
    peer = perturb(transformers.AutoModel.from_config(case.config()))
    peer.save_pretrained(tmp_path)
    described = {"a": Head(task="classification", labels=("x", "y"))}
    model = EncoderWithHeads(family_config(case), described)
    before = {name: tensor.clone() for name, tensor in model.heads.state_dict().items()}
    reader.init_from(model, tmp_path)
    changed = {
        name.removeprefix("a.")
        for name, tensor in model.heads.state_dict().items()
        if not torch.equal(tensor, before[name])
    }
    pooler = {n for n, _ in peer.named_parameters() if n.startswith("pooler.")}
    assert changed == ({"pooler.dense.weight", "pooler.dense.bias"} if pooler else set())


@every_case
def test_config(case):
    """What is written is what transformers would have written, where we have a word for it."""
    config = family_config(case)
    theirs_ = case.config().to_dict()
    own = config.to_dict()
    assert own | {key: theirs_[key] for key in own if key in theirs_} == own
    assert family_of(config).config.from_dict(own) == config


# -- as a bundle ------------------------------------------------------------------------------------------------------

TOPICS = ("sea", "sky", "trade")
TEXTS = [samples.text(words, seed=words) for words in (1, 3, 9, 20, 50)]
PAIRS = [(TEXTS[2], TEXTS[3]), (TEXTS[0], TEXTS[4])]


KINDS = {
    "classifier": transformers.AutoModelForSequenceClassification,
    "masked": transformers.AutoModelForMaskedLM,
}


@dataclass(frozen=True)
class Exported:
    """A folder with a joint checkpoint and the two that transformers wrote, and the bundle that was made of it."""

    folder: Path
    bundle: Bundle

    def outputs(self, packed: Packed) -> BatchOutputs:
        return torch_outputs(reader.load_model(self.folder / "joint"), packed)

    def session(self, precision: Precision, layout: str = "packed") -> Session:
        graphs = self.bundle.manifest.graphs
        graph = next(g for g in graphs if (g.precision, g.layout) == (precision, layout))
        return Session(self.bundle, graph, CPU, SessionOptions(threads=1))

    def batch(self, lengths: list[int]) -> Packed:
        """Random ids, of one segment where the family has one; some texts have no mask token."""
        config = reader.read_config(self.folder / "joint")
        packed = batch(lengths, config.vocab_size)
        if mask := self.bundle.manifest.mask_token_id:
            packed.input_ids[3::7] = mask
        types = packed.token_type_ids * (config.type_vocab_size > 1)
        return Packed(packed.input_ids, types, packed.position_ids, packed.layout)


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Exported]:
    """A family in all precisions, exported when it is first asked for."""
    root = tmp_path_factory.mktemp("families")
    return cache(lambda model_type: export_family(model_type, root / model_type))


def export_family(model_type: str, folder: Path) -> Exported:
    """Join a classifier and, if any, a masked language model of the same encoder, as transformers wrote them."""
    told = {"positions": max(MIXED), "id2label": dict(enumerate(TOPICS))}
    kinds = {n: kind for n, kind in KINDS.items() if n != "masked" or model_type in PRETRAINABLE}
    for name, kind in kinds.items():
        hub.save(model_type, folder / name, kind, **told)
        # Two unigram tokenizers of the same texts may differ.
        shutil.copy(folder / "classifier" / "tokenizer.json", folder / "shared.json")
        shutil.copy(folder / "shared.json", folder / name / "tokenizer.json")
    first, *others = (kind.from_pretrained(folder / name) for name, kind in kinds.items())
    for second in others:
        second.base_model.load_state_dict(first.base_model.state_dict(), strict=False)
        second.save_pretrained(folder / "masked")
    models = [reader.load_model(folder / name) for name in kinds]
    described = {name: head for model in models for name, head in model.described.items()}
    joint = EncoderWithHeads(models[0].config, described)
    joint.load_state_dict({n: t for model in models for n, t in model.state_dict().items()})
    writer.save_joint(folder / "joint", joint, folder / "shared.json")
    out = folder / model_type
    half = ["fp16"] if FAMILIES[model_type].fits_half else []
    run_export(folder / "joint", out, "--precision", "fp32", "int8", *half)
    return Exported(folder, bundle.load(out))


@pytest.fixture
def exported(exports: Callable[[str], Exported], model_type: str) -> Exported:
    return exports(model_type)


SOON = ("bert",)  # the exports of all take minutes, DeBERTa's most of all


def families(names: Iterable[str]) -> pytest.MarkDecorator:
    """A parameter for each of these families, most of them slow."""
    marked = [pytest.param(name, marks=() if name in SOON else pytest.mark.slow) for name in names]
    return pytest.mark.parametrize("model_type", marked)


every_family, every_masked = families(FAMILIES), families(PRETRAINABLE)
every_half = families(name for name, family in FAMILIES.items() if family.fits_half)
MIXED = [200, 1, 9, 37, 2, 90]
PRE_NORM = {"modernbert", "eurobert", "qwen3"}
BIASED = {"mpnet", "deberta", "deberta-v2", "modernbert", "qwen3"}  # with an attention bias


@every_family
@pytest.mark.parametrize("layout", ["packed", "portable"])
def test_graphs_are_pytorch(exported, layout):
    """The fp32 graphs give PyTorch's logits, of texts and of mask tokens, for texts of all lengths together."""
    packed = exported.batch(MIXED)
    expected = exported.outputs(packed)
    assert len(expected.get("fill-mask", packed.input_ids)) > len(MIXED)
    found = exported.session("fp32", layout).run(packed)
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=0, atol=1e-4, err_msg=name)


@every_half
def test_half(exported, model_type):
    """CUDA's graph, evaluated node by node, gives PyTorch's logits but for rounding, and states its attention bias.

    Norms after a sum are in fp16, but for families whose layers normalize first. Graphs for a CPU have no such norm.
    """
    packed = exported.batch([197, *MIXED[1:]])  # in 200 slots on CUDA
    path, mask = exported.bundle.path / "fp16.onnx", exported.bundle.manifest.mask_token_id
    found, expected = cuda_emulator.emulated(path, mask)(packed), exported.outputs(packed)
    for name in expected:
        assert cosine(found[name], expected[name]) > 1 - 1e-4, name
    (record,) = [g for g in exported.bundle.manifest.graphs if g.provider == "cuda"]
    assert (model_type in BIASED) is record.attention_bias
    fused = {
        path.name
        for path in exported.bundle.path.glob("*.onnx")
        if "SkipLayerNormalization"
        in {n.op_type for n in onnx.load(path, load_external_data=False).graph.node}
    }
    assert fused == (set() if model_type in PRE_NORM else {"fp16.onnx"})
    graph = onnx.load(exported.bundle.path / "fp16.onnx", load_external_data=False).graph
    products = {node.input[1] for node in graph.node if node.op_type == "Gemm"}
    trunk = {t.name: t.data_type for t in graph.initializer if "encoder.layers" in t.name}
    matrices = {name: kind for name, kind in trunk.items() if name in products}
    assert matrices
    assert {TensorProto.FLOAT16} == {*matrices.values()}


@pytest.mark.parametrize("layout", ["packed", "portable"])
def test_graphs_tell_two_texts_apart(segmented, layout):
    """ModernBERT's do, too, where its configuration has segments."""
    packed = segmented.batch(MIXED)
    assert 1 in packed.token_type_ids
    expected = segmented.outputs(packed)["topic"]
    session = segmented.session("fp32", layout)
    np.testing.assert_allclose(session.run(packed)["topic"], expected, rtol=0, atol=1e-4)
    one = replace(packed, token_type_ids=0 * packed.token_type_ids)
    assert np.abs(session.run(one)["topic"] - expected).max() > 1e-3


@pytest.fixture(scope="module")
def segmented(tmp_path_factory: pytest.TempPathFactory) -> Exported:
    """ModernBERT with segments, which transformers does not have."""
    folder = tmp_path_factory.mktemp("segmented")
    learnt = train(samples.corpus(), vocab_size=500, family=FAMILIES["modernbert"])
    learnt.save(str(folder / "tokenizer.json"))
    config = replace(
        family_config(CASES["modernbert"]),
        vocab_size=learnt.get_vocab_size(),
        max_position_embeddings=max(MIXED),
        type_vocab_size=2,
    )
    model = perturb(EncoderWithHeads(config, {"topic": Head(task="classification", labels=TOPICS)}))
    writer.save_joint(folder / "joint", model, folder / "tokenizer.json")
    run_export(folder / "joint", folder / "out", "--precision", "fp32")
    return Exported(folder, bundle.load(folder / "out"))


@pytest.fixture(scope="module")
def server(request: pytest.FixtureRequest, exports: Callable[[str], Exported]) -> Iterator[Server]:
    """All families that this run tests in one service, at fp32."""
    asked = chosen(request, "model_type")
    folders = [exports(model_type).bundle.path for model_type in FAMILIES if model_type in asked]
    with serving(*folders, "--precision", "fp32") as it:
        yield it


def scores(folder: Path, texts: list[Any]) -> list[dict[str, float]]:
    """Transformers' scores of each text or pair."""
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    told = []
    for text in texts:
        both = text if isinstance(text, tuple) else (text,)
        with torch.no_grad():
            logits = model(**tokenizer(*both, return_tensors="pt")).logits[0]
        told.append(dict(zip(TOPICS, torch.softmax(logits, -1).tolist(), strict=True)))
    return told


@every_family
@pytest.mark.e2e
def test_answers_are_those_of_transformers(server, exported, model_type):
    """The scores of every label, of texts and of pairs, to 1e-4."""
    expected = scores(exported.folder / "classifier", [*TEXTS, *PAIRS])
    asked = {"model": model_type, "top_k": None}
    texts = server.answer("/classify", {"inputs": TEXTS, **asked})
    firsts, seconds = (list(side) for side in zip(*PAIRS, strict=True))
    pairs = server.answer("/classify", {"inputs": firsts, "text_pair": seconds, **asked})
    found = [
        {said["label"]: said["score"] for said in result}
        for result in texts["results"] + pairs["results"]
    ]
    assert len(expected) == len(found)
    for one, other in zip(expected, found, strict=True):
        assert other == pytest.approx(one, abs=1e-4)
    assert max(abs(found[0][label] - found[3][label]) for label in TOPICS) > 1e-2


# With one and with several mask tokens, next to punctuation and at both ends.
MASKED = ("The {mask} of the harbor was late.", "{mask} sails, and the wind takes it to {mask}")
FOLDED = 8192  # numbers; the tracer itself widens smaller fp16 weights


@every_masked
def test_vocabulary_matrix_is_stored_once(exported):
    """Each graph's output matrix is its embedding table."""
    rows = exported.bundle.manifest.vocabulary.size
    for record in exported.bundle.manifest.graphs:
        graph = onnx.load(exported.bundle.path / record.file, load_external_data=False).graph
        sizes = [tuple(tensor.dims) for tensor in graph.initializer]
        tables = [size for size in sizes if len(size) == 2 and size[0] == rows and size[1] > 1]
        if record.precision != "fp16" or rows * tables[0][1] > FOLDED:
            assert 1 == len(tables), record.file


@every_masked
@pytest.mark.e2e
def test_filled_masks_are_those_of_transformers(server, exported, model_type):
    """Tokens, texts and scores equal the results of transformers' pipeline, the scores to 1e-4; also for targets."""
    pipeline = transformers.pipeline("fill-mask", model=str(exported.folder / "masked"), device=-1)
    texts = [text.format(mask=pipeline.tokenizer.mask_token) for text in MASKED]
    vocabulary = pipeline.tokenizer.get_vocab()
    targets = sorted(vocabulary, key=vocabulary.__getitem__)[40:60:3]
    for options in ({"top_k": 7}, {"targets": targets, "top_k": 4}):
        body = {"model": model_type, "inputs": texts, **options}
        expected = flat(pipeline(texts, **options))
        found = flat(server.answer("/fill-mask", body)["results"])
        scores = [token.pop("score") for token in expected]
        assert scores == pytest.approx([token.pop("score") for token in found], abs=1e-4)
        assert expected == found


def flat(results: list[Any]) -> list[dict[str, Any]]:
    """The tokens of all mask tokens of all texts."""
    masks = [tokens if isinstance(tokens[0], list) else [tokens] for tokens in results]
    return [dict(token) for own in masks for tokens in own for token in tokens]

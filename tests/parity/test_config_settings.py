"""Each setting of `config.json` has here the meaning that it has in transformers, or it is refused by name."""

import dataclasses
import inspect
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import GenerationConfig

from model.checkpoints import reader
from model.checkpoints.config_table import CONFIG_TABLES, OF_FAMILY, tables_of, unknown_settings
from model.checkpoints.errors import CheckpointError
from model.checkpoints.settings_table import Handling, Setting
from model.families.registry import FAMILIES
from tests.json_files import edit_json, editing
from tests.model.helpers import TOLERANCE, batch, ours, perturb, theirs

SHAPE = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
MORE: dict[str, dict[str, Any]] = {
    "mpnet": {"pad_token_id": 1},
    "albert": {"embedding_size": 16},
    "electra": {"embedding_size": 16},
    "qwen3": {"num_key_value_heads": 2, "head_dim": 16},
    "gemma3_text": {"num_key_value_heads": 2, "head_dim": 16},
    "deberta": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
    "deberta-v2": {"relative_attention": True, "pos_att_type": ["c2p", "p2c"]},
}
# A value of each setting other than transformers' default. A honored one may need other weights, which it gets.
RATES = dict.fromkeys(
    (
        *("hidden_dropout_prob", "attention_probs_dropout_prob", "classifier_dropout", "dropout"),
        *("attention_dropout", "qa_dropout", "seq_classif_dropout", "classifier_dropout_prob"),
        *("embedding_dropout", "mlp_dropout", "pooler_dropout", "cls_dropout", "initializer_range"),
        *(
            "resid_pdrop",
            "attn_pdrop",
            "embd_pdrop",
            "summary_last_dropout",
            "summary_first_dropout",
        ),
    ),
    0.25,
)
ROPE = {"rope_type": "default", "rope_theta": 50.0}
ROPES = {"full_attention": {"rope_theta": 70.0}, "sliding_attention": {"rope_theta": 20.0}}
HONORED: dict[str, Any] = {
    "vocab_size": 100,
    "max_position_embeddings": 48,
    "pad_token_id": 3,
    "problem_type": "multi_label_classification",
    "id2label": {"0": "a", "1": "b", "2": "c"},
    "num_labels": 3,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 40,
    "layer_norm_eps": 0.1,
    "norm_eps": 0.1,
    "rms_norm_eps": 0.1,
    "num_key_value_heads": 2,
    "type_vocab_size": 3,
    "dim": 48,
    "n_layers": 3,
    "n_heads": 2,
    "hidden_dim": 40,
    "embedding_size": 24,
    "num_hidden_groups": 2,
    "inner_group_num": 2,
    "norm_bias": True,
    "attention_bias": True,
    "mlp_bias": True,
    "classifier_bias": True,
    "classifier_pooling": "mean",
    "local_attention": 4,
    "layer_types": ["sliding_attention", "full_attention"],
    "global_attn_every_n_layers": 2,
    "global_rope_theta": 70.0,
    "local_rope_theta": 20.0,
    "rope_parameters": ROPE,
    "rope_scaling": ROPE,
    "rope_theta": 50.0,
    "head_dim": 8,
    "use_sliding_window": False,
    "sliding_window": 4,
    "max_window_layers": 1,
    "sliding_window_pattern": 2,
    "query_pre_attn_scalar": 9,
    "use_bidirectional_attention": True,
    "rope_local_base_freq": 20.0,
    "relative_attention": False,
    "max_relative_positions": 5,
    "position_biased_input": False,
    "pos_att_type": "P2C",
    "pooler_hidden_size": 32,
    "attention_head_size": 8,
    "position_buckets": 8,
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
    "conv_kernel_size": 3,
    "conv_groups": 2,
    "conv_act": "gelu",
}
HARMLESS: dict[str, Any] = {
    **RATES,
    "dtype": "float16",
    "torch_dtype": "bfloat16",
    "label2id": {"x": 0},
    "bos_token_id": 5,
    "eos_token_id": 6,
    "cls_token_id": 5,
    "sep_token_id": 6,
    "mask_token_id": 6,
    "tie_word_embeddings": False,
    "chunk_size_feed_forward": 1,
    "use_cache": False,
    "output_hidden_states": True,
    "output_attentions": True,
    "tie_last_hidden_states": False,
    "attn_implementation": "eager",
    "auto_map": {"AutoModel": "modeling.Own"},
    "transformers_version": "4.0.0",
    "sinusoidal_pos_embds": True,
    "summary_type": "mean",
    "summary_use_proj": False,
    "summary_activation": "relu",
    "decoder_bias": False,
    "sparse_prediction": True,
    "sparse_pred_ignore_index": 1,
    "deterministic_flash_attn": True,
    "final_logit_softcapping": 30.0,
    "_sliding_window_pattern": 2,
    "reference_compile": True,
    "initializer_cutoff_factor": 1.0,
    "legacy": False,
    "max_length": 3,
    "do_sample": True,
    "top_k": 1,
}
REFUSED: dict[str, tuple[Any, ...]] = {
    "quantization_config": ({"quant_method": "bitsandbytes", "load_in_8bit": True}, {"bits": 4}),
    "compression_config": ({"quant_method": "compressed-tensors"},),
    "transformers_weights": ("other.safetensors",),
    "per_layer_config": ({"0": {"intermediate_size": 8}},),
    "pruned_heads": ({"0": [1]},),
    "position_embedding_type": ("relative_key", "relative_key_query"),
    "is_encoder_decoder": (True,),
    "is_decoder": (True,),
    "add_cross_attention": (True,),
    "classifier_activation": ("relu",),
    "rope_scaling": ({"rope_type": "linear", "factor": 2.0}, ROPE),
    "head_dim": (16,),
    "sliding_window": (8,),
    "is_causal": (False,),
    "attn_logit_softcapping": (30.0,),
    "talking_head": (True,),
    "pooler_hidden_act": ("tanh",),
}
# What the families refuse of settings that they honor.
REFUSED_VALUES: list[tuple[str, str, Any]] = [
    ("bert", "hidden_act", "relu"),
    ("bert", "hidden_act", "gelu_new"),
    ("roberta", "hidden_act", "gelu_new"),
    ("distilbert", "activation", "relu"),
    ("albert", "hidden_act", "relu"),
    ("modernbert", "hidden_activation", "silu"),
    ("modernbert", "rope_parameters", {"full_attention": {"rope_type": "yarn", "factor": 2.0}}),
    ("modernbert", "rope_parameters", {"full_attention": {"partial_rotary_factor": 0.5}}),
    ("modernbert", "rope_parameters", {"rope_theta": 5.0}),
    ("modernbert", "layer_types", ["full_attention", "linear_attention"]),
    ("modernbert", "layer_types", ["full_attention"]),
    ("modernbert", "classifier_pooling", "max"),
    ("nomic_bert", "rope_scaling", {"rope_type": "linear", "factor": 2.0}),
    ("nomic_bert", "rope_parameters", {"rope_theta": 5.0, "partial_rotary_factor": 0.5}),
    ("nomic_bert", "head_dim", 16),
    ("gte", "hidden_act", "silu"),
    ("gte", "position_embedding_type", "absolute"),
    ("gte", "layer_norm_type", "rms_norm"),
    ("gte", "logn_attention_scale", True),
    ("gte", "pack_qkv", False),
    ("gte", "rope_parameters", {"rope_type": "dynamic", "rope_theta": 5.0, "factor": 2.0}),
    ("gte", "rope_parameters", {"rope_type": "linear", "rope_theta": 5.0, "factor": 0.5}),
    ("gte", "rope_scaling", {"type": "ntk", "factor": 8.0, "mixed_b": 0.9}),
    ("gte", "head_dim", 16),
    ("jina_embeddings_v3", "head_dim", 16),
    ("jina_embeddings_v3", "rope_parameters", {"rope_type": "yarn", "factor": 2.0}),
    ("eurobert", "hidden_act", "gelu"),
    ("eurobert", "num_key_value_heads", 3),
    ("eurobert", "head_dim", 7),
    ("eurobert", "classifier_pooling", "cls"),
    ("eurobert", "rope_parameters", {"rope_type": "llama3", "rope_theta": 5.0, "factor": 8.0}),
    ("qwen3", "layer_types", ["full_attention"]),
    ("qwen3", "layer_types", ["sliding_attention", "full_attention"]),
    ("gemma3_text", "hidden_activation", "gelu"),
    ("gemma3_text", "rope_parameters", {"rope_theta": 5.0}),
    ("gemma3_text", "layer_types", ["full_attention"]),
    ("deberta", "pooler_hidden_size", 16),
    ("deberta-v2", "attention_head_size", 4),
    ("deberta-v2", "pos_att_type", ["p2p"]),
    ("deberta-v2", "conv_act", "relu"),
    ("bert", "hidden_size", 30),
    ("bert", "problem_type", "rank"),
]
# Compared elsewhere: labels and CrossEncoders (tests/model/test_labels.py, test_sentence_settings.py), the words of
# NomicBERT's first code (tests/model/test_config.py), and what is Quartet's own.
ELSEWHERE = {
    *("model_type", "architectures", "sentence_transformers"),
    "sbert_ce_default_activation_function",
    *("hidden_act", "activation", "hidden_activation"),
    *("normalize", "null_threshold", "max_answer_tokens", "max_query_tokens", "demo"),
    "calibration_temperature",
    *("generator_size", "matryoshka_dimensions", "relative_attention_num_buckets"),
}


def fields_of(model_type: str, **more: Any) -> dict[str, Any]:
    words = FAMILIES[model_type].config.words
    own = {**SHAPE, **MORE.get(model_type, {})}
    return {**{words.get(name, name): value for name, value in own.items()}, **more}


def save(folder: Path, model_type: str, /, **fields: Any) -> Path:
    """A classifier of transformers with random weights."""
    config = transformers.AutoConfig.for_model(model_type, **fields_of(model_type, **fields))
    torch.manual_seed(0)
    peer = transformers.AutoModelForSequenceClassification.from_config(config)
    perturb(peer).save_pretrained(folder)
    return folder


def edit(folder: Path, **fields: Any) -> Path:
    edit_json(folder / "config.json", **fields)
    return folder


@torch.no_grad()
def assert_same_logits(folder: Path, model_type: str) -> torch.Tensor:
    """The logits of transformers for the directory are those that we read; returns them."""
    peer = transformers.AutoModelForSequenceClassification.from_pretrained(
        folder, dtype=torch.float32
    ).eval()
    packed = batch([12, 1, 40, 7])
    pad = peer.config.pad_token_id
    packed.input_ids[packed.input_ids == pad] = 5
    arguments = theirs(packed)
    arguments["input_ids"][arguments["attention_mask"] == 0] = pad
    model = reader.load_model(folder)
    ids, types, *rest = ours(packed)
    segments = ("bert", "albert", "electra", "nomic_bert", "gte", "deberta", "deberta-v2")
    if model_type not in segments or model.config.type_vocab_size < 2:
        types = torch.zeros_like(types)
        del arguments["token_type_ids"]
    expected = peer(**arguments, return_dict=True).logits
    torch.testing.assert_close(model(ids, types, *rest)["classification"], expected, **TOLERANCE)
    head = model.described["classification"]
    assert head.labels == tuple(str(peer.config.id2label[n]) for n in range(len(head.labels)))
    assert head.problem_type == peer.config.problem_type
    return expected


def settings(handling: Handling) -> list[tuple[str, Setting]]:
    """Each setting with this handling, with a family that has it."""
    common = [("bert", setting) for setting in CONFIG_TABLES[0].settings]
    own = [(name, setting) for name, table in OF_FAMILY.items() for setting in table.settings]
    return [(name, setting) for name, setting in [*common, *own] if setting.handling is handling]


def cases(handling: Handling, values: Mapping[str, Any]) -> Any:
    found = [
        pytest.param(family, setting.name, values[setting.name], id=f"{family}-{setting.name}")
        for family, setting in settings(handling)
        if setting.name in values
    ]
    return pytest.mark.parametrize(("family", "name", "value"), found)


@cases(Handling.HONORED, HONORED)
def test_honored(family, name, value, tmp_path):
    """A honored setting gives transformers' logits, whatever its value."""
    if (family, name) == ("modernbert", "type_vocab_size"):
        pytest.skip("Quartet's own")
    if family in ("modernbert", "gemma3_text") and name == "rope_parameters":
        value = ROPES
    fields = {name: value}
    if name in ("conv_groups", "conv_act"):
        fields["conv_kernel_size"] = 3
    if (family, name) == ("qwen3", "layer_types"):
        fields |= {"use_sliding_window": True, "sliding_window": 4}
    if name in ("id2label", "problem_type"):
        fields["num_labels"] = 3
    folder = save(tmp_path, family, **fields)
    if name == "num_labels":  # transformers saves id2label in its place
        path = folder / "config.json"
        with editing(path) as document:
            del document["id2label"], document["label2id"]
    assert_same_logits(edit(folder, **{name: value}), family)


@cases(Handling.NO_EFFECT, HARMLESS)
def test_no_effect(family, name, value, tmp_path):
    """A setting without effect gives transformers' logits, and the same as without it."""
    folder = save(tmp_path, family)
    expected = assert_same_logits(folder, family)
    found = assert_same_logits(edit(folder, **{name: value}), family)
    torch.testing.assert_close(found, expected, **TOLERANCE)


REFUSED_CASES = [
    (family, setting.name, value)
    for family, setting in settings(Handling.REFUSED)
    for value in REFUSED[setting.name]
]


@pytest.mark.parametrize(("family", "name", "value"), REFUSED_CASES + REFUSED_VALUES)
def test_refused(family, name, value, tmp_path):
    """A setting that is refused is named with its file, in one line."""
    folder = edit(save(tmp_path, family), **{name: value})
    with pytest.raises(CheckpointError, match=rf"^[^\n]*config\.json: [^\n]*{name}[^\n]*$"):
        reader.load_model(folder)


@pytest.mark.parametrize(("family", "setting"), settings(Handling.REFUSED))
def test_harmless_values(family, setting, tmp_path):
    """The values of a refused setting that pass are those with which transformers computes the same."""
    folder = save(tmp_path, family)
    for value in setting.harmless:
        if value is None and setting.name in ("classifier_activation", "pooler_hidden_act"):
            continue  # transformers refuses null itself
        if value == {} and setting.name == "quantization_config":
            continue  # transformers asks it for its method
        edit(folder, **{setting.name: value})
        reader.load_model(folder)
        if value is not None:
            assert_same_logits(folder, family)


@pytest.mark.parametrize("family", FAMILIES)
def test_absent_fields(family):
    """A field that `config.json` leaves out has transformers' value."""
    peer = transformers.AutoConfig.for_model(family)
    own = FAMILIES[family].config
    found = own.from_dict({"model_type": family})
    compared = 0
    for field in dataclasses.fields(found):
        word = own.words.get(field.name, field.name)
        if word is None or not hasattr(peer, word) or field.name == "type_vocab_size" == 0:
            continue
        expected = getattr(peer, word)
        if expected is None:
            continue
        expected = (
            tuple(expected or ()) if isinstance(getattr(found, field.name), tuple) else expected
        )
        assert (field.name, expected) == (field.name, getattr(found, field.name))
        compared += 1
    assert compared >= 8


def read_by_transformers(family: str) -> set[str]:
    """The names of settings that transformers reads for a family: its classes' fields, and what its code looks up."""
    kind = transformers.CONFIG_MAPPING[family]
    names = {field.name for field in dataclasses.fields(kind)} | kind.attribute_map.keys()
    names |= {name for name in kind().to_dict() if not name.startswith("_")}
    names |= GenerationConfig._get_default_generation_params().keys()
    names |= {"num_labels", "torch_dtype", "name_or_path", "attn_implementation", "auto_map"}
    names |= {"experts_implementation", "per_layer_config", "quantization_config"}
    names |= {"transformers_weights"}
    configuration = inspect.getsource(sys.modules[kind.__module__])
    names |= {*re.findall(r'kwargs\.(?:pop|get)\("(\w+)"', configuration)}
    peer = transformers.AutoModel.from_config(kind(**fields_of(family)))
    modeling = inspect.getsource(sys.modules[type(peer).__module__])
    names |= {*re.findall(r'getattr\((?:self\.)?config, "(\w+)"', modeling)}
    names |= {*re.findall(r"\bconfig\.([a-z]\w*)\b(?!\()", modeling)}
    return names


NO_SETTINGS = {  # attributes of the class, and what is computed from settings
    *("hidden_states", "sliding_window", "use_return_dict", "to_dict", "get_text_config"),
    # of models of images in the same file
    *("image_token_id", "mm_tokens_per_image", "text_config", "vision_config"),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_every_setting_is_in_a_table(family):
    """No setting that transformers reads is unknown here."""
    document = {**dict.fromkeys(read_by_transformers(family) - NO_SETTINGS), "model_type": family}
    assert [] == unknown_settings(document)


def test_every_setting_is_compared():
    """Each setting of a table has a value above, or is compared elsewhere."""
    values = HONORED.keys() | HARMLESS.keys() | REFUSED.keys() | ELSEWHERE
    harmless_by_kind = {
        "used in text generation only, which an encoder does not do",
        "changes how the library computes, not the result",
    }
    for model_type in FAMILIES:
        for table in tables_of(model_type):
            missing = [
                setting.name
                for setting in table.settings
                if setting.name not in values
                and setting.note
                not in {*harmless_by_kind, "a setting of the family's original code"}
                and not setting.name.startswith("_")
            ]
            assert [] == [
                name for name in missing if name not in ("name_or_path", "summary_proj_to_labels")
            ]


def test_unknown_settings():
    """A name that is in no table of the family is listed."""
    document = {"model_type": "bert", "hidden_size": 8, "dim": 8, "gradient_checkpointing": False}
    assert ["dim", "gradient_checkpointing"] == unknown_settings(document)
    assert ["dim"] == unknown_settings({"model_type": "gpt2", "dim": 8})

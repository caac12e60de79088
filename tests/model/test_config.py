"""A config says exactly what the hub's `config.json` says, or is refused."""

import pytest
import transformers

from model.config import PRESETS, BertConfig, preset
from model.families.modernbert import ModernBertConfig
from model.families.nomic_bert import NomicBertConfig


@pytest.mark.parametrize(
    ("name", "layers", "hidden", "heads"),
    [
        ("tiny", 2, 128, 2),
        ("mini", 4, 256, 4),
        ("small", 6, 384, 12),
        ("base", 12, 768, 12),
        ("large", 24, 1024, 16),
    ],
)
def test_presets(name, layers, hidden, heads):
    """The presets have the shapes of Google's releases (and of MiniLM)."""
    config = preset(name)

    assert (config.num_hidden_layers, config.hidden_size) == (layers, hidden)
    assert (config.num_attention_heads, config.intermediate_size) == (heads, 4 * hidden)
    assert config.vocab_size == 30_522


def test_preset_with_overrides():
    """A preset's fields can be overridden, those it sets included."""
    config = preset("tiny", vocab_size=100, num_hidden_layers=1)

    assert (config.vocab_size, config.num_hidden_layers, config.hidden_size) == (100, 1, 128)


def test_unknown_preset():
    """An unknown preset is refused with the names of those there are."""
    with pytest.raises(ValueError, match=f"'huge': one of {', '.join(PRESETS)}"):
        preset("huge")


def test_preset_of_a_family():
    """A preset takes a family's kind of config, and its feed-forward the family's width."""
    config = preset("mini", ModernBertConfig, local_attention=32)

    assert (config.model_type, config.local_attention) == ("modernbert", 32)
    assert (config.num_hidden_layers, config.hidden_size, config.intermediate_size) == (4, 256, 384)
    with pytest.raises(ValueError, match="bert has no 'local_attention': one of vocab_size"):
        preset("mini", local_attention=32)


def test_defaults_are_transformers():
    """Every default is that of transformers."""
    theirs = transformers.BertConfig().to_dict()

    assert {
        name: theirs.get(name, value) for name, value in BertConfig().to_dict().items()
    } == BertConfig().to_dict()


@pytest.mark.parametrize("name", PRESETS)
def test_round_trip_by_transformers(name):
    """A config comes back unchanged from transformers' own."""
    config = preset(name, layer_norm_eps=1e-6, hidden_dropout_prob=0.2)

    theirs = transformers.BertConfig(**config.to_dict())

    assert BertConfig.from_dict(theirs.to_dict()) == config


def test_from_dict_ignores_what_does_not_shape_the_encoder():
    """Unknown fields and nulls of a hub config are passed over."""
    config = BertConfig.from_dict({"hidden_size": 24, "use_cache": True, "pad_token_id": None})

    assert config == BertConfig(hidden_size=24)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"model_type": "roberta"}, "model_type 'roberta' is not 'bert'"),
        ({"num_hidden_layers": 10**7}, "num_hidden_layers = 10000000 exceeds 1000"),
        ({"hidden_act": "gelu_new"}, "'gelu_new': only 'gelu' is bert's"),
        ({"hidden_size": 100}, "hidden_size 100 is not a multiple of num_attention_heads 12"),
        ({"hidden_dropout_prob": 2}, "hidden_dropout_prob = 2 must be a number from 0 to 1"),
    ],
)
def test_refuses_what_it_would_compute_differently(fields, message):
    """A config that means another computation is refused by name."""
    with pytest.raises(ValueError, match=message):
        BertConfig.from_dict(fields)


def test_nomic_berts_first_words():
    """The reader accepts its configuration in transformers' names, and in the names of its original code."""
    sizes = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    first = {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_inner": 64, "layer_norm_epsilon": 1e-6}
    first |= {"n_positions": 8192, "resid_pdrop": 0.1, "attn_pdrop": 0.2, "rotary_emb_base": 500}
    first |= {"activation_function": "swiglu", "qkv_proj_bias": False, "causal": False}
    found = NomicBertConfig.from_dict({"model_type": "nomic_bert", **first})
    assert found == NomicBertConfig(
        **sizes,
        intermediate_size=64,
        max_position_embeddings=8192,
        layer_norm_eps=1e-6,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.2,
        rope_theta=500,
    )

    theirs = transformers.AutoConfig.for_model("nomic_bert", **sizes).to_dict()
    assert NomicBertConfig.from_dict(theirs) == NomicBertConfig(**sizes)
    assert NomicBertConfig.from_dict(found.to_dict()) == found


@pytest.mark.parametrize(
    ("said", "theta", "longest"),
    [
        ({"rope_theta": 50.0}, 50.0, 2048),
        ({"rope_parameters": {"rope_theta": 60.0}, "rotary_emb_base": 500}, 60.0, 2048),
        ({"max_position_embeddings": 64, "n_positions": 8192}, 1000.0, 64),
        ({"n_positions": 8192, "rotary_scaling_factor": 2}, 1000.0, 2048),
        ({"n_positions": 8192, "rotary_scaling_factor": 2, "max_trained_positions": 512}, 1000.0, 512),
    ],
)  # fmt: skip
def test_nomic_berts_rotations(said, theta, longest):
    """Values under newer names count; with scaled rotations the reader limits the length instead."""
    found = NomicBertConfig.from_dict(said)
    assert (found.rope_theta, found.max_length) == (theta, longest)


@pytest.mark.parametrize(
    ("said", "value"),
    [
        ("prenorm", True),
        ("activation_function", "gelu"),
        ("mlp_fc1_bias", True),
        ("rotary_emb_interleaved", True),
        ("moe_every_n_layers", 2),
        ("head_dim", 32),
        ("causal", True),
        ("rope_parameters", {"rope_type": "yarn"}),
        ("rope_scaling", {"type": "linear", "factor": 4}),
    ],
)
def test_what_nomic_bert_is_not(said, value):
    """Variants that would be computed otherwise are refused by name."""
    with pytest.raises(ValueError, match="rope_type" if said.startswith("rope") else said):
        NomicBertConfig.from_dict({said: value})

"""The settings in `config.json`, for each family: common settings first, then the family's own.

`check_config` raises for a setting whose value transformers would compute otherwise. The values of sizes and rates are
checked where the family's configuration is made (`model/config.py`).
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from model.checkpoints.errors import CheckpointError
from model.checkpoints.settings_table import Setting, SettingsFile, honored, no_effect, refused
from model.config import ORIGINAL_NAMES


def _file(families: str, *settings: Setting) -> SettingsFile:
    name = f"config.json ({families})" if families else "config.json"
    return SettingsFile(name, "transformers", settings)


TRAINING = "used in training only"
GENERATION = "used in text generation only, which an encoder does not do"
RUNTIME = "changes how the library computes, not the result"
DROPOUTS = ("dropout", "dropout_prob", "pdrop")  # ends of names of dropout rates

ALL = _file(
    "",
    *honored("model_type", "architectures", "vocab_size", "max_position_embeddings"),
    *honored("pad_token_id", note="begins the positions of RoBERTa's descendants"),
    *honored("id2label", note="labels that are numbers become text"),
    *honored("num_labels", note="where there is no id2label; otherwise they must agree"),
    *honored("problem_type"),
    *honored("sentence_transformers", note="activation_fn of a CrossEncoder"),
    *honored("sbert_ce_default_activation_function", note="in an older CrossEncoder"),
    *honored(
        *("normalize", "null_threshold", "max_answer_tokens", "max_query_tokens", "demo"),
        "calibration_temperature",
        "matryoshka_dimensions",
        note="Quartet's own",
    ),
    refused(
        "quantization_config",
        {},
        note="quantized weights: save the model in full precision, and export that with --precision int8",
    ),
    refused("compression_config", {}, note="quantized weights: save the model in full precision"),
    refused(
        "transformers_weights", "model.safetensors", note="rename the file to model.safetensors"
    ),
    refused("per_layer_config", {}, note="layers of different shapes"),
    refused("pruned_heads", {}, note="layers with fewer heads"),
    refused("position_embedding_type", "absolute", note="read by transformers 4"),
    refused("is_encoder_decoder", False),
    refused("is_decoder", False, note="a decoder is not an encoder"),
    refused("add_cross_attention", False, note="a decoder is not an encoder"),
    *no_effect("dtype", "torch_dtype", note="weights are read as float32"),
    *no_effect("label2id", "initializer_range", note=TRAINING),
    *no_effect("bos_token_id", "eos_token_id", note="the tokenizer's files contain these tokens"),
    *no_effect("tie_word_embeddings", note="used in the masked language model only"),
    *no_effect(
        *("chunk_size_feed_forward", "use_cache", "return_dict", "output_attentions"),
        *("output_hidden_states", "attn_implementation", "_attn_implementation"),
        *("_attn_implementation_internal", "_attn_implementation_autoset"),
        *("experts_implementation", "_experts_implementation_internal"),
        "tie_last_hidden_states",
        note=RUNTIME,
    ),
    *no_effect(
        "auto_map", note="transformers has the family itself, and runs no code of the model's"
    ),
    *no_effect("name_or_path", "_name_or_path", "_commit_hash", "transformers_version"),
    *no_effect(
        *("max_length", "min_length", "do_sample", "early_stopping", "num_beams", "temperature"),
        *("top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty"),
        *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids"),
        *("num_return_sequences", "output_scores", "return_dict_in_generate"),
        *("forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values"),
        *("exponential_decay_length_penalty", "suppress_tokens", "begin_suppress_tokens"),
        *("epsilon_cutoff", "eta_cutoff", "encoder_repetition_penalty", "num_assistant_tokens"),
        *("num_assistant_tokens_schedule", "assistant_confidence_threshold"),
        *("assistant_lookbehind", "target_lookbehind", "num_beam_groups", "diversity_penalty"),
        note=GENERATION,
    ),
)

# In most families under these names.
SIZES = honored("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size")
ACTIVATION = honored("hidden_act", note="the family's own; others are refused")
NORM = honored("layer_norm_eps")
DROPOUT = no_effect("hidden_dropout_prob", "attention_probs_dropout_prob", note=TRAINING)
SHAPE = (*SIZES, *ACTIVATION, *NORM, *DROPOUT)
SEGMENTS = honored("type_vocab_size")
CLASSIFIER_DROPOUT = no_effect("classifier_dropout", note=TRAINING)
ROPE_SCALING = "only rotations that do not change with the length of the text are supported"

BERT = _file("bert", *SHAPE, *SEGMENTS, *CLASSIFIER_DROPOUT)
ROBERTA = _file("roberta, xlm-roberta, camembert", *SHAPE, *SEGMENTS, *CLASSIFIER_DROPOUT)
DISTILBERT = _file(
    "distilbert",
    *honored("dim", "n_layers", "n_heads", "hidden_dim"),
    *honored(
        *("hidden_size", "num_hidden_layers", "num_attention_heads"),
        note="other name for dim, n_layers or n_heads",
    ),
    *honored("activation", note="the family's own; others are refused"),
    *no_effect("dropout", "attention_dropout", "qa_dropout", "seq_classif_dropout", note=TRAINING),
    *no_effect("sinusoidal_pos_embds", note="the weights have a row for each position"),
)
ALBERT = _file(
    "albert",
    *SHAPE,
    *SEGMENTS,
    *honored("embedding_size", "num_hidden_groups", "inner_group_num"),
    *no_effect("classifier_dropout_prob", note=TRAINING),
)
ELECTRA = _file(
    "electra",
    *SHAPE,
    *SEGMENTS,
    *CLASSIFIER_DROPOUT,
    *honored("embedding_size"),
    *honored("generator_size", note="Quartet's own"),
    *no_effect(
        *("summary_type", "summary_use_proj", "summary_activation"),
        *("summary_last_dropout", "summary_first_dropout", "summary_proj_to_labels"),
        note="used in multiple choice only",
    ),
)
MPNET = _file(
    "mpnet", *SHAPE, *honored("relative_attention_num_buckets", note="transformers always has 32")
)
MODERNBERT = _file(
    "modernbert",
    *SIZES,
    *honored("hidden_activation", note="the family's own; others are refused"),
    *honored("norm_eps", "norm_bias", "attention_bias", "mlp_bias", "local_attention"),
    *honored("layer_types", "rope_parameters", "classifier_bias", "classifier_pooling"),
    *honored("type_vocab_size", note="Quartet's own: transformers ignores segments"),
    *honored(
        *("global_attn_every_n_layers", "global_rope_theta", "local_rope_theta"),
        note="older name for layer_types or rope_parameters",
    ),
    refused("classifier_activation", "gelu"),
    refused("rope_scaling", {}, note=ROPE_SCALING),
    refused("head_dim", note="heads of another size"),
    refused("sliding_window", note="write local_attention, which is twice as much"),
    *no_effect("attention_dropout", "embedding_dropout", "mlp_dropout", note=TRAINING),
    *no_effect("classifier_dropout", "initializer_cutoff_factor", note=TRAINING),
    *no_effect("cls_token_id", "sep_token_id", note="the tokenizer's files contain these tokens"),
    *no_effect("decoder_bias", "sparse_prediction", note="used in the masked language model only"),
    *no_effect("sparse_pred_ignore_index", note="used in the masked language model only"),
    *no_effect(
        "deterministic_flash_attn", "reference_compile", "repad_logits_with_grad", note=RUNTIME
    ),
)
NOMIC_BERT = _file(
    "nomic_bert",
    *SHAPE,
    *SEGMENTS,
    *CLASSIFIER_DROPOUT,
    *honored("rope_parameters", "rope_scaling", "rope_theta", "head_dim"),
    *honored(
        *("n_embd", "n_layer", "n_head", "n_inner", "n_positions", "layer_norm_epsilon"),
        *("rotary_emb_base", "rotary_scaling_factor", "max_trained_positions"),
        *("activation_function", "causal", "scale_attn_weights", "prenorm", "parallel_block"),
        *("use_rms_norm", "qkv_proj_bias", "mlp_fc1_bias", "mlp_fc2_bias", "rotary_emb_fraction"),
        *("rotary_emb_interleaved", "rotary_emb_scale_base", "moe_every_n_layers"),
        note="a setting of the family's original code",
    ),
    *no_effect("resid_pdrop", "attn_pdrop", "embd_pdrop", note=TRAINING),
)
GTE = _file(
    "gte, new",
    *SHAPE,
    *SEGMENTS,
    *CLASSIFIER_DROPOUT,
    *honored("rope_parameters", "rope_scaling", "rope_theta", "head_dim"),
    *honored(
        *("position_embedding_type", "layer_norm_type", "logn_attention_scale", "pack_qkv"),
        note="a setting of the family's original code",
    ),
    *no_effect("logn_attention_clip1", "use_memory_efficient_attention", note=RUNTIME),
    *no_effect("unpad_inputs", note=RUNTIME),
)
JINA = _file(
    "jina_embeddings_v3",
    *SHAPE,
    *SEGMENTS,
    *CLASSIFIER_DROPOUT,
    *honored("rope_parameters", "rope_theta", "head_dim"),
)
LLAMA_SETTINGS = (
    *SIZES,
    *ACTIVATION,
    *honored("rms_norm_eps", "num_key_value_heads", "head_dim", "attention_bias"),
    *honored("rope_parameters", "rope_scaling", "rope_theta"),
    *no_effect("attention_dropout", note=TRAINING),
)
EUROBERT = _file(
    "eurobert",
    *LLAMA_SETTINGS,
    *honored("mlp_bias", "classifier_pooling"),
    *no_effect("mask_token_id", note="the tokenizer's files contain this token"),
    *no_effect("pretraining_tp", note=RUNTIME),
)
QWEN3 = _file(
    "qwen3",
    *LLAMA_SETTINGS,
    *honored("use_sliding_window", "sliding_window", "layer_types"),
    *honored("max_window_layers", note="older name for layer_types"),
    refused("is_causal", True, note="attention in both directions"),
)
GEMMA3 = _file(
    "gemma3_text",
    *SIZES,
    *honored("hidden_activation", note="the family's own; others are refused"),
    *honored("rms_norm_eps", "num_key_value_heads", "head_dim", "attention_bias"),
    *honored("sliding_window", "layer_types", "query_pre_attn_scalar", "rope_parameters"),
    *honored("use_bidirectional_attention"),
    *honored("rope_theta", "rope_local_base_freq", note="older name for rope_parameters"),
    *honored("sliding_window_pattern", note="older name for layer_types"),
    refused("rope_scaling", {}, note=ROPE_SCALING),
    refused("attn_logit_softcapping", note="limited attention scores"),
    *no_effect("final_logit_softcapping", note="used in the language model only"),
    *no_effect("_sliding_window_pattern", note="layer_types has the kinds of layers"),
    *no_effect("attention_dropout", note=TRAINING),
)
DEBERTA_SETTINGS = (
    *SHAPE,
    *SEGMENTS,
    *honored("embedding_size", "relative_attention", "max_relative_positions"),
    *honored("position_biased_input", "pos_att_type"),
    refused("talking_head", False),
    refused("pooler_hidden_act", "gelu"),
    *honored("pooler_hidden_size", note="must be hidden_size"),
    *no_effect("cls_dropout", "pooler_dropout", note=TRAINING),
    *no_effect(
        "legacy", note="used in the masked language model only; a fill-mask head needs true"
    ),
)
DEBERTA = _file("deberta", *DEBERTA_SETTINGS)
DEBERTA_V2 = _file(
    "deberta-v2",
    *DEBERTA_SETTINGS,
    *honored("attention_head_size", note="must be hidden_size / num_attention_heads"),
    *honored("position_buckets", "share_att_key", "norm_rel_ebd"),
    *honored("conv_kernel_size", "conv_groups", "conv_act"),
)

CONFIG_TABLES = (
    *(ALL, BERT, ROBERTA, DISTILBERT, ALBERT, ELECTRA, MPNET),
    *(MODERNBERT, NOMIC_BERT, GTE, JINA, EUROBERT, QWEN3, GEMMA3, DEBERTA, DEBERTA_V2),
)
OF_FAMILY: Mapping[str, SettingsFile] = {
    "bert": BERT,
    "roberta": ROBERTA,
    "xlm-roberta": ROBERTA,
    "camembert": ROBERTA,
    "distilbert": DISTILBERT,
    "albert": ALBERT,
    "electra": ELECTRA,
    "mpnet": MPNET,
    "modernbert": MODERNBERT,
    "nomic_bert": NOMIC_BERT,
    "gte": GTE,
    "jina_embeddings_v3": JINA,
    "eurobert": EUROBERT,
    "qwen3": QWEN3,
    "gemma3_text": GEMMA3,
    "deberta": DEBERTA,
    "deberta-v2": DEBERTA_V2,
}


def tables_of(model_type: str) -> Sequence[SettingsFile]:
    """Return the tables of a family's `config.json`; only the common one for a family that Quartet does not have."""
    own = OF_FAMILY.get(ORIGINAL_NAMES.get(model_type, model_type))
    return (ALL,) if own is None else (ALL, own)


def check_config(path: Path, document: Any) -> None:
    """Raise CheckpointError naming the first setting in `config.json` that is refused or of another JSON type."""
    if not isinstance(document, Mapping):
        raise CheckpointError(f"{path}: must be a JSON object, not {type(document).__name__}")
    for name, (is_valid, expected) in KINDS.items():
        value = document.get(name)
        if value is not None and not is_valid(value):
            raise CheckpointError(f"{path}: {name} = {value!r} must be {expected}")
    common, *own = tables_of(document.get("model_type", "bert"))
    own_names = {setting.name for table in own for setting in table.settings}
    common.check(path, {name: document[name] for name in document.keys() - own_names})
    for table in own:
        table.check(path, document)


def unknown_settings(document: Mapping[str, Any]) -> list[str]:
    """Return the names in a `config.json` that neither Quartet nor transformers reads, sorted."""
    tables = tables_of(document.get("model_type", "bert"))
    return sorted(set.intersection(*({*table.unknown_settings(document)} for table in tables)))


def _is_rope(value: Any) -> bool:
    """Whether a value is an object of numbers and names, or one of such objects by kinds of layers."""
    return isinstance(value, dict) and all(
        isinstance(part, dict | str | int | float | None) for part in value.values()
    )


def _is_strings(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(part, str) for part in value)


def _is_positive(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_share(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 1


# The settings that no family's configuration checks, or that are read before it does.
KINDS = {
    "model_type": (lambda value: isinstance(value, str), "text"),
    "architectures": (_is_strings, "a list of texts"),
    "rope_parameters": (_is_rope, "an object"),
    "rope_scaling": (_is_rope, "an object"),
    "layer_types": (_is_strings, "a list of texts"),
    "pos_att_type": (lambda value: isinstance(value, str) or _is_strings(value), "a list of texts"),
    "global_attn_every_n_layers": (_is_positive, "a positive integer"),
    **dict.fromkeys(
        ("num_hidden_layers", "hidden_size", "num_attention_heads", "max_position_embeddings"),
        (_is_positive, "a positive integer"),
    ),
    "max_trained_positions": (_is_positive, "a positive integer"),
    "num_labels": (_is_positive, "a positive integer"),
    "sentence_transformers": (lambda value: isinstance(value, dict), "an object"),
    "sbert_ce_default_activation_function": (lambda value: isinstance(value, str), "text"),
    **dict.fromkeys(
        {s.name for table in CONFIG_TABLES for s in table.settings if s.name.endswith(DROPOUTS)},
        (_is_share, "a number from 0 to 1"),
    ),
}

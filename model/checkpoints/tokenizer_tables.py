"""The settings of a tokenizer's files, compared with transformers."""

from typing import Any

from model.checkpoints.settings_table import Handling, Setting, SettingsFile, honored, no_effect

WORDPIECE = "WordPiece classes"
BLANKS = "byte-level BPE and unigram classes"
ONLY_CODE = "only code can give this; remove it"
TRANSFORMERS_4 = "read by Python tokenizers of transformers 4 only"


def _honored(name: str, note: str = "") -> Setting:
    (setting,) = honored(name, note=note)
    return setting


def _refused(name: str, harmless: tuple[Any, ...], note: str) -> Setting:
    """Return a setting that is refused, null included unless it is among the harmless values."""
    return Setting(name, Handling.REFUSED, harmless, note)


def _ignored(note: str, *names: str) -> tuple[Setting, ...]:
    return no_effect(*names, note=note)


SIDE = (
    "a text that is too long is truncated at its end; set 'right' if that is right for this model"
)
SPECIAL = tuple(
    _honored(name, "text, or an AddedToken")
    for name in (
        *("bos_token", "eos_token", "unk_token", "sep_token"),
        *("pad_token", "cls_token", "mask_token"),
    )
)
EXTRA = (
    _honored("extra_special_tokens", "a list, or an object of named tokens"),
    _honored("additional_special_tokens", "where extra_special_tokens is absent or empty"),
)

TOKENIZER_CONFIG = SettingsFile(
    "tokenizer_config.json",
    "transformers",
    (
        _honored("tokenizer_class", "a class that is not known is refused"),
        *SPECIAL,
        *EXTRA,
        _honored("*_token", "any other name with text as its value: a special token"),
        _honored("model_specific_special_tokens", "an object of named tokens"),
        _honored(
            "added_tokens_decoder",
            "special_tokens_map.json, added_tokens.json and, for classes that build anew, added_tokens "
            "of tokenizer.json are not read where this is present",
        ),
        _honored("do_lower_case", f"{WORDPIECE}, ALBERT, DeBERTa-v2; transformers 5"),
        _honored("strip_accents", WORDPIECE),
        _honored("tokenize_chinese_chars", WORDPIECE),
        _honored("keep_accents", "ALBERT"),
        _honored("split_by_punct", "DeBERTa-v2"),
        _honored("unk_id", "DeBERTa-v2, where unk_token is not in the vocabulary with score 0"),
        _honored("add_prefix_space", f"{BLANKS}; transformers 5"),
        _honored("trim_offsets", "RoBERTa; ALBERT's has no effect"),
        _honored(
            "model_input_names",
            "without token_type_ids, both texts of a pair have token type 0; so by default in "
            "PreTrainedTokenizerFast and AlbertTokenizer of transformers 5, but not of 4",
        ),
        _honored("model_max_length", "a number above 1000000 is no limit"),
        _honored("max_len", "where model_max_length is absent"),
        _refused("truncation_side", ("right",), SIDE),
        _refused(
            "split_special_tokens",
            (False,),
            "special tokens in a text are one token each; set false",
        ),
        _refused(
            "auto_map",
            ({},),
            "code in a checkpoint is not run; save the tokenizer with PreTrainedTokenizerFast",
        ),
        _refused(
            "fast_tokenizer_files",
            ([], ["tokenizer.json"]),
            "only tokenizer.json is read; keep the file to use under that name",
        ),
        _refused("init_inputs", ([],), ONLY_CODE),
        *(
            _refused(name, (None,), ONLY_CODE)
            for name in (
                *("gguf_file", "vocab", "merges", "post_processor", "tokenizer_object"),
                *("tokenizer_truncation", "tokenizer_padding", "tokenizer"),
                *("_json_truncation", "_json_padding", "_spm_precompiled_charsmap"),
            )
        ),
        _refused("fix_mistral_regex", (False, None), "for Mistral's tokenizers; remove it"),
        *_ignored(
            "does not change tokens",
            *("errors", "clean_up_tokenization_spaces", "backend", "verbose", "files_loaded"),
            "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output",
            *("chat_template", "chat_control_tokens", "response_template", "response_schema"),
            *("processor_class", "name_or_path", "is_local", "local_files_only"),
        ),
        *_ignored(
            "files are read from the checkpoint's directory",
            *("tokenizer_file", "vocab_file", "merges_file", "special_tokens_map_file"),
        ),
        *_ignored(
            "the template decides, in every class that is read here",
            *("add_bos_token", "add_eos_token"),
        ),
        *_ignored(
            "changes padding only, which is masked",
            *("padding_side", "pad_token_type_id", "pad_to_multiple_of"),
        ),
        *_ignored(
            "transformers truncates by the arguments of its call, not by this setting",
            *("max_length", "stride", "truncation_strategy"),
        ),
        *_ignored(
            TRANSFORMERS_4,
            *("do_basic_tokenize", "never_split", "wordpieces_prefix", "remove_space", "legacy"),
            *("sp_model_kwargs", "vocab_type", "use_fast", "full_tokenizer_file"),
        ),
    ),
)

SPECIAL_TOKENS_MAP = SettingsFile(
    "special_tokens_map.json",
    "transformers",
    (
        *SPECIAL,
        _honored("extra_special_tokens", "a list, or an object of named tokens"),
        _honored("additional_special_tokens", "where extra_special_tokens is absent"),
        _honored("*_token", "any other name: a special token"),
    ),
)

ADDED_TOKENS = SettingsFile(
    "added_tokens.json",
    "transformers",
    (_honored("*", "token and id; an id other than the one it gets in transformers is refused"),),
)

TOKENIZER_JSON = SettingsFile(
    "tokenizer.json",
    "transformers",
    (
        _honored(
            "model", "classes that build anew take vocabulary and merges only; transformers 5"
        ),
        _honored("added_tokens", "an id other than the one it gets in transformers is refused"),
        _honored(
            "normalizer", "classes that build anew take the precompiled one only; transformers 5"
        ),
        _honored("pre_tokenizer", "PreTrainedTokenizerFast; others build it anew; transformers 5"),
        _honored(
            "post_processor",
            "PreTrainedTokenizerFast and ALBERT; others build it anew; one without special tokens is "
            "refused; transformers 5",
        ),
        _refused("truncation.direction", ("right", None), SIDE),
        _honored("padding", "its pad_token, where no file names one; the rest has no effect"),
        *_ignored("does not change tokens", "decoder", "version"),
    ),
)

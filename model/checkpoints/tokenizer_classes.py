"""The tokenizer classes of transformers that are read here, and what each builds.

A class other than `AS_SAVED` takes the vocabulary from `tokenizer.json` or from older files, and builds everything
else from settings: normalizer, pre-tokenizer, special tokens and template. The parts of `tokenizer.json` that such a
class builds again have no effect, as in transformers 5.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, Protocol

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

Token = str | AddedToken
Named = Mapping[str, Token | None]  # special tokens by the names of their settings

BRACKETS: Mapping[str, str] = MappingProxyType(
    {f"{kind}_token": f"[{kind.upper()}]" for kind in ("unk", "sep", "pad", "cls", "mask")}
)
ANGLES: Mapping[str, str] = MappingProxyType(
    {
        "bos_token": "<s>",
        "eos_token": "</s>",
        "sep_token": "</s>",
        "cls_token": "<s>",
        "unk_token": "<unk>",
        "pad_token": "<pad>",
        "mask_token": "<mask>",
    }
)
SENTENCE = {"bos_token": "[CLS]", "eos_token": "[SEP]"}
NOT_USED = ("<s>NOTUSED", "</s>NOTUSED", "<unk>NOTUSED")
BLANK = "▁"


class Switches(Protocol):
    """Typed access to settings; raises CheckpointError for a value of another type."""

    def boolean(self, name: str, default: bool) -> bool: ...
    def optional_boolean(self, name: str) -> bool | None: ...
    def integer(self, name: str, default: int) -> int: ...


@dataclass(frozen=True)
class Parts:
    """What a class builds from.

    vocabulary: ids by token (WordPiece, BPE), or pairs of a piece and its score (unigram)
    merges: of BPE
    charsmap: SentencePiece's precompiled normalization, if `tokenizer.json` has one
    saved_frame: the post-processor in `tokenizer.json`, if there is one
    named: special tokens, those that the class has by default included
    """

    vocabulary: Any
    merges: list[tuple[str, str]]
    charsmap: bytes | None
    saved_frame: processors.PostProcessor | None
    switches: Switches
    named: Named

    def token(self, name: str) -> str:
        return str(self.named[name])


def _wordpiece(parts: Parts) -> Tokenizer:
    switches = parts.switches
    tokenizer = Tokenizer(models.WordPiece(parts.vocabulary, unk_token=parts.token("unk_token")))
    tokenizer.normalizer = normalizers.BertNormalizer(
        clean_text=True,
        handle_chinese_chars=switches.boolean("tokenize_chinese_chars", True),
        strip_accents=switches.optional_boolean("strip_accents"),
        lowercase=switches.boolean("do_lower_case", True),
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    return tokenizer


def _byte_level(parts: Parts) -> Tokenizer:
    tokenizer = Tokenizer(
        models.BPE(
            vocab=parts.vocabulary,
            merges=parts.merges,
            continuing_subword_prefix="",
            end_of_word_suffix="",
            fuse_unk=False,
        )
    )
    blank = parts.switches.boolean("add_prefix_space", False)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=blank)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _unigram(parts: Parts, unknown: int, scheme: str, *cutters: Any) -> Tokenizer:
    """Build from pieces with their scores; `cutters` run before the metaspace."""
    tokenizer = Tokenizer(models.Unigram(parts.vocabulary, unk_id=unknown, byte_fallback=False))
    metaspace = pre_tokenizers.Metaspace(replacement=BLANK, prepend_scheme=scheme)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*cutters, metaspace])
    tokenizer.decoder = decoders.Metaspace(replacement=BLANK, prepend_scheme=scheme)
    return tokenizer


def _words(parts: Parts, unknown: int) -> Tokenizer:
    """Unigram within words, as XLM-RoBERTa, CamemBERT and ALBERT split texts."""
    scheme = "always" if parts.switches.boolean("add_prefix_space", True) else "never"
    tokenizer = _unigram(parts, unknown, scheme, pre_tokenizers.WhitespaceSplit())
    if parts.charsmap is not None:
        tokenizer.normalizer = normalizers.Precompiled(parts.charsmap)
    return tokenizer


def _camembert(parts: Parts) -> Tokenizer:
    pieces = [piece for piece, _ in parts.vocabulary]
    unknown = parts.token("unk_token")
    return _words(parts, pieces.index(unknown) if unknown in pieces else 0)


def _albert(parts: Parts) -> Tokenizer:
    tokenizer = _words(parts, 1)
    for name in ("cls_token", "sep_token"):
        if tokenizer.token_to_id(parts.token(name)) is None:
            raise ValueError(f"{name} {parts.token(name)!r} is not in the vocabulary")
    steps: list[Any] = [normalizers.Replace("``", '"'), normalizers.Replace("''", '"')]
    if not parts.switches.boolean("keep_accents", False):
        steps += [normalizers.NFKD(), normalizers.StripAccents()]
    if parts.switches.boolean("do_lower_case", True):
        steps.append(normalizers.Lowercase())
    if parts.charsmap is not None:
        steps.append(normalizers.Precompiled(parts.charsmap))
    tokenizer.normalizer = normalizers.Sequence(steps)
    return tokenizer


def _deberta_v2(parts: Parts) -> Tokenizer:
    switches = parts.switches
    unknown = (parts.token("unk_token"), 0.0)
    known = unknown in parts.vocabulary
    scheme = "always" if switches.boolean("add_prefix_space", True) else "first"
    cutters = []
    if switches.boolean("split_by_punct", False):
        cutters.append(pre_tokenizers.Punctuation(behavior="isolated"))
    index = switches.integer("unk_id", 1)
    tokenizer = _unigram(
        parts, parts.vocabulary.index(unknown) if known else index, scheme, *cutters
    )
    steps: list[Any] = [normalizers.Lowercase()] if switches.boolean("do_lower_case", False) else []
    steps += [
        normalizers.Replace(Regex(r"\s{2,}|[\n\r\t]"), " "),
        normalizers.NFC(),
        normalizers.Strip(left=False, right=True),
    ]
    tokenizer.normalizer = normalizers.Sequence(steps)
    return tokenizer


# -- templates ----------------------------------------------------------------------------------------------------


def _template(tokenizer: Tokenizer, start: str, end: str, *second: str) -> None:
    """Frame a text by two special tokens; `second` continues the template of one text to that of a pair."""
    single = [start, "$A", end]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=single,
        pair=[*single, *second],
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in (start, end)],
    )


def _bert_frame(tokenizer: Tokenizer, parts: Parts) -> None:
    start, end = parts.token("cls_token"), parts.token("sep_token")
    _template(tokenizer, start, end, "$B:1", f"{end}:1")


def _doubled_frame(tokenizer: Tokenizer, parts: Parts) -> None:
    start, end = parts.token("bos_token"), parts.token("eos_token")
    _template(tokenizer, start, end, end, "$B", end)


def _deberta_frame(tokenizer: Tokenizer, parts: Parts) -> None:
    start, end = parts.token("cls_token"), parts.token("sep_token")
    _template(tokenizer, start, end, end, "$B", end)


def _roberta_frame(tokenizer: Tokenizer, parts: Parts) -> None:
    trim = parts.switches.boolean("trim_offsets", True)
    _roberta_template(tokenizer, parts, trim, parts.switches.boolean("add_prefix_space", False))


def _mpnet_frame(tokenizer: Tokenizer, parts: Parts) -> None:
    _roberta_template(tokenizer, parts, True, False)


def _roberta_template(tokenizer: Tokenizer, parts: Parts, trim: bool, blank: bool) -> None:
    sep, cls = parts.token("sep_token"), parts.token("cls_token")
    tokenizer.post_processor = processors.RobertaProcessing(
        (sep, tokenizer.token_to_id(sep)), (cls, tokenizer.token_to_id(cls)), trim, blank
    )


def _albert_frame(tokenizer: Tokenizer, parts: Parts) -> None:
    """Keep the template of `tokenizer.json`, which this class prefers to its own."""
    if parts.saved_frame is None:
        _bert_frame(tokenizer, parts)
    else:
        tokenizer.post_processor = parts.saved_frame


# -- classes ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TokenizerClass:
    """One class of transformers.

    model: the kind of model that its vocabulary is for
    files: the older files that it reads where there is no `tokenizer.json`; none for SentencePiece's
    named: its special tokens by default
    frame_tokens: the special tokens that it cannot build without
    segments: whether the second text of a pair gets token type 1, unless `model_input_names` says otherwise
    wrap: what it makes of a special token that is a string, by the name of its setting
    extra: special tokens that it has by default, without names
    """

    name: str
    model: Literal["WordPiece", "BPE", "Unigram"]
    build: Callable[[Parts], Tokenizer]
    frame: Callable[[Tokenizer, Parts], None]
    named: Mapping[str, str]
    frame_tokens: tuple[str, ...] = ("unk_token", "cls_token", "sep_token")
    files: tuple[str, ...] = ()
    segments: bool = False
    wrap: Callable[[str, str], Token] = field(default=lambda name, token: token)
    extra: tuple[str, ...] = ()


def _mpnet_token(name: str, token: str) -> Token:
    return AddedToken(token, lstrip=name == "mask_token", rstrip=False)


def _camembert_token(name: str, token: str) -> Token:
    return AddedToken(token, lstrip=True, special=True) if name == "mask_token" else token


WORDS, PAIRS = ("vocab.txt",), ("vocab.json", "merges.txt")
DOUBLED = ("unk_token", "bos_token", "eos_token")
AS_SAVED = "PreTrainedTokenizerFast"  # reads tokenizer.json as it is; transformers 5 calls it TokenizersBackend
CLASSES: dict[str, TokenizerClass] = {
    row.name: row
    for row in (
        TokenizerClass(
            "BertTokenizer",
            "WordPiece",
            _wordpiece,
            _bert_frame,
            BRACKETS,
            files=WORDS,
            segments=True,
        ),
        TokenizerClass(
            "DistilBertTokenizer", "WordPiece", _wordpiece, _bert_frame, BRACKETS, files=WORDS
        ),
        TokenizerClass(
            "MPNetTokenizer",
            "WordPiece",
            _wordpiece,
            _mpnet_frame,
            {**ANGLES, "unk_token": "[UNK]"},
            files=WORDS,
            wrap=_mpnet_token,
        ),
        TokenizerClass("RobertaTokenizer", "BPE", _byte_level, _roberta_frame, ANGLES, files=PAIRS),
        TokenizerClass(
            "DebertaTokenizer",
            "BPE",
            _byte_level,
            _deberta_frame,
            {**BRACKETS, **SENTENCE},
            files=PAIRS,
            segments=True,
        ),
        TokenizerClass(
            "XLMRobertaTokenizer",
            "Unigram",
            lambda parts: _words(parts, 3),
            _doubled_frame,
            ANGLES,
            DOUBLED,
        ),
        TokenizerClass(
            "CamembertTokenizer",
            "Unigram",
            _camembert,
            _doubled_frame,
            ANGLES,
            DOUBLED,
            wrap=_camembert_token,
            extra=NOT_USED,
        ),
        TokenizerClass(
            "AlbertTokenizer",
            "Unigram",
            _albert,
            _albert_frame,
            {**BRACKETS, **SENTENCE, "unk_token": "<unk>", "pad_token": "<pad>"},
        ),
        TokenizerClass(
            "DebertaV2Tokenizer",
            "Unigram",
            _deberta_v2,
            _bert_frame,
            {**BRACKETS, **SENTENCE},
            segments=True,
        ),
    )
}

# Other names of these classes in transformers. Each name may also end in "Fast".
ALIASES = {
    "BartTokenizer": "RobertaTokenizer",
    "ConvBertTokenizer": "BertTokenizer",
    "ElectraTokenizer": "BertTokenizer",
    "LayoutLMTokenizer": "BertTokenizer",
    "LongformerTokenizer": "RobertaTokenizer",
    "MobileBertTokenizer": "BertTokenizer",
    "PreTrainedTokenizer": AS_SAVED,
    "PreTrainedTokenizerFast": AS_SAVED,
    "SqueezeBertTokenizer": "BertTokenizer",
    "TokenizersBackend": AS_SAVED,
}

# The class of a model type for which no file names one.
MODEL_TYPES = {
    "albert": "AlbertTokenizer",
    "bert": "BertTokenizer",
    "camembert": "CamembertTokenizer",
    "convbert": "BertTokenizer",
    "data2vec-text": "RobertaTokenizer",
    "deberta": "DebertaTokenizer",
    "deberta-v2": "DebertaV2Tokenizer",
    "distilbert": "BertTokenizer",
    "electra": "BertTokenizer",
    "ernie": "BertTokenizer",
    "ibert": "RobertaTokenizer",
    "layoutlm": "BertTokenizer",
    "lilt": "RobertaTokenizer",
    "longformer": "RobertaTokenizer",
    "megatron-bert": "BertTokenizer",
    "mobilebert": "BertTokenizer",
    "modernbert": AS_SAVED,
    "mpnet": "MPNetTokenizer",
    "nezha": "BertTokenizer",
    "nomic_bert": "BertTokenizer",
    "nystromformer": AS_SAVED,
    "qdqbert": "BertTokenizer",
    "roberta": "RobertaTokenizer",
    "roberta-prelayernorm": "RobertaTokenizer",
    "squeezebert": "BertTokenizer",
    "xlm-roberta": "XLMRobertaTokenizer",
    "xlm-roberta-xl": AS_SAVED,
    "xmod": "XLMRobertaTokenizer",
    "yoso": "AlbertTokenizer",
}
# Model types whose tokenizer.json transformers reads as it is, whatever class a file names.
ALWAYS_AS_SAVED = frozenset(kind for kind, name in MODEL_TYPES.items() if name == AS_SAVED)


def canonical(name: str) -> str | None:
    """Return the class that a declared name means: a key of `CLASSES`, or AS_SAVED; None for other classes."""
    stem = name.removesuffix("Fast")
    found = ALIASES.get(name, ALIASES.get(stem, stem))
    return found if found in CLASSES or found == AS_SAVED else None

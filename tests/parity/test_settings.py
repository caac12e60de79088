"""Every setting of a checkpoint's files has the meaning that it has in the library that defines it, or is refused."""

import inspect
import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers.models.auto import tokenization_auto
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from model.checkpoints import tables
from model.checkpoints.errors import CheckpointError
from model.checkpoints.settings_table import Handling, render_table
from model.checkpoints.tokenizer_files import MAX_LENGTH, read_model_max_length, read_tokenizer
from model.checkpoints.tokenizer_tables import SPECIAL_TOKENS_MAP, TOKENIZER_CONFIG
from service.core.encode import Encoder
from tests import samples
from tests.json_files import write_json

Document = dict[str, Any]


@pytest.mark.parametrize(
    "setting",
    [one for one in TOKENIZER_CONFIG.settings if one.handling is Handling.REFUSED],
    ids=lambda setting: setting.name,
)
def test_refused_setting(setting, bases, tmp_path):
    """A setting that no fast tokenizer follows is refused with file, name and value; harmless values are accepted."""
    for number, value in enumerate([*setting.harmless, *CHANGED.get(setting.name, ("text", 5))]):
        folder = shutil.copytree(bases["BertTokenizer"], tmp_path / str(number))
        spoil_config(**{setting.name: value})(folder)
        if value in setting.harmless:
            agree(folder)
            continue
        with pytest.raises(CheckpointError) as caught:
            read_tokenizer(folder)
        assert_message(str(caught.value), folder, "tokenizer_config.json", setting.name)


def assert_message(message: str, *parts: object) -> None:
    """One line that names these parts."""
    assert "\n" not in message
    assert not [part for part in map(str, parts) if part not in message]


def change_json(path: Path, change: Callable[[Document], object]) -> None:
    document = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    change(document)
    write_json(path, document)


def test_documented():
    """docs/reference/compat.md has the tables of the code."""
    path = Path(__file__).parents[2] / "docs/reference/compat.md"
    text = path.read_text(encoding="utf-8")
    table = render_table(tables.TABLES, tables.versions())
    assert tables.insert(text, "settings", table) == text, (
        "run python -m model.checkpoints.tables --write docs/reference/compat.md"
    )


# -- tokenizers -----------------------------------------------------------------------------------


TEXTS = [
    "The CAT sat on a Café, naïve café.",
    "中文 is 中文字",
    "[CLS] cat [SEP]<s>cat </s> <mask> [MASK]cat <unk> [UNK] <pad>",
    "new1 xnew1y  new1. NEW1 new2 cat new2cat new3",
    "  leading  blanks\tand\nlines ",
    "''quoted`` \"text\" can't",
    "e\u0301 ﬁ ① ☃ \U0001f600",
    "",
    "a",
]
WORDS = [
    "cat",
    "café",
    "Café",
    "cafe",
    "CAT",
    "naïve",
    "the",
    "The",
    "中文",
    "中",
    "文",
    "new",
    "a",
]
LINES = [*(text for text in TEXTS if "new1" not in text), *(f" {word}" for word in WORDS)] * 4
MODEL_TYPES = {  # a model type of each class
    "BertTokenizer": "bert",
    "DistilBertTokenizer": "distilbert",
    "MPNetTokenizer": "mpnet",
    "RobertaTokenizer": "roberta",
    "DebertaTokenizer": "deberta",
    "XLMRobertaTokenizer": "xlm-roberta",
    "CamembertTokenizer": "camembert",
    "AlbertTokenizer": "albert",
    "DebertaV2Tokenizer": "deberta-v2",
    "MBart50Tokenizer": "mbart",
    "T5Tokenizer": "t5",
    "XLNetTokenizer": "xlnet",
}
MODEL_FILES = {  # of classes whose SentencePiece model has another name than `sentencepiece.bpe.model`
    "DebertaV2Tokenizer": "spm",
    **dict.fromkeys(("AlbertTokenizer", "T5Tokenizer", "XLNetTokenizer"), "spiece"),
}


BRACKETS = ("[UNK]", "[SEP]", "[PAD]", "[CLS]", "[MASK]")
ANGLES = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
KINDS = {  # the model and the special tokens of each class
    "BertTokenizer": ("WordPiece", BRACKETS),
    "DistilBertTokenizer": ("WordPiece", BRACKETS),
    "MPNetTokenizer": ("WordPiece", (*ANGLES, "[UNK]")),
    "RobertaTokenizer": ("BPE", ANGLES),
    "DebertaTokenizer": ("BPE", BRACKETS),
    "XLMRobertaTokenizer": ("Unigram", ANGLES),  # whose unknown token is the fourth
    "CamembertTokenizer": ("Unigram", (*ANGLES, "<s>NOTUSED", "</s>NOTUSED", "<unk>NOTUSED")),
    "AlbertTokenizer": ("Unigram", ("<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]")),
    "DebertaV2Tokenizer": ("Unigram", BRACKETS),
}


OLDER = [name for name, (model, _) in KINDS.items() if model != "Unigram"]


def make_wordpiece(special: list[str]) -> Tokenizer:
    letters = sorted({letter for text in [*TEXTS, *WORDS] for letter in text if letter.strip()})
    pieces = [*special, *letters, *(f"##{letter}" for letter in letters), *WORDS]
    vocabulary = {piece: index for index, piece in enumerate(dict.fromkeys(pieces))}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return tokenizer


def make_byte_level(special: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(LINES, trainer)
    return tokenizer


def make_unigram(special: list[str]) -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    unknown = next(token for token in special if "unk" in token.lower())
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=special, unk_token=unknown, show_progress=False
    )
    tokenizer.train_from_iterator(LINES, trainer)
    return tokenizer


def make_base(folder: Path, name: str) -> Path:
    """Write a directory that transformers reads with a class, by its model type alone."""
    model, special = KINDS[name]
    makers = {"WordPiece": make_wordpiece, "BPE": make_byte_level, "Unigram": make_unigram}
    tokenizer = makers[model]([*special])
    tokenizer.add_special_tokens([*special])
    folder.mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(folder / "config.json", {"model_type": MODEL_TYPES[name]})
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": name})
    return folder


def make_older(folder: Path, base: Path) -> Path:
    """Copy a directory with older files instead of `tokenizer.json`."""
    shutil.copytree(base, folder)
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    tokenizer.model.save(str(folder))
    (folder / "tokenizer.json").unlink()
    return folder


def make_saved(folder: Path, base: Path) -> Path:
    """Copy a directory whose `tokenizer.json` is read as it is."""
    shutil.copytree(base, folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(base).backend_tokenizer
    tokenizer.save(str(folder / "tokenizer.json"))
    write_json(
        folder / "tokenizer_config.json",
        {"tokenizer_class": "PreTrainedTokenizerFast", "cls_token": "[CLS]", "pad_token": "[PAD]"},
    )
    return folder


def make_bases(folder: Path) -> dict[str, Path]:
    """Write a directory for each class, with each kind of files."""
    bases = {name: make_base(folder / name, name) for name in KINDS}
    for name in OLDER:
        bases[f"{name}, older"] = make_older(folder / f"{name}-older", bases[name])
    bases["as saved"] = make_saved(folder / "saved", bases["BertTokenizer"])
    return bases


def agree(folder: Path) -> None:
    """Assert equal ids and token types, of texts and pairs, and the same length limit."""
    try:
        theirs = transformers.AutoTokenizer.from_pretrained(folder)
    except Exception:  # of any kind
        with pytest.raises(CheckpointError) as caught:
            read_tokenizer(folder)
        assert_message(str(caught.value), folder)
        return
    ours = read_tokenizer(folder)
    segments = "token_type_ids" in theirs.model_input_names
    limit = theirs.model_max_length
    assert (limit if limit <= MAX_LENGTH else None) == read_model_max_length(folder)
    rows = [*TEXTS, *zip(TEXTS, TEXTS[::-1], strict=True)]
    rows = [row for row in rows if isinstance(row, str) or all(row)]
    found = ours.encode_batch(rows)
    for row, encoding in zip(rows, found, strict=True):
        pair = (row,) if isinstance(row, str) else row
        expected = theirs(*pair, return_offsets_mapping=True)
        types = expected["token_type_ids"] if segments else [0] * len(encoding.ids)
        assert expected["input_ids"] == encoding.ids, row
        assert types == encoding.type_ids, row
        assert expected["offset_mapping"] == encoding.offsets, row
    encoder = Encoder(ours, 64)
    for text, encoded in zip(TEXTS, encoder.texts(TEXTS), strict=True):
        assert (
            theirs(text)["input_ids"][:64] == encoded.windows[0].input_ids.tolist()
            or encoded.truncated
        )


CHANGED: dict[str, tuple[Any, ...]] = {  # values that change what a refused setting does
    "truncation_side": ("left",),
    "split_special_tokens": (True,),
    "auto_map": ({"AutoTokenizer": ["code.Tokenizer", None]},),
    "fast_tokenizer_files": (["tokenizer.json", "tokenizer.4.0.json"],),
    "init_inputs": (["vocab.txt"],),
    "fix_mistral_regex": (True,),
}


@pytest.mark.parametrize("name", [*KINDS, *(f"{name}, older" for name in OLDER), "as saved"])
@pytest.mark.parametrize(
    "values",
    [
        {},
        {"do_lower_case": True, "add_prefix_space": True, "mask_token": "cat"},
        {"model_input_names": ["input_ids", "attention_mask"], "model_max_length": 16},
        {"extra_special_tokens": ["new1"], "additional_special_tokens": ["new2"]},
    ],
    ids=["plain", "switches", "inputs", "added"],
)
def test_classes(name, values, bases, tmp_path):
    """Texts and pairs of each class, from each kind of files, get the ids, types and offsets of transformers."""
    folder = shutil.copytree(bases[name], tmp_path / "given")
    spoil_config(**values)(folder)
    agree(folder)


# What transformers' own code gives to these functions; no file does.
CALLS = {
    *("_commit_hash", "_from_auto", "_from_pipeline", "args", "cache_dir", "code_revision"),
    *("config", "kwargs", "mistral_format", "proxies", "revision", "self", "subfolder", "token"),
    *("tokenizer_type", "trust_remote_code", "type", "normalizers"),
}
READS = re.compile(
    r'(?:kwargs|config)(?:\.(?:pop|get|setdefault)\(|\[)"(\w+)"'
    r'|"(\w+)" (?:not )?in (?:\w+_)?(?:kwargs|config)'
)


def test_all_that_transformers_reads():
    """Every setting that transformers' code reads of a tokenizer is in the table."""
    names = {"tokenizer_class"}
    for name in KINDS:
        names |= {*inspect.signature(getattr(transformers, name).__init__).parameters}
    backend = transformers.PreTrainedTokenizerFast
    for function in (
        PreTrainedTokenizerBase.__init__,
        PreTrainedTokenizerBase._from_pretrained,
        PreTrainedTokenizerBase.from_pretrained,
        backend.__init__,
        backend.convert_to_native_format,
        tokenization_auto.AutoTokenizer.from_pretrained,
    ):
        found = {one or other for one, other in READS.findall(inspect.getsource(function))}
        assert found
        names |= found
    names |= {*PreTrainedTokenizerBase.SPECIAL_TOKENS_ATTRIBUTES}
    assert [] == TOKENIZER_CONFIG.unknown_settings(dict.fromkeys(names - CALLS))


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_bases(tmp_path_factory.mktemp("bases"))


@pytest.mark.parametrize("model_type", ["bert", "modernbert", "deberta-v2", "unheard-of"])
@pytest.mark.parametrize(
    "name", ["PreTrainedTokenizerFast", "TokenizersBackend", "BertTokenizer", "MPNetTokenizer"]
)
@pytest.mark.parametrize("file", ["config.json", "tokenizer_config.json"])
def test_declared_class(file, name, model_type, bases, tmp_path):
    """Either file can declare the class; a ModernBERT's tokenizer.json is read as it is, whatever they declare."""
    folder = shutil.copytree(bases["as saved"], tmp_path / "given")
    (folder / "tokenizer_config.json").unlink()
    change_json(folder / "tokenizer.json", lambda document: document.update(normalizer=None))
    write_json(folder / "config.json", {"model_type": model_type})
    change_json(folder / file, lambda document: document.update(tokenizer_class=name))
    if file == "config.json" and model_type == "unheard-of":
        assert read_tokenizer(
            folder
        )  # transformers does not read the file of a model it does not know
    else:
        agree(folder)


def test_one_token_type(bases, tmp_path):
    """A model with one token type gets type 0 for both texts of a pair."""
    folder = shutil.copytree(bases["BertTokenizer"], tmp_path / "given")
    assert {0, 1} == {*read_tokenizer(folder).encode("a", "cat").type_ids}
    change_json(folder / "config.json", lambda document: document.update(type_vocab_size=1))
    assert {0} == {*read_tokenizer(folder).encode("a", "cat").type_ids}


def spoil_config(**values: Any) -> Callable[[Path], object]:
    return lambda folder: change_json(
        folder / "tokenizer_config.json", lambda document: document.update(values)
    )


def spoil_saved(**values: Any) -> Callable[[Path], object]:
    return lambda folder: change_json(
        folder / "tokenizer.json", lambda document: document.update(values)
    )


def remove(*names: str) -> Callable[[Path], object]:
    return lambda folder: [(folder / name).unlink() for name in names]


REFUSED: dict[str, tuple[str, Callable[[Path], object], tuple[str, ...]]] = {
    "another class": (
        "BertTokenizer",
        spoil_config(tokenizer_class="BertJapaneseTokenizer"),
        ("BertJapaneseTokenizer",),
    ),
    "no token": (
        "BertTokenizer",
        spoil_config(sep_token=None),
        ("the template has no token at one end", "cls_token and sep_token"),
    ),
    "no names": (
        "BertTokenizer",
        spoil_config(model_input_names="input_ids"),
        ("model_input_names = 'input_ids' is not a list of names",),
    ),
    "no content": (
        "BertTokenizer",
        spoil_config(added_tokens_decoder={"5": {}}),
        ("tokenizer_config.json: added_tokens_decoder['5'] = {} has no content",),
    ),
    "an empty model": (
        "XLMRobertaTokenizer",
        lambda folder: (
            remove("tokenizer.json")(folder),
            (folder / "sentencepiece.bpe.model").touch(),
        ),
        ("sentencepiece.bpe.model is empty",),
    ),
    "no vocabulary": ("XLMRobertaTokenizer", remove("tokenizer.json"), ("has neither",)),
    "no merges": ("RobertaTokenizer, older", remove("merges.txt"), ("cannot be read",)),
    "another model": (
        "BertTokenizer",
        spoil_config(tokenizer_class="RobertaTokenizer"),
        ("tokenizer.json: model.type = 'WordPiece'", "RobertaTokenizer reads BPE"),
    ),
    "no special tokens": ("as saved", spoil_saved(post_processor=None), ("tokenizer.json: post_processor",)),
    "the beginning is cut": (
        "BertTokenizer",
        spoil_saved(
            truncation={
                "max_length": 9,
                "strategy": "LongestFirst",
                "stride": 0,
                "direction": "Left",
            }
        ),
        ("tokenizer.json: truncation.direction = 'left'",),
    ),
    "another id": (
        "BertTokenizer",
        lambda folder: write_json(folder / "added_tokens.json", {"new1": 999}),
        ("added_tokens.json: token 'new1' has id 999",),
    ),
    "text for a switch": (
        "BertTokenizer",
        spoil_config(do_lower_case="false"),
        ("tokenizer_config.json: do_lower_case = 'false' is not true or false",),
    ),
    "no object": (
        "BertTokenizer",
        lambda folder: write_json(folder / "tokenizer_config.json", [1]),
        ("tokenizer_config.json: must be a JSON object, not list",),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused_tokenizer(case, bases, tmp_path):
    """What would be split otherwise is refused by file, setting and value, in one line."""
    base, spoil, parts = REFUSED[case]
    folder = shutil.copytree(bases[base], tmp_path / "given")
    spoil(folder)
    with pytest.raises(CheckpointError) as caught:
        read_tokenizer(folder)
    assert_message(str(caught.value), folder, *parts)


def make_sentencepiece(folder: Path, name: str) -> sentencepiece.SentencePieceProcessor:
    """Write a directory whose only vocabulary is a SentencePiece model with its usual normalization."""
    corpus = folder / "corpus.txt"
    corpus.write_text("\n".join([*samples.corpus(), *COMPOSED]), encoding="utf-8")
    prefix = str(folder / MODEL_FILES.get(name, "sentencepiece.bpe"))
    special = {"pad_piece": "[PAD]", "bos_piece": "[CLS]", "eos_piece": "[SEP]"}
    options = {"AlbertTokenizer": special, "DebertaV2Tokenizer": special | {"unk_piece": "[UNK]"}}
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=prefix,
        vocab_size=160,
        hard_vocab_limit=False,
        minloglevel=2,
        **options.get(name, {}),
    )
    write_json(folder / "config.json", {"model_type": MODEL_TYPES[name]})
    write_json(folder / "tokenizer_config.json", {"tokenizer_class": name})
    return sentencepiece.SentencePieceProcessor(model_file=f"{prefix}.model")


COMPOSED = [
    "\uff30\uff41\uff52\uff49\uff53  ﬁne x² ½ … ①",
    "Café\tÜber  naïve e\u0301te\u0301",
    "東京 ｶﾅ 한국어 Москва",
]


@pytest.mark.parametrize("name", ["XLMRobertaTokenizer", "CamembertTokenizer"])
def test_sentencepiece(name, tmp_path):
    """A SentencePiece model without `tokenizer.json` splits thousands of texts as the library of that name does."""
    theirs = make_sentencepiece(tmp_path, name)
    ours = read_tokenizer(tmp_path)
    texts = [samples.text(1 + seed % 20, seed=seed) for seed in range(2000)]
    texts = [f"{text} {COMPOSED[seed % 3]}" for seed, text in enumerate(texts)]
    found = [encoding.ids[1:-1] for encoding in ours.encode_batch(texts)]
    unknown = ours.token_to_id("<unk>")
    pieces = [[theirs.id_to_piece(index) for index in ids] for ids in theirs.encode(texts)]
    assert [[ours.token_to_id(piece) for piece in row] for row in pieces] == found
    assert any(unknown not in ids for ids in found)


RANGES = (  # of scripts, full width forms, compatibility characters, emoji, controls and characters of zero width
    *((0x20, 0x7F), (0xA0, 0x250), (0x300, 0x370), (0x370, 0x500), (0x591, 0x5EB), (0x61B, 0x66A)),
    *((0x900, 0x980), (0xE01, 0xE3B), (0x1100, 0x1200), (0x3041, 0x3100), (0x4E00, 0x4E80)),
    *((0xAC00, 0xAC80), (0xFB00, 0xFB50), (0xFF00, 0xFFF0), (0x2100, 0x2190), (0x1D400, 0x1D450)),
    *((0x1F300, 0x1F380), (0x00, 0x20), (0x7F, 0xA0), (0x200B, 0x2010), (0x2028, 0x2070)),
)


def script_texts(count):
    """Return texts whose words have characters of one range, or of two."""
    rng = random.Random(1)
    texts = []
    for _ in range(count):
        words = []
        for _ in range(rng.randint(1, 8)):
            ranges = rng.choices(RANGES, k=2)
            places = (rng.choice((*ranges, ranges[0])) for _ in range(rng.randint(1, 6)))
            words.append("".join(chr(rng.randrange(*place)) for place in places))
        texts.append(rng.choice((" ", "", "  ", "\u3000")).join(words))
    return texts


@pytest.mark.parametrize(
    "name",
    [
        *("AlbertTokenizer", "CamembertTokenizer", "MBart50Tokenizer"),
        *("T5Tokenizer", "XLMRobertaTokenizer", "XLNetTokenizer"),
    ],
)
def test_sentencepiece_of_every_class(name, tmp_path):
    """The ids of texts of many scripts are those of the class in transformers."""
    make_sentencepiece(tmp_path, name)
    ours, theirs = read_tokenizer(tmp_path), getattr(transformers, name).from_pretrained(tmp_path)
    texts = script_texts(2000)
    assert theirs(texts)["input_ids"] == [encoding.ids for encoding in ours.encode_batch(texts)]


def test_sentencepiece_without_its_normalization(tmp_path):
    """A class that ignores a SentencePiece model's normalization is refused, with what to do."""
    make_sentencepiece(tmp_path, "DebertaV2Tokenizer")
    with pytest.raises(CheckpointError) as caught:
        read_tokenizer(tmp_path)
    assert_message(str(caught.value), tmp_path, "spm.model: DebertaV2Tokenizer", "transformers 4")


@pytest.mark.parametrize(
    ("value", "expected"),
    [(64, 64), (64.0, 64), (10**30, None), (1e30, None), (float("inf"), None), (None, None)],
)
def test_length_limit(value, expected, tmp_path):
    """A limit is a whole number of tokens; a huge number is none."""
    write_json(tmp_path / "tokenizer_config.json", {"model_max_length": value})
    assert expected == read_model_max_length(tmp_path)


@pytest.mark.parametrize("value", ["64", 64.5, 0, -1, True, [64], float("nan"), float("-inf")])
def test_no_length_limit(value, tmp_path):
    """Other values are refused by file, setting and value."""
    path = tmp_path / "tokenizer_config.json"
    write_json(path, {"model_max_length": value})
    with pytest.raises(CheckpointError) as caught:
        read_model_max_length(tmp_path)
    assert_message(str(caught.value), path, f"model_max_length = {value!r}")


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 10**12)
    | st.floats()
    | st.sampled_from(["cat", "new1", "[CLS]", "", "a b", "\x00", "\ud7ff", "BertTokenizer"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "content",
                    "special",
                    "lstrip",
                    "normalized",
                    "__type",
                    "id",
                    "type",
                    "0",
                    "200",
                    "x_token",
                ]
            ),
            inner | st.just("AddedToken"),
            max_size=4,
        )
    ),
    max_leaves=6,
)
CONFIG_NAMES = [setting.name.replace("*", "x") for setting in TOKENIZER_CONFIG.settings]
PLACES = [
    *(("tokenizer_config.json", name) for name in CONFIG_NAMES),
    *(
        ("special_tokens_map.json", setting.name.replace("*", "x"))
        for setting in SPECIAL_TOKENS_MAP.settings
    ),
    *(("added_tokens.json", name) for name in ("new1", "cat", "[CLS]", "")),
    *(
        ("tokenizer.json", name)
        for name in (
            "added_tokens",
            "truncation",
            "padding",
            "normalizer",
            "post_processor",
            "model",
        )
    ),
    *(("config.json", name) for name in ("tokenizer_class", "model_type", "type_vocab_size")),
]


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    place=st.sampled_from(PLACES),
    value=JSON,
    base=st.sampled_from(["BertTokenizer", "RobertaTokenizer", "AlbertTokenizer", "as saved"]),
)
def test_any_json(place, value, base, bases, tmp_path):
    """Any JSON in any place is read as transformers reads it, or refused in one line that names the directory."""
    file, name = place
    folder = tmp_path / "any"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(bases[base], folder)
    change_json(folder / file, lambda document: document.update({name: value}))
    try:
        ours = read_tokenizer(folder)
    except CheckpointError as error:
        assert_message(str(error), folder)
        return
    try:
        theirs = transformers.AutoTokenizer.from_pretrained(folder)
        expected = theirs(TEXTS[:5])["input_ids"]
    except BaseException:  # a panic of Rust's is no Exception
        return
    assert expected == [encoding.ids for encoding in ours.encode_batch(TEXTS[:5])]

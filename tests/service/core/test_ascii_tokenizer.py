"""The shortcut for ASCII text, against the tokenizer with its normalizer."""

import random
import string

import numpy as np
import pytest
import tokenizers
from tokenizers import AddedToken, normalizers, pre_tokenizers

from service.core import ascii_tokenizer as ascii_module
from service.core.ascii_tokenizer import AsciiTokenizer
from service.core.encode import Encoder, load_tokenizer
from tests.conftest import ROOT

WORDS = [
    "the",
    "MUSEUM's",
    "U.S.",
    "1,234.56",
    "naïve",
    "日本",
    "re-opened",
    "[MASK]",
    "[sep]",
    "~`|^",
]


def random_texts(seed: int, count: int = 400) -> list[str]:
    """Texts of words, of all printable ASCII characters, and of spaces and control characters between them."""
    rng = random.Random(seed)
    gaps = [" ", " ", " ", "  ", "\n", "\t", "\r\n", "\x00", "\x7f", "\x0b"]
    characters = string.ascii_letters + string.digits + string.punctuation
    texts = []
    for _ in range(count):
        parts = [
            rng.choice(WORDS)
            if rng.random() < 0.2
            else "".join(rng.choices(characters, k=rng.randint(1, 9)))
            for _ in range(rng.randint(0, 12))
        ]
        texts.append("".join(part + rng.choice(gaps[: rng.choice((3, 10))]) for part in parts))
    return texts


@pytest.fixture(scope="module")
def trained() -> tokenizers.Tokenizer:
    """The tokenizer of the default bundle: 30,522 pieces, lower case."""
    return load_tokenizer(ROOT / "bundles" / "quartet-mini" / "tokenizer.json")


def changed(tokenizer: tokenizers.Tokenizer, **options: bool | None) -> tokenizers.Tokenizer:
    """Return a copy with another normalizer."""
    copy = tokenizers.Tokenizer.from_str(tokenizer.to_str())
    copy.normalizer = normalizers.BertNormalizer(**options)
    return copy


def takes(ascii_tokenizer: AsciiTokenizer, text: str) -> bool:
    return ascii_tokenizer.encode(text, None, with_offsets=False) is not None


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"lowercase": False},
        {"strip_accents": False},
        {"clean_text": False},
        {"handle_chinese_chars": False},
    ],
    ids=str,
)
def test_windows_are_those_without_the_shortcut(options, trained):
    """Ids, offsets and words are equal for any mix of texts, and most ASCII texts take the shortcut."""
    tokenizer = changed(trained, **options)
    short, whole = Encoder(tokenizer, 32), Encoder(tokenizer, 32)
    whole._ascii = None
    texts = random_texts(seed=1)
    assert short._ascii is not None
    taken = sum(takes(short._ascii, text) for text in texts)
    assert len(texts) // 4 < taken < len(texts)

    for one, other in zip(short.texts(texts), whole.texts(texts), strict=True):
        for window, expected in zip(one.windows, other.windows, strict=True):
            np.testing.assert_array_equal(window.input_ids, expected.input_ids)
            np.testing.assert_array_equal(window.offsets, expected.offsets)
            np.testing.assert_array_equal(window.words, expected.words)
    for cut, expected_cut in zip(
        short.windows(texts, truncate="window"),
        whole.windows(texts, truncate="window"),
        strict=True,
    ):
        ids = [window.input_ids.tolist() for window in cut.windows]
        assert [window.input_ids.tolist() for window in expected_cut.windows] == ids


def test_parts_and_a_full_table_change_no_token(trained, monkeypatch):
    """A long text in parts, with words that the table forgets or is too small for, and cut at any number of tokens."""
    monkeypatch.setattr(ascii_module, "PART", 7)
    monkeypatch.setattr(ascii_module, "WORDS", 3)
    monkeypatch.setattr(ascii_module, "LONGEST_WORD", 5)
    ascii_tokenizer = AsciiTokenizer(trained)
    texts = [text for text in random_texts(seed=2) if takes(ascii_tokenizer, text)]
    for text in [" ".join(texts[:100]), "museums" * 30, *texts]:
        expected = trained.encode(text, add_special_tokens=False)
        for needed in (None, 1, 5, 300):
            short = ascii_tokenizer.encode(text, needed, with_offsets=True)
            assert expected.ids[:needed] == short.ids[:needed]
            assert expected.offsets[:needed] == short.offsets[:needed]
            assert expected.word_ids[:needed] == short.word_ids[:needed]
            assert short.ids == ascii_tokenizer.encode(text, needed, with_offsets=False).ids
            assert needed is None or len(short.ids) <= needed + 30
        assert len(ascii_tokenizer._pieces) <= 3


def test_a_text_that_may_contain_an_added_token_does_not_take_it(trained):
    """Added tokens are found in the normalized text, too: "Évian" in "evian"."""
    tokenizer = changed(trained)
    tokenizer.add_tokens([AddedToken("Évian", normalized=True), AddedToken("中", normalized=True)])
    ascii_tokenizer = AsciiTokenizer(tokenizer)
    for text in ("a bottle of evian", "EVIAN", "[MASK]"):
        assert not takes(ascii_tokenizer, text)
    assert takes(ascii_tokenizer, "A cup of COAL")
    short, whole = Encoder(tokenizer, 32), Encoder(tokenizer, 32)
    whole._ascii = None
    for text in ("a bottle of evian", "Coal 中 coal"):
        (one,), (other,) = short.texts([text]), whole.texts([text])
        assert other.windows[0].input_ids.tolist() == one.windows[0].input_ids.tolist()


def test_other_tokenizers_have_none(trained):
    """Neither another normalizer nor another pre-tokenizer."""
    tokenizer = changed(trained)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    with pytest.raises(ValueError, match="BERT"):
        AsciiTokenizer(tokenizer)
    tokenizer = changed(trained)
    tokenizer.normalizer = normalizers.Lowercase()
    with pytest.raises(ValueError, match="BERT"):
        AsciiTokenizer(tokenizer)
    assert Encoder(tokenizer, 32)._ascii is None

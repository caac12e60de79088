# ruff: noqa: RUF001  (letters that look like others are what is tested)
"""Spans keep to characters and words, whatever tokenizer a model has."""

import string
from collections.abc import Sequence

import numpy as np
import pytest
import tokenizers
from hypothesis import assume, example, given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tokenizers import models, normalizers, pre_tokenizers, processors

from service.core.decode import AGGREGATION_STRATEGIES, EntitySpan, ner, qa
from service.core.encode import Encoded, Encoder

LABELS = ("O", "B-X", "I-X")
MARKS = "([{<\u00ab\u201c\u2018\u00bf\uff08\u300c.,;:!?)]}>\u00bb\u201d\u2019\u2026\uff09\u3001\u3002\u300d\u2014-'\""
PARTS = [
    *("a", "Z", "é", "e\u0301", "ß", "ﬁ", "9", "Berlin", "U.S.", "O'Neill", "AT&T", "1,234.56", "$5", "3.5%"),
    *("漢", "字", "か", "カ", "ー", "ｶﾞ", "か\u3099", "ก", "กำ", "กิ", "แ", "ລ", "ក្ក", "မြန်", "Ｂ", "２"),
    *("각", "\u1100\u1161\u11a8", "क्षि", "ஸ்ரீ", "שָׁלוֹם", "مَرْحَبًا", "צה״ל"),
    *("😀", "👩\u200d👧", "👍🏽", "🇩🇪", "🇫🇷", "1\ufe0f\u20e3", "\u2764\ufe0f"),
    *(" ", "  ", "\t", "\n", "\r\n", "\u00a0", "\u3000", "\u200b", "\u200e", "\u200f", "\u00ad", "\ufeff", "\u2028"),
    *MARKS,
]  # fmt: skip
MORE = "今天京气怎么样我在上海工作卖亰全学年にわたって小校の国語教科書挿し絵用いるれ베를린서왔다นม่ำาลข北"
CHARACTERS = pre_tokenizers.Split(tokenizers.Regex(r"\X"), "isolated")
LETTERS = sorted({*"".join(PARTS), *string.printable, *MORE})
texts = st.lists(st.sampled_from(PARTS), max_size=12).map("".join)
unspaced = st.lists(st.sampled_from("漢字北京かなカナー、。กขแลกិក"), min_size=1, max_size=12).map(
    "".join
)


def framed(tokenizer: tokenizers.Tokenizer) -> Encoder:
    special = [(name, tokenizer.token_to_id(name)) for name in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B [SEP]", special_tokens=special
    )
    return Encoder(tokenizer, 512)


def pieces(*known: str, whitespace: bool = True) -> Encoder:
    """A unigram tokenizer, whose words end at white space (as XLM-R's) or begin with it (as DeBERTa's)."""
    vocab = {"[UNK]": 0.0, "[CLS]": 0.0, "[SEP]": 0.0}
    vocab |= dict.fromkeys([*LETTERS, "▁"], -9.0)
    vocab |= dict.fromkeys(known, -1.0)
    tokenizer = tokenizers.Tokenizer(models.Unigram([*vocab.items()], unk_id=0))
    metaspace = pre_tokenizers.Metaspace(prepend_scheme="always")
    split = [pre_tokenizers.WhitespaceSplit(), metaspace] if whitespace else [metaspace]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(split)
    return framed(tokenizer)


def byte_pairs(*, trim: bool) -> Encoder:
    """A byte-level tokenizer, whose tokens hold the space before them (as ModernBERT's) or do not (as RoBERTa's)."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    names = ["[CLS]", "[SEP]"]
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=330,
        special_tokens=names,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["Berlin in Berlin, (U.S.). 北京 北京北京"] * 3, trainer)
    encoder = framed(tokenizer)
    if not trim:
        return encoder
    framing = [processors.ByteLevel(trim_offsets=True), tokenizer.post_processor]
    tokenizer.post_processor = processors.Sequence(framing)
    return Encoder(tokenizer, 512)


def wordpieces(*, chinese: bool, lowercase: bool = True) -> Encoder:
    """BERT's tokenizer, which knows all letters."""
    vocab = ["[UNK]", "[CLS]", "[SEP]", *LETTERS, *("##" + one for one in LETTERS), "berlin"]
    tokenizer = tokenizers.Tokenizer(
        models.WordPiece({token: index for index, token in enumerate(vocab)}, unk_token="[UNK]")
    )
    tokenizer.normalizer = normalizers.BertNormalizer(
        handle_chinese_chars=chinese, lowercase=lowercase
    )
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    return framed(tokenizer)


ENCODERS = {
    "xlm-r": pieces("北京", "▁Berlin", "Berlin", ").", "กข"),
    "deberta": pieces("北京", "▁Berlin", "Berlin", whitespace=False),
    "roberta": byte_pairs(trim=True),
    "modernbert": byte_pairs(trim=False),
    "bert": wordpieces(chinese=True),
    "bert, cased": wordpieces(chinese=False, lowercase=False),
}


@pytest.fixture(scope="module", params=ENCODERS)
def encoder(request: pytest.FixtureRequest) -> Encoder:
    return ENCODERS[request.param]


def words(encoder: Encoder, text: str) -> list[str]:
    """The words of a text, by its tokens."""
    [window] = encoder.texts([text])[0].windows
    wide = window.offsets[:, 0] < window.offsets[:, 1]
    found: dict[int, list[int]] = {}
    for word, (start, end) in zip(window.words[wide], window.offsets[wide].tolist(), strict=True):
        found[word] = [min(start, *found.get(word, [start])), max(end, *found.get(word, [end]))]
    return [text[start:end] for start, end in found.values()]


def labelled(encoded: Encoded, *spans: tuple[int, int]) -> NDArray[np.float32]:
    """Logits of a model that marks these spans, at every token that begins in one."""
    [window] = encoded.windows
    logits = np.zeros((len(window), len(LABELS)), np.float32)
    begun = set()
    for row, (start, end) in enumerate(window.offsets.tolist()):
        around = {span for span in spans if span[0] <= start < span[1] and start < end}
        logits[row, 0 if not around else 1 if around - begun else 2] = 9
        begun |= around
    return logits


def find(encoder: Encoder, text: str, *spans: str, strategy: str = "first") -> list[str]:
    """The entities where a model marks the first occurrence of each of the spans."""
    [encoded] = encoder.texts([text])
    places = [(text.index(span), text.index(span) + len(span)) for span in spans]
    entities = entities_of(encoded, labelled(encoded, *places), text, strategy)
    return [entity.word for entity in entities]


def entities_of(
    encoded: Encoded, logits: NDArray[np.float32], text: str, strategy: str
) -> Sequence[EntitySpan]:
    return ner(encoded.windows, [logits], text, labels=LABELS, aggregation_strategy=strategy)


class TestWords:
    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            ("She is in Berlin, he (in London).", "She is in Berlin , he ( in London ) ."),
            ("“Berlin” «Bonn» ‘Köln’ ¿Qué? [1]", "“ Berlin ” « Bonn » ‘ Köln ’ ¿ Qué ? [ 1 ]"),
            ("O'Neill O’Neill AT&T Jean-Luc a_b", "O'Neill O’Neill AT&T Jean-Luc a_b"),
            ("Berlin's Berlin’s JAMES'S a'st", "Berlin 's Berlin ’s JAMES 'S a'st"),
            ("the U.S. and e.g. J.R.R. or U.S", "the U.S. and e.g. J.R.R. or U.S"),
            ("1,234.56 3.5% $5 10:30 3/4 2019 a,b a/b", "1,234.56 3.5 % $5 10:30 3/4 2019 a , b a / b"),
            ("C++ Berlin—Bonn 1990–95 a...b -a-", "C++ Berlin — Bonn 1990 – 95 a . . . b - a -"),
            ("Ada😀 👍🏽Bob 🇩🇪🇫🇷", "Ada 😀 👍🏽 Bob 🇩🇪 🇫🇷"),
            ("iPhone在北亰，ＡＢ（か）ー", "iPhone 在 北 亰 ， ＡＢ （ か ） ー"),
            ("แม่น้ำ", "แ ม่ น้ำ"),
            ("베를린에서 왔다", "베를린에서 왔다"),
            ("שָׁלוֹם צה״ל مَرْحَبًا، ab", "שָׁלוֹם צה״ל مَرْحَبًا ، ab"),
            ("a\u00a0b\u3000c\td\ne\u200bf\u200eg", "a b c d e f g"),
            ("e\u0301a नमस्ते \u0301 \u0301a", "e\u0301a नमस्ते \u0301 \u0301a"),
        ],
    )  # fmt: skip
    def test_words(self, text, expected):
        """Words end at spaces, at marks that connect nothing, and around characters of scripts without spaces."""
        letters = tokenizers.Tokenizer(models.BPE())
        letters.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        letters.train_from_iterator(
            [],
            tokenizers.trainers.BpeTrainer(
                special_tokens=["[CLS]", "[SEP]"],
                initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
                show_progress=False,
            ),
        )

        assert expected.split(" ") == words(framed(letters), text)

    def test_words_of_the_tokenizer(self):
        """No word goes on where the tokenizer's own words end."""
        bert = "O ' Neill U . S . Jean - Luc"

        assert bert.lower().split() == [
            word.lower() for word in words(ENCODERS["bert"], "O'Neill U.S. Jean-Luc")
        ]

    @given(text=texts)
    def test_edges(self, encoder, text):
        """No token begins or ends with a space or within a character, except after a space."""
        [window] = encoder.texts([text])[0].windows
        characters = {0} | {end for _, (_, end) in CHARACTERS.pre_tokenize_str(text)}
        spaced = {index + 1 for index, letter in enumerate(text) if letter.isspace()}

        for start, end in window.offsets.tolist():
            part = text[start:end]
            assert part == part.strip() == part.strip("\u200b\u200e\u200f\u00ad\ufeff")
            assert start in characters | spaced or start == end
            assert end in characters or start == end

    @given(text=texts)
    def test_tokens_are_in_order(self, encoder, text):
        """Places and words rise, and a token of some width lies within the text."""
        [window] = encoder.texts([text])[0].windows
        offsets, found = window.offsets[1:-1], window.words[1:-1]
        wide = offsets[offsets[:, 0] < offsets[:, 1]]

        assert (np.diff(found) >= 0).all()
        assert (np.diff(wide, axis=0) >= 0).all()
        assert (offsets[:, 0] <= offsets[:, 1]).all()
        assert offsets.size == 0 or 0 <= offsets.min() <= offsets.max() <= len(text)

    @given(text=texts, capacity=st.integers(3, 9))
    def test_truncated_text(self, encoder, text, capacity):
        """Truncation does not change the offsets and words of the remaining text."""
        short = Encoder(encoder.tokenizer, capacity)
        [whole], [cut] = (one.texts([text + " end" * 99])[0].windows for one in (encoder, short))

        np.testing.assert_array_equal(whole.offsets[: capacity - 1], cut.offsets[: capacity - 1])
        np.testing.assert_array_equal(whole.words[: capacity - 1], cut.words[: capacity - 1])

    @example("'s")
    @given(text=st.text(st.sampled_from("ab E.,;'s“’é(—%"), max_size=30))
    def test_known_words(self, text):
        """Where the tokenizer's own places are taken as they are, they are what is found."""
        for name in ("bert", "roberta"):
            places = ENCODERS[name]._places
            encoding = ENCODERS[name].tokenizer.encode(text, add_special_tokens=False)
            ids = np.array(encoding.ids, np.int64)
            offsets = np.array(encoding.offsets, np.int32).reshape(-1, 2)
            own = np.array(encoding.word_ids, np.int32)
            wide = offsets[:, 0] < offsets[:, 1]
            if places.are_known(text):
                found, numbers = places.find(text, ids, offsets, own)
                np.testing.assert_array_equal(found[wide], offsets[wide])
                np.testing.assert_array_equal(np.diff(numbers[wide]) > 0, np.diff(own[wide]) > 0)

    def test_usual_english_is_known(self):
        """BERT's and RoBERTa's own places are taken where a text has nothing that they get wrong."""
        plain = "She lives in Berlin, and he in “Bonn” now."
        marks = "She (in “Berlin”), and he."
        known = {
            name: [encoder._places.are_known(text) for text in (plain, marks, "今天 Berlin")]
            for name, encoder in ENCODERS.items()
        }

        assert {
            "xlm-r": [False, False, False],
            "deberta": [False, False, False],
            "roberta": [True, False, False],
            "modernbert": [False, False, False],
            "bert": [True, True, False],
            "bert, cased": [True, True, False],
        } == known


class TestEntities:
    @pytest.mark.parametrize("strategy", AGGREGATION_STRATEGIES[1:])
    @pytest.mark.parametrize(
        ("text", "span"),
        [
            ("She lives in Berlin, and", "Berlin"),
            ("She lives (in Berlin).", "Berlin"),
            ("“Berlin” and «Bonn»", "Berlin"),
            ("in Berlin's streets", "Berlin"),
            ("from Berlin—a city", "Berlin"),
            ("in the U.S. and", "U.S."),
            ("of AT&T, Inc.", "AT&T"),
            ("an O'Neill.", "O'Neill"),
            ("in C++, not C#", "C++"),
            ("costs $5, or 3.5%.", "3.5%"),
            ("in 2019, again", "2019"),
            ("for 1,234.56!", "1,234.56"),
            ("is Jean-Luc?", "Jean-Luc"),
            ("has [1] too", "[1]"),
            ("says ¿Qué? to", "¿Qué?"),
            ("a\u00a0Berlin\u3000and\tb\nc", "Berlin"),
            ("Berlin😀 and", "Berlin"),
            ("今天北京天气", "北京"),
            ("我在（北京）。", "北京"),
            ("iPhone在北京卖", "iPhone"),
            ("iPhone在北京卖", "北京"),
            ("กขแลกำ", "แล"),
        ],
    )
    def test_marked_spans(self, encoder, text, span, strategy):
        """Every strategy finds the span that the model marks, no more and no less."""
        assert [span] == find(encoder, text, span, strategy=strategy)

    @pytest.mark.parametrize("strategy", AGGREGATION_STRATEGIES[2:])
    @pytest.mark.parametrize("name", ["xlm-r", "deberta", "bert", "bert, cased"])
    @given(data=st.data(), text=unspaced)
    def test_scripts_without_spaces(self, name, strategy, data, text):
        """Every strategy finds what `simple` finds where each token is a character or more."""
        encoder = ENCODERS[name]
        [encoded] = encoder.texts([text])
        [window] = encoded.windows
        wide = window.offsets[window.offsets[:, 0] < window.offsets[:, 1]]
        assume(len(np.unique(wide[:, 0])) == len(wide))  # no two tokens of one character
        size = len(window)
        chosen = data.draw(st.lists(st.integers(0, 2), min_size=size, max_size=size))
        logits = 9 * np.eye(3, dtype=np.float32)[chosen]

        expected = entities_of(encoded, logits, text, "simple")
        found = entities_of(encoded, logits, text, strategy)

        assert [one[2:] for one in found] == [one[2:] for one in expected]

    def test_space_token_decides_nothing(self):
        """The token of the space before a word has no text, and no say in the word's label."""
        encoder = pieces("北京", "Öster", "reich")
        for text in ("北京", "Österreich"):
            [encoded] = encoder.texts([text])
            assert encoder.tokenizer.encode(text).tokens[1] == "▁"
            logits = labelled(encoded, (0, len(text)))
            logits[1] = [9, 0, 0]

            assert [text] == [one.word for one in entities_of(encoded, logits, text, "first")]

    def test_written_space_sign(self):
        """A sign of the text that looks as the token of a space is text."""
        assert ["a", "▁", "▁"] == words(pieces(), "a▁ ▁")


class TestAnswers:
    @pytest.mark.parametrize(
        ("context", "span"),
        [
            ("The bakery is (on Mill Street) today", "Mill Street"),
            ("全学年にわたって小学校の国語", "小学校"),
            ("They live in Berlin, he says", "Berlin"),
            ("It costs $5, or 3.5%.", "3.5%"),
            ("กขแลกำกิ", "แล"),
            ("Jose\u0301 said", "Jose\u0301"),
        ],
    )
    def test_marked_spans(self, encoder, context, span):
        """An answer is the span that the model marks."""
        [encoded] = encoder.questions(["Where?"], [context])
        [window] = encoded.windows
        begin = context.index(span)
        within = (window.sequence == 1) & (window.offsets[:, 0] >= begin)
        rows = np.flatnonzero(within & (window.offsets[:, 1] <= begin + len(span)))
        rows = rows[window.offsets[rows, 0] < window.offsets[rows, 1]]
        logits = np.zeros((len(window), 2), np.float32)
        logits[rows[0], 0] = logits[rows[-1], 1] = 12

        [found] = qa(
            encoded.windows,
            [logits],
            context,
            top_k=1,
            handle_impossible_answer=False,
            null_threshold=0,
            max_answer_tokens=30,
        )

        assert (span, begin) == (found.answer, found.start)

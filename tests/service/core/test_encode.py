"""Text is cut as transformers' tokenizers cut it, and every token knows where it stands in its text."""

import re
import string
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import transformers
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tokenizers import models, normalizers, pre_tokenizers, processors

from service.core.encode import Cut, Encoder, Encoding, TextError, Window, expand, load_tokenizer

compare = settings(max_examples=50)

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
WORDS = ["the", "river", "cafe", "un", "##aff", "##able", "##s", "!", ",", "?", "1", "2", "漢"]

words = st.sampled_from(["The", "river,", "unaffable", "cafés!", "12", "漢字", "zzz", "?"])
prose = st.lists(words, max_size=30).map(" ".join)

PARTS = [
    "a", "Z", "é", "e\u0301", "\u0308", "ß", "ﬁ", "İ", "Ǆ",  # accents, alone too; case that grows
    "😀", "👩\u200d👩\u200d👧", "🏽", "🇩🇪", "\ufe0f",  # emoji, joined, coloured, flags
    "שָׁלוֹם", "مَرْحَبًا", "\u202e", "\u200f",  # right to left, and its marks
    "漢", "か", "각", "\uff46", "क्षि", "ஸ்ரீ",  # scripts without blanks, and one code point in pieces
    " ", "\t", "\n", "\r\n", "\u00a0", "\u3000", "\u200b", "\u200d", "\u00ad", "\ufeff", "\x00",
    ".", "'", "-", "[SEP]", "½", "①", "\ufffd", "\U0010ffff",
]  # fmt: skip
odd_text = st.one_of(
    st.lists(st.sampled_from(PARTS), max_size=16).map("".join), st.text(max_size=16)
)


def lettered() -> tokenizers.Tokenizer:
    """A WordPiece tokenizer that knows some words, and all else by its letters."""
    letters = [*string.ascii_lowercase, *("##" + letter for letter in string.ascii_lowercase)]
    known = {token: index for index, token in enumerate([*SPECIAL, *WORDS, *letters])}
    tokenizer = tokenizers.Tokenizer(models.WordPiece(known, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.post_processor = template("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1")
    return tokenizer


def template(single: str, pair: str) -> processors.TemplateProcessing:
    special = [("[CLS]", 2), ("[SEP]", 3)]
    return processors.TemplateProcessing(single=single, pair=pair, special_tokens=special)


@pytest.fixture(scope="module")
def minilm(minilm_folder: Path) -> Path:
    """The real MiniLM's `tokenizer.json`, which carries truncation and padding."""
    return minilm_folder / "tokenizer.json"


@pytest.fixture(scope="module", params=["lettered", "minilm"])
def file(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A `tokenizer.json`: a small one made here, and MiniLM's."""
    if request.param == "minilm":
        path: Path = request.getfixturevalue("minilm")
        return path
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    lettered().save(str(path))
    return path


@pytest.fixture(scope="module")
def tokenizer(file: Path) -> tokenizers.Tokenizer:
    """That file, read once: MiniLM's takes longer than a test."""
    return load_tokenizer(file)


@pytest.fixture(scope="module")
def peer(file: Path) -> Any:
    """transformers' tokenizer from the same file."""
    if (file.parent / "config.json").is_file():
        return transformers.AutoTokenizer.from_pretrained(file.parent)
    names = ["input_ids", "token_type_ids", "attention_mask"]
    return transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(file), pad_token="[PAD]", model_input_names=names
    )


@pytest.fixture
def encoder() -> Encoder:
    """Windows of sixteen tokens, from the small tokenizer."""
    return Encoder(lettered(), 16)


def ids(encoded: Sequence[Cut]) -> list[list[int]]:
    return [window.input_ids.tolist() for item in encoded for window in item.windows]


def types(encoded: Sequence[Cut]) -> list[list[int]]:
    return [window.token_type_ids.tolist() for item in encoded for window in item.windows]


def own(window: Encoding, sequence: int = 0) -> list[int]:
    """The ids of one text's tokens in a window."""
    return window.input_ids[window.sequence == sequence].tolist()


def refusal(encode: Callable[[], object]) -> tuple[list[int], str] | None:
    try:
        encode()
    except TextError as error:
        return error.indices, error.reason
    return None


class TestTexts:
    @compare
    @given(texts=st.lists(prose, min_size=1, max_size=4), max_length=st.integers(3, 40))
    def test_cut_as_transformers(self, tokenizer, peer, texts, max_length):
        """A text that is too long is cut where transformers cuts it."""
        encoded = Encoder(tokenizer, max_length).texts(texts)

        expected = peer(texts, truncation=True, max_length=max_length)
        assert ids(encoded) == expected["input_ids"]
        assert types(encoded) == expected["token_type_ids"]
        whole = [len(row) for row in peer(texts)["input_ids"]]
        assert [item.truncated for item in encoded] == [size > max_length for size in whole]

    @compare
    @given(text=prose, max_length=st.integers(3, 40), data=st.data())
    def test_windows_as_transformers(self, tokenizer, peer, text, max_length, data):
        """Windows lie where transformers' overflowing tokens do, with the same stride."""
        stride = data.draw(st.integers(0, max_length - 3))

        encoded = Encoder(tokenizer, max_length).texts([text], truncate="window", stride=stride)

        options = {"max_length": max_length, "stride": stride, "return_overflowing_tokens": True}
        assert ids(encoded) == peer([text], truncation=True, **options)["input_ids"]
        assert not encoded[0].truncated

    @compare
    @given(
        texts=st.lists(prose, min_size=1, max_size=4),
        max_length=st.integers(3, 40),
        truncate=st.sampled_from([True, "window", False]),
        data=st.data(),
    )
    def test_windows_alone_are_the_same(self, texts, max_length, truncate, data):
        """Without the tokens' places, windows hold the same tokens, and what is refused is refused alike."""
        stride = data.draw(st.integers(0, max_length - 3))
        encoder = Encoder(lettered(), max_length)
        encode = partial(encoder.texts, texts, truncate=truncate, stride=stride)
        cut = partial(encoder.windows, texts, truncate=truncate, stride=stride)
        if refusal(encode) is not None:
            assert refusal(encode) == refusal(cut)
            return
        encoded, windows = encode(), cut()
        assert (ids(encoded), types(encoded)) == (ids(windows), types(windows))
        assert [item.truncated for item in encoded] == [item.truncated for item in windows]
        assert [item.lengths for item in encoded] == [item.lengths for item in windows]

    def test_fields(self, encoder):
        """Every token knows its place and word in its text; special tokens have none."""
        [encoded] = encoder.texts(["The unaffable café"])
        [window] = encoded.windows

        tokens = [encoder.tokenizer.id_to_token(token) for token in window.input_ids]
        assert tokens == ["[CLS]", "the", "un", "##aff", "##able", "cafe", "[SEP]"]
        expected = [[0, 0], [0, 3], [4, 6], [6, 9], [9, 13], [14, 18], [0, 0]]
        assert window.offsets.tolist() == expected
        assert window.words.tolist() == [-1, 0, 1, 1, 1, 2, -1]
        assert window.sequence.tolist() == [-1, 0, 0, 0, 0, 0, -1]
        kinds = [array.dtype for array in (window.input_ids, window.token_type_ids)]
        kinds += [window.offsets.dtype, window.words.dtype, window.sequence.dtype]
        assert kinds == [np.int64, np.int64, np.int32, np.int32, np.int8]

    @pytest.mark.parametrize(
        "single", ["[CLS]:0 $A:0 [SEP]:0", "[CLS]:1 $A:1 [SEP]:1", "[CLS]:2 $A:0 [SEP]:1"]
    )
    def test_windows_have_the_types_of_the_template(self, single):
        """Whether all tokens have one in common or not."""
        tokenizer = lettered()
        tokenizer.post_processor = template(single, "[CLS] $A [SEP] $B:1 [SEP]:1")
        encoder = Encoder(tokenizer, 16)
        prose = ["the river", "", "un" * 30]
        encoded, windows = encoder.texts(prose), encoder.windows(prose)
        assert (ids(encoded), types(encoded)) == (ids(windows), types(windows))
        assert types(windows)[0] == tokenizer.encode(prose[0]).type_ids

    def test_places_of_later_windows(self, encoder):
        """In every window, places and words are those in the whole text."""
        text = "the river cafes " * 10

        [encoded] = encoder.texts([text], truncate="window", stride=3)

        spans = [word.span() for word in re.finditer(r"\S+", text)]
        assert len(encoded.windows) > 2
        for window in encoded.windows:
            rows = zip(
                window.input_ids[1:-1], window.offsets[1:-1], window.words[1:-1], strict=True
            )
            for token, (start, end), word in rows:
                piece = encoder.tokenizer.id_to_token(token).removeprefix("##")
                assert text[start:end] == piece
                assert spans[word][0] <= start < end <= spans[word][1]

    @pytest.mark.parametrize("truncate", [True, "window", False])
    def test_empty(self, encoder, truncate):
        """An empty text, or a blank one, is its special tokens alone; no texts are none."""
        assert ids(encoder.texts(["", " \n"], truncate=truncate)) == [[2, 3], [2, 3]]
        assert encoder.texts([], truncate=truncate) == []

    def test_refuses_all_that_are_too_long(self, encoder):
        """Without truncation every text that is too long is named, and one that just fits is not."""
        fits, long = "the " * 14, "the " * 15
        assert len(encoder.texts([fits], truncate=False)[0].windows[0]) == 16

        with pytest.raises(TextError, match="longer than 16 tokens") as refused:
            encoder.texts([long, fits, "", long], truncate=False)

        assert refused.value.indices == [0, 3]
        assert str(refused.value).startswith("inputs [0, 3]: ")

    @pytest.mark.parametrize("stride", [-1, 14, 15])
    def test_impossible_stride(self, encoder, stride):
        """A stride that leaves a window nothing new is refused."""
        with pytest.raises(ValueError, match=f"a stride of {stride} does not fit windows of 14"):
            encoder.texts(["the " * 20], truncate="window", stride=stride)

    def test_longest_stride(self, encoder):
        """The longest stride shares half of the text's room with each neighbour."""
        assert encoder.longest_stride == 7


class TestPrompts:
    """`Encoder.windows` with a prompt before each text."""

    @compare
    @given(
        text=prose,
        prompt=st.sampled_from(["The river, ", "un", "12: ", "   ", "cafe"]),
        max_length=st.integers(8, 20),
    )
    def test_cut_as_transformers(self, peer, tokenizer, text, prompt, max_length):
        """Prompt and text are tokenized together, and the end of both is cut."""
        expected = peer([prompt + text], truncation=True, max_length=max_length)
        encoder = Encoder(tokenizer, max_length)
        found = encoder.windows([text], prompt=prompt)
        assert expected["input_ids"] == ids(found)
        whole = len(peer(prompt + text)["input_ids"])
        assert (whole > max_length) is found[0].truncated

    def test_every_window_has_the_prompt(self, encoder):
        """Windows of a long text begin with the prompt and share `stride` tokens of the text."""
        text = "The river un ! , ? 1 2 the the river , ? 1 2 ! cafe 2 1"
        windows = encoder.windows([text], truncate="window", stride=2, prompt="cafe: ")[0].windows
        prompt = encoder.tokenizer.encode("cafe:", add_special_tokens=False).ids
        own = encoder.tokenizer.encode(text, add_special_tokens=False).ids
        rest = []
        for number, window in enumerate(windows):
            assert len(window) <= 16
            tokens = window.input_ids.tolist()
            assert [2, *prompt] == tokens[: len(prompt) + 1]
            rest += tokens[len(prompt) + 1 + (2 if number else 0) : -1]
        assert len(windows) > 1
        assert own == rest

    def test_first_window_is_the_cut_text(self, encoder):
        """The first window is what `truncate` true gives; a text that fits is one window."""
        for text in ("The river un ! , ? 1 2 the the river , ? 1 2 ! cafe 2 1", "The river"):
            (cut,) = encoder.windows([text], prompt="cafe ")
            (windows,) = encoder.windows([text], prompt="cafe ", truncate="window")
            assert ids([cut]) == ids([windows])[:1]
            assert not windows.truncated

    def test_a_prompt_that_joins_the_text(self, encoder):
        """Later windows begin with the tokens that the prompt has within the text, too."""
        text = "afables " + "river " * 20
        (found,) = encoder.windows([text], prompt="river un", truncate="window")
        shared = encoder.tokenizer.encode("river", add_special_tokens=False).ids
        joined = encoder.tokenizer.encode("river un" + text, add_special_tokens=False).ids
        assert ids([found])[0] == [2, *joined[:14], 3]
        assert all(window[1] == shared[0] for window in ids([found]))

    def test_refuses_all_that_are_too_long(self, encoder):
        """The prompt counts where texts must fit."""
        texts = ["river " * 14, "river " * 13, "river"]
        refused = refusal(lambda: encoder.windows(texts, truncate=False, prompt="the "))
        assert refused is not None
        assert [0] == refused[0]

    def test_long_prompts(self, encoder):
        """A prompt of more than half a window is no beginning of every window."""
        assert 7 == encoder.longest_prompt == encoder.count_tokens("river " * 7)
        encoder.windows(["river " * 20], prompt="river " * 7, truncate="window")
        with pytest.raises(ValueError, match="a prompt of 8 tokens does not fit: at most 7"):
            encoder.windows(["river " * 20], prompt="river " * 8, truncate="window")


class TestPairs:
    @compare
    @given(
        texts=st.lists(prose, min_size=3, max_size=3),
        pairs=st.lists(prose, min_size=3, max_size=3),
        max_length=st.integers(5, 50),
    )
    def test_cut_as_transformers(self, tokenizer, peer, texts, pairs, max_length):
        """Of a pair that is too long, the longer text loses tokens first, as in transformers."""
        encoded = Encoder(tokenizer, max_length).pairs(texts, pairs)

        expected = peer(texts, pairs, truncation="longest_first", max_length=max_length)
        assert ids(encoded) == expected["input_ids"]
        assert types(encoded) == expected["token_type_ids"]
        whole = [len(row) for row in peer(texts, pairs)["input_ids"]]
        assert [item.truncated for item in encoded] == [size > max_length for size in whole]

    def test_refuses_all_that_are_too_long(self, encoder):
        """Without truncation every pair that is too long is named, and one that just fits is not."""
        with pytest.raises(TextError, match="longer than 16 tokens") as refused:
            encoder.pairs(["the " * 6] * 3, ["the " * 8, "the " * 7, "the " * 9], truncate=False)

        assert refused.value.indices == [0, 2]

    def test_different_numbers(self, encoder):
        """Texts without a partner are refused."""
        with pytest.raises(ValueError, match="shorter"):
            encoder.pairs(["the", "river"], ["cafe"])


class TestQuestions:
    @compare
    @given(
        question=st.lists(words, max_size=3).map(" ".join),
        context=prose,
        max_length=st.integers(40, 60),
        stride=st.integers(0, 5),
    )
    def test_windows_as_transformers(self, tokenizer, peer, question, context, max_length, stride):
        """The question stands whole in every window, and the context is cut, as in transformers."""
        context = context * 3
        encoder = Encoder(tokenizer, max_length)

        encoded = encoder.questions([question], [context], stride=stride)

        options = {"max_length": max_length, "stride": stride, "return_overflowing_tokens": True}
        expected = peer([question], [context], truncation="only_second", **options)
        assert ids(encoded) == expected["input_ids"]
        assert types(encoded) == expected["token_type_ids"]
        assert not encoded[0].truncated

    def test_long_question(self, encoder):
        """A question longer than `max_query_tokens` is cut to it, and that is said."""
        cut, whole = encoder.questions(
            ["the " * 5, "the " * 4], ["river", "river"], max_query_tokens=4
        )

        assert [len(own(item.windows[0], 0)) for item in (cut, whole)] == [4, 4]
        assert [cut.truncated, whole.truncated] == [True, False]

    def test_question_as_long_as_a_window(self, encoder):
        """However long the question, windows keep their length, and room for some context."""
        for truncate in (True, "window"):
            [encoded] = encoder.questions(["the " * 20], ["river cafe"], truncate=truncate)

            assert encoded.truncated
            assert {len(window) for window in encoded.windows} == {16}
            assert len(own(encoded.windows[0], 1)) == 1

    def test_one_window(self, encoder):
        """With plain truncation there is one window, and the encoding reports the truncation."""
        short, long = encoder.questions(["the?"] * 2, ["river", "river " * 20], truncate=True)

        assert [len(item.windows) for item in (short, long)] == [1, 1]
        assert [short.truncated, long.truncated] == [False, True]
        assert len(long.windows[0]) == 16

    def test_refuses_all_that_are_too_long(self, encoder):
        """Without truncation, long contexts and long questions are refused, every one named."""
        questions = ["the?", "the " * 5, "the?", "the?"]
        contexts = ["river " * 12, "river", "river " * 11, "river"]

        with pytest.raises(TextError) as refused:
            encoder.questions(questions, contexts, truncate=False, max_query_tokens=4)

        assert refused.value.indices == [0, 1]

    def test_stride_of_small_windows(self, encoder):
        """A stride too large for what the question leaves shrinks to half of that."""
        [encoded] = encoder.questions(["the " * 7], ["river " * 20], stride=7)

        first, second, *_ = encoded.windows
        assert own(first, 1)[-3:] == own(second, 1)[:3]
        assert np.array_equal(first.offsets[-4:-1], second.offsets[9:12])
        assert len(encoded.windows) == 6


class TestOneWithEach:
    @compare
    @given(prose, st.lists(prose, min_size=1, max_size=3), st.booleans())
    @example("the " * 20, ["the " * 16], True)  # each is longer than a window
    def test_cut_as_pairs(self, first, seconds, truncate):
        """Each pair has the tokens, types and refusals that it has alone."""
        encoder = Encoder(lettered(), 16)

        def separately():
            return [*encoder.pairs([first] * len(seconds), seconds, truncate=truncate)]

        def together():
            others = encoder.text_ids(seconds, truncate)
            return encoder.one_with_each(*encoder.text_ids([first]), others, truncate=truncate)

        assert refusal(separately) == refusal(together)
        if refusal(together) is None:
            assert (ids(separately()), types(separately())) == (ids(together()), types(together()))
            assert [a.truncated for a in separately()] == [b.truncated for b in together()]

    @compare
    @given(prose, prose, st.integers(0, 3))
    def test_windows_as_questions(self, first, second, stride):
        """Each window has the whole first text and a part of the second, unless the first is too long."""
        encoder = Encoder(lettered(), 16)
        fits = (16 - 3) // 2
        (question,) = encoder.questions([first], [second], stride=stride, max_query_tokens=fits)
        pair = *encoder.text_ids([first]), encoder.text_ids([second], "window")
        (cut,) = encoder.one_with_each(*pair, truncate="window", stride=stride)
        whole = len(encoder.whole([first], [second])[0].windows[0]) <= 16
        expected = [*encoder.pairs([first], [second])] if whole else [question]
        assert (ids(expected), types(expected)) == (ids([cut]), types([cut]))
        assert cut.truncated is (not whole and question.truncated)


class TestPrefixed:
    @compare
    @given(st.lists(prose, min_size=1, max_size=3), st.booleans(), st.integers(4, 20))
    def test_cut_as_texts(self, texts, truncate, length):
        """Windows and refusals equal the results for texts that begin with the prefix, at that length."""
        whole = Encoder(lettered(), min(length, 16))

        def expected():
            return [*whole.texts([f"the {text}" for text in texts], truncate=truncate)]

        def found():
            encoder = Encoder(lettered(), 16)
            return encoder.prefixed(texts, prefix="the ", length=length, truncate=truncate)

        assert refusal(expected) == refusal(found)
        if refusal(found) is None:
            assert (ids(expected()), types(expected())) == (ids(found()), types(found()))
            assert [a.truncated for a in expected()] == [b.truncated for b in found()]

    def test_each_window_begins_with_the_prefix(self, encoder):
        """A long text is read in windows; neighbors share a stride, at most half of the text's tokens in a window."""
        (the,) = encoder.prefixed(["the"])
        (long,) = encoder.prefixed(
            ["river " * 12], prefix="the ", length=8, truncate="window", stride=9
        )
        assert not long.truncated
        assert [8] * (len(long.windows) - 1) == long.lengths[:-1]
        assert {(2, the.windows[0].input_ids[1])} == {
            (int(window.input_ids[0]), window.input_ids[1]) for window in long.windows
        }

    def test_a_prefix_that_fills_a_window(self, encoder):
        """It is cut at half a window, so that every window has a part of the text."""
        (cut,) = encoder.prefixed(["river " * 12], prefix="the " * 20, length=8, truncate="window")
        assert len(cut.windows) > 2
        assert 8 == max(cut.lengths)


class TestExpand:
    WINDOW = Window(np.array([2, 7, 3]), np.array([0, 1, 1]))

    @pytest.mark.parametrize(("attended", "hidden"), [(True, 0), (False, 2)])
    def test_filled_up(self, attended, hidden):
        """Added tokens are of the first segment, and others attend to them or not."""
        found = expand(self.WINDOW, 5, 4, attended=attended)
        assert [2, 7, 3, 4, 4] == found.input_ids.tolist()
        assert [0, 1, 1, 0, 0] == found.token_type_ids.tolist()
        assert hidden == found.hidden

    def test_long_enough(self):
        """A window of that length stays as it is."""
        assert self.WINDOW is expand(self.WINDOW, 3, 4, attended=False)


class TestWhole:
    def test_nothing_is_cut(self):
        """A text that is longer than a window is whole, and marked."""
        encoder = Encoder(lettered(), 8)
        short, long = encoder.whole(["The river", "The river " * 9])
        assert (4, False, 20, True) == (short.tokens, short.truncated, long.tokens, long.truncated)
        (pair,) = encoder.whole(["The"], ["river"])
        assert [-1, 0, -1, 1, -1] == pair.windows[0].sequence.tolist()


class TestOffsets:
    @settings(max_examples=250)  # 5,000 texts
    @given(texts=st.lists(odd_text, min_size=20, max_size=20))
    def test_every_token_is_in_its_text(self, tokenizer, texts):
        """Places are half-open code points, rise, are never empty, and hold what became the token."""
        encoder = Encoder(tokenizer, 512)

        for text, encoded in zip(texts, encoder.texts(texts, truncate="window"), strict=True):
            [window] = encoded.windows
            places = window.offsets[1:-1]
            assert (places[:, 0] < places[:, 1]).all()
            assert (places >= 0).all()
            assert (places <= len(text)).all()
            assert (np.diff(places, axis=0) >= 0).all()
            for token, (start, end) in zip(window.input_ids[1:-1], places, strict=True):
                assert_comes_from(encoder, token, text[start:end])

    @compare
    @given(pairs=st.lists(st.tuples(odd_text, odd_text), min_size=10, max_size=10))
    def test_pairs_are_their_texts(self, tokenizer, pairs):
        """In a pair each text's tokens, places and words are those that it has alone."""
        encoder = Encoder(tokenizer, 512)
        firsts, seconds = zip(*pairs, strict=True)

        together = encoder.pairs(firsts, seconds)

        for sequence, texts in enumerate((firsts, seconds)):
            for pair, alone in zip(together, encoder.texts(texts), strict=True):
                [window], [single] = pair.windows, alone.windows
                at, inside = window.sequence == sequence, single.sequence == 0
                for field in ("input_ids", "offsets", "words"):
                    found, expected = getattr(window, field)[at], getattr(single, field)[inside]
                    np.testing.assert_array_equal(found, expected)

    @compare
    @given(texts=st.lists(odd_text, min_size=10, max_size=10))
    def test_as_transformers(self, tokenizer, peer, texts):
        """Places hold those that transformers gives, and no word is of two words there."""
        expected = peer(texts, return_offsets_mapping=True)

        for row, encoded in enumerate(Encoder(tokenizer, 512).texts(texts)):
            [window] = encoded.windows
            theirs = np.array(expected["offset_mapping"][row])
            assert (window.offsets[:, 0] <= theirs[:, 0]).all()
            assert (window.offsets[:, 1] >= theirs[:, 1]).all()
            if texts[row].isascii():
                np.testing.assert_array_equal(window.offsets, theirs)
            word_of = dict(zip(window.words.tolist(), expected.word_ids(row), strict=True))
            assert [word_of[word] for word in window.words.tolist()] == expected.word_ids(row)


def assert_comes_from(encoder: Encoder, token: int, part: str) -> None:
    """The part of a text normalises to the token, or, where one character became several tokens, to more."""
    piece = encoder.tokenizer.id_to_token(int(token))
    if piece in SPECIAL:
        assert piece == "[UNK]" or part.startswith(piece)
        return
    normalizer = encoder.tokenizer.normalizer
    assert normalizer is not None
    normal = normalizer.normalize_str(part).strip()
    if normal != piece.removeprefix("##"):
        assert not part.isascii()
        assert piece.removeprefix("##") in normal


class TestTokenizer:
    def test_state_is_never_changed(self, tokenizer):
        """However text is cut, the tokenizer stays what it was."""
        encoder = Encoder(tokenizer, 16)
        before = encoder.tokenizer.to_str()
        long = "the river " * 20

        encoder.texts([long, ""])
        encoder.texts([long], truncate="window", stride=4)
        encoder.pairs([long], [long])
        encoder.questions([long], [long], stride=4)
        with pytest.raises(TextError):
            encoder.texts([long], truncate=False)

        assert encoder.tokenizer.to_str() == before
        assert encoder.tokenizer.truncation is None
        assert encoder.tokenizer.padding is None

    def test_baked_truncation_and_padding(self, tmp_path):
        """A file that carries truncation and padding is loaded without either."""
        tokenizer = lettered()
        tokenizer.enable_truncation(max_length=4)
        tokenizer.enable_padding(length=32)
        tokenizer.save(str(tmp_path / "tokenizer.json"))

        encoder = Encoder.from_file(tmp_path / "tokenizer.json", 64)

        assert len(encoder.texts(["the river " * 10])[0].windows[0]) == 22
        assert len(encoder.texts(["the"])[0].windows[0]) == 3

    def test_minilm_file(self, minilm):
        """MiniLM's own file, which cuts at 128 and pads, is loaded without either."""
        carried = tokenizers.Tokenizer.from_file(str(minilm))
        assert carried.truncation is not None
        assert carried.padding is not None

        loaded = load_tokenizer(minilm)

        assert (loaded.truncation, loaded.padding) == (None, None)
        assert len(Encoder(loaded, 512).texts(["the " * 600])[0].windows[0]) == 512

    def test_refuses_a_tokenizer_that_cuts(self):
        """An encoder is not made from a tokenizer that cuts or pads by itself."""
        cutting, padding = lettered(), lettered()
        cutting.enable_truncation(8)
        padding.enable_padding()

        for tokenizer in (cutting, padding):
            with pytest.raises(ValueError, match="neither truncation nor padding"):
                Encoder(tokenizer, 16)

    @pytest.mark.parametrize(
        ("single", "pair"),
        [
            ("$A [SEP]", "$A [SEP] $B [SEP]"),
            ("[CLS] $A", "[CLS] $A $B:1"),
            ("[CLS] $A [SEP]", "[CLS] $A [SEP] [SEP] $B [SEP]"),
            ("[CLS]:1 $A:1 [SEP]:1", "[CLS] [CLS] $A [SEP]:1 $B:1 [CLS]:1"),
        ],
    )
    def test_other_templates(self, single, pair):
        """Whatever special tokens a tokenizer's template has, texts are framed by them."""
        tokenizer = lettered()
        tokenizer.post_processor = template(single, pair)
        encoder = Encoder(tokenizer, 32)

        for encoded, inputs in (
            (encoder.texts(["the river", ""]), ["the river", ""]),
            (encoder.pairs(["the", ""], ["river!", "cafe"]), [("the", "river!"), ("", "cafe")]),
        ):
            expected = tokenizer.encode_batch(inputs)
            assert ids(encoded) == [one.ids for one in expected]
            assert types(encoded) == [one.type_ids for one in expected]

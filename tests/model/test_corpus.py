"""Pretraining text is read whole, drawn as BERT draws it, and drawn again the same."""

import gzip
import hashlib
import lzma
import math
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from tokenizers import Tokenizer

from model import corpus, tokenizer
from model.bert import BERT
from model.corpus import Batch, Corpus, Sample, Specials, draw, make_batch, mask_tokens, sentences
from model.families import FAMILIES
from model.family import Family, Pairs

CLS, SEP, MASK = 2, 3, 4
SPECIALS = Specials(
    ids={"[CLS]": CLS, "[SEP]": SEP, "[MASK]": MASK},
    frame=BERT.frame,
    sep=SEP,
    mask=MASK,
    vocab_size=30_522,
)


def within(share: float, expected: float, count: int) -> bool:
    """Five standard deviations of a binomial share: off by chance once in two million runs."""
    return abs(share - expected) < 5 * math.sqrt(expected * (1 - expected) / count)


class TestSentences:
    @pytest.mark.parametrize(
        ("paragraph", "expected"),
        [
            ("It rained. We stayed! Why? No idea.", ["It rained.", "We stayed!", "Why?", "No idea."]),
            ("Dr. Noether met Mr. Hilbert. They spoke.", ["Dr. Noether met Mr. Hilbert.", "They spoke."]),
            ("J. S. Bach wrote it. We heard it.", ["J. S. Bach wrote it.", "We heard it."]),
            ("In the U.S. Congress sat. It rose.", ["In the U.S. Congress sat.", "It rose."]),
            ("It closed in Oct. 1999, vs. May.", ["It closed in Oct. 1999, vs. May."]),
            ("Rivers, e.g. Rhine, flow.", ["Rivers, e.g. Rhine, flow."]),
            ('She said "Go." Then she left.', ['She said "Go."', "Then she left."]),
            ("He asked “Who?” “Me.” (It was.) Yes.", ["He asked “Who?”", "“Me.”", "(It was.)", "Yes."]),
            ('"Why?" he asked. Nobody knew.', ['"Why?" he asked.', "Nobody knew."]),
            ("Wait... What was that?", ["Wait...", "What was that?"]),
            ("On and on ... until dawn. It rained.", ["On and on ... until dawn.", "It rained."]),
            ("It rose 3.5 percent. In 2017? 12 went.", ["It rose 3.5 percent.", "In 2017?", "12 went."]),
            ("Really?! Yes.  Two   spaces.", ["Really?!", "Yes.", "Two   spaces."]),
            ("no capital. no sentence", ["no capital. no sentence"]),
            ("Without an end", ["Without an end"]),
            ("  ", []),
            ("", []),
        ],
    )  # fmt: skip
    def test_cases(self, paragraph: str, expected: list[str]) -> None:
        """Paragraphs are cut where sentences end, not after abbreviations, initials or numbers."""
        assert sentences(paragraph) == expected

    @given(st.text(alphabet="aB. !?\"'”()\n…é1"))
    def test_nothing_is_lost(self, paragraph: str) -> None:
        """Sentences are never empty, and together they are the paragraph."""
        found = sentences(paragraph)

        assert all(found)
        assert "".join("".join(found).split()) == "".join(paragraph.split())


class TestDocuments:
    @pytest.mark.parametrize(
        ("suffix", "write"), [(".txt", Path.open), (".gz", gzip.open), (".xz", lzma.open)]
    )
    def test_formats(
        self, suffix: str, write: Callable[..., Any], tmp_path: Path, documents: list[list[str]]
    ) -> None:
        """Plain, gzipped and xz-ed files give the same documents: a paragraph per line."""
        path = tmp_path / f"corpus{suffix}"
        with write(path, "wt", encoding="utf-8") as file:
            file.write("\n\n".join("\n".join(document) for document in documents))

        assert list(corpus.documents([path])) == documents

    def test_boundaries(self, tmp_path: Path) -> None:
        """Any run of blank lines, and the end of a file, ends a document."""
        (tmp_path / "a.txt").write_bytes(b"\n\none\r\n two \n \t\n\n\nthree")
        (tmp_path / "b.txt").write_text("four\n\n")

        found = list(corpus.documents([tmp_path / "a.txt", tmp_path / "b.txt"]))

        assert found == [["one", "two"], ["three"], ["four"]]

    def test_unknown_format(self, tmp_path: Path) -> None:
        """A file of another kind is refused by name."""
        with pytest.raises(ValueError, match=r"corpus\.zip: .*\.gz, \.xz, \.txt"):
            list(corpus.documents([tmp_path / "corpus.zip"]))


class TestBuild:
    def test_tokens(
        self, corpus_file: Path, documents: list[list[str]], small_tokenizer: Tokenizer
    ) -> None:
        """The corpus holds every document's sentences, in order, as their tokens."""
        built = corpus.build([corpus_file], small_tokenizer)

        texts = [[text for paragraph in d for text in sentences(paragraph)] for d in documents]
        flat = [text for document in texts for text in document]
        expected = small_tokenizer.encode_batch(flat, add_special_tokens=False)
        found = [built.tokens(i, i + 1).tolist() for i in range(len(flat))]
        assert found == [encoding.ids for encoding in expected]
        assert built.num_documents == len(documents)
        assert np.diff(built.document_starts).tolist() == [len(document) for document in texts]

    def test_document_of(self, corpus_file: Path, small_tokenizer: Tokenizer) -> None:
        """Every sentence knows the sentences of its own document."""
        built = corpus.build([corpus_file], small_tokenizer)

        for first, last in zip(built.document_starts, built.document_starts[1:], strict=False):
            for sentence in range(first, last):
                assert built.document_of(sentence) == (first, last)

    def test_no_text(self, tmp_path: Path, small_tokenizer: Tokenizer) -> None:
        """Files without text are refused by name."""
        (tmp_path / "empty.txt").write_text("\n\n")

        with pytest.raises(ValueError, match=r"no text in .*empty\.txt"):
            corpus.build([tmp_path / "empty.txt"], small_tokenizer)

    def test_large_vocabulary(self) -> None:
        """A vocabulary whose ids do not fit 16 bits is refused."""
        large: Any = SimpleNamespace(get_vocab_size=lambda: 2**16 + 1)

        with pytest.raises(ValueError, match="65537 does not fit"):
            corpus.build([], large)

    def test_cache(
        self,
        monkeypatch: pytest.MonkeyPatch,
        tmp_path: Path,
        corpus_file: Path,
        tokenizer_file: Path,
    ) -> None:
        """A corpus is tokenised once, and anew for another file, its content, or another tokenizer."""
        calls = []

        def build(files: list[Path], tokenizer: Tokenizer) -> Corpus:
            calls.append(files)
            return built(files, tokenizer)

        built = corpus.build
        monkeypatch.setattr(corpus, "build", build)
        other_file, other_tokenizer = tmp_path / "other.txt", tmp_path / "tokenizer.json"
        other_file.write_text("One more. And one.")
        other_tokenizer.write_text(tokenizer_file.read_text() + "\n")

        first = corpus.load([corpus_file], tokenizer_file, tmp_path / "cache")
        again = corpus.load([corpus_file], tokenizer_file, tmp_path / "cache")
        corpus.load([corpus_file, other_file], tokenizer_file, tmp_path / "cache")
        corpus.load([corpus_file], other_tokenizer, tmp_path / "cache")

        other_file.write_text("One more. And two.")
        corpus.load([corpus_file, other_file], tokenizer_file, tmp_path / "cache")

        both = [corpus_file, other_file]
        assert calls == [[corpus_file], both, [corpus_file], both]
        assert all(map(np.array_equal, astuple(first), astuple(again)))
        assert len(list((tmp_path / "cache").iterdir())) == 4


class TestSpecials:
    @pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
    def test_as_the_tokenizer_has_it(self, family: Family, documents: list[list[str]]) -> None:
        """What stands around one text, and around two, is what the family's own tokenizer puts there."""
        words = [text for document in documents for text in document]
        trained = tokenizer.train(words, vocab_size=400, family=family)
        specials = Specials.of(trained, family)
        texts = words[:2]
        bare = [trained.encode(text, add_special_tokens=False).ids for text in texts]
        arrays = [np.asarray(ids) for ids in bare]

        for count in (1, 2):
            expected = trained.encode(*texts[:count])
            ids, types = specials.around(*arrays[:count])
            assert ids.tolist() == expected.ids
            assert types.tolist() == expected.type_ids
            room = specials.room(len(ids), count)
            assert room == sum(map(len, bare[:count]))
        assert trained.id_to_token(specials.mask) == family.special_tokens["mask"]
        assert trained.id_to_token(specials.sep) == family.special_tokens["sep"]
        assert specials.vocab_size == trained.get_vocab_size()

    def test_missing(self) -> None:
        """A tokenizer without a mask token is refused by what it lacks."""
        minimal: Any = SimpleNamespace(token_to_id={"[CLS]": 0, "[SEP]": 1}.get)

        with pytest.raises(ValueError, match=r"lacks bert's special tokens: \['\[MASK\]'\]"):
            Specials.of(minimal, BERT)


@pytest.fixture(scope="module")
def spoken() -> Corpus:
    """Forty documents in which every token of sentence i is 100 + i."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(2, 9, size=40)
    lengths = rng.integers(1, 12, size=sizes.sum())
    ids = np.repeat(100 + np.arange(len(lengths)), lengths).astype(np.uint16)
    return Corpus(ids, corpus._starts(lengths.tolist()), corpus._starts(sizes.tolist()))


def samples(spoken: Corpus, count: int, length: int, pairs: Pairs | None) -> list[Sample]:
    rngs = (np.random.default_rng([7, index]) for index in range(count))
    return [draw(spoken, SPECIALS, length, pairs, rng) for rng in rngs]


def parts(sample: Sample) -> list[NDArray[np.int64]]:
    """The sentence index of each token, for each text of a sample."""
    ends = np.flatnonzero(sample.input_ids == SEP)
    starts = [1, *(ends[:-1] + 1)]
    return [sample.input_ids[s:e] - 100 for s, e in zip(starts, ends, strict=True)]


def assert_running(spoken: Corpus, text: NDArray[np.int64]) -> None:
    """The tokens are running text: whole sentences but for the last, of one document."""
    expected = spoken.tokens(int(text[0]), spoken.document_of(int(text[0]))[1]) - 100
    np.testing.assert_array_equal(text, expected[: len(text)])


class TestDraw:
    @pytest.mark.parametrize("length", [3, 20, 500])
    def test_blocks(self, spoken: Corpus, length: int) -> None:
        """One text fills its sample, from a sentence's start on, with a separator between documents."""
        after = np.append(np.arange(1, spoken.num_sentences), 0)
        last = np.isin(np.arange(spoken.num_sentences), spoken.document_starts[1:] - 1)
        for sample in samples(spoken, 100, length, pairs=None):
            assert len(sample.input_ids) == length
            assert not sample.token_type_ids.any()
            assert (sample.input_ids[0], sample.input_ids[-1]) == (CLS, SEP)
            sentence, text = int(sample.input_ids[1]) - 100, sample.input_ids[1:-1]
            expected: list[int] = []
            while len(expected) < len(text):
                expected += (spoken.tokens(sentence, sentence + 1)).tolist()
                expected += [SEP] * bool(last[sentence])
                sentence = int(after[sentence])
            assert text.tolist() == expected[: len(text)]

    def test_order(self, spoken: Corpus) -> None:
        """Both texts are whole sentences that meet in the document; class 1: the second stands before the first."""
        for sample in samples(spoken, 1000, 40, pairs="sop"):
            texts = parts(sample)
            before, after = texts[::-1] if sample.is_next else texts
            assert after[0] == before[-1] + 1
            both = np.concatenate([before, after])
            first, end = int(before[0]), int(after[-1]) + 1
            np.testing.assert_array_equal(both, spoken.tokens(first, end) - 100)
            assert spoken.document_of(first) == spoken.document_of(end - 1)

    def test_half_are_swapped(self, spoken: Corpus) -> None:
        """Half of the pairs, and with no regard to how long either text is."""
        count = 4000
        drawn = samples(spoken, count, 40, pairs="sop")
        longer = [len(first) > len(second) for first, second in map(parts, drawn)]

        assert within(float(np.mean([sample.is_next for sample in drawn])), 0.5, count)
        told = np.corrcoef(longer, [sample.is_next for sample in drawn])[0, 1]
        assert abs(told) < 5 / math.sqrt(count)

    @pytest.mark.parametrize("length", [6, 9, 14])
    def test_order_of_what_has_no_room(self, spoken: Corpus, length: int) -> None:
        """Sentences that are too long are cut where they do not meet."""
        for sample in samples(spoken, 300, length, pairs="sop"):
            texts = parts(sample)
            before, after = texts[::-1] if sample.is_next else texts
            assert 2 <= len(before) + len(after) <= length - 3
            assert after[0] == before[-1] + 1
            sentence = spoken.tokens(int(before[-1]), int(before[-1]) + 1)
            end = before[before == before[-1]]
            assert len(end) == min(len(sentence), len(before))
            assert len(sample.input_ids) <= length

    def test_real_neighbours(self, spoken: Corpus) -> None:
        """Class 0: the second text starts with the sentence after the first text's last."""
        for sample in samples(spoken, 1000, 40, pairs="nsp"):
            if sample.is_next == 0:
                first, second = parts(sample)
                assert second[0] == first[-1] + 1
                assert spoken.document_of(second[0]) == spoken.document_of(first[0])

    def test_random_texts(self, spoken: Corpus) -> None:
        """Class 1: the second text comes from another document."""
        for sample in samples(spoken, 1000, 40, pairs="nsp"):
            if sample.is_next == 1:
                first, second = parts(sample)
                assert spoken.document_of(second[0]) != spoken.document_of(first[0])

    def test_half_are_real(self, spoken: Corpus) -> None:
        """Half the pairs are real neighbours."""
        count = 4000
        share = np.mean([sample.is_next for sample in samples(spoken, count, 16, pairs="nsp")])

        assert within(float(share), 0.5, count)

    @pytest.mark.parametrize("length", [8, 16, 40, 500])
    def test_pairs_are_well_formed(self, spoken: Corpus, length: int) -> None:
        """A pair is [CLS] A [SEP] B [SEP], never too long, both texts running, segments 0 and 1."""
        for sample in samples(spoken, 200, length, pairs="nsp"):
            first, second = parts(sample)
            assert_running(spoken, first)
            assert_running(spoken, second)
            assert len(sample.input_ids) == len(first) + len(second) + 3 <= length
            expected = [0] * (len(first) + 2) + [1] * (len(second) + 1)
            assert sample.token_type_ids.tolist() == expected

    def test_sentences_by_their_tokens(self, spoken: Corpus) -> None:
        """A sentence starts samples as often as its share of the corpus' tokens."""
        count = 4000
        starts = Counter(int(parts(s)[0][0]) for s in samples(spoken, count, 8, pairs=None))

        lengths = np.diff(spoken.sentence_starts)
        longest = int(lengths.argmax())
        share = lengths[longest] / lengths.sum()
        assert within(starts[longest] / count, float(share), count)
        assert len(starts) > 0.9 * len(lengths)

    def test_no_neighbours(self) -> None:
        """Pairs from documents of one sentence each are refused with the reason."""
        lonely = Corpus(np.arange(100, 110, dtype=np.uint16), np.arange(11), np.arange(11))

        with pytest.raises(ValueError, match="at least two sentences"):
            draw(lonely, SPECIALS, 20, "nsp", np.random.default_rng(0))

    def test_one_document(self) -> None:
        """In a corpus of one document a random text is from anywhere in it."""
        alone = Corpus(np.arange(100, 110, dtype=np.uint16), np.arange(11), np.array([0, 10]))

        assert {s.is_next for s in samples(alone, 50, 20, pairs="nsp")} == {0, 1}


Masked = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]


@pytest.fixture(scope="module")
def masked() -> list[Masked]:
    """Three hundred texts: original ids, changed ids, chosen positions."""
    rng = np.random.default_rng(3)
    found = []
    for _ in range(300):
        first, second = rng.integers(5, 30_522, size=(2, rng.integers(20, 60)))
        ids = np.concatenate([[CLS], first, [SEP], second, [SEP]])
        found.append((ids, *mask_tokens(ids, SPECIALS, 0.15, rng)))
    return found


class TestMasking:
    def test_share(self, masked: list[Masked]) -> None:
        """Of each text, 15 % of the tokens that are not special are chosen, to the nearest token."""
        for ids, _, chosen in masked:
            assert len(chosen) == round(0.15 * (len(ids) - 3))

    def test_80_10_10(self, masked: list[Masked]) -> None:
        """Of the chosen, 80 % become [MASK], 10 % a random token, and 10 % stay."""
        old = np.concatenate([ids[chosen] for ids, _, chosen in masked])
        new = np.concatenate([changed[chosen] for _, changed, chosen in masked])

        noise = (new != MASK) & (new != old)
        assert within(float((new == MASK).mean()), 0.8, len(new))
        assert within(float((new == old).mean()), 0.1, len(new))
        assert within(float(noise.mean()), 0.1, len(new))
        assert abs(new[noise].mean() / 30_522 - 0.5) < 5 / math.sqrt(12 * noise.sum())

    def test_the_rest_is_untouched(self, masked: list[Masked]) -> None:
        """Special tokens are never chosen, no position twice, and what is not chosen stays."""
        for ids, changed, chosen in masked:
            assert not np.isin(ids[chosen], [CLS, SEP]).any()
            assert (np.diff(chosen) > 0).all()
            others = np.setdiff1d(np.arange(len(ids)), chosen)
            np.testing.assert_array_equal(changed[others], ids[others])

    def test_positions_are_even(self) -> None:
        """Every position is chosen as often as any other."""
        ids = np.concatenate([[CLS], np.arange(100, 120), [SEP]])
        rng = np.random.default_rng(5)
        count = 3000

        times = Counter(
            int(at) for _ in range(count) for at in mask_tokens(ids, SPECIALS, 0.15, rng)[1]
        )

        assert set(times) == set(range(1, 21))
        assert all(within(number / count, 0.15, count) for number in times.values())

    def test_short_text(self) -> None:
        """Even a text of one token has one to guess."""
        rng = np.random.default_rng(0)

        _, chosen = mask_tokens(np.array([CLS, 50, SEP]), SPECIALS, 0.15, rng)

        assert chosen.tolist() == [1]

    def test_the_input_is_kept(self) -> None:
        """Masking changes a copy."""
        ids = np.array([CLS, *range(50, 90), SEP])
        before = ids.copy()

        mask_tokens(ids, SPECIALS, 0.5, np.random.default_rng(0))

        np.testing.assert_array_equal(ids, before)


FIXED: dict[str, Any] = {
    "seed": 3,
    "step": 5,
    "size": 6,
    "length": 24,
    "rate": 0.15,
    "pairs": "nsp",
}


def digest(batch: Batch) -> str:
    arrays = [batch.input_ids, batch.token_type_ids, batch.masked, batch.labels, batch.is_next]
    arrays += [batch.layout.lengths, batch.layout.unpack]
    return hashlib.sha256(b"".join(array.tobytes() for array in arrays)).hexdigest()


class TestMakeBatch:
    @pytest.mark.parametrize("pairs", ["nsp", "sop", None])
    def test_labels(self, spoken: Corpus, pairs: Pairs | None) -> None:
        """The labels are what stood at the masked positions; all other tokens are as drawn."""
        arguments = {**FIXED, "pairs": pairs}
        batch = make_batch(spoken, SPECIALS, **arguments)

        rngs = [np.random.default_rng([3, 5, index]) for index in range(6)]
        drawn = [draw(spoken, SPECIALS, 24, pairs, rng) for rng in rngs]
        original = np.concatenate([sample.input_ids for sample in drawn])
        np.testing.assert_array_equal(batch.labels, original[batch.masked])
        others = np.setdiff1d(np.arange(len(original)), batch.masked)
        np.testing.assert_array_equal(batch.input_ids[others], original[others])
        assert batch.layout.lengths.tolist() == [len(sample.input_ids) for sample in drawn]
        assert batch.is_next.tolist() == [sample.is_next for sample in drawn]
        types = np.concatenate([sample.token_type_ids for sample in drawn])
        np.testing.assert_array_equal(batch.token_type_ids, types)

    @pytest.mark.parametrize("other", [{"step": 6}, {"seed": 4}])
    def test_differs(self, spoken: Corpus, other: dict[str, int]) -> None:
        """Another step, or another seed, draws another batch."""
        batch = make_batch(spoken, SPECIALS, **FIXED)

        assert digest(make_batch(spoken, SPECIALS, **{**FIXED, **other})) != digest(batch)

    def test_masking_is_dynamic(self, spoken: Corpus) -> None:
        """The same text is masked elsewhere when it is drawn at another step."""
        short = Corpus(spoken.ids[:12], np.array([0, 12]), np.array([0, 1]))
        arguments = {**FIXED, "pairs": None, "size": 1}

        masks = {
            tuple(make_batch(short, SPECIALS, **{**arguments, "step": step}).masked)
            for step in range(40)
        }

        assert len(masks) > 10

    def test_the_size_does_not_matter(self, spoken: Corpus) -> None:
        """A sample is the same in a smaller batch: it follows from seed, step and index alone."""
        large = make_batch(spoken, SPECIALS, **FIXED)
        small = make_batch(spoken, SPECIALS, **{**FIXED, "size": 2})

        total = len(small.input_ids)
        np.testing.assert_array_equal(small.input_ids, large.input_ids[:total])
        np.testing.assert_array_equal(small.labels, large.labels[large.masked < total])

    def test_another_process(self, spoken: Corpus, tmp_path: Path) -> None:
        """Another process makes the very same batch."""
        np.savez(tmp_path / "corpus.npz", **vars(spoken))
        program = (
            "import sys, numpy; from model.corpus import Corpus, make_batch;"
            "from tests.model.test_corpus import FIXED, SPECIALS, digest;"
            "corpus = Corpus(**numpy.load(sys.argv[1]));"
            "print(digest(make_batch(corpus, SPECIALS, **FIXED)))"
        )

        root = Path(corpus.__file__).parents[1]
        command = [sys.executable, "-c", program, str(tmp_path / "corpus.npz")]
        output = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True)

        assert output.stdout.strip() == digest(make_batch(spoken, SPECIALS, **FIXED))

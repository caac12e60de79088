"""Pretraining text is read whole, cut into its sentences, and tokenised once."""

import gzip
import itertools
import lzma
from dataclasses import astuple
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model import tokenizer
from model.data import corpus
from model.data.checksums import DataError
from model.data.corpus import Corpus, sentences
from model.families.registry import FAMILIES


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
    def test_cases(self, paragraph, expected):
        """Paragraphs are cut where sentences end, not after abbreviations, initials or numbers."""
        assert sentences(paragraph) == expected

    @given(st.text(alphabet="aB. !?\"'”()\n…é1"))
    def test_nothing_is_lost(self, paragraph):
        """Sentences are never empty, and together they are the paragraph."""
        found = sentences(paragraph)

        assert all(found)
        assert "".join("".join(found).split()) == "".join(paragraph.split())


class TestDocuments:
    @pytest.mark.parametrize(
        ("suffix", "write"), [(".txt", Path.open), (".gz", gzip.open), (".xz", lzma.open)]
    )
    def test_formats(self, suffix, write, tmp_path, documents):
        """Plain, gzipped and xz-ed files give the same documents: a paragraph per line."""
        path = tmp_path / f"corpus{suffix}"
        with write(path, "wt", encoding="utf-8") as file:
            file.write("\n\n".join("\n".join(document) for document in documents))

        assert list(corpus.documents([path])) == documents

    def test_boundaries(self, tmp_path):
        """Any run of blank lines, and the end of a file, ends a document."""
        (tmp_path / "a.txt").write_bytes(b"\n\none\r\n two \n \t\n\n\nthree")
        (tmp_path / "b.txt").write_text("four\n\n")

        found = list(corpus.documents([tmp_path / "a.txt", tmp_path / "b.txt"]))

        assert found == [["one", "two"], ["three"], ["four"]]

    def test_unknown_format(self, tmp_path):
        """A file of another kind is refused by name."""
        with pytest.raises(ValueError, match=r"corpus\.zip: .*\.gz, \.xz, \.txt"):
            list(corpus.documents([tmp_path / "corpus.zip"]))

    def test_damage(self, tmp_path):
        """What cannot be unpacked is named, with how far it was read."""
        path = tmp_path / "corpus.gz"
        path.write_bytes(gzip.compress(b"one\ntwo\n")[:-4])
        with pytest.raises(DataError, match=r"corpus\.gz cannot be read beyond line 2: .*ended"):
            list(corpus.documents([path]))


class TestBuild:
    def test_tokens(self, corpus_file, documents, small_tokenizer):
        """The corpus holds every document's sentences, in order, as their tokens."""
        built = corpus.build([corpus_file], small_tokenizer)

        texts = [[text for paragraph in d for text in sentences(paragraph)] for d in documents]
        flat = [text for document in texts for text in document]
        expected = small_tokenizer.encode_batch(flat, add_special_tokens=False)
        found = [built.tokens(i, i + 1).tolist() for i in range(len(flat))]
        assert found == [encoding.ids for encoding in expected]
        assert built.num_documents == len(documents)
        assert np.diff(built.document_starts).tolist() == [len(document) for document in texts]

    @pytest.mark.parametrize("model_type", ["bert", "roberta", "albert"])
    def test_sentences_are_read_as_running_text(self, corpus_file, documents, model_type):
        """The tokens of all sentences equal the tokens of the whole text, for every kind of space handling."""
        family = FAMILIES[model_type]
        cut = tokenizer.train(itertools.chain(*documents), 300, family=family)
        built = corpus.build([corpus_file], cut)

        for number, document in enumerate(documents):
            running = " ".join(" ".join(sentences(paragraph)) for paragraph in document)
            first, last = built.document_starts[number : number + 2]
            expected = cut.encode(running, add_special_tokens=False).ids
            assert built.tokens(first, last).tolist() == expected

    def test_document_of(self, corpus_file, small_tokenizer):
        """Every sentence knows the sentences of its own document."""
        built = corpus.build([corpus_file], small_tokenizer)

        for first, last in zip(built.document_starts, built.document_starts[1:], strict=False):
            for sentence in range(first, last):
                assert built.document_of(sentence) == (first, last)

    def test_split(self, corpus_file, small_tokenizer):
        """Held-out documents are whole, are chosen by the seed, and with the rest are the corpus."""
        texts = corpus_file.read_text(encoding="utf-8").split("\n\n")
        many = corpus_file.with_name("many.txt")
        many.write_text("\n\n".join(f"Number {n}. {texts[n % len(texts)]}" for n in range(40)))
        whole = corpus.build([many], small_tokenizer)

        kept, held = whole.split(0.1, seed=1)
        _, same = whole.split(0.1, seed=1)
        _, other = whole.split(0.1, seed=2)

        def documents(part):
            places = itertools.pairwise(part.document_starts.tolist())
            return [tuple(part.tokens(first, last).tolist()) for first, last in places]

        assert held is not None
        assert (36, 4) == (kept.num_documents, held.num_documents)
        assert sorted(documents(whole)) == sorted(documents(kept) + documents(held))
        assert documents(held) == documents(same) != documents(other)
        assert len(kept.ids) == kept.sentence_starts[-1]

    def test_few_documents_are_not_split(self, corpus_file, small_tokenizer):
        """Few documents stay together, and a share of 0 splits none."""
        many = corpus.build([corpus_file], small_tokenizer)
        few = Corpus(
            many.ids, many.sentence_starts, many.document_starts[: corpus.FEWEST_DOCUMENTS]
        )

        for text, share in ((few, 0.1), (many, 0.0)):
            kept, held = text.split(share, seed=1)
            assert kept is text
            assert held is None

    def test_no_text(self, tmp_path, small_tokenizer):
        """Files without text are refused by name."""
        (tmp_path / "empty.txt").write_text("\n\n")

        with pytest.raises(ValueError, match=r"no text in .*empty\.txt"):
            corpus.build([tmp_path / "empty.txt"], small_tokenizer)

    def test_large_vocabulary(self):
        """A vocabulary whose ids do not fit 16 bits is refused."""
        large = SimpleNamespace(get_vocab_size=lambda: 2**16 + 1)

        with pytest.raises(ValueError, match="65537 does not fit"):
            corpus.build([], large)

    def test_cache(self, monkeypatch, tmp_path, corpus_file, tokenizer_file):
        """A corpus is tokenised once, and anew for another file, its content, or another tokenizer."""
        calls = []

        def build(files, tokenizer):
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

    def test_padding_of_a_tokenizer(self, corpus_file, tokenizer_file, small_tokenizer, tmp_path):
        """A tokenizer file that pads and truncates, as published ones do, gives the same corpus."""
        small_tokenizer.enable_padding(length=64)
        small_tokenizer.enable_truncation(max_length=4)
        small_tokenizer.save(str(tmp_path / "padding.json"))

        plain = corpus.load([corpus_file], tokenizer_file, tmp_path)
        padded = corpus.load([corpus_file], tmp_path / "padding.json", tmp_path)

        assert all(map(np.array_equal, astuple(plain), astuple(padded)))

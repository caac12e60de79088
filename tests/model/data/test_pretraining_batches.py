"""Samples are drawn as BERT and its descendants draw them, hidden evenly, and drawn again the same."""

import hashlib
import math
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from model import tokenizer
from model.data import corpus, pretraining_batches
from model.data.corpus import Corpus
from model.data.pretraining_batches import Pair, Sampler, Samples, Specials, draw_pair
from model.families.bert_names import BERT
from model.families.registry import FAMILIES, PRETRAINABLE
from model.families.spec import Pairs

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


class TestSpecials:
    @pytest.mark.parametrize("family", PRETRAINABLE.values(), ids=PRETRAINABLE)
    def test_as_the_tokenizer_has_it(self, family, documents):
        """Special tokens around one text, and around two, are the same as with the family's tokenizer."""
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

    def test_missing(self):
        """A tokenizer without a mask token is refused by what it lacks."""
        minimal = SimpleNamespace(token_to_id={"[CLS]": 0, "[SEP]": 1}.get)

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


def draw(spoken: Corpus, count: int, length: int, pairs: Pairs) -> list[Pair]:
    rngs = (np.random.default_rng([7, index]) for index in range(count))
    return [draw_pair(spoken, SPECIALS, length, pairs, rng) for rng in rngs]


def blocks(spoken: Corpus, count: int, length: int) -> NDArray[np.int64]:
    """The ids of blocks [count, length], with nothing hidden."""
    drawn = Sampler(spoken, SPECIALS, pairs=None)
    found = drawn.samples(seed=7, step=0, size=count, length=length, rate=0.15)
    assert not found.token_type_ids.any()
    return found.original_ids.numpy()


def parts(sample: Pair) -> list[NDArray[np.int64]]:
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
    def test_blocks(self, spoken, length):
        """One text fills its sample, from a sentence's start on, with a separator between documents."""
        after = np.append(np.arange(1, spoken.num_sentences), 0)
        last = np.isin(np.arange(spoken.num_sentences), spoken.document_starts[1:] - 1)
        for ids in blocks(spoken, 100, length):
            assert len(ids) == length
            assert (ids[0], ids[-1]) == (CLS, SEP)
            sentence, text = int(ids[1]) - 100, ids[1:-1]
            expected = []
            while len(expected) < len(text):
                expected += (spoken.tokens(sentence, sentence + 1)).tolist()
                expected += [SEP] * bool(last[sentence])
                sentence = int(after[sentence])
            assert text.tolist() == expected[: len(text)]

    def test_order(self, spoken):
        """Both texts are whole sentences that meet in the document; class 1: the second stands before the first."""
        for sample in draw(spoken, 1000, 40, pairs="sop"):
            texts = parts(sample)
            before, after = texts[::-1] if sample.is_next else texts
            assert after[0] == before[-1] + 1
            both = np.concatenate([before, after])
            first, end = int(before[0]), int(after[-1]) + 1
            np.testing.assert_array_equal(both, spoken.tokens(first, end) - 100)
            assert spoken.document_of(first) == spoken.document_of(end - 1)

    def test_half_are_swapped(self, spoken):
        """Half of the pairs, and with no regard to how long either text is."""
        count = 4000
        drawn = draw(spoken, count, 40, pairs="sop")
        longer = [len(first) > len(second) for first, second in map(parts, drawn)]

        assert within(float(np.mean([sample.is_next for sample in drawn])), 0.5, count)
        told = np.corrcoef(longer, [sample.is_next for sample in drawn])[0, 1]
        assert abs(told) < 5 / math.sqrt(count)

    @pytest.mark.parametrize("length", [6, 9, 14])
    def test_order_of_what_has_no_room(self, spoken, length):
        """Sentences that are too long are cut where they do not meet."""
        for sample in draw(spoken, 300, length, pairs="sop"):
            texts = parts(sample)
            before, after = texts[::-1] if sample.is_next else texts
            assert 2 <= len(before) + len(after) <= length - 3
            assert after[0] == before[-1] + 1
            sentence = spoken.tokens(int(before[-1]), int(before[-1]) + 1)
            end = before[before == before[-1]]
            assert len(end) == min(len(sentence), len(before))
            assert len(sample.input_ids) <= length

    def test_real_neighbours(self, spoken):
        """Class 0: the second text starts with the sentence after the first text's last."""
        for sample in draw(spoken, 1000, 40, pairs="nsp"):
            if sample.is_next == 0:
                first, second = parts(sample)
                assert second[0] == first[-1] + 1
                assert spoken.document_of(second[0]) == spoken.document_of(first[0])

    def test_random_texts(self, spoken):
        """Class 1: the second text comes from another document."""
        for sample in draw(spoken, 1000, 40, pairs="nsp"):
            if sample.is_next == 1:
                first, second = parts(sample)
                assert spoken.document_of(second[0]) != spoken.document_of(first[0])

    def test_half_are_real(self, spoken):
        """Half the pairs are real neighbours."""
        count = 4000
        share = np.mean([sample.is_next for sample in draw(spoken, count, 16, pairs="nsp")])

        assert within(float(share), 0.5, count)

    @pytest.mark.parametrize("length", [8, 16, 40, 500])
    def test_pairs_are_well_formed(self, spoken, length):
        """A pair is [CLS] A [SEP] B [SEP], never too long, both texts running, segments 0 and 1."""
        for sample in draw(spoken, 200, length, pairs="nsp"):
            first, second = parts(sample)
            assert_running(spoken, first)
            assert_running(spoken, second)
            assert len(sample.input_ids) == len(first) + len(second) + 3 <= length
            expected = [0] * (len(first) + 2) + [1] * (len(second) + 1)
            assert sample.token_type_ids.tolist() == expected

    def test_sentences_by_their_tokens(self, spoken):
        """A sentence starts samples as often as its share of the corpus' tokens."""
        count = 4000
        starts = Counter(int(ids[1]) - 100 for ids in blocks(spoken, count, 8))

        lengths = np.diff(spoken.sentence_starts)
        longest = int(lengths.argmax())
        share = lengths[longest] / lengths.sum()
        assert within(starts[longest] / count, float(share), count)
        assert len(starts) > 0.9 * len(lengths)

    def test_no_neighbours(self):
        """Pairs from documents of one sentence each are refused with the reason."""
        lonely = Corpus(np.arange(100, 110, dtype=np.uint16), np.arange(11), np.arange(11))

        with pytest.raises(ValueError, match="at least two sentences"):
            draw(lonely, 1, 20, "nsp")

    def test_one_document(self):
        """In a corpus of one document a random text is from anywhere in it."""
        alone = Corpus(np.arange(100, 110, dtype=np.uint16), np.arange(11), np.array([0, 10]))

        assert {s.is_next for s in draw(alone, 50, 20, pairs="nsp")} == {0, 1}


def hide(
    ids: Tensor, guesses: tuple[int, ...], seed: int = 0, **settings: Any
) -> tuple[Tensor, Tensor]:
    """Texts [B, L] with this many masked tokens in each, and their positions."""
    text = Corpus(np.arange(100, 110, dtype=np.uint16), np.arange(11), np.array([0, 10]))
    sampler = Sampler(text, SPECIALS, pairs=None, **settings)
    return sampler._hide(ids, guesses, torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def masked() -> tuple[Tensor, Tensor, Tensor]:
    """Three hundred pairs: original ids, changed ids, and where 12 of 80 are hidden, each [300, 83]."""
    first, second = torch.randint(
        5, 30_522, (2, 300, 40), generator=torch.Generator().manual_seed(3)
    )
    cls, sep = (torch.full((300, 1), token) for token in (CLS, SEP))
    ids = torch.cat([cls, first, sep, second, sep], dim=1)
    return ids, *hide(ids, (12,) * 300)


class TestHiding:
    def test_as_many_as_requested(self, masked):
        """Each row has the requested number of masked tokens, also if the numbers differ."""
        ids, _, hidden = masked
        assert (hidden.sum(dim=1) == 12).all()
        _, others = hide(ids[:3], (1, 5, 80))
        assert others.sum(dim=1).tolist() == [1, 5, 80]

    def test_80_10_10(self, masked):
        """Of the hidden, 80 % become [MASK], 10 % a random token, and 10 % stay."""
        ids, changed, hidden = masked
        old, new = ids[hidden].numpy(), changed[hidden].numpy()

        noise = (new != MASK) & (new != old)
        assert within(float((new == MASK).mean()), 0.8, len(new))
        assert within(float((new == old).mean()), 0.1, len(new))
        assert within(float(noise.mean()), 0.1, len(new))
        assert abs(new[noise].mean() / 30_522 - 0.5) < 5 / math.sqrt(12 * noise.sum())

    def test_the_rest_is_untouched(self, masked):
        """Special tokens are never hidden, and what is not hidden stays."""
        ids, changed, hidden = masked
        assert not ((ids == CLS) | (ids == SEP))[hidden].any()
        assert torch.equal(changed[~hidden], ids[~hidden])

    def test_positions_are_even(self):
        """Every position is hidden as often as any other."""
        count = 3000
        ids = torch.tensor([[CLS, *range(100, 120), SEP]]).repeat(count, 1)

        _, hidden = hide(ids, (3,) * count)

        times = hidden.sum(dim=0).tolist()
        assert times[0] == times[-1] == 0
        assert all(within(number / count, 0.15, count) for number in times[1:-1])

    def test_whole_words(self):
        """All pieces of a word are hidden or none, but of the last one as many as are missing; words come evenly."""
        count = 2000
        goes_on = [token >= 200 for token in range(SPECIALS.vocab_size)]
        words = [[100, 200, 201], [101], [102, 202], [103], [104, 203, 204]]
        flat = [token for word in words for token in word]
        ids = torch.tensor([[CLS, *flat, SEP]]).repeat(count, 1)

        _, hidden = hide(ids, (4,) * count, continues=goes_on)

        cut, chosen = 0, Counter[int]()
        for row in hidden[:, 1:-1].tolist():
            rows = iter(row)
            pieces = [[next(rows) for _ in word] for word in words]
            assert sum(map(sum, pieces)) == 4
            broken = [word for word in pieces if any(word) and not all(word)]
            assert len(broken) <= 1
            cut += len(broken)
            chosen.update(i for i, word in enumerate(pieces) if all(word))
        assert 0 < cut < count
        assert within(chosen[1] / count, chosen[3] / count, count)

    def test_the_input_is_kept(self):
        """Hiding changes a copy."""
        ids = torch.tensor([[CLS, *range(50, 90), SEP]])
        before = ids.clone()

        hide(ids, (20,))

        assert torch.equal(ids, before)


@pytest.mark.parametrize("family", ["bert", "roberta", "albert"])
def test_continues(family, documents):
    """Of a text's tokens those go on with a word that are not its first piece, in any kind of tokenizer."""
    texts = [text for document in documents for text in document]
    trained = tokenizer.train(texts, vocab_size=300, family=FAMILIES[family])
    goes_on = pretraining_batches.continues(trained)
    sentence = " ".join(re.findall("[a-z]{3,}", " ".join(texts[:3])))

    words = []
    for token in trained.encode(f" {sentence}", add_special_tokens=False).ids:
        words[len(words) :] = [] if goes_on[token] else [[]]
        words[-1].append(token)

    assert [trained.decode(word).strip() for word in words] == sentence.split()


FIXED: dict[str, Any] = {"seed": 3, "step": 5, "size": 6, "length": 24, "rate": 0.15}


def sampled(spoken: Corpus, pairs: Pairs | None = "nsp", **other: Any) -> Samples:
    return Sampler(spoken, SPECIALS, pairs).samples(**{**FIXED, **other})


def digest(found: Samples) -> str:
    batch = found.pack()
    layout = batch.inputs[3]
    tensors = [*batch.inputs[:3], batch.masked, batch.labels, batch.is_next]
    tensors += [layout.lengths, layout.unpack]
    return hashlib.sha256(b"".join(tensor.numpy().tobytes() for tensor in tensors)).hexdigest()


class TestSamples:
    @pytest.mark.parametrize("pairs", ["nsp", "sop", None])
    def test_pack(self, spoken, pairs):
        """Labels are what stood at the masked places; other tokens are as drawn; each row is a sequence."""
        found = sampled(spoken, pairs)
        batch = found.pack()
        ids, types, positions, layout = batch.inputs

        rows = [row[:n] for row, n in zip(found.original_ids, found.lengths, strict=True)]
        original = torch.cat(rows)
        assert torch.equal(batch.labels, original[batch.masked])
        others = torch.ones_like(original, dtype=torch.bool)
        others[batch.masked] = False
        assert torch.equal(ids[others], original[others])
        assert layout.lengths.tolist() == [*found.lengths]
        assert positions.tolist() == [i for n in found.lengths for i in range(n)]
        if pairs:
            drawn = [
                draw_pair(spoken, SPECIALS, 24, pairs, np.random.default_rng([3, 5, index]))
                for index in range(6)
            ]
            assert original.tolist() == np.concatenate([p.input_ids for p in drawn]).tolist()
            assert types.tolist() == np.concatenate([p.token_type_ids for p in drawn]).tolist()
            assert batch.is_next.tolist() == [pair.is_next for pair in drawn]
        else:
            assert found.lengths == (24,) * 6

    @pytest.mark.parametrize("pairs", ["nsp", None])
    def test_share(self, spoken, pairs):
        """Of each text as many tokens are hidden as come nearest to the share, and one at least."""
        found = sampled(spoken, pairs, rate=0.3)
        special = 3 if pairs else 2
        assert found.predictions == tuple(round(0.3 * (n - special)) for n in found.lengths)
        assert set(sampled(spoken, pairs, rate=0.001).predictions) == {1}
        assert len(found.pack().masked) == sum(found.predictions) == found.counts["mlm"]

    @pytest.mark.parametrize("pairs", ["nsp", None])
    @pytest.mark.parametrize("count", [1, 2, 4, 6])
    def test_parts(self, spoken, pairs, count):
        """Parts are the whole, cut between samples into even shares."""
        whole = sampled(spoken, pairs)
        cut = [whole.part(number, count) for number in range(count)]

        packed, batches = whole.pack(), [part.pack() for part in cut]
        for i in range(3):
            assert torch.equal(torch.cat([b.inputs[i] for b in batches]), packed.inputs[i])
        assert torch.equal(torch.cat([b.labels for b in batches]), packed.labels)
        assert torch.equal(torch.cat([b.is_next for b in batches]), packed.is_next)
        assert max(map(len, cut)) - min(map(len, cut)) <= 1
        for name, number in whole.counts.items():
            assert sum(part.counts[name] for part in cut) == number

    @pytest.mark.parametrize("pairs", ["nsp", None])
    @pytest.mark.parametrize("other", [{"step": 6}, {"seed": 4}])
    def test_differs(self, spoken, other, pairs):
        """Another step, or another seed, draws other samples."""
        assert digest(sampled(spoken, pairs, **other)) != digest(sampled(spoken, pairs))

    def test_hiding_is_dynamic(self, spoken):
        """The same text is hidden elsewhere when it is drawn at another step."""
        short = Corpus(spoken.ids[:12], np.array([0, 12]), np.array([0, 1]))

        found = {tuple(sampled(short, None, size=1, step=step).pack().masked) for step in range(40)}

        assert len(found) > 10

    def test_documents_without_text(self):
        """Where there is hardly anything but separators, these are hidden before there is too little to guess."""
        short = Corpus(np.arange(100, 104, dtype=np.uint16), np.arange(5), np.arange(5))

        found = sampled(short, None, rate=0.9)

        assert found.hidden.sum(dim=1).tolist() == list(found.predictions)

    @pytest.mark.parametrize("pairs", ["nsp", None])
    def test_another_process(self, spoken, tmp_path, pairs):
        """Another process draws the very same samples."""
        np.savez(tmp_path / "corpus.npz", **vars(spoken))
        program = (
            "import sys, numpy; from model.data.corpus import Corpus;"
            "from tests.model.data.test_pretraining_batches import digest, sampled;"
            "corpus = Corpus(**numpy.load(sys.argv[1]));"
            f"print(digest(sampled(corpus, {pairs!r})))"
        )

        root = Path(corpus.__file__).parents[2]
        command = [sys.executable, "-c", program, str(tmp_path / "corpus.npz")]
        output = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True)

        assert output.stdout.strip() == digest(sampled(spoken, pairs))

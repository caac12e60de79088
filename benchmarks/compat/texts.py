"""Real texts of 10 to 2,000 tokens, from data sets in a directory next to the repository."""

import itertools
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from model.data import corpus, labelled_rows

DATA = Path("../shared/data")
# In words: about 10, 200 and 2,000 tokens.
SHORTEST, MIDDLE, LONGEST = 6, 150, 1350
LONG = 0.15  # of all texts are longer than the middle


def sizes(count: int) -> list[int]:
    """Of texts, in words: short and long ones in no order."""
    long = max(1, round(LONG * count))
    short = np.geomspace(SHORTEST, MIDDLE, count - long, endpoint=False)
    spread = np.concatenate([short, np.geomspace(LONGEST, MIDDLE, long, endpoint=False)])
    return np.random.default_rng(0).permutation(spread.round().astype(int)).tolist()


def singles(count: int, data: Path = DATA) -> list[str]:
    """News, reviews, an encyclopedia, novels, and sentences with blanks around every word, in turn."""
    rows = [
        labelled_rows.read(data / "classification/ag_news/test.jsonl.gz", "classification"),
        labelled_rows.read(data / "classification/sst2/train_sentences.jsonl.gz", "classification"),
        labelled_rows.read(data / "ner/conll2003/train.conll.gz", "ner"),
    ]
    news, reviews, spaced = ((row.text for row in found) for found in rows)
    books = data / "pretrain/wiki_en_00.txt.xz", data / "pretrain/books_00.txt.xz"
    pages, novels = (itertools.chain.from_iterable(corpus.documents([book])) for book in books)
    sources = itertools.cycle([news, reviews, pages, novels, spaced])
    return [grow(source, size) for source, size in zip(sources, sizes(count), strict=False)]


def pairs(count: int, data: Path = DATA) -> list[tuple[str, str]]:
    """Half of them as they are, half made of two texts of any lengths."""
    half = count // 2
    names = ("sts/stsb/dev", "classification/mrpc/test", "pairs/mnli_sample/test")
    parts = [
        pair_rows(data, name, half // 3 + (rest < half % 3)) for rest, name in enumerate(names)
    ]
    long = singles(2 * (count - half), data)
    return [*itertools.chain(*parts), *zip(long[::2], long[1::2], strict=True)]


def questions(count: int, data: Path = DATA) -> list[tuple[str, str]]:
    """Questions, half of them without an answer, each with its paragraph and those that follow in the article."""
    found = labelled_rows.read(data / "qa/squad_v2.0_dev.json.gz", "qa")
    contexts = list(dict.fromkeys(row.context for row in found))
    where = {context: number for number, context in enumerate(contexts)}
    chosen = [found[i] for i in np.linspace(0, len(found) - 1, count).round().astype(int)]
    both = zip(chosen, sizes(count), strict=True)
    return [
        (
            row.question,
            grow(itertools.islice(itertools.cycle(contexts), where[row.context], None), size),
        )
        for row, size in both
    ]


def grow(pieces: Iterable[str], size: int) -> str:
    """Join pieces to a text of at least `size` words."""
    text = ""
    for piece in pieces:
        text = f"{text} {piece}" if text else piece
        if len(text.split()) >= size:
            return text
    raise ValueError(f"there are no {size} words")


def pair_rows(data: Path, name: str, count: int) -> Sequence[tuple[str, str]]:
    problem_type = "regression" if name.startswith("sts") else None
    found = labelled_rows.read(data / f"{name}.jsonl.gz", "classification", problem_type)
    return [(row.text, row.pair) for row in found[:count]]

"""Make questions of plain text: `python -m model.cloze OUT.json.gz FILE... [--questions N]`.

A name or number that recurs in a passage is asked for with one of its sentences, and found in what is left of the
passage: what a reader of spans has to learn, to match a question with its place, and nobody needs to write it.
Cloze questions: Lewis et al. 2019 (arXiv 1906.04980). Spans that recur: Ram et al. 2021 (arXiv 2101.00438).
The file has the form of SQuAD.
"""

import argparse
import gzip
import itertools
import json
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model import lock
from model.corpus import documents, sentences

PASSAGE = (40, 220)  # words
SENTENCE = (6, 40)  # words, of one that a question is made of
ANSWER = (3, 60)  # characters

# Capitalised words and numbers that stand together, as "the Bank of England", "12 March 1845" and "1,200".
NAME = re.compile(
    r"(?:[A-Z][\w'’-]*|\d[\d,.]*\d|\d)(?: (?:of |the |de |and )?(?:[A-Z][\w'’-]*|\d[\d,]*))*"
)
# Words with a capital only because a sentence begins.
OPENING = """
A After Although An And As At Because Before Both But By During Each Every For From He Her His How However If In It Its
Many Most My No Not Of On One Or Our She Since So Some Such That The Their Then There These They This Those To Two Under
Until Upon We What When Where Which While Who With You
"""
COMMON = frozenset(OPENING.split())


@dataclass(frozen=True)
class Question:
    context: str
    question: str
    answer: str
    start: int  # of the answer, in characters of the context


def words(text: str) -> int:
    return text.count(" ") + 1


def names(sentence: str) -> Iterator[tuple[int, str]]:
    """Where the names and numbers of a sentence begin, and each of them."""
    for found in NAME.finditer(sentence):
        start, parts = found.start(), found.group().rstrip(",'’-").split(" ")
        while parts and parts[0] in COMMON:
            start += len(parts.pop(0)) + 1
        name = " ".join(parts)
        if ANSWER[0] <= len(name) <= ANSWER[1]:
            yield start, name


def asked(name: str, rng: random.Random) -> str:
    """What a question asks for, as far as the answer's looks tell."""
    if re.fullmatch(r"1\d{3}|20\d{2}", name):
        return "what year"
    if name[0].isdigit():
        return "how many"
    return rng.choice(("what", "what", "who", "which"))


def passages(paragraphs: Iterable[str]) -> Iterator[str]:
    """Neighbouring paragraphs, together as long as a passage may well be."""
    kept: list[str] = []
    for paragraph in paragraphs:
        kept.append(paragraph)
        if sum(map(words, kept)) >= sum(PASSAGE) / 2:
            yield " ".join(kept)
            kept = []
    if kept:
        yield " ".join(kept)


def questions(passage: str, rng: random.Random) -> list[Question]:
    """All that a passage is good for, one for each name, in random order."""
    parts = sentences(passage)
    if len(parts) < 3 or not PASSAGE[0] <= words(passage) <= PASSAGE[1]:
        return []
    found: dict[str, Question] = {}
    order = list(range(len(parts)))
    rng.shuffle(order)
    for index in order:
        sentence, context = parts[index], " ".join(parts[:index] + parts[index + 1 :])
        if not SENTENCE[0] <= words(sentence) <= SENTENCE[1]:
            continue
        for start, name in names(sentence):
            if name in found:
                continue
            places = list(re.finditer(rf"(?<!\w){re.escape(name)}(?!\w)", context))
            if not 1 <= len(places) <= 2:  # or anybody could tell
                continue
            before, after = sentence[:start], sentence[start + len(name) :].rstrip(".!?\"'”’ ")
            question = f"{before}{asked(name, rng)}{after}?"
            found[name] = Question(context, question, name, places[0].start())
    kept = list(found.values())
    rng.shuffle(kept)
    return kept


def make(files: Sequence[Path], count: int, each: int = 2, seed: int = 1) -> Iterator[Question]:
    """At most `count` questions, in the order of the text, at most `each` of a passage."""
    rng = random.Random(seed)
    made = (
        question
        for paragraphs in documents(files)
        for passage in passages(paragraphs)
        for question in questions(passage, rng)[:each]
    )
    return itertools.islice(made, count)


def as_squad(made: Iterable[Question]) -> dict[str, Any]:
    """In SQuAD's form: a paragraph for each question, whose context is its own."""
    paragraphs = [
        {
            "context": one.context,
            "qas": [
                {
                    "id": str(index),
                    "question": one.question,
                    "answers": [{"text": one.answer, "answer_start": one.start}],
                }
            ],
        }
        for index, one in enumerate(made)
    ]
    return {"version": "1.1", "data": [{"title": "", "paragraphs": paragraphs}]}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m model.cloze", description=__doc__)
    parser.add_argument("out", type=Path, help="a .json.gz file, in the form of SQuAD")
    parser.add_argument(
        "files",
        type=Path,
        nargs="+",
        help="text: a paragraph per line, an empty line between documents",
    )
    parser.add_argument("--questions", type=int, default=80_000, metavar="N")
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    try:
        for path in args.files:
            lock.check(path)
        squad = as_squad(make(args.files, args.questions, seed=args.seed))
    except (OSError, ValueError) as error:
        raise SystemExit(f"{error}") from None
    args.out.parent.mkdir(parents=True, exist_ok=True)
    # No name and no time in the file: the same text gives the same bytes.
    with args.out.open("wb") as raw, gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as file:
        file.write(json.dumps(squad, ensure_ascii=False).encode())
    print(f"{args.out}: {len(squad['data'][0]['paragraphs'])} questions")


if __name__ == "__main__":
    main()

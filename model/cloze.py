"""Make questions of plain text: `python -m model.cloze OUT.json.gz FILE... [--questions N]`.

The answer is a name, a number or a few words of a sentence, and the question is made of the words around it: some are
dropped, and the halves may be swapped. Such questions train the matching of a question with its place, without human
annotation. Noisy cloze questions: Lewis et al. 2019 (arXiv 1906.04980). The file has the format of SQuAD.
"""

import argparse
import itertools
import json
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.data import checksums
from model.data.corpus import documents, sentences
from service.core.data_files.text_files import write_gzip

PASSAGE = (50, 200)  # words
SENTENCE = (6, 50)  # words of a sentence that becomes a question
ANSWER = (3, 60)  # characters
KEPT = (6, 14)  # words around the answer in a question, before some are dropped
LOST = 0.6  # largest share of these that is dropped
NAMED = 0.45  # share of answers that are names and numbers, where a sentence has any
FIRST = 0.7  # share of questions that begin with the question word

# Adjacent capitalized words and numbers, as "the Bank of England", "12 March 1845" and "1,200".
NAME = re.compile(
    r"(?<!\w)(?:[A-Z][\w'’-]*|\d[\d,.]*\d|\d)(?: (?:of |the |de |and )?(?:[A-Z][\w'’-]*|\d[\d,]*))*(?!\w)"
)
# Words with a capital only because a sentence begins.
OPENING = """
A After Although An And As At Because Before Both But By During Each Every For From He Her His How However If In It Its
Many Most My No Not Of On One Or Our She Since So Some Such That The Their Then There These They This Those To Two Under
Until Upon We What When Where Which While Who With You
"""
COMMON = frozenset(OPENING.split())
# Words that an answer neither ends with nor, except for an article, begins with.
JOINING = """
a after also an and are as at be been before but by during for from had has have he her his in into is it its not of on
or she than that the their then these they this those to was were which who with
"""
SMALL = frozenset(JOINING.split())
MONTH = re.compile(
    r"\b(?:January|February|March|April|May|June|July|August|September|October|November|December)\b"
)
# Words next to a name that indicate its kind.
TITLES = """
Mr Mrs Ms Dr Sir Lord Lady Saint King Queen Prince Princess Emperor Empress Pope Bishop President Senator Governor Mayor
General Colonel Captain Professor actor actress singer author writer poet painter composer director producer coach
"""
ACTIONS = """
said says wrote writes argued believed thought married died killed sang played met taught became served resigned
composed painted directed retired studied
"""
PLACES = """
City County Town Village River Lake Sea Ocean Bay Gulf Island Islands Valley Mountain Mountains Mount Park Street Road
Avenue Square Bridge Station Airport State Province District Peninsula Desert Forest
"""
GROUPS = """
University College School Institute Company Corporation Inc Ltd Party Club Band Orchestra Council Committee Union Army
Navy Church Museum Association Society League Records Group Bank Team Times Act War Battle
"""
TITLE, ACTION, PLACE, GROUP = (
    frozenset(kind.split()) for kind in (TITLES, ACTIONS, PLACES, GROUPS)
)
WHERE = frozenset(("in", "at", "near", "outside", "around", "toward", "towards"))
ASKING = {
    "person": ("who", "who", "who", "what person"),
    "place": ("where", "where", "what", "which place"),
    "group": ("what", "which", "which group", "what"),
}


@dataclass(frozen=True)
class GeneratedQuestion:
    context: str
    question: str
    answer: str
    start: int  # of the answer, in characters of the context


def words(text: str) -> int:
    return text.count(" ") + 1


def names(sentence: str) -> Iterator[tuple[int, str]]:
    """Yield the start of each name and number of a sentence, and its text."""
    for found in NAME.finditer(sentence):
        start, parts = found.start(), found.group().rstrip(",'’-").split(" ")
        while parts and parts[0] in COMMON:
            start += len(parts.pop(0)) + 1
        name = " ".join(parts)
        if ANSWER[0] <= len(name) <= ANSWER[1]:
            yield start, name


def phrase(sentence: str, rng: random.Random) -> tuple[int, str] | None:
    """Choose a few words of a sentence as an answer: their start and text; None if no choice fits."""
    parts = list(re.finditer(r"\S+", sentence))
    for _ in range(8):
        count = rng.choice((1, 1, 2, 2, 3, 3, 4, 5))
        first = rng.randrange(max(1, len(parts) - count + 1))
        end = parts[first : first + count][-1].end()
        text = sentence[parts[first].start() : end].lstrip("\"'“‘(")
        begin, text = end - len(text), text.rstrip(".,;:'\"”’)!?")
        if may_be_answer(text):
            return begin, text
    return None


def may_be_answer(text: str) -> bool:
    """Return whether some words may be an answer: without punctuation, and without function words at their ends."""
    parts = text.lower().split()
    return (
        ANSWER[0] <= len(text) <= ANSWER[1]
        and not re.search(r"[,;:.!?()\"“”—]", text)
        and parts[0] not in SMALL - {"a", "an", "the"}
        and parts[-1] not in SMALL
    )


def kind_of_name(answer: str, before: str = "", after: str = "") -> str:
    """Return a name's kind by its last word and the sentence around it: person, place, group, or "" for unknown."""
    near = before.split()[-1:], after.split()[:2]
    previous, following = bare(near[0][0]) if near[0] else "", [bare(word) for word in near[1]]
    last = answer.split()[-1]
    if last in GROUP:
        return "group"
    if last in PLACE or answer.split()[0] in ("Mount", "Lake"):
        return "place"
    born = following[:2] == ["was", "born"]
    if previous in TITLE or answer.split()[0] in TITLE or born or {*following[:1]} & ACTION:
        return "person"
    if previous in WHERE:
        return "place"
    return "person" if previous == "by" else ""


def question_word(answer: str, rng: random.Random, before: str = "", after: str = "") -> str:
    """Choose the question word by the answer's form and the words next to it."""
    if re.fullmatch(r"1\d{3}|20\d{2}", answer):
        return rng.choice(("when", "what year", "in what year"))
    if MONTH.search(answer):
        return "when"
    if answer[0].isdigit():
        if after.lstrip().startswith(("%", "percent", "per cent")):
            return rng.choice(("what percentage", "how much", "what percent"))
        if before.rstrip().endswith(("$", "£", "€")):
            return "how much"
        counted = re.match(r"\s[a-z]+s\b", after)
        return "how many" if counted else rng.choice(("how many", "how much"))
    if answer[0].isupper() and (kind := kind_of_name(answer, before, after)):
        return rng.choice(ASKING[kind])
    if answer[0].isupper():
        return rng.choice(("what", "what", "who", "who", "which", "where"))
    return rng.choice(("what", "what", "what", "how", "why", "which"))


def make_question(
    sentence: str, start: int, answer: str, rng: random.Random, most_lost: float = LOST
) -> str | None:
    """Make a question of words around the answer, at most the share `most_lost` dropped; None if impossible."""
    before = sentence[:start].split()
    after = sentence[start + len(answer) :].split()
    room = rng.randint(*KEPT)
    left = min(len(before), max(rng.randint(0, room), room - len(after)))
    lost = rng.uniform(0, most_lost)
    near = before[len(before) - left :], after[: room - left]
    halves = [[word for word in map(bare, side) if word and rng.random() >= lost] for side in near]
    rng.shuffle(halves)
    if len(halves[0]) + len(halves[1]) < 3 or any(answer in " ".join(half) for half in halves):
        return None
    what = question_word(answer, rng, sentence[:start], sentence[start + len(answer) :])
    if rng.random() < FIRST:
        what = what.capitalize()
        halves = [[], halves[0] + halves[1]]
    return " ".join([*halves[0], what, *halves[1]]) + "?"


def bare(word: str) -> str:
    return word.strip('.,;:!?()"“”')


def passages(paragraphs: Iterable[str]) -> Iterator[str]:
    """Join adjacent paragraphs to passages of suitable length."""
    kept: list[str] = []
    for paragraph in paragraphs:
        kept.append(paragraph)
        if sum(map(words, kept)) >= sum(PASSAGE) / 2:
            yield " ".join(kept)
            kept = []
    if kept:
        yield " ".join(kept)


def questions(
    passage: str, rng: random.Random, count: int = 2, share_named: float = NAMED, lost: float = LOST
) -> list[GeneratedQuestion]:
    """Make at most `count` questions of a passage. share_named, lost: see NAMED and LOST"""
    parts = sentences(passage)
    context = " ".join(parts)
    made: list[GeneratedQuestion] = []
    if not parts or not PASSAGE[0] <= words(context) <= PASSAGE[1]:
        return made
    for _ in range(3 * count):
        sentence = rng.choice(parts)
        if not SENTENCE[0] <= words(sentence) <= SENTENCE[1]:
            continue
        named = list(names(sentence))
        found = rng.choice(named) if named and rng.random() < share_named else phrase(sentence, rng)
        question = make_question(sentence, *found, rng, lost) if found else None
        if found and question:
            made.append(
                GeneratedQuestion(context, question, found[1], context.index(sentence) + found[0])
            )
        if len(made) == count:
            break
    return made


def make(
    files: Sequence[Path], count: int, seed: int = 1, share_named: float = NAMED, lost: float = LOST
) -> Iterator[GeneratedQuestion]:
    """Make at most `count` questions, in the order of the text; see `questions`."""
    rng = random.Random(seed)
    made = (
        question
        for paragraphs in documents(files)
        for passage in passages(paragraphs)
        for question in questions(passage, rng, 2, share_named, lost)
    )
    return itertools.islice(made, count)


def as_squad(made: Iterable[GeneratedQuestion]) -> dict[str, Any]:
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
    parser.add_argument(
        "--named", type=float, default=NAMED, help="share of answers that are names or numbers"
    )
    parser.add_argument(
        "--lost", type=float, default=LOST, help="largest share of a question's words left out"
    )
    args = parser.parse_args()
    for name in ("named", "lost"):
        if not 0 <= getattr(args, name) <= 1:
            parser.error(f"--{name}: {getattr(args, name)} is not from 0 to 1")
    try:
        for path in args.files:
            checksums.check(path)
        made = make(args.files, args.questions, args.seed, args.named, args.lost)
        squad = as_squad(made)
    except (OSError, ValueError) as error:
        raise SystemExit(f"{error}") from None
    write_gzip(args.out, [json.dumps(squad, ensure_ascii=False)])
    print(f"{args.out}: {len(squad['data'][0]['paragraphs'])} questions")


if __name__ == "__main__":
    main()

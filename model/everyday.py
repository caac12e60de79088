"""Make training rows of everyday language: `python -m model.everyday OUT --text FILE --questions FILE --pairs FILE`.

It fills templates (`everyday.toml`), and makes of data what is missing there: sentences without a name, questions
without an answer, and opposites of related texts. OUT gets a file for each head, in a format that training reads.
"""

import argparse
import itertools
import json
import math
import random
import re
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from model.data import checksums, labelled_rows
from model.data.corpus import documents, sentences
from model.data.labelled_rows import QuestionRow, Similar
from service.core.data_files.text_files import write_gzip

TEMPLATES = Path(__file__).with_name("everyday.toml")
SLOT = re.compile(r"\{(\w+)\}")
WORD = re.compile(r"[^\W\d_]+(?:['’]\w+)?")
KINDS = {"first": "PER", "last": "PER", "city": "LOC", "country": "LOC", "org": "ORG"}
KINDS |= {"nation": "MISC"}
NAME = re.compile(r"(?<= )(?:\d+|[A-Z]\w+(?: [A-Z]\w+)*)")  # in a question
CAPITAL = re.compile(r"I(?:['’]\w+)?$")  # of a word that is no name
MOST_SENTENCES = 4  # of a context without its answer
COMMON = 5  # a word that begins a sentence is no name if it occurs in lower case this often
UNPUNCTUATED = 0.3  # share of the rows that lose their last mark

RELATED = ("anchor", "positive", "negative")

Row = dict[str, Any]


def fill(template: str, lists: dict[str, list[str]], rng: random.Random) -> Row:
    """Return a text with a random entry in each slot, and the spans of the entries that are entities."""
    text, at = "", 0
    spans: list[tuple[int, int, str]] = []
    for slot in SLOT.finditer(template):
        entry = rng.choice(lists[slot[1]])
        text += template[at : slot.start()]
        if kind := KINDS.get(slot[1]):
            joins = spans and text[spans[-1][1] :] == " " and spans[-1][2] == kind == "PER"
            start = spans.pop()[0] if joins else len(text)
            spans.append((start, len(text) + len(entry), kind))
        text, at = text + entry, slot.end()
    text += template[at:]
    if len(text) > 1 and text[-1] in ".!?" and rng.random() < UNPUNCTUATED:
        text = text[:-1].rstrip()
    return {"text": text, "entities": spans}


def filled(
    templates: Sequence[str], lists: dict[str, list[str]], count: int, rng: random.Random
) -> list[Row]:
    """Return `count` rows, evenly from each template; templates without a slot make equal rows."""
    return [fill(templates[number % len(templates)], lists, rng) for number in range(count)]


def plain_sentences(files: Sequence[Path], count: int, rng: random.Random) -> list[str]:
    """Return short sentences of text without a name: only the first word, and "I", have capitals."""
    kept, common = [], Counter[str]()
    for paragraphs in documents(files):
        for sentence in itertools.chain.from_iterable(map(sentences, paragraphs)):
            words = WORD.findall(sentence)
            common.update(word for word in words if word.islower())
            short = 3 <= len(words) <= 22 and sentence.isprintable()
            if short and all(word.islower() or CAPITAL.match(word) for word in words[1:]):
                kept.append((words[0].lower(), sentence.strip("\"'“”‘’ ")))
    found = [text for first, text in kept if common[first] >= COMMON and "“" not in text]
    return rng.sample(found, min(count, len(found)))


def opinion_words(table: dict[str, list[str]], lists: dict[str, list[str]]) -> set[str]:
    """Return the words that only templates of praise or blame have."""
    sides = [*table["positive"], *table["negative"], *lists["good"], *lists["bad"]]
    plain = [*table["plain"], *lists["plain"], *lists["item"]]
    found = [SLOT.sub("", " ".join(texts)).lower() for texts in (sides, plain)]
    return {*WORD.findall(found[0])} - {*WORD.findall(found[1])}


def sentiment_rows(
    templates: Row, plain: Sequence[str], count: int, rng: random.Random
) -> Iterator[Row]:
    """Yield texts with their labels: templates, emoji alone and behind them, and plain text as neutral."""
    table, lists = templates["sentiment"], templates["lists"]
    for label in ("negative", "plain", "positive"):
        signs = table[f"{label}_emoji"]
        for row in filled(table[label], lists, count, rng):
            sign = " " * rng.randint(0, 1) + rng.choice(signs) if rng.random() < 0.15 else ""
            yield {"text": row["text"] + sign, "label": label}
        short = [row["text"] for row in filled(table["plain"], lists, 4 * len(signs), rng)]
        for number, text in enumerate(short):
            sign = signs[number % len(signs)]
            chosen = rng.choice((sign, sign * rng.randint(1, 3), f"{text} {sign}"))
            yield {"text": chosen, "label": label}
    opinions = opinion_words(table, lists)
    for text in plain:
        if not opinions & {*WORD.findall(text.lower())}:
            yield {"text": text, "label": "plain"}


def entity_rows(templates: Row, plain: Sequence[str], count: int, rng: random.Random) -> list[Row]:
    """Return texts with the spans of their entities, and as many without an entity."""
    table, lists = templates["entities"], templates["lists"]
    rows = filled(table["rows"], lists, count, rng) + filled(table["none"], lists, count // 2, rng)
    neutral = [t for t in templates["sentiment"]["plain"] if not KINDS.keys() & {*SLOT.findall(t)}]
    rows += filled(neutral, lists, count // 2, rng)
    return rows + [{"text": text, "entities": []} for text in plain]


def unanswerable(rows: Sequence[QuestionRow], rng: random.Random) -> Iterator[Row]:
    """Yield each question with a similar context without its answer, or about a name that its context does not have."""
    contexts = [*dict.fromkeys(row.context for row in rows)]
    words = [{*WORD.findall(context.lower())} for context in contexts]
    places: dict[str, list[int]] = defaultdict(list)
    for index, found in enumerate(words):
        for word in found:
            places[word].append(index)
    names: dict[bool, list[str]] = {False: [], True: []}  # numbers: True
    for name in itertools.chain.from_iterable(NAME.findall(row.question) for row in rows):
        names[name.isdigit()].append(name)
    for row in rows:
        if own := NAME.findall(row.question):
            old = rng.choice(own)
            new = rng.choice(names[old.isdigit()])
            if new not in row.context and new not in own:
                question = row.question.replace(old, new)
                yield {"question": question, "context": row.context, "answers": []}
        answer = row.answers[0][0].lower()
        score: Counter[int] = Counter()
        for word in dict.fromkeys(WORD.findall(row.question.lower())):  # in order, for ties
            share = len(places[word]) / len(contexts)
            if 0 < share < 0.1:  # a rare word
                weight = round(-1000 * math.log(share))
                score.update(dict.fromkeys(places[word], weight))
        near = [contexts[index] for index, _ in score.most_common(20)]
        if able := [c for c in near if c != row.context and answer not in c.lower()]:
            yield {"question": row.question, "context": rng.choice(able[:3]), "answers": []}


def cropped(rows: Sequence[QuestionRow], rng: random.Random) -> Iterator[Row]:
    """Yield each question with the sentences around its answer, and with others of its context, without its answer."""
    for row in rows:
        parts, starts, at = sentences(row.context), [], 0
        for part in parts:
            starts.append(at := row.context.index(part, at))
            at += len(part)
        ends = [start + len(part) for start, part in zip(starts, parts, strict=True)]
        answer, place = row.answers[0]
        index = next((i for i, end in enumerate(ends) if place + len(answer) <= end), len(parts))
        if len(parts) < 3 or index == len(parts) or place < starts[index]:
            continue
        first = max(0, index - rng.randint(0, 2))
        last = min(len(parts) - 1, index + rng.randint(0, 2))
        answers = [{"text": answer, "answer_start": place - starts[first]}]
        context = row.context[starts[first] : ends[last]]
        yield {"question": row.question, "context": context, "answers": answers}
        pairs = itertools.combinations_with_replacement(range(len(parts)), 2)
        others = [
            row.context[starts[a] : ends[b]]
            for a, b in pairs
            if b - a < MOST_SENTENCES and not a <= index <= b
        ]
        golds = [text.lower() for text, _ in row.answers]
        able = [text for text in others if not any(gold in text.lower() for gold in golds)]
        asked = {*WORD.findall(row.question.lower())}
        able.sort(key=lambda text: -len(asked & {*WORD.findall(text.lower())}))
        if able:
            yield {"question": row.question, "context": rng.choice(able[:3]), "answers": []}


def opposite_rows(templates: Row) -> Iterator[Row]:
    """Yield requests, another wording of each, and a request for the opposite that is worded like it."""
    frames = templates["frames"]
    for group in templates["opposites"]:
        for here, there in (group["words"], group["words"][::-1]):
            for number, (verb, of) in enumerate(itertools.product(here, group["of"])):
                frame, other = (frames[(number + shift) % len(frames)] for shift in (0, 1))
                same = here[(here.index(verb) + 1) % len(here)]
                words = verb, same, there[number % len(there)]
                texts = [
                    f.format(f"{w} {of}") for f, w in zip((frame, other, frame), words, strict=True)
                ]
                yield dict(zip(RELATED, texts, strict=True))
    for group in templates["meanings"]:
        for first, second in itertools.permutations(group["same"], 2):
            for other in group["other"]:
                yield dict(zip(RELATED, (first, second, other), strict=True))


def antonyms(
    templates: Row, rows: Sequence[Similar], count: int, rng: random.Random
) -> Iterator[Row]:
    """Yield at most `count` pairs of related texts, with the first text as negative, where one word is its antonym."""
    swap = {b: a for a, b in templates["antonyms"]} | dict(templates["antonyms"])
    for row in itertools.islice(rng.sample(rows, len(rows)), count):
        anchor, positive = rng.sample(row.texts, 2)
        if able := [word for word in WORD.finditer(anchor) if word[0].lower() in swap]:
            word = rng.choice(able)
            negative = anchor[: word.start()] + swap[word[0].lower()] + anchor[word.end() :]
            yield dict(zip(RELATED, (anchor, positive, negative), strict=True))


def write_rows(out: Path, made: Mapping[str, Iterable[Row]]) -> None:
    """Write a file of JSON lines for each name."""
    for name, rows in made.items():
        path = out / f"{name}.jsonl.gz"
        count = write_gzip(path, (json.dumps(row, ensure_ascii=False) + "\n" for row in rows))
        print(f"{path}: {count:,} rows")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m model.everyday", description=__doc__)
    parser.add_argument("out", type=Path)
    for option, kind in (
        ("text", "plain text"),
        ("questions", "SQuAD"),
        ("pairs", "related texts"),
    ):
        parser.add_argument(f"--{option}", type=Path, nargs="+", required=True, help=kind)
    for option, number in (("rows", 4000), ("plain", 8000), ("seed", 1)):
        parser.add_argument(f"--{option}", type=int, default=number)
    given = parser.parse_args()
    rng = random.Random(given.seed)
    try:
        for file in given.text:
            checksums.check(file)
        templates = tomllib.loads(TEMPLATES.read_text(encoding="utf-8"))
        plain = plain_sentences(given.text, given.plain, rng)
        questions = [row for file in given.questions for row in labelled_rows.read(file, "qa")]
        pairs = [row for file in given.pairs for row in labelled_rows.read(file, "embedding")]
        made: dict[str, Iterable[Row]] = {
            "sentiment": sentiment_rows(templates, plain, given.rows, rng),
            "entities": entity_rows(templates, plain, given.rows, rng),
            "answers": itertools.chain(unanswerable(questions, rng), cropped(questions, rng)),
            "embeddings": [
                *opposite_rows(templates),
                *antonyms(templates, pairs, given.plain, rng),
            ],
        }
        write_rows(given.out, made)
    except (OSError, ValueError) as error:
        raise SystemExit(f"{error}") from None


if __name__ == "__main__":
    main()

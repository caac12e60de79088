"""Sentences of Wikipedia with their entities, as training rows.

The first sentence of an article has the kind of its title: "X is a village in ...". A sentence becomes a row if every
name in it has a kind: by the title of an article, by a word in it, by a frequent given name, or as a word that often
follows "in". Each file of text needs its file of titles next to it.
"""

import random
import re
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from model.cloze import COMMON, GROUP, MONTH, PLACE, TITLE
from model.data import checksums
from model.data.corpus import documents, sentences
from service.core.data_files.text_files import read_lines

KINDS_FILE = Path(__file__).with_name("wikipedia_names.toml")
LENGTH = (4, 40)  # words of a sentence
FREQUENT = 5  # persons with a given name; texts with a nationality
PLACED = (8, 0.35)  # times that a place follows a preposition, and the share of all its times

# Adjacent capitalized words, joined by "of" and particles of names; a full stop belongs to initials only.
PART = r"(?:(?:[A-Z]\.)+|[^\W\d_a-zß-öø-ÿ][\w'’-]*[^\W_]|[A-Z](?!\w))"
RUN = re.compile(rf"(?<![\w'’-]){PART}(?:(?: (?:of(?: the)?|de|la|von|van|der|du|di|al))? {PART})*")
BRACKETS = re.compile(r" ?\([^()]*\)")
IS = re.compile(r"\b(?:is|was|are|were) (?:an?|the|one of the) (.+)")
END = re.compile(r"[,;.(]| (?:in|of|by|from|that|which|who|for|on|at|with|and|to|located|based)\b")
LIVED = re.compile(r"\((?:[^()]*\b)?(?:born|died|c\.|\d{3,4} ?[–-] ?)[^()]*\)")
DAYS = frozenset(
    ["Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday", "I"]
)
CLUBS = {"Town", "City", "Park"}  # last words of the names of clubs, too
WHOLE = re.compile(r"[\"“]?[A-Z].*\w{3}[.!?][\"”]?$")  # a sentence that no abbreviation cut
POSSESSIVE = re.compile(r"['’]s?$")

Row = dict[str, Any]


@dataclass
class Names:
    """What the text of all articles contains about names. kinds: of titles; the other sets: of words"""

    kinds: dict[str, str] = field(default_factory=dict)
    given: set[str] = field(default_factory=set)
    nations: set[str] = field(default_factory=set)
    places: set[str] = field(default_factory=set)
    plain: set[str] = field(default_factory=set)


def kind_of_title(first: str, nouns: dict[str, str]) -> tuple[str, str]:
    """Return the kind of what a first sentence defines, and the capitalized word before its noun; "" for unknown."""
    dates = LIVED.search(first[:200])
    found = IS.search(BRACKETS.sub("", first))
    if not found:
        return "", ""
    phrase = END.split(found[1], maxsplit=1)[0].split()
    kind = next((nouns[word] for word in reversed(phrase) if word in nouns), "")
    if kind == "PER" or (dates and "born" in dates[0]):
        is_nation = len(phrase) > 1 and phrase[0].isalpha() and phrase[0].istitle()
        return "PER", phrase[0] if is_nation and phrase[1].islower() else ""
    return kind, ""


def read_articles(files: Sequence[Path]) -> Iterator[tuple[str, list[str]]]:
    """Yield the title and the paragraphs of each article. Raises ValueError for another number of titles."""
    for file in files:
        titles = file.with_name(file.name.replace(".txt.xz", ".titles.txt.gz"))
        checksums.check(file)
        checksums.check(titles)
        names = (line.strip() for _, line in read_lines(titles))
        yield from zip(names, documents([file]), strict=True)


def short_title(title: str) -> str:
    """Return a title without what tells it from others: "Lester (storm)" and "Lester, Ohio" are Lester."""
    return BRACKETS.sub("", title).partition(",")[0].strip()


def learn(articles: Iterable[tuple[str, list[str]]], nouns: dict[str, str]) -> Names:
    """Collect the kinds of titles, and words that are given names, nationalities, places, or no names."""
    kinds: dict[str, set[str]] = defaultdict(set)
    given, nations, after, total, lower = (Counter[str]() for _ in range(5))
    for title, paragraphs in articles:
        kind, nation = kind_of_title(paragraphs[0], nouns)
        name = short_title(title)
        kinds[name].add("" if name.startswith("List of") else kind)
        if kind == "PER" and " " in name:
            given[name.split()[0]] += 1
        nations[nation] += 1
        text = paragraphs[-1]
        lower.update(re.findall(r"\b[a-z]+\b", text))
        for run in RUN.finditer(text):
            total[run[0]] += 1
            after[run[0]] += text[: run.start()].endswith((" in ", " near ", " to ", " from "))
    least, share = PLACED
    return Names(
        {name: min(each) for name, each in kinds.items() if len(each) == 1 and each != {""}},
        {name for name, count in given.items() if count >= FREQUENT},
        {name for name, count in nations.items() if name and count >= FREQUENT},
        {
            name
            for name, count in after.items()
            if count >= least and count >= share * total[name] and not MONTH.search(name)
        },
        {word for word, count in lower.items() if count >= 3},
    )


def kind_of_name(name: str, names: Names, own: dict[str, str]) -> str | None:
    """Return the kind of a name, "" for a word that is no entity, and None for unknown."""
    if name in own:
        return own[name]
    if MONTH.fullmatch(name) or name in DAYS:
        return ""
    if name in names.places:
        return "LOC"
    if name in names.nations:
        return "MISC"
    parts = name.split()
    if len(parts) == 1 or "'s " in name:
        return None
    if parts[-1] in GROUP:
        return "ORG"
    if parts[-1] in PLACE - CLUBS or parts[0] in ("Mount", "Lake", "River"):
        return "LOC"
    if name in names.kinds:
        return names.kinds[name]
    if parts[0] in ("University", "Bank", "Ministry", "Department", "Institute"):
        return "ORG" if len(parts) > 2 else None
    is_person = len(parts) <= 3 and parts[0] in names.given and "of" not in parts
    return "PER" if is_person else None


def label(sentence: str, names: Names, own: dict[str, str]) -> Row | None:
    """Return a sentence with the spans of its entities; None where a name has no known kind."""
    entities = []
    for run in RUN.finditer(sentence):
        start, name = run.start(), POSSESSIVE.sub("", run[0])
        opens = not sentence[:start].strip("\"'“‘(")
        while name:
            head, _, rest = name.partition(" ")
            opening = opens and (head in COMMON or head.lower() in names.plain)
            whole = name in own or (rest and (name in names.kinds or name.split()[-1] in GROUP))
            if head != "The" and (whole or not (opening or head in TITLE)):
                break
            start, name, opens = start + len(head) + 1, rest, False
        kind = kind_of_name(name, names, own) if name else ""
        if kind is None:
            return None
        if kind:
            entities.append((start, start + len(name), kind))
    return {"text": sentence, "entities": entities}


def own_names(title: str, kind: str) -> dict[str, str]:
    """Return the names by which an article calls its subject, with its kind."""
    name = short_title(title)
    own = {name: kind} if kind else {}
    if kind == "PER" and " " in name and "of" not in name.split():
        own |= {name.split()[-1]: kind}
    return own


def make(
    files: Sequence[Path], count: int, nouns: dict[str, str], rng: random.Random
) -> tuple[Names, list[Row]]:
    """Return the names of all files, and at most `count` rows, of which one in eight has no entity."""
    names = learn(read_articles(files), nouns)
    found: dict[bool, list[Row]] = {False: [], True: []}
    for title, paragraphs in read_articles(files):
        own = own_names(title, kind_of_title(paragraphs[0], nouns)[0])
        for sentence in sentences(rng.choice(paragraphs)):
            fits = LENGTH[0] <= len(sentence.split()) <= LENGTH[1] and WHOLE.match(sentence)
            if fits and (row := label(sentence, names, own)):
                found[bool(row["entities"])].append(row)
    few = rng.sample(found[False], min(len(found[False]), count // 8))
    many = rng.sample(found[True], min(len(found[True]), count - len(few)))
    return names, rng.sample([*few, *many], len(few) + len(many))


def read_nouns() -> dict[str, str]:
    """Return the kind of each noun that follows "X is a"."""
    kinds = tomllib.loads(KINDS_FILE.read_text(encoding="utf-8"))
    return {noun: kind for kind, text in kinds.items() for noun in text.split()}

"""Make the training rows of quartet-starter: `python -m model.starter_rows OUT --wikipedia FILE... --plain FILE...`.

All rows come from texts whose terms permit commercial use, and from the templates of this repository. OUT gets the
files that `configs/starter.toml` reads.
"""

import argparse
import random
import re
import tomllib
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path

from model import everyday, wikipedia_names
from model.data import checksums, labelled_rows
from model.data.corpus import documents, sentences
from model.everyday import WORD, Row
from model.wikipedia_names import Names
from service.core.data_files.text_files import write_gzip

TEMPLATES = Path(__file__).with_name("starter.toml")
OF_WIKIPEDIA = 0.7  # share of the filled rows whose names are Wikipedia's
SHORT = (5, 40)  # words of a sentence about what critics wrote
# Sentences about what critics wrote, by their words.
PRAISED = re.compile(r"praised|acclaimed|(?:positive|favou?rable|good|rave) reviews?|well.received")
PANNED = re.compile(
    r"critici[sz]ed|panned|(?:negative|unfavou?rable|bad|poor) reviews?|poorly received"
)
UNSURE = re.compile(
    r"\b(?:not?|but|although|though|despite|however|while|mixed|critical of)\b", re.I
)


def name_lists(names: Names) -> dict[str, list[str]]:
    """Return lists of Wikipedia's names for the slots of templates."""
    people = [name.split() for name, kind in names.kinds.items() if kind == "PER"]
    groups = [name for name, kind in names.kinds.items() if kind == "ORG"]
    return {
        "first": sorted(names.given),
        "last": sorted({parts[-1] for parts in people if len(parts) == 2}),
        "city": sorted(names.places),
        "org": sorted(name for name in groups if name.count(" ") < 3 and name[0].isupper()),
        "nation": sorted(names.nations),
    }


def entity_rows(
    templates: Row, own: Row, names: Names, plain: Sequence[str], count: int, rng: random.Random
) -> list[Row]:
    """Return rows of templates, with names of Wikipedia in most of them, and rows without an entity."""
    lists = templates["lists"] | own["lists"]
    known = [*own["news"], *templates["entities"]["rows"]]
    rows = everyday.entity_rows(templates, plain, count, rng)
    for chosen, share in ((lists | name_lists(names), OF_WIKIPEDIA), (lists, 1 - OF_WIKIPEDIA)):
        rows += everyday.filled(known, chosen, round(2 * count * share), rng)
    return rows


def review_rows(own: Row, count: int, rng: random.Random) -> Iterator[Row]:
    """Yield `count` texts of praise and as many of blame, some of two sentences."""
    for label, table in (("positive", "praise"), ("negative", "blame")):
        texts = [row["text"] for row in everyday.filled(own[table], own["lists"], count, rng)]
        for first, second in zip(texts, rng.sample(texts, count), strict=True):
            yield {"text": rng.choice((first, first, f"{first} . {second}")), "label": label}


def reception_rows(files: Sequence[Path]) -> Iterator[Row]:
    """Yield sentences of Wikipedia about praise or blame by critics, with their label."""
    about = (
        paragraph
        for paragraph in chain.from_iterable(documents(files))
        if PRAISED.search(paragraph) or PANNED.search(paragraph)
    )
    for text in chain.from_iterable(map(sentences, about)):
        found = PRAISED.search(text), PANNED.search(text)
        short = SHORT[0] <= len(WORD.findall(text)) <= SHORT[1]
        if short and (found[0] is None) != (found[1] is None) and not UNSURE.search(text):
            yield {"text": text, "label": "positive" if found[0] else "negative"}


def opinion_rows(own: Row, files: Sequence[Path], count: int, rng: random.Random) -> list[Row]:
    """Return at most `count` sentences of prose with words of praise and as many of blame, none with both."""
    sides = {"positive": {*own["praising"].split()}, "negative": {*own["blaming"].split()}}
    found: dict[str, list[Row]] = {label: [] for label in sides}
    for text in chain.from_iterable(map(sentences, chain.from_iterable(documents(files)))):
        words = {*map(str.lower, WORD.findall(text))}
        labels = [label for label, side in sides.items() if words & side]
        if len(labels) == 1 and SHORT[0] <= len(words) <= SHORT[1] and not UNSURE.search(text):
            found[labels[0]].append({"text": text, "label": labels[0]})
    return [row for rows in found.values() for row in rng.sample(rows, min(count, len(rows)))]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m model.starter_rows", description=__doc__)
    parser.add_argument("out", type=Path)
    for option, text in (
        ("wikipedia", "files of its text, next to the files of titles"),
        ("plain", "text, of which sentences without a name become rows"),
        ("questions", "SQuAD, whose questions are more text"),
    ):
        parser.add_argument(f"--{option}", type=Path, nargs="+", required=True, help=text)
    for option, number in (("rows", 1500), ("names", 12_000), ("sentences", 3000), ("seed", 1)):
        parser.add_argument(f"--{option}", type=int, default=number)
    given = parser.parse_args()

    def rng() -> random.Random:
        return random.Random(given.seed)

    try:
        for file in given.plain:
            checksums.check(file)
        templates, own = (
            tomllib.loads(file.read_text(encoding="utf-8"))
            for file in (everyday.TEMPLATES, TEMPLATES)
        )
        plain = everyday.plain_sentences(given.plain, 2 * given.sentences, rng())
        some = plain[: given.sentences]
        squad = [row for file in given.questions for row in labelled_rows.read(file, "qa")]
        nouns = wikipedia_names.read_nouns()
        names, of_wikipedia = wikipedia_names.make(given.wikipedia, given.names, nouns, rng())
        texts = [*plain, *(row.question for row in squad), *(row["text"] for row in of_wikipedia)]
        made: dict[str, Iterable[Row]] = {
            "wikipedia": of_wikipedia,
            "entities": entity_rows(templates, own, names, some, given.rows, rng()),
            "sentiment": everyday.sentiment_rows(templates, some, given.rows, rng()),
            "reviews": review_rows(own, given.rows, rng()),
            "reception": reception_rows(given.wikipedia),
            "opinions": opinion_rows(own, given.plain, 2 * given.rows, rng()),
            "embeddings": everyday.opposite_rows(templates),
        }
        everyday.write_rows(given.out, made)
        count = write_gzip(given.out / "texts.txt.gz", (f"{text}\n\n" for text in texts))
        print(f"{given.out / 'texts.txt.gz'}: {count:,} texts")
    except (OSError, ValueError) as error:
        raise SystemExit(f"{error}") from None


if __name__ == "__main__":
    main()

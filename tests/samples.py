"""Texts made up on the spot: plain ones of any length, strange ones, and a data file for each kind of head."""

import random

NAMES = ["Ada", "Grace", "Emmy", "Sofya", "Rosalind", "Marta Lindqvist", "Chien-Shiung", "Lise"]
VERBS = ["measured", "drew", "doubted", "repaired", "described", "forgot", "sold", "painted"]
THINGS = ["a comet", "the old engine", "two prime numbers", "every river", "some café tables"]
PLACES = ["in Turin", "at dawn", "near the harbour", "without a word", "for Dr. Noether", "twice"]

OUTLIER = "kraken"  # a token of the tiny model whose activations dwarf all others

STRANGE = {
    "emoji": "🚀 Ada 👩‍🚀 measured 🎉 a comet 👍🏽 in Turin 🇮🇹.",
    "combining marks": "Re\u0301my dre\u0302w a cafe\u0301 table in Zu\u0308rich.",
    "right to left": "עדה מדדה כוכב שביט בטורינו، وقاست ليزا نهرا.",
    "line ends": "Ada drew\r\na comet\r\n\r\nin Turin\r\n",
    "joiners": "Li\u200dse, me\u200casured\u200b a \ufeffcomet.",
    "wide": "艾达 在都灵 测量了 一颗彗星。エミーが川を描いた。",
    "controls": "Grace\tsold\x00 every\x07 river\x7f at\u2028dawn.",
}


def sentence(rng: random.Random) -> str:
    return " ".join(map(rng.choice, (NAMES, VERBS, THINGS, PLACES))) + rng.choice(".!?")


def text(words: int, seed: int = 0) -> str:
    """A text of this many words."""
    rng = random.Random(seed)
    made: list[str] = []
    while len(made) < words:
        made += sentence(rng).split()
    return " ".join(made[:words])


def corpus(sentences: int = 400) -> list[str]:
    """What the tiny model's tokenizer is trained on."""
    rng = random.Random(1)
    return [f"{sentence(rng)} {OUTLIER}" for _ in range(sentences)] + [*STRANGE.values()]

"""The texts of requests: three mixes of lengths, from real news if available."""

import gzip
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

NEWS = Path("../shared/data/classification/ag_news/test.jsonl.gz")
WORDS = ["the", "river", "and", "town", "of", "a", "north", "station", "in", "early", "spring"]


@dataclass(frozen=True)
class Mix:
    """Lengths in words, log-normal: about 1.3 tokens each, and two more for a text."""

    name: str
    median: float
    sigma: float
    longest: int


MIXES = {
    mix.name: mix
    for mix in (
        Mix("short", 9.5, 0.45, 40),  # 15 tokens on average: questions, titles
        Mix("news", 27, 0.70, 200),  # 45, with a long tail to 256
        Mix("documents", 160, 0.45, 600),  # 200 when cut at 256
    )
}


def texts(mix: Mix, count: int = 600, seed: int = 0, source: Path = NEWS) -> list[str]:
    """Return the same texts every time, in random order of lengths; of generated words where `source` is missing."""
    rng = np.random.default_rng(seed)
    sampled = rng.lognormal(np.log(mix.median), mix.sigma, count)
    lengths = np.clip(sampled, 3, mix.longest).astype(int)
    words = running_words(source, int(lengths.sum()), rng)
    ends = np.cumsum(lengths)
    return [" ".join(words[end - length : end]) for end, length in zip(ends, lengths, strict=True)]


def running_words(source: Path, count: int, rng: np.random.Generator) -> list[str]:
    if not source.is_file():
        return list(rng.choice(WORDS, size=count))
    words: list[str] = []
    with gzip.open(source, "rt", encoding="utf-8") as lines:
        for line in lines:
            words += json.loads(line)["text"].split()
            if len(words) >= count:
                break
    return (words * (count // len(words) + 1))[:count]

"""The overlap of neighbors, and the sentences that it is measured with."""

import lzma
from pathlib import Path

import numpy as np

from benchmarks import neighbors


def test_overlap() -> None:
    """Two of three nearest rows are the same: a row is no neighbor of itself."""
    angles = np.array([0.0, 0.1, 0.2, 0.3, 0.5])
    exact = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    assert 1 == neighbors.overlap(exact, exact, nearest=3)
    angles[1] = 3
    other = np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)
    found = neighbors.neighbors(other, 3)
    assert {2, 3, 4} == {*found[0].tolist()}
    expected = np.mean(
        [len({*a} & {*b}) / 3 for a, b in zip(neighbors.neighbors(exact, 3), found, strict=True)]
    )
    assert expected == neighbors.overlap(exact, other, nearest=3) < 1


def test_sentences(tmp_path: Path) -> None:
    """Sentences of a fit length are read, each once, and of them every seventh."""
    lines = [
        f"Sentence number {n} of this file has more than forty characters. Short."
        for n in range(30)
    ]
    with lzma.open(tmp_path / "text.xz", "wt", encoding="utf-8") as file:
        file.write("\n".join(lines + lines))
    found = neighbors.read_sentences(tmp_path / "text.xz", 4)
    assert [line.removesuffix(" Short.") for line in lines[0:28:7]] == found

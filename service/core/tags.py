"""Labels of tokens as parts of entities: the only module that parses "B-PER" and similar labels.

The schemes are IO, IOB1, IOB2 (BIO), BIOES (IOBES), BILOU and BMEWO (BMES). A scheme is recognized from the whole set
of labels. All labels except "O" must consist of a position and a type. Each position must occur with a type that also
occurs with another position, so that "E-MAIL" is not the end of a "MAIL". The position comes first or last, with a dash
or an underscore ("B-PER", "PER_B"). In any other set, labels join as in transformers: "B-" and "I-" are positions, and
other labels continue only themselves.
"""

import functools
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

OUTSIDE = "O"
_SINGLE, _BEGIN, _INSIDE, _END = "SUW", "B", "IM", "EL"
_LETTERS = _SINGLE + _BEGIN + _INSIDE + _END
_SPELLINGS = tuple(
    re.compile(pattern)
    for pattern in (
        rf"(?P<position>[{_LETTERS}])-(?P<type>.+)",
        rf"(?P<position>[{_LETTERS}])_(?P<type>.+)",
        rf"(?P<type>.+)-(?P<position>[{_LETTERS}])",
        rf"(?P<type>.+)_(?P<position>[{_LETTERS}])",
    )
)
_SPECIAL = re.compile(r"\[.*\]|<.*>|X|PAD")  # labels of special tokens, in some checkpoints


class Tag(NamedTuple):
    """A label's type ("PER") and position ("" for none). common: equal for labels that continue one entity"""

    position: str
    type: str
    common: str

    @property
    def begins(self) -> bool:
        """Whether an entity begins at the label, independent of the label before."""
        return bool(self.position) and self.position in _BEGIN + _SINGLE

    @property
    def ends(self) -> bool:
        """Whether the entity ends at the label, independent of the next label."""
        return bool(self.position) and self.position in _END + _SINGLE


def read(labels: Sequence[str]) -> list[Tag]:
    """Return the tag of each label of a set."""
    for spelling in _SPELLINGS:
        found = [spelling.fullmatch(label) for label in labels]
        others = [label for label, match in zip(labels, found, strict=True) if not match]
        positions = {match["position"] for match in found if match}
        if (
            positions
            and positions <= _proven(found)
            and all(other == OUTSIDE or _SPECIAL.fullmatch(other) for other in others)
        ):
            return [
                Tag(match["position"], match["type"], match["type"])
                if match
                else Tag("", *[label] * 2)
                for label, match in zip(labels, found, strict=True)
            ]
    found = [_SPELLINGS[0].fullmatch(label) for label in labels]
    proven = _proven(found)
    tags = []
    for label, match in zip(labels, found, strict=True):
        if label.startswith(("B-", "I-")):
            tags.append(Tag(label[0], label[2:], label[2:]))
        else:
            tags.append(
                Tag("", label[2:] if match and match["position"] in proven else label, label)
            )
    return tags


def _proven(found: Sequence[re.Match[str] | None]) -> set[str]:
    """Return the positions that occur with a type that also occurs with another position."""
    positions = defaultdict(set)
    for match in filter(None, found):
        positions[match["type"]].add(match["position"])
    return set().union(*(some for some in positions.values() if len(some) > 1))


class Scheme(NamedTuple):
    """The rules by which neighboring labels of a set join.

    types       type of each label, "O" if it is outside of entities
    kinds  [C]  the same number for labels that may continue each other
    begins [C]  whether an entity begins at the label, independent of the label before
    ends   [C]  whether an entity ends at the label, independent of the next label
    """

    types: tuple[str, ...]
    kinds: NDArray[np.int64]
    begins: NDArray[np.bool]
    ends: NDArray[np.bool]

    def breaks(self, found: NDArray[np.int64]) -> NDArray[np.bool]:
        """Return whether an entity ends between each two neighbors of `found` `[n]`, labels by index; `[n - 1]`."""
        kinds = self.kinds[found]
        breaks: NDArray[np.bool] = self.begins[found[1:]] | (kinds[1:] != kinds[:-1])
        return breaks | self.ends[found[:-1]]


def scheme(labels: Sequence[str]) -> Scheme:
    """Return how labels of this set join."""
    return _scheme(tuple(labels))


@functools.lru_cache(maxsize=64)
def _scheme(labels: tuple[str, ...]) -> Scheme:
    tags = read(labels)
    common = [tag.common for tag in tags]
    return Scheme(
        tuple(tag.type for tag in tags),
        np.array([common.index(name) for name in common]),
        np.array([tag.begins for tag in tags]),
        np.array([tag.ends for tag in tags]),
    )


def to_bio(found: Sequence[str], labels: Sequence[str]) -> list[str]:
    """Return neighboring labels, each from the set `labels`, as "B-" and "I-" of their types, or "O"."""
    joined = scheme(labels)
    indices = np.array([labels.index(label) for label in found], np.int64)
    begins = [True, *joined.breaks(indices).tolist()]
    types = [joined.types[index] for index in indices]
    return [
        name if name == OUTSIDE else f"{'B' if begin else 'I'}-{name}"
        for name, begin in zip(types, begins, strict=False)
    ]


def place(labels: Sequence[str], type_: str, *, first: bool, last: bool) -> int | None:
    """Return the index of the label of an entity's first, last or other token, None if there is none.

    A missing position is replaced: an end by inside, and a beginning by inside if no label of the type begins.
    """
    wanted = {
        (True, True): (_SINGLE, _BEGIN),
        (True, False): (_BEGIN,),
        (False, True): (_END, _INSIDE),
        (False, False): (_INSIDE,),
    }[first, last]
    of_type = {tag.position: index for index, tag in enumerate(read(labels)) if tag.type == type_}
    anywhere = (_INSIDE,) if not {*of_type} & {*_BEGIN, *_SINGLE} else ()
    for letters in (*wanted, *anywhere):
        for letter in letters:
            if letter in of_type:
                return of_type[letter]
    return of_type.get("")

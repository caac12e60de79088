"""The positions where a span of a text may begin and end: the definition of characters, words and spaces.

A character is a grapheme cluster of Unicode Standard Annex 29, such as a letter with its accents, or a joined emoji. A
code point that extends a space is a character by itself. No span cuts a character. A space is white space, a control or
an invisible format character. No span begins or ends with a space. A word is a run of characters that ends

- at a space;
- at a punctuation mark or a symbol such as an emoji. Each of them is a word, except a mark that connects two letters or
  digits (O'Neill, AT&T, Jean-Luc, 1,234.56) and the stops of an abbreviation (U.S.);
- before a possessive 's, which is a word;
- around every character of a script that is written without spaces between words, such as Chinese, Japanese and Thai;
- where the tokenizer's pre-tokenizer ends one.

A token belongs to the word in which it begins. This module reads no labels. Whether the stop after a name is part of
the name depends on the label that the model predicts for the token of the stop.
"""

import functools
import re
import unicodedata
from collections.abc import Iterable

import numpy as np
import tokenizers
from numpy.typing import NDArray

CharacterPositions = NDArray[np.int32]
Kinds = NDArray[np.uint8]

# The kind of a code point is a letter of this table; patterns are matched against the kinds of a text, in bytes.
#   " " space       a letter          s the letter s      n number       o other, such as "$" and "+"
#   q apostrophe    . full stop       c mark that connects letters and numbers        d mark that connects numbers
#   p other mark    x symbol, as emoji                u character of a script without spaces          f half of a flag
#   e extends the character before    j joins two emoji   v joins two consonants      L V T S parts of Hangul syllables
_KINDS_OF = {
    "q": "'\u2019",
    ".": ".",
    "c": "-\u2010\u2011\u05be\u00b7\u05f3\u05f4&_@",  # hyphens, middle dot, Hebrew geresh and gershayim
    "d": ",:/",
    "p": "<>=|~^`",
    "x": "\u203c\u2049\u3030\u303d",
    "s": "sS",
    "j": "\u200d",
    "v": "\u094d\u09cd\u0acd\u0b4d\u0c4d\u0d4d\u1039\u17d2\u1a60\u1b44\u1bab\ua9c0\uaaf6",
    "e": "\u0e33\u0eb3\u200c\uff9e\uff9f",  # not of category M
    " ": "\u00ad\u061c\u180e\u200b\u200e\u200f\u2028\u2029\ufeff",
}
_KINDS_BETWEEN = {
    "x": (
        ("\u2194", "\u2194"),
        ("\u25fb", "\u25fe"),
        ("\u2934", "\u2935"),
        ("\U0001f000", "\U0001f1e5"),
        ("\U0001f200", "\U0001faff"),
    ),
    "e": (("\U0001f3fb", "\U0001f3ff"), ("\U000e0020", "\U000e007f")),  # skin colors, tags
    "f": (("\U0001f1e6", "\U0001f1ff"),),
    " ": (("\u202a", "\u202e"), ("\u2060", "\u206f")),
    "L": (("\u1100", "\u115f"), ("\ua960", "\ua97c")),
    "V": (("\u1160", "\u11a7"), ("\ud7b0", "\ud7c6")),
    "T": (("\u11a8", "\u11ff"), ("\ud7cb", "\ud7fb")),
    "S": (("\uac00", "\ud7a3"),),
}
# Blocks of the scripts whose letters and numbers are of kind u.
_WITHOUT_SPACES = (
    ("\u0e00", "\u0eff"),  # Thai, Lao
    ("\u1000", "\u109f"),  # Myanmar
    ("\u1780", "\u17ff"),  # Khmer
    ("\u1950", "\u19df"),  # Tai Le, New Tai Lue
    ("\u1a20", "\u1aaf"),  # Tai Tham
    ("\u1b00", "\u1b7f"),  # Balinese
    ("\u2e80", "\u312f"),  # Han radicals and signs, Hiragana, Katakana, Bopomofo
    ("\u3190", "\ua4cf"),  # Han, Yi
    ("\ua980", "\ua9ff"),  # Javanese, Myanmar
    ("\uaa60", "\uaadf"),  # Myanmar, Tai Viet
    ("\uf900", "\ufaff"),  # Han
    ("\uff66", "\uff9d"),  # Katakana of half width
    ("\U00011700", "\U0001174f"),  # Ahom
    ("\U00016fe0", "\U00018dff"),  # Tangut, Khitan
    ("\U0001aff0", "\U0001b2ff"),  # Hiragana, Katakana, Nushu
    ("\U00020000", "\U000323af"),  # Han
)
_KINDS_OF_CATEGORY = {
    **dict.fromkeys(("Lu", "Ll", "Lt", "Lm", "Lo"), "a"),
    **dict.fromkeys(("Nd", "Nl", "No"), "n"),
    **dict.fromkeys(("Mn", "Mc", "Me"), "e"),
    **dict.fromkeys(("Pc", "Pd", "Ps", "Pe", "Pi", "Pf", "Po"), "p"),
    "So": "x",
    **dict.fromkeys(("Zs", "Zl", "Zp", "Cc"), " "),
    **dict.fromkeys(("Sm", "Sc", "Sk", "Cf", "Cs", "Co", "Cn"), "o"),
}
_ASSIGNED = 0x32400  # no larger code point is a letter, a mark or a symbol, except the tags

_CORE = rb"[anosLVTS]"
_CHARACTER = re.compile(
    rb"(?:ff|L+(?:[SV]V*)?T*|[SV]V*T*|[^ ])(?:[ejv]|(?<=[xe]j)x|(?<=v)[asu]|(?<=vj)[asu])*"
)
_WORD = re.compile(
    rb"[as]{2,}(?=[ p])"  # matches most words of most texts, and is faster than the general patterns
    rb"|(?<=[ansLVTSejv])qs(?!%(core)b)"
    rb"|(?=[uxpqcd.f])%(character)b"
    rb"|(?:[as]\.){2,}(?!%(core)b)"
    rb"|[ejv]*%(core)b[anosLVTSejv]*"
    rb"(?:(?!qs(?!%(core)b))(?<!o)(?:[qc.](?=[ansLVTS])|(?<=n)d(?=n))%(core)b[anosLVTSejv]*)*"
    rb"|[ejv]+" % {b"character": _CHARACTER.pattern, b"core": _CORE}  # after a space
)
_COMPOSED = re.compile(rb"[ejvfVT]|L[LS]")

# The conditions under which a tokenizer's own offsets and words are right. Each has a pattern that a text must not
# match, and a test text for which they must be right. BERT's tokenizers are right where all characters are common ones.
# Byte-level tokenizers also need a text in which no two marks meet, and which begins with neither a space nor an
# apostrophe.
_COMMON = (
    r"\t\n\r -~\u00a1-\u00a5\u00a7\u00a8\u00aa-\u00ac\u00af\u00b1-\u024f\u2010-\u2027\u2030-\u205e"
)
_TRIALS = (
    (
        re.compile(rf"[^{_COMMON}]"),
        "Ab cd, (ef). \"gh\"\ti-j K'l\nm's n/o p:q;\r\nr! s? t.u <v> =w x|y ~z [a] {b} c_d e@f g&h #i 1,2 3.4 %"
        " 5*6 $7 8` ^9 a\\b a+b \u201cc\u201d \u2018d\u2019 e\u2014f \u00bfg \u00abh\u00bb \u00e9\u00fc i\u2019s\u2026",
    ),
    (
        re.compile(rf"\A[ ']|[^{_COMMON}]|[\t\n\r]|[^\w\s]{{2}}"),
        "Ab cd, (ef) gh. \"ij k\" l-m N'o p's q/r s:t u; v! w? x.y <z =a b> c|d ~e [f] {g h} i_j k@l m&n #o"
        " 1,2 3.4 5% 6*7 $8 9` ^a b\\c d+e \u201cf g\u201d \u2018h i\u2019 j\u2014k \u00bfl \u00abm n\u00bb"
        " \u00e9\u00fc o\u2019s p\u2026",
    ),
)
_SPACE_TOKENS = ("▁", "Ġ")  # the space before a word, in tokenizers of pieces and of bytes


class Places:
    """The positions of one tokenizer's tokens in a text, by characters and words."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        ids = {mark: tokenizer.token_to_id(mark) for mark in _SPACE_TOKENS}
        self._space_ids = {mark: id_ for mark, id_ in ids.items() if id_ is not None}
        self._unusual = next(
            (pattern for pattern, text in _TRIALS if self._keeps(tokenizer, text)), None
        )

    def are_known(self, text: str) -> bool:
        """Return whether the tokenizer's own offsets and words are right for a text."""
        return self._unusual is not None and not self._unusual.search(text)

    def find(
        self,
        text: str,
        ids: NDArray[np.int64],
        offsets: CharacterPositions,
        words: CharacterPositions,
    ) -> tuple[CharacterPositions, CharacterPositions]:
        """Return offsets `[n, 2]` and words `[n]` of the first n tokens of `text`, from the tokenizer's own.

        The offsets of a token have no space at their edges and cut no character. They are of width 0 where the token
        represents only spaces. Word indices ascend. Two words of the tokenizer never become one.

        ids: of the tokens, `[n]`
        """
        if not len(ids):
            return offsets, words
        kinds = _kinds(text[: int(offsets[-1, 1]) + _LOOK_AHEAD])
        starts, ends = offsets[:, 0], offsets[:, 1]
        for mark, id_ in self._space_ids.items():
            if mark not in text:
                ends = np.where(ids == id_, starts, ends)
        edges = _edges(_WORD.finditer(kinds))
        if not len(edges):
            return np.column_stack([starts, starts]), np.zeros_like(words)
        # The first word that ends after the token begins, and the last that begins before the token ends.
        first = np.searchsorted(edges[:, 1], starts, side="right")
        last = np.searchsorted(edges[:, 0], ends, side="left") - 1
        filled = first <= last
        starts = np.where(filled, np.maximum(starts, edges[np.minimum(first, last), 0]), starts)
        ends = np.where(filled, np.minimum(ends, edges[last, 1]), starts)
        if not text.isascii() and _COMPOSED.search(kinds):
            composed = _edges(m for m in _CHARACTER.finditer(kinds) if m.end() - m.start() > 1)
            starts, ends = _widen(starts, ends, composed)
        numbers = np.zeros_like(words)
        np.cumsum((words[1:] != words[:-1]) | (first[1:] != first[:-1]), out=numbers[1:])
        return np.stack([starts, ends], axis=1), numbers

    def _keeps(self, tokenizer: tokenizers.Tokenizer, text: str) -> bool:
        """Return whether the tokenizer's own words and offsets of a text are right, and cover all words of the text."""
        encoding = tokenizer.encode(text, add_special_tokens=False)
        own = (
            np.asarray(encoding.offsets, np.int32).reshape(-1, 2),
            np.asarray([-1 if word is None else word for word in encoding.word_ids], np.int32),
        )
        offsets, words = self.find(text, np.asarray(encoding.ids, np.int64), *own)
        return (
            np.array_equal(offsets, own[0])
            and np.array_equal(np.diff(words) > 0, np.diff(own[1]) != 0)
            and len({*words.tolist()}) >= len(_WORD.findall(_kinds(text)))
        )


_LOOK_AHEAD = 64  # code points to read after the last token; a truncated text has many more


def _kinds(text: str) -> bytes:
    """Return the kind of each code point, one byte each."""
    if text.isascii():
        return text.encode().translate(_ascii_table())
    return _table()[np.frombuffer(text.encode("utf-32-le"), np.uint32)].tobytes()


@functools.cache
def _ascii_table() -> bytes:
    return _table()[:256].tobytes()


@functools.cache
def _table() -> Kinds:
    """Return the kind of every code point, `[0x110000]`."""
    table = np.full(0x110000, ord("o"), np.uint8)
    categories = (unicodedata.category(chr(code)) for code in range(_ASSIGNED))
    kinds = "".join(map(_KINDS_OF_CATEGORY.__getitem__, categories))
    table[:_ASSIGNED] = np.frombuffer(kinds.encode(), np.uint8)
    for first, last in _WITHOUT_SPACES:
        part = table[ord(first) : ord(last) + 1]
        part[(part == ord("a")) | (part == ord("n"))] = ord("u")
    for kind, ranges in _KINDS_BETWEEN.items():
        for first, last in ranges:
            table[ord(first) : ord(last) + 1] = ord(kind)
    for kind, characters in _KINDS_OF.items():
        for character in characters:
            table[ord(character)] = ord(kind)
    return table


def _edges(matches: Iterable[re.Match[bytes]]) -> CharacterPositions:
    """Return start and end `[W, 2]` of each match."""
    edges = [edge for match in matches for edge in match.span()]
    return np.array(edges, np.int32).reshape(-1, 2)


def _widen(
    starts: CharacterPositions, ends: CharacterPositions, characters: CharacterPositions
) -> tuple[CharacterPositions, CharacterPositions]:
    """Move the edges that cut one of the `characters` `[k, 2]` to its edges, except edges of width 0."""
    filled = starts < ends
    first = np.searchsorted(characters[:, 1], starts, side="right")
    last = np.searchsorted(characters[:, 0], ends, side="left") - 1
    padded = np.vstack([characters, [[np.iinfo(np.int32).max, -1]]])  # for no character: -1 and k
    starts, ends = (
        np.where(filled, np.minimum(starts, padded[first, 0]), starts),
        np.where(filled, np.maximum(ends, padded[last, 1]), ends),
    )
    return starts, np.maximum(starts, ends)

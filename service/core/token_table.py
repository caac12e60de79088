"""The tokens of OpenAI's tokenizer `cl100k_base`, which some clients send in place of texts.

The table is a `.tiktoken` file: a line for each token, its bytes in base64 and its id.
"""

import base64
from collections.abc import Mapping, Sequence
from pathlib import Path

# Ids that have no bytes: https://github.com/openai/tiktoken/blob/main/tiktoken_ext/openai_public.py
SPECIAL_TOKENS = frozenset({100257, 100258, 100259, 100260, 100276})


class TokenTable:
    """The bytes of each token, by its id."""

    def __init__(self, tokens: Mapping[int, bytes]) -> None:
        self._tokens = tokens

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens without special tokens; bytes that are no UTF-8 become U+FFFD. Raises KeyError."""
        return b"".join(self._tokens[one] for one in ids if one not in SPECIAL_TOKENS).decode(
            errors="replace"
        )


def read_token_table(path: Path) -> TokenTable:
    """Read a `.tiktoken` file. Raises OSError, and ValueError for a line that is no token."""
    tokens: dict[int, bytes] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        match line.split():
            case []:
                continue
            case [encoded, rank] if rank.isdigit():
                try:
                    tokens[int(rank)] = base64.b64decode(encoded, validate=True)
                    continue
                except ValueError:
                    pass
        raise ValueError(
            f"line {number} is not a token in base64 and its id, as in a .tiktoken file"
        )
    if not tokens:
        raise ValueError("there is no token, as in a .tiktoken file")
    return TokenTable(tokens)

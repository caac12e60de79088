"""Train a tokenizer on a corpus: `python -m model.tokenizer OUT/tokenizer.json FILE... [--family F] [--vocab-size N]`.

The family decides the algorithm and the special tokens: WordPiece (Schuster and Nakajima 2012), byte-level BPE
(Sennrich et al. 2016, as in GPT-2), or a unigram model (Kudo 2018).
"""

import argparse
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from model.data import checksums
from model.families.bert_names import BERT
from model.families.registry import FAMILIES
from model.families.spec import Family

ALPHABET = 400  # different characters of word pieces; others are unknown


def train(
    texts: Iterable[str], vocab_size: int = 30522, lowercase: bool = True, family: Family = BERT
) -> tokenizers.Tokenizer:
    """Train a family's tokenizer on texts. Its special tokens get the first ids.

    The same texts give the same tokenizer; a unigram tokenizer may differ slightly, because the sums of its trainer
    differ in the last digits between processes.

    lowercase: WordPiece and unigram; it also strips accents, as BERT's uncased models do
    """
    tokenizer, specials = _untrained(family, lowercase), _specials(family)
    settings = {"vocab_size": vocab_size, "show_progress": False}
    match family.tokenizer:
        case "wordpiece":
            texts = list(texts)  # read twice
            letters, inner = _alphabet(texts, tokenizer)
            trainer = trainers.WordPieceTrainer(
                special_tokens=specials + inner,
                initial_alphabet=letters,
                limit_alphabet=len(letters),
                **settings,
            )
            tokenizer.train_from_iterator(texts, trainer)
            tokenizer = _with_pieces(
                tokenizer.get_vocab(with_added_tokens=False), family, lowercase
            )
        case "byte-level BPE":
            alphabet = pre_tokenizers.ByteLevel.alphabet()
            trainer = trainers.BpeTrainer(
                special_tokens=specials, initial_alphabet=alphabet, **settings
            )
            tokenizer.train_from_iterator(texts, trainer)
        case "unigram":
            unknown = family.special_tokens["unk"]
            trainer = trainers.UnigramTrainer(
                special_tokens=specials, unk_token=unknown, **settings
            )
            tokenizer.train_from_iterator(texts, trainer)
    _frame(tokenizer, family)
    return tokenizer


def _alphabet(texts: Iterable[str], tokenizer: tokenizers.Tokenizer) -> tuple[list[str], list[str]]:
    """Return the most frequent characters, and the word pieces (`##x`) of those that can continue a word.

    Otherwise the trainer numbers these pieces in an order that differs between processes, and merges equally frequent
    pairs by these numbers.
    """
    raw = Counter[str]()
    for text in texts:
        raw.update(text)
    cleaned = Counter[str]()
    for character, count in raw.items():
        for letter in tokenizer.normalizer.normalize_str(character):
            cleaned[letter] += count
    del cleaned[" "]
    letters = sorted(sorted(cleaned), key=lambda letter: -cleaned[letter])[:ALPHABET]
    clean, split = tokenizer.normalizer.normalize_str, tokenizer.pre_tokenizer.pre_tokenize_str
    inner = [f"##{letter}" for letter in sorted(letters) if len(split(clean(f"a{letter}"))) == 1]
    return sorted(letters), inner


def _with_pieces(
    vocabulary: Mapping[str, int], family: Family, lowercase: bool
) -> tokenizers.Tokenizer:
    """Return a WordPiece tokenizer with this vocabulary."""
    tokenizer = _untrained(family, lowercase)
    unknown = family.special_tokens["unk"]
    tokenizer.model = models.WordPiece(dict(vocabulary), unk_token=unknown)
    tokenizer.add_special_tokens(_specials(family))
    return tokenizer


def _specials(family: Family) -> list[str]:
    return list(dict.fromkeys(family.special_tokens.values()))


def _untrained(family: Family, lowercase: bool) -> tokenizers.Tokenizer:
    """Return a tokenizer with the family's normalizer, pre-tokenizer and decoder, and an empty model."""
    match family.tokenizer:
        case "wordpiece":
            tokenizer = tokenizers.Tokenizer(
                models.WordPiece(unk_token=family.special_tokens["unk"])
            )
            tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
            tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
            tokenizer.decoder = decoders.WordPiece(prefix="##")
        case "byte-level BPE":
            tokenizer = tokenizers.Tokenizer(models.BPE())
            tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
            tokenizer.decoder = decoders.ByteLevel()
        case "unigram":
            tokenizer = tokenizers.Tokenizer(models.Unigram())
            cased = [normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase()]
            tokenizer.normalizer = normalizers.Sequence(
                cased if lowercase else [normalizers.NFKC()]
            )
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
            tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def _frame(tokenizer: tokenizers.Tokenizer, family: Family) -> None:
    """Set the templates of special tokens for a text and for a pair."""
    single, pair = family.frame
    framing = processors.TemplateProcessing(
        single=single,
        pair=pair,
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in _specials(family)],
    )
    # The space before a word is not part of the word's offsets.
    if family.tokenizer == "byte-level BPE":
        framing = processors.Sequence([processors.ByteLevel(trim_offsets=True), framing])
    tokenizer.post_processor = framing


def main() -> None:
    from model.data.corpus import documents

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--vocab-size", type=int, default=30522)
    parser.add_argument("--cased", action="store_true", help="keep case and accents")
    parser.add_argument("--family", choices=FAMILIES, default=BERT.model_type)
    arguments = parser.parse_args()
    paragraphs = (paragraph for document in documents(arguments.files) for paragraph in document)
    try:
        for file in arguments.files:
            checksums.check(file)
        tokenizer = train(
            paragraphs, arguments.vocab_size, not arguments.cased, FAMILIES[arguments.family]
        )
    except (OSError, ValueError) as error:
        raise SystemExit(f"{error}") from None
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(arguments.out))
    print(f"{arguments.out}: {tokenizer.get_vocab_size()} tokens")


if __name__ == "__main__":
    main()

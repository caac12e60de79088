"""Train a WordPiece tokenizer on a corpus: `python -m model.tokenizer OUT/tokenizer.json FILE... [--vocab-size N]`."""

import argparse
from collections.abc import Iterable
from pathlib import Path

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

SPECIAL_TOKENS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]


def train(
    texts: Iterable[str], vocab_size: int = 30522, lowercase: bool = True
) -> tokenizers.Tokenizer:
    """A BERT tokenizer (WordPiece with `##` continuations) learnt from texts.

    lowercase: also strips accents, as BERT's uncased models do. Special tokens take the first five ids.
    """
    tokenizer = _around(models.WordPiece(unk_token="[UNK]"), lowercase)
    trainer = trainers.WordPieceTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        limit_alphabet=400,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    _frame(tokenizer)
    return tokenizer


def wordpiece(vocabulary: str, lowercase: bool = True) -> tokenizers.Tokenizer:
    """The tokenizer that an older checkpoint's `vocab.txt` stands for: one token a line, in order of their ids."""
    tokenizer = _around(models.WordPiece.from_file(vocabulary, unk_token="[UNK]"), lowercase)
    tokenizer.add_special_tokens(SPECIAL_TOKENS)
    _frame(tokenizer)
    return tokenizer


def _around(model: models.WordPiece, lowercase: bool) -> tokenizers.Tokenizer:
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece(prefix="##")
    return tokenizer


def _frame(tokenizer: tokenizers.Tokenizer) -> None:
    """[CLS] A [SEP], or [CLS] A [SEP] B [SEP] with segment 1 from B on."""
    cls, sep = tokenizer.token_to_id("[CLS]"), tokenizer.token_to_id("[SEP]")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", cls), ("[SEP]", sep)],
    )


def main() -> None:
    from model.corpus import documents

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--vocab-size", type=int, default=30522)
    parser.add_argument("--cased", action="store_true", help="keep case and accents")
    arguments = parser.parse_args()
    paragraphs = (paragraph for document in documents(arguments.files) for paragraph in document)
    tokenizer = train(paragraphs, arguments.vocab_size, lowercase=not arguments.cased)
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(arguments.out))
    print(f"{arguments.out}: {tokenizer.get_vocab_size()} tokens")


if __name__ == "__main__":
    main()

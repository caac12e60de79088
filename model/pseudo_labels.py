"""Label plain text by a teacher: `python -m model.pseudo_labels CHECKPOINT OUT FILE... [--texts N]`.

The teacher's labels are training rows for a student, next to rows that people labelled (Lee 2013, "Pseudo-Label").
They extend a small data set to texts of other kinds. A head of classification with a single label writes
`.jsonl.gz`, a head of ner `.conll.gz`; both are formats that training reads.
"""

import argparse
import json
import random
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from model import evaluate
from model.checkpoints.source import read_source
from model.data import checksums, head_rows
from model.data.corpus import documents, sentences
from model.data.labelled_rows import Sentence, Text
from model.heads import EncoderWithHeads
from model.training import optim
from service.core import decode, tags
from service.core.data_files.rows import parse_json
from service.core.data_files.text_files import DataError, read_lines, write_gzip
from service.core.encode import Encoder
from service.core.manifest import Head

WORDS = (4, 60)  # of a text
CHUNK = 2048  # texts that are labelled at once
SUFFIXES = {"classification": ".jsonl.gz", "ner": ".conll.gz"}

# A word as in CoNLL-2003: initials with their full stops, a word with inner marks, or one other mark.
WORD = re.compile(r"(?:[A-Z]\.){2,}|\w+(?:[-'’.,&/]\w+)*|[^\w\s]")


def read_passages(file: Path) -> Iterator[list[str]]:
    """Yield the sentences of each paragraph of text, or of the `text` of each JSON line. Raises DataError."""
    if ".jsonl" in file.suffixes:
        for number, line in read_lines(file):
            if line.strip():
                yield sentences(_text_of(f"{file}:{number}", line))
        return
    for paragraphs in documents([file]):
        yield from map(sentences, paragraphs)


def _text_of(where: str, line: str) -> str:
    text = parse_json(where, line).get("text")
    if not isinstance(text, str):
        raise DataError(f"{where}: no text")
    return text


def choose_texts(files: Sequence[Path], count: int, longest: int, seed: int) -> list[str]:
    """Return `count` different texts, or all if there are fewer, evenly from each file, in an order of the seed.

    longest: the largest number of adjacent sentences of a text; every number from 1 on is equally frequent
    """
    rng = random.Random(seed)
    chosen: dict[str, None] = {}
    for number, file in enumerate(files, start=1):
        found = list(dict.fromkeys(_join(read_passages(file), longest, rng)))
        rng.shuffle(found)
        share = count * number // len(files) - len(chosen)
        chosen |= dict.fromkeys([text for text in found if text not in chosen][:share])
    texts = list(chosen)
    rng.shuffle(texts)
    return texts


def _join(passages: Iterable[list[str]], longest: int, rng: random.Random) -> Iterator[str]:
    for passage in passages:
        start = 0
        while start < len(passage):
            end = start + rng.randint(1, longest)
            text = " ".join(passage[start:end])
            if WORDS[0] <= len(text.split()) <= WORDS[1]:
                yield text
            start = end


def label_texts(
    model: EncoderWithHeads, encoder: Encoder, name: str, texts: Sequence[str], min_score: float
) -> Iterator[Text]:
    """Yield the texts with the label of a classification head, without those whose score is below `min_score`."""
    head = model.described[name]
    rows = [Text(str(number), text, None) for number, text in enumerate(texts)]
    for row, (text, logits) in zip(rows, _outputs(model, encoder, name, rows), strict=True):
        lengths = [len(window) for window in text.windows]
        (best,) = decode.classify(
            logits, lengths, labels=head.labels, problem_type=head.problem_type, top_k=1
        )
        if best.score >= min_score:
            yield Text(row.where, row.text, None, labels=(best.label,))


def tag_texts(
    model: EncoderWithHeads, encoder: Encoder, name: str, texts: Sequence[str], min_score: float
) -> Iterator[Sentence]:
    """Yield the texts as words with BIO tags, without texts that have a token's score below `min_score`."""
    head = model.described[name]
    split = [WORD.findall(text) for text in texts]
    rows = [
        Sentence(str(number), words, [tags.OUTSIDE] * len(words))
        for number, words in enumerate(split)
        if words
    ]
    for row, (text, logits) in zip(rows, _outputs(model, encoder, name, rows), strict=True):
        scores = [
            decode.softmax(window[encoding.sequence == 0]).max(axis=-1)
            for window, encoding in zip(logits, text.windows, strict=True)
        ]
        if np.concatenate(scores).min(initial=1.0) >= min_score:
            found = evaluate.word_tags(row, text.windows, logits, head.labels)
            yield Sentence(row.where, row.words, found)


def _outputs(
    model: EncoderWithHeads, encoder: Encoder, name: str, rows: Sequence[Any]
) -> evaluate.HeadOutputs:
    run = evaluate.torch_run(model, [name])
    return evaluate.head_outputs(run, encoder, model.described[name], name, rows, evaluate.STRIDE)


def find_head(model: EncoderWithHeads, name: str) -> str:
    """Return the head of this name, or without a name the only one that can label text. Raises ValueError."""
    able = [each for each, head in model.described.items() if _gives_one_label(head)]
    if not able:
        raise ValueError(
            f"no head gives a text one label or each word a tag: {', '.join(model.described)}"
        )
    if name and name not in able:
        raise ValueError(f"--head {name}: not one of {', '.join(able)}")
    if not name and len(able) > 1:
        raise ValueError(f"--head: the checkpoint has several: {', '.join(able)}")
    return name or able[0]


def _gives_one_label(head: Head) -> bool:
    if head.task == "classification":
        return head.problem_type in (None, head_rows.SINGLE_LABEL) and len(head.labels) > 1
    return head.task in SUFFIXES


def as_lines(row: Text | Sentence) -> str:
    """Return a row as the lines of its file."""
    if isinstance(row, Text):
        return json.dumps({"text": row.text, "label": row.labels[0]}, ensure_ascii=False) + "\n"
    lines = (f"{word} {tag}\n" for word, tag in zip(row.words, row.tags, strict=True))
    return "".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m model.pseudo_labels", description=__doc__)
    parser.add_argument("checkpoint", help="the teacher: a directory or a hub name")
    parser.add_argument("out", type=Path, help="a .jsonl.gz or .conll.gz file")
    parser.add_argument(
        "files",
        type=Path,
        nargs="+",
        help="plain text, or JSON lines with a text each (.jsonl, .jsonl.gz)",
    )
    parser.add_argument("--head", default="", help="of the teacher, where it has several")
    parser.add_argument("--texts", type=int, default=20_000, metavar="N")
    parser.add_argument(
        "--sentences", type=int, default=1, help="largest number of adjacent sentences of a text"
    )
    parser.add_argument(
        "--min-score", type=float, default=0.0, help="leave out texts with a score below this"
    )
    parser.add_argument("--max-length", type=int, default=128, help="tokens of a window")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    for option in ("texts", "sentences"):
        if getattr(arguments, option) < 1:
            parser.error(f"--{option}: {getattr(arguments, option)} is below 1")
    try:
        source = read_source(arguments.checkpoint)
        model = source.model.to(optim.pick_device())
        name = find_head(model, arguments.head)
        task = model.described[name].task
        if not arguments.out.name.endswith(SUFFIXES[task]):
            raise ValueError(f"{arguments.out}: rows of {task} are written to {SUFFIXES[task]}")
        for file in arguments.files:
            checksums.check(file)
        texts = choose_texts(arguments.files, arguments.texts, arguments.sentences, arguments.seed)
    except (OSError, ValueError) as error:
        raise SystemExit(f"{error}") from None
    encoder = Encoder(source.tokenizer, min(arguments.max_length, source.max_length))
    label = label_texts if task == "classification" else tag_texts
    rows = (
        row
        for start in range(0, len(texts), CHUNK)
        for row in label(model, encoder, name, texts[start : start + CHUNK], arguments.min_score)
    )
    count = write_gzip(arguments.out, map(as_lines, rows))
    if not count:
        arguments.out.unlink()
        raise SystemExit(f"none of {len(texts):,} texts has scores of {arguments.min_score:g}")
    print(f"{arguments.out}: {count:,} of {len(texts):,} texts")


if __name__ == "__main__":
    main()

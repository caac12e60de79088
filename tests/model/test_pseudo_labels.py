"""Plain text that a teacher labels becomes rows that training reads, with the labels that the service would give."""

import json
import random
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from model import pseudo_labels
from model.checkpoints import writer
from model.checkpoints.source import read_source
from model.data import labelled_rows
from model.heads import EncoderWithHeads
from service.core import decode
from service.core.data_files.text_files import read_text, write_gzip
from service.core.encode import Encoder
from service.core.manifest import Head
from tests.model.helpers import perturb, shape

HEADS = {
    "tone": Head(task="classification", labels=("bad", "good")),
    "names": Head(task="ner", labels=("O", "B-PER", "I-PER")),
    "several": Head(
        task="classification", labels=("a", "b"), problem_type="multi_label_classification"
    ),
    "vectors": Head(task="embedding", pooling="mean", dimensions=32),
}
TEXT = "Ada drew a comet. Grace sold the old engine!\n\nEmmy forgot it at dawn? Mary painted every river twice.\n"


def save(folder: Path, tokenizer_file: Path, *names: str) -> Path:
    """Write an untrained teacher with some of HEADS."""
    torch.manual_seed(0)
    model = EncoderWithHeads(shape(vocab_size=200), {name: HEADS[name] for name in names})
    perturb(model)
    if len(names) == 1:
        writer.save_head(folder, model, names[0], tokenizer_file)
    else:
        writer.save_joint(folder, model, tokenizer_file)
    return folder


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Run the script with these arguments."""

    def call(*arguments: object) -> None:
        monkeypatch.setattr(sys, "argv", ["model.pseudo_labels", *map(str, arguments)])
        pseudo_labels.main()

    return call


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "some.txt"
    path.write_text(TEXT, encoding="utf-8")
    return path


def test_labels_are_those_of_the_service(tmp_path, tokenizer_file, text_file, run):
    """Each sentence is a row with the label that the service's decoding ranks first."""
    checkpoint = save(tmp_path / "teacher", tokenizer_file, *HEADS)
    out = tmp_path / "tone.jsonl.gz"
    run(checkpoint, out, text_file, "--head", "tone")
    rows = labelled_rows.read(out, "classification")
    assert sorted(row.text for row in rows) == [
        "Ada drew a comet.",
        "Emmy forgot it at dawn?",
        "Grace sold the old engine!",
        "Mary painted every river twice.",
    ]
    model = read_source(str(checkpoint)).model
    encoder = Encoder.from_file(tokenizer_file, 64)
    for row in rows:
        (encoded,) = encoder.texts([row.text])
        logits = pseudo_labels.evaluate.torch_run(model, ["tone"])(encoded.windows)
        (best,) = decode.classify(
            [logits[0]["tone"]],
            [len(encoded.windows[0])],
            labels=HEADS["tone"].labels,
            problem_type=None,
            top_k=1,
        )
        assert row.labels == (best.label,)


def test_tags_are_read_as_rows_of_ner(tmp_path, tokenizer_file, text_file, run):
    """Marks are words of their own, as in CoNLL-2003, and the only head needs no name."""
    out = tmp_path / "names.conll.gz"
    run(save(tmp_path / "teacher", tokenizer_file, "names"), out, text_file)
    rows = labelled_rows.read(out, "ner")
    assert sorted(row.text for row in rows)[0] == "Ada drew a comet ."
    assert {tag for row in rows for tag in row.tags} <= {*HEADS["names"].labels}
    assert len({tag for row in rows for tag in row.tags}) > 1  # the teacher does not only say O


def test_the_same_command_writes_the_same_bytes(tmp_path, tokenizer_file, text_file, run):
    checkpoint = save(tmp_path / "teacher", tokenizer_file, "tone")
    files = [tmp_path / "a.jsonl.gz", tmp_path / "b.jsonl.gz"]
    for file in files:
        run(checkpoint, file, text_file, "--sentences", 2)
    assert files[0].read_bytes() == files[1].read_bytes()


@pytest.mark.parametrize("name", ["tone", "names"])
def test_uncertain_texts_are_left_out(name, tmp_path, tokenizer_file, text_file, run):
    """The score of a text is its label's, or the lowest of its tokens'; no text leaves no file."""
    checkpoint = save(tmp_path / "teacher", tokenizer_file, name)
    task = HEADS[name].task
    out = tmp_path / f"some{pseudo_labels.SUFFIXES[task]}"
    with pytest.raises(SystemExit, match="none of 4 texts has scores of 1"):
        run(checkpoint, out, text_file, "--min-score", 1)
    assert not out.exists()
    run(checkpoint, out, text_file)
    label = pseudo_labels.label_texts if task == "classification" else pseudo_labels.tag_texts
    model = read_source(str(checkpoint)).model
    head = pseudo_labels.find_head(model, "")
    texts = pseudo_labels.choose_texts([text_file], 9, 1, seed=1)
    encoder = Encoder.from_file(tokenizer_file, 64)
    kept = [sum(1 for _ in label(model, encoder, head, texts, score / 100)) for score in range(101)]
    assert kept[0] == len(texts) == 4
    assert kept[-1] == 0
    assert kept == sorted(kept, reverse=True)


def test_a_text_has_one_to_several_sentences_of_a_paragraph(tmp_path):
    """No sentence is in two texts, and no text spans two paragraphs."""
    path = tmp_path / "many.txt"
    sentences = [[f"This is sentence {i} of paragraph {j}." for i in range(7)] for j in range(40)]
    path.write_text("\n".join(" ".join(each) for each in sentences), encoding="utf-8")
    texts = pseudo_labels.choose_texts([path], 1000, 3, seed=1)
    counts = [text.count("sentence") for text in texts]
    assert {*counts} == {1, 2, 3}
    assert sum(counts) == 7 * 40
    for text in texts:
        numbers = {part.split(".")[0] for part in text.split(" of paragraph ")[1:]}
        assert len(numbers) == 1


def test_texts_come_evenly_from_each_file(tmp_path):
    """A long file does not displace a short one, and a text of both files is one text."""
    files = []
    for name, count in (("long", 300), ("short", 20)):
        files.append(tmp_path / f"{name}.txt")
        lines = [f"The {name} file has this as line {i}." for i in range(count)]
        files[-1].write_text("\n".join([*lines, "Both of the files have this."]), encoding="utf-8")
    texts = pseudo_labels.choose_texts(files, 20, 1, seed=1)
    assert len(texts) == len({*texts}) == 20
    assert sum("long" in text for text in texts) >= 9
    assert sum("short" in text for text in texts) >= 9


def test_texts_of_json_lines_are_sentences(tmp_path):
    """Labels are ignored, and may be missing; very short and very long sentences are left out."""
    path = tmp_path / "reviews.jsonl.gz"
    long = " ".join(["very"] * 80)
    rows = [
        {"text": f"We liked the food a lot. Good. It was {long} nice.", "label": "x"},
        {"text": "The soup was cold again."},
    ]
    write_gzip(path, [json.dumps(row) + "\n" for row in rows])
    texts = pseudo_labels.choose_texts([path], 10, 1, seed=1)
    assert sorted(texts) == ["The soup was cold again.", "We liked the food a lot."]


def test_a_row_without_a_text_is_named(tmp_path, tokenizer_file, run):
    path = tmp_path / "reviews.jsonl"
    path.write_text('{"text": "The soup was cold again."}\n{"label": "x"}\n', encoding="utf-8")
    checkpoint = save(tmp_path / "teacher", tokenizer_file, "tone")
    with pytest.raises(SystemExit, match=r"reviews\.jsonl:2: no text"):
        run(checkpoint, tmp_path / "a.jsonl.gz", path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["a.jsonl.gz"], "--head: the checkpoint has several: tone, names"),
        (["a.jsonl.gz", "--head", "several"], "--head several: not one of tone, names"),
        (["a.jsonl.gz", "--head", "names"], r"rows of ner are written to \.conll\.gz"),
        (["a.conll.gz", "--head", "tone"], r"rows of classification are written to \.jsonl\.gz"),
    ],
)
def test_wrong_arguments_are_one_line(arguments, message, tmp_path, tokenizer_file, text_file, run):
    checkpoint = save(tmp_path / "teacher", tokenizer_file, *HEADS)
    out, *options = arguments
    with pytest.raises(SystemExit, match=message):
        run(checkpoint, tmp_path / out, text_file, *options)
    assert not (tmp_path / out).exists()


def test_a_teacher_without_labels_is_refused(tmp_path, tokenizer_file, text_file, run):
    checkpoint = save(tmp_path / "teacher", tokenizer_file, "vectors")
    with pytest.raises(SystemExit, match="no head gives a text one label or each word a tag"):
        run(checkpoint, tmp_path / "a.jsonl.gz", text_file)


def test_words_keep_initials_and_inner_marks():
    """As CoNLL-2003 has them."""
    text = 'The U.S. envoy, Jean-Luc O\'Neil, paid 1,200.50 for "AT&T".'
    spaced = 'The U.S. envoy , Jean-Luc O\'Neil , paid 1,200.50 for " AT&T " .'
    assert pseudo_labels.WORD.findall(text) == spaced.split()


def test_gzip_files_have_no_time(tmp_path):
    """The number of parts is returned, and folders are made."""
    rng = random.Random(0)
    parts = [f"{rng.random()}\n" for _ in range(5)]
    path = tmp_path / "new" / "a.txt.gz"
    assert write_gzip(path, parts) == 5
    assert read_text(path) == "".join(parts)
    assert path.read_bytes()[4:8] == bytes(4)  # the modification time of RFC 1952

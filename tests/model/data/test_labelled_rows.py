"""Fine-tuning data is read from the formats people have, and what is wrong with it is named."""

import gzip
import json
import lzma
from pathlib import Path

import pytest

from model.data import labelled_rows
from model.data.labelled_rows import DataError, Similar, Text


def write(path: Path, *lines: object) -> Path:
    """A file of lines; what is no string is written as JSON."""
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text(text + "\n", encoding="utf-8")
    return path


def squad(path: Path, *questions: dict[str, object], context: str = "Ada drew it.") -> Path:
    paragraph = {"context": context, "qas": list(questions)}
    return write(path, {"data": [{"title": "t", "paragraphs": [paragraph]}]})


def test_a_label_may_be_a_string_or_a_number(tmp_path):
    """Labels are strings from here on."""
    path = write(
        tmp_path / "a.jsonl",
        {"text": "a", "label": "x"},
        {"text": "b", "text_pair": "c", "label": 1},
    )
    assert labelled_rows.read(path, "classification") == [
        Text(f"{path}:1", "a", None, ("x",)),
        Text(f"{path}:2", "b", "c", ("1",)),
    ]


def test_several_labels_may_hold_together(tmp_path):
    """A multi-label row has a list, which may be empty."""
    path = write(
        tmp_path / "a.jsonl", {"text": "a", "labels": ["x", "y"]}, {"text": "b", "labels": []}
    )
    found = labelled_rows.read(path, "classification", "multi_label_classification")
    assert [row.labels for row in found] == [("x", "y"), ()]


@pytest.mark.parametrize("name", ["label", "score"])
def test_a_regression_has_a_number(tmp_path, name):
    """The number may be called label or score."""
    path = write(tmp_path / "a.jsonl", {"text": "a", name: 2.5}, {"text": "b", name: 3})
    assert [row.score for row in labelled_rows.read(path, "classification", "regression")] == [
        2.5,
        3.0,
    ]


def test_packed_files_are_unpacked(tmp_path):
    """A name that ends in .gz says so; empty lines are no rows."""
    path = tmp_path / "a.jsonl.gz"
    path.write_bytes(gzip.compress(b'{"text": "caf\xc3\xa9", "label": "x"}\n\n'))
    assert [row.text for row in labelled_rows.read(path, "classification")] == ["café"]


def test_sentences_of_several_columns(tmp_path):
    """Phrases, comments, -DOCSTART- lines and repeated empty lines do not matter."""
    path = write(
        tmp_path / "a.conll",
        "-DOCSTART- -X- O O",
        "",
        "Ada NNP I-NP B-PER",
        "sold\tVBD\tB-VP\tO",
        "",
        "",
        "# a comment",
        "Turin NNP I-NP B-LOC",
    )
    first, second = labelled_rows.read(path, "ner")
    assert (first.words, first.tags, first.where) == (["Ada", "sold"], ["B-PER", "O"], f"{path}:3")
    assert (second.words, second.tags, second.where) == (["Turin"], ["B-LOC"], f"{path}:8")
    assert (first.text, first.starts.tolist()) == ("Ada sold", [0, 4])


@pytest.mark.parametrize(
    ("lines", "words", "tags"),
    [
        (["1 EU NNP I-NP I-ORG", "2 rejects VBZ I-VP O"], ["EU", "rejects"], ["B-ORG", "O"]),
        (["1\tEU\tB-ORG", "2\trejects\tO"], ["EU", "rejects"], ["B-ORG", "O"]),
        (["B-ORG\tEU", "O\trejects"], ["EU", "rejects"], ["B-ORG", "O"]),
        (["New York\tB-LOC", "10 000\tO"], ["New York", "10 000"], ["B-LOC", "O"]),
        (["en:Berlin\tB-LOC", "en::\tO"], ["Berlin", ":"], ["B-LOC", "O"]),
        (["en:Berlin B-LOC", "fr:is O"], ["en:Berlin", "fr:is"], ["B-LOC", "O"]),
        (["EU I-NP", "rejects I-VP"], ["EU", "rejects"], ["B-NP", "B-VP"]),
        (["# O", "a W-X", "b M-X", "c E-X"], ["#", "a", "b", "c"], ["O", "B-X", "B-X", "I-X"]),
    ],
)
def test_columns_by_their_content(tmp_path, caplog, lines, words, tags):
    """Numbers and phrases are none of them; what is not plainly two columns is reported in one line."""
    path = write(tmp_path / "a.bio", *lines)
    [row] = labelled_rows.read(path, "ner")
    assert (row.words, row.tags) == (words, tags)
    is_plain = len(lines[0].split("\t" if "\t" in lines[0] else " ")) == 2 and words[0] != "Berlin"
    assert len(caplog.messages) == (0 if is_plain else 1)


def test_two_columns_of_tags(tmp_path):
    """The error lists the columns, and a number after the file's name chooses."""
    path = write(tmp_path / "a.tsv", "1\tBonn\tB-ORG\tB-LOC", "2\twon\tO\tO")
    message = (
        r"a\.tsv: .* unclear: 1 \('1', '2'\), 2 \('Bonn', 'won'\), 3 .*, such as \?tokens=2&tags=3"
    )
    with pytest.raises(DataError, match=message):
        labelled_rows.read(path, "ner")
    [row] = labelled_rows.read(f"{path}?tokens=2&tags=3", "ner")
    assert (row.words, row.tags) == (["Bonn", "won"], ["B-ORG", "O"])


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["Bonn B-LOC", "10 000 O"], "a.conll:2: 3 columns, and line 1 has 2"),
        (["Bonn B-LOC", "won"], "a.conll:2: not a token and its tag .*: 'won'"),
        (["Bonn LOC", "won O"], "a.conll:1: not a token and its tag"),
        ([""], "no rows"),
    ],
)
def test_wrong_columns(tmp_path, lines, message):
    with pytest.raises(DataError, match=message):
        labelled_rows.read(write(tmp_path / "a.conll", *lines), "ner")


WORD_ROWS = {
    "lines.csv": ["word,tag", "New York,B-LOC", '",",O', "", "Ada,B-PER"],
    "rows.csv": ["tokens;tags", "New York;B-LOC", ",;O", ";", "Ada;B-PER"],
    "numbers.csv": ["sentence_id,Word,Tag", "1,New York,B-LOC", '1,",",O', "2,Ada,B-PER"],
    "first.csv": ["Sentence #,Word,POS,Tag", "1,New York,NNP,B-LOC", ',",",:,O', "2,Ada,NNP,B-PER"],
    "lines.tsv": ["word\ttag", "New York\tB-LOC", ",\tO", "", "Ada\tB-PER"],
    "lines.conll": ["token\tner_tag", "New York\tB-LOC", ",\tO", "", "Ada\tB-PER"],
}


@pytest.mark.parametrize("name", WORD_ROWS)
def test_a_word_in_each_row(tmp_path, name):
    """An empty line or row ends a sentence, or the column with its number."""
    first, second = labelled_rows.read(write(tmp_path / name, *WORD_ROWS[name]), "ner")
    assert (first.words, first.tags) == (["New York", ","], ["B-LOC", "O"])
    assert (second.words, second.tags) == (["Ada"], ["B-PER"])


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (["Ada,B-PER", "won,O"], "a.csv: nothing ends a sentence: add empty lines, or a column"),
        (["Ada,B-PER", "", ",O"], "a.csv:4: no word: fill the cell, or remove the row"),
        (["Ada,B-PER", "", "won,"], "a.csv:4: no tag: fill the cell, or remove the row"),
        (["Ada,B-PER", "", "won,X"], "a.csv:4: a tag may not be 'X'"),
    ],
)
def test_wrong_rows_of_words(tmp_path, lines, message):
    with pytest.raises(DataError, match=message):
        labelled_rows.read(write(tmp_path / "a.csv", "word,tag", *lines), "ner")


def test_a_word_may_hold_blanks_of_other_kinds(tmp_path):
    """Only blanks and tabs part columns, not a no-break space."""
    path = write(tmp_path / "a.txt", "10\N{NO-BREAK SPACE}000 O")
    assert labelled_rows.read(path, "ner")[0].words == ["10\N{NO-BREAK SPACE}000"]


@pytest.mark.parametrize(
    ("tags", "bio"),
    [
        ("O I-PER I-PER O", "O B-PER I-PER O"),
        ("I-PER I-LOC", "B-PER B-LOC"),
        ("I-PER B-PER I-PER", "B-PER B-PER I-PER"),
        ("B-PER I-PER O B-PER", "B-PER I-PER O B-PER"),
    ],
)
def test_every_entity_begins_with_b(tags, bio):
    """IOB1 becomes BIO, and BIO stays what it is."""
    assert labelled_rows.to_bio(tags.split()) == bio.split()


def test_scores_have_to_vary(tmp_path):
    """Equal scores are refused, because they do not say whether the pairs are alike."""
    pair = {"text": "a", "text_pair": "b", "score": 5}
    path = write(tmp_path / "a.jsonl", {"texts": ["c", "d"]}, pair, pair)
    with pytest.raises(DataError, match=r"a\.jsonl: all scores are 5"):
        labelled_rows.read(path, "embedding")


def test_texts_that_say_the_same_have_no_score(tmp_path):
    """Captions of one picture, and entailed pairs; pairs with another label are left out."""
    pair = {"text": "a", "text_pair": "b"}
    path = write(
        tmp_path / "a.jsonl",
        {"texts": ["x", "y", "z"]},
        {**pair, "label": "entailment"},
        {**pair, "label": "neutral"},
    )
    assert labelled_rows.read(path, "embedding") == [
        Similar(f"{path}:1", ("x", "y", "z"), None),
        Similar(f"{path}:2", ("a", "b"), None),
    ]


def test_anchors_have_a_positive_and_any_negatives(tmp_path):
    """One by name, a list, several by number, or none; what is null is not there."""
    pair = {"anchor": "a", "positive": "p"}
    path = write(
        tmp_path / "a.jsonl",
        pair,
        {**pair, "negative": "n"},
        {**pair, "negatives": ["n", "m"]},
        {**pair, "negative_1": "n", "negative_2": "m", "negative_3": None},
        {"query": "a", "pos": ["p"], "neg": ["n", "m"]},
    )
    found = labelled_rows.read(path, "embedding")
    assert [row.negatives for row in found] == [(), ("n",), *[("n", "m")] * 3]
    assert {(row.texts, row.score) for row in found} == {(("a", "p"), None)}


PACKED = gzip.compress(b'{"text": "a", "label": "x"}\n' * 9, mtime=0)


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("a.jsonl.gz", PACKED[:-12], "ended before"),
        ("a.jsonl.gz", PACKED[:-6] + bytes(6), "CRC"),
        ("a.jsonl.gz", PACKED[:10] + b"\xff" * 20, "decompressing"),
        ("a.jsonl.gz", b"text", "Not a gzipped file"),
        ("a.jsonl.xz", lzma.compress(b"a")[:-1], "ended before"),
        ("a.jsonl.xz", b"text", "not supported"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, name, content, reason):
    """The error names the file for every error of the decompressing library, at any position."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=rf"{name} cannot be read beyond line \d: .*{reason}"):
        labelled_rows.read(tmp_path / name, "classification")


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        (
            ["a\tp", "b\tq"],
            "t.tsv:1: .* no text .*the columns are a, p. Say which is which: 'FILE.text=COLUMN&",
        ),
        (["anchor\tpositive", "a\t"], "t.tsv:2: no positive"),
        (["text\ttext_pair\tscore", "a\tb\thigh"], "t.tsv:2: score may not be 'high'"),
        ([""], "t.tsv: no rows"),
        (["anchor\tpositive"], "t.tsv: no rows"),
    ],
)
def test_errors_of_tables_name_the_line(tmp_path, lines, reason):
    """What is in the wrong column is never guessed at."""
    with pytest.raises(DataError, match=reason):
        labelled_rows.read(write(tmp_path / "t.tsv", *lines), "embedding")


@pytest.mark.parametrize(
    ("task", "line", "reason"),
    [
        ("embedding", '{"anchor": "a"}', "no positive"),
        ("embedding", '{"positive": "p"}', "no anchor"),
        ("embedding", '{"anchor": "a", "positive": " "}', "must be strings, not blank"),
        ("embedding", '{"query": "a", "pos": ["p", "q"]}', "2 positives: write a row for each"),
        ("embedding", '{"anchor": "a", "positive": "p", "negative": ""}', "not blank"),
        ("embedding", '{"anchor": "a", "positive": "p", "negatives": ["n", 1]}', "must be strings"),
        ("embedding", '{"anchor": "a", "positive": "p", "negative": 1}', "negative may not be 1"),
        ("embedding", '{"anchor": "a", "positive": "p", "negative": "p"}', "both positive and neg"),
        ("classification", '{"text": "a"', "not JSON"),
        ("classification", "[1]", "not a JSON object"),
        ("classification", '{"label": "x"}', "no text"),
        ("classification", '{"text": 1, "label": "x"}', "text may not be 1"),
        ("classification", '{"text": "a", "label": true}', "label may not be True"),
        ("ner", "Ada", "not a token and its tag"),
        ("ner", "Ada PER", "not a token and its tag"),
        ("ner", "Ada X-PER", "not a token and its tag"),
        ("embedding", '{"texts": ["a"]}', "two or more strings"),
        ("embedding", '{"text": "a", "text_pair": "b", "score": "5"}', "score may not be '5'"),
    ],
)
def test_errors_name_the_line(tmp_path, task, line, reason):
    """The first line is right, the second is not."""
    right = {"ner": "Ada B-PER", "embedding": {"texts": ["a", "b"]}}
    path = write(tmp_path / "a.data", right.get(task, {"text": "a", "label": "x"}), line)
    with pytest.raises(DataError, match=f"a.data:2: .*{reason}"):
        labelled_rows.read(path, task)


def test_errors_name_the_question(tmp_path):
    """SQuAD's files are one long line, so an error says which question it is."""
    path = squad(
        tmp_path / "a.json", {"id": "q7", "question": "Who?", "answers": [{"text": "Ada"}]}
    )
    with pytest.raises(DataError, match="question 'q7': no answer_start"):
        labelled_rows.read(path, "qa")

"""Data sets in the hub's layout become the rows that the same data would be in files."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import huggingface_hub
import pytest
from datasets import ClassLabel, Dataset, Features, List, Value

from model.data import hf_datasets, labelled_rows
from model.data.checksums import DataError
from model.data.labelled_rows import QuestionRow, Similar, Text

STRING, FLOAT = Value("string"), Value("float32")
POLARITY = ClassLabel(names=["negative", "positive"])
ENTAILED = ClassLabel(names=["entailment", "neutral", "contradiction"])


@pytest.fixture(autouse=True)
def _no_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make no request to the hub, and cache prepared data in a temporary folder."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    hf_datasets._load.cache_clear()
    yield
    hf_datasets._load.cache_clear()


def parquet(folder: Path, features: dict[str, Any], *given: dict[str, Any]) -> Path:
    """A data set of one split, whose file itself says what its columns are."""
    folder.mkdir()
    Dataset.from_list(list(given), Features(features)).to_parquet(folder / "train.parquet")
    return folder


def test_texts_have_the_names_of_their_classes(tmp_path):
    """Rows like SST-2's, with an unused column; a label of -1 means no label."""
    folder = parquet(
        tmp_path / "set",
        {"idx": Value("int32"), "sentence": STRING, "label": POLARITY},
        {"idx": 0, "sentence": "good", "label": 1},
        {"idx": 1, "sentence": "who knows", "label": -1},
        {"idx": 2, "sentence": "bad", "label": 0},
    )
    name = f"hub:{folder}/train"
    assert labelled_rows.read(name, "classification") == [
        Text(f"{name}: row 0", "good", None, ("positive",)),
        Text(f"{name}: row 2", "bad", None, ("negative",)),
    ]


def test_labels_without_names_may_be_none_too(tmp_path, caplog):
    """-1 is no class, but it is a number. Rows without a label are counted in the log."""
    columns = {"text": STRING, "label": Value("int64")}
    given = [{"text": text, "label": label} for text, label in (("a", 1), ("b", -1), ("c", 0))]
    name = f"hub:{parquet(tmp_path / 'set', columns, *given)}/train"
    assert [row.labels for row in labelled_rows.read(name, "classification")] == [("1",), ("0",)]
    assert [f"{name}: rows left out because they have no label: 1"] == caplog.messages
    found = labelled_rows.read(name, "classification", "regression")
    assert [row.score for row in found] == [1.0, -1.0, 0.0]


@pytest.mark.parametrize(
    "names",
    [
        ("text", "text_pair"),
        ("premise", "hypothesis"),
        ("sentence1", "sentence2"),
        ("question1", "question2"),
        ("question", "sentence"),
    ],
)
def test_pairs_have_many_names(tmp_path, names):
    """Pairs are classified, or are positives of each other."""
    first, second = names
    columns = {second: STRING, first: STRING, "label": ENTAILED}
    folder = parquet(
        tmp_path / "set",
        columns,
        {first: "a", second: "b", "label": 0},
        {first: "c", second: "d", "label": 1},
    )
    name = f"hub:{folder}/train"
    assert labelled_rows.read(name, "classification") == [
        Text(f"{name}: row 0", "a", "b", ("entailment",)),
        Text(f"{name}: row 1", "c", "d", ("neutral",)),
    ]
    assert labelled_rows.read(name, "embedding") == [Similar(f"{name}: row 0", ("a", "b"), None)]


def test_several_labels_are_names_too(tmp_path):
    folder = parquet(
        tmp_path / "set",
        {"text": STRING, "labels": List(POLARITY)},
        {"text": "a", "labels": [0, 1]},
        {"text": "b", "labels": []},
    )
    found = labelled_rows.read(
        f"hub:{folder}/train", "classification", "multi_label_classification"
    )
    assert [("negative", "positive"), ()] == [row.labels for row in found]


@pytest.mark.parametrize(("feature", "label"), [(FLOAT, 0.5), (POLARITY, 1)])
def test_grades_are_numbers(tmp_path, feature, label):
    """Of a class its number counts, where texts are graded."""
    folder = parquet(
        tmp_path / "set", {"text": STRING, "label": feature}, {"text": "a", "label": label}
    )
    assert [label] == [
        row.score
        for row in labelled_rows.read(f"hub:{folder}/train", "classification", "regression")
    ]


@pytest.mark.parametrize("score", ["score", "similarity_score", "label"])
def test_pairs_may_be_scored(tmp_path, score):
    """In STS-B's forms; a score becomes one from 0 to 1."""
    folder = parquet(
        tmp_path / "set",
        {"sentence1": STRING, "sentence2": STRING, score: FLOAT},
        *({"sentence1": "a", "sentence2": "b", score: value} for value in (1, 5, 2)),
    )
    found = labelled_rows.read(f"hub:{folder}/train", "embedding")
    assert [("a", "b")] * 3 == [row.texts for row in found]
    assert [0.0, 1.0, 0.25] == [row.score for row in found]


@pytest.mark.parametrize("tags", ["ner_tags", "tags"])
def test_tokens_have_the_names_of_their_tags(tmp_path, tags):
    """IOB1 becomes BIO, as it does from files."""
    folder = parquet(
        tmp_path / "set",
        {"tokens": List(STRING), tags: List(ClassLabel(names=["O", "B-PER", "I-PER"]))},
        {"tokens": ["Ada", "Byron", "sat"], tags: [2, 2, 0]},
    )
    (found,) = labelled_rows.read(f"hub:{folder}/train", "ner")
    assert (["Ada", "Byron", "sat"], ["B-PER", "I-PER", "O"]) == (found.words, found.tags)
    assert "Ada Byron sat" == found.text


def test_a_tag_of_no_class_is_not_guessed(tmp_path):
    features = {"tokens": List(STRING), "tags": List(ClassLabel(names=["O", "B-PER"]))}
    folder = parquet(tmp_path / "set", features, {"tokens": ["Ada"], "tags": [-1]})
    with pytest.raises(DataError, match="row 0: a tag may not be -1"):
        labelled_rows.read(f"hub:{folder}/train", "ner")


@pytest.mark.parametrize("together", [True, False])
def test_questions_are_those_of_squad(tmp_path, together):
    """Answers are a list of objects or an object of lists, and there may be none."""
    one = {"text": STRING, "answer_start": Value("int32")}
    lists = {name: List(feature) for name, feature in one.items()}
    right = {"text": ["Ada", "it"], "answer_start": [0, 9]}
    wrong = {"text": [], "answer_start": []}
    if together:
        right = [{"text": "Ada", "answer_start": 0}, {"text": "it", "answer_start": 9}]
        wrong = []
    folder = parquet(
        tmp_path / "set",
        {
            "id": STRING,
            "question": STRING,
            "context": STRING,
            "answers": List(one) if together else lists,
        },
        {"id": "1", "question": "Who?", "context": "Ada drew it.", "answers": right},
        {"id": "2", "question": "Why?", "context": "Ada drew it.", "answers": wrong},
    )
    name = f"hub:{folder}/train"
    assert labelled_rows.read(name, "qa") == [
        QuestionRow(f"{name}: row 0", "Who?", "Ada drew it.", (("Ada", 0), ("it", 9))),
        QuestionRow(f"{name}: row 1", "Why?", "Ada drew it.", ()),
    ]


CARD = """---
configs:
- config_name: plain
  data_files:
  - split: train
    path: plain/*.jsonl
- config_name: graded
  data_files:
  - split: validation
    path: graded/part-*.jsonl
dataset_info:
- config_name: graded
  features:
  - name: body
    dtype: string
  - name: stars
    dtype:
      class_label:
        names:
          '0': one
          '1': two
---
# Reviews
"""


@pytest.fixture
def reviews(tmp_path: Path) -> Path:
    """Two configurations of lines of JSON, of which the card says what they hold."""
    folder = tmp_path / "set"
    for config, field, texts in (("plain", "text", "abc"), ("graded", "body", "de")):
        (folder / config).mkdir(parents=True)
        label = "label" if config == "plain" else "stars"
        lines = [json.dumps({field: text, label: n % 2}) for n, text in enumerate(texts)]
        (folder / config / "part-1.jsonl").write_text("\n".join(lines))
    (folder / "README.md").write_text(CARD)
    return folder


def test_a_configuration_and_a_part_of_a_split(reviews):
    """Numbers without names stay numbers, as in files."""
    found = labelled_rows.read(f"hub:{reviews}:plain/train[1:]", "classification")
    assert [("b", ("1",)), ("c", ("0",))] == [(row.text, row.labels) for row in found]


def test_columns_may_be_named(reviews):
    name = Path(f"hub:{reviews}:graded/validation?text=body&label=stars")  # as export has it
    found = labelled_rows.read(name, "classification")
    assert [("d", ("one",)), ("e", ("two",))] == [(row.text, row.labels) for row in found]


def test_named_columns_are_all_that_count(tmp_path):
    """With named columns, no other column is guessed."""
    names = ("sentence1", "sentence2", "title", "label")
    row = dict(zip(names, "abtx", strict=True))
    folder = parquet(tmp_path / "set", dict.fromkeys(names, STRING), row)
    name = f"hub:{folder}/train?text=title&label=label"
    assert [Text(f"{name}: row 0", "t", None, ("x",))] == labelled_rows.read(name, "classification")


def test_the_full_name_is_required(monkeypatch):
    """A revision, too; and once in a run, however often it is read."""
    asked = []

    def load_dataset(*path, **rest):
        asked.append((*path, rest))
        return Dataset.from_list([{"text": "a", "label": "x"}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    for _ in range(2):
        labelled_rows.read("hub:some-one/a.set:the-config/train[:10%]@refs/pr/2", "classification")
    labelled_rows.read("hub:some-one/a.set/test", "classification")
    assert [
        ("some-one/a.set", "the-config", {"split": "train[:10%]", "revision": "refs/pr/2"}),
        ("some-one/a.set", None, {"split": "test", "revision": None}),
    ] == asked


@pytest.mark.parametrize(
    ("name", "task", "reason"),
    [
        ("hub:reviews", "classification", "not hub:OWNER/NAME"),
        ("hub:{}:plain", "classification", "not hub:OWNER/NAME"),
        ("hub:json/train", "classification", "json is neither a directory nor OWNER/NAME"),
        ("hub:../no/where/train", "classification", "../no/where is neither a directory nor"),
        ("hub:no-owner/nothing/train", "classification", "Couldn't reach 'no-owner/nothing'"),
        ("hub:./nothing/train", "classification", "./nothing"),
        ("hub:{}:plane/train", "classification", "'plane' not found. Available: .*plain"),
        ("hub:{}:plain/dev", "classification", "Unknown split \"dev\".*'train'"),
        ("hub:{}:graded/validation", "classification", "the columns are body, stars. Say .*text="),
        ("hub:{}:plain/train", "ner", "entities may not be 0: .* need tokens and tags"),
        ("hub:{}:plain/train?txt=text", "classification", "'txt' in the place of FIELD=COLUMN"),
        ("hub:{}:plain/train?text", "classification", "'text' in the place of FIELD=COLUMN"),
        ("hub:{}:plain/train?text=body", "classification", "no column 'body' among text, label"),
        ("hub:{}:plain/train?text=text", "classification", "needs text and label"),
        ("hub:{}:plain/train?tokens=text&tags=label", "ner", "row 0: tokens may not be 'a'"),
        ("hub:{}:plain/train[:0]", "classification", "corresponds to no data"),
    ],
)
def test_what_is_not_to_be_had_is_said(reviews, name, task, reason):
    """In one line, with the name as it was given."""
    asked = name.format(reviews)
    with pytest.raises(DataError, match=reason) as refused:
        labelled_rows.read(asked, task)
    assert str(refused.value).startswith(f"{asked}: ")
    assert "\n" not in str(refused.value)


def test_a_split_without_labels_has_no_rows(tmp_path):
    """As GLUE's test splits are."""
    features = {"sentence": STRING, "label": POLARITY}
    folder = parquet(tmp_path / "set", features, {"sentence": "a", "label": -1})
    with pytest.raises(DataError, match="no rows"):
        labelled_rows.read(f"hub:{folder}/train", "classification")


def test_a_broken_file_is_named(reviews):
    (reviews / "plain" / "part-1.jsonl").write_text('{"text": "a"')
    with pytest.raises(DataError, match=r"(?s)hub:.*plain/train: .*JSON"):
        labelled_rows.read(f"hub:{reviews}:plain/train", "classification")


@pytest.mark.parametrize(
    ("task", "row", "reason"),
    [
        ("ner", {"tokens": ["Ada"], "ner_tags": ["PER"]}, "a tag may not be 'PER'"),
        ("ner", {"tokens": ["Ada"], "ner_tags": [1]}, "a tag may not be 1"),
        ("ner", {"tokens": ["Ada", "sat"], "ner_tags": ["O"]}, "as many as tags"),
        ("ner", {"tokens": [1], "ner_tags": ["O"]}, "tokens must be strings"),
        (
            "qa",
            {"question": "q", "context": "c", "answers": {"text": ["c"], "answer_start": [0, 1]}},
            "1 answers and 2 starts",
        ),
        ("qa", {"question": "q", "context": "c", "answers": "c"}, "answers may not be 'c'"),
        ("classification", {"text": "a", "label": 0.5}, "label may not be 0.5"),
    ],
)
def test_errors_name_the_row(task, row, reason, monkeypatch):
    found = Dataset.from_list([row])
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: found)
    with pytest.raises(DataError, match=f"hub:a/b/c: row 0: .*{reason}"):
        labelled_rows.read("hub:a/b/c", task)

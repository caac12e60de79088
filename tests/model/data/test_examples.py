"""What a model should say is laid on the tokens that the service will read it from."""

import json
import math
from collections.abc import Sequence
from itertools import islice, zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tokenizers import Tokenizer
from torch import Tensor

from model import evaluate, tokenizer
from model.data import examples, head_rows, losses
from model.data.examples import Example, ExampleStream
from model.data.head_rows import HeadSettings
from model.data.labelled_rows import DataError, QuestionRow, Sentence, Similar, Text
from model.data.losses import Batch
from model.families.registry import FAMILIES
from model.heads import IGNORE_INDEX
from service.core.encode import Encoder, Encoding
from service.core.manifest import Head

LABELS = ("O", "B-PER", "I-PER", "B-LOC", "I-LOC")


@pytest.fixture
def encoder(tokenizer_file: Path) -> Encoder:
    return Encoder.from_file(tokenizer_file, 64)


@pytest.fixture
def narrow(tokenizer_file: Path) -> Encoder:
    """Windows into which a text must be cut."""
    return Encoder.from_file(tokenizer_file, 32)


def sentence(words: str, tags: str) -> Sentence:
    return Sentence("here", words.split(" "), tags.split())


def window(length: int) -> Encoding:
    """An encoding of some length, of which nothing else matters."""
    rows = np.arange(length)
    return Encoding(rows, 0 * rows, np.zeros((length, 2), np.int32), rows, rows.astype(np.int8))


# -- labels ---------------------------------------------------------------------------------------


def test_labels_are_collected_and_sorted():
    """Those that a setting does not name are taken from the rows."""
    found = [Text("", "a", None, (label,)) for label in ("pos", "neg", "pos")]
    settings = HeadSettings(task="classification", train=[], demo=True)
    head = examples.describe(settings, found, hidden_size=32)
    assert head.labels == ("neg", "pos")
    assert (head.problem_type, head.demo) == ("single_label_classification", True)


def test_given_labels_keep_their_order():
    """What a setting names is taken as it is."""
    settings = HeadSettings(task="classification", train=[], labels=["pos", "neg"])
    assert examples.describe(settings, [], hidden_size=32).labels == ("pos", "neg")


def write_labels(path: Path, *labels: str) -> str:
    rows = [{"text": f"text {number}", "label": label} for number, label in enumerate(labels)]
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return str(path)


def test_training_labels_are_mapped_and_dropped(tmp_path):
    """Files with other labels train one head; labels that are not mapped stay."""
    train = [
        write_labels(tmp_path / "five.jsonl", "very bad", "bad", "mixed", "very good"),
        write_labels(tmp_path / "two.jsonl", "good", "bad"),
    ]
    settings = HeadSettings(
        task="classification",
        train=train,
        label_map={"very bad": "bad", "very good": "good"},
        drop_labels=["mixed"],
    )
    found = head_rows.read_training(settings)
    assert [row.labels[0] for row in found] == ["bad", "bad", "good", "good", "bad"]
    assert [row.text for row in found] == ["text 0", "text 1", "text 3", "text 0", "text 1"]
    assert examples.describe(settings, found, hidden_size=32).labels == ("bad", "good")


@pytest.mark.parametrize("settings", [{"label_map": {"god": "good"}}, {"drop_labels": ["god"]}])
def test_a_mapped_label_that_no_row_has_is_an_error(settings, tmp_path):
    """A misspelled label must not leave rows as they are."""
    train = [write_labels(tmp_path / "a.jsonl", "good", "bad")]
    with pytest.raises(DataError, match=r"a\.jsonl: no row has the label 'god'"):
        head_rows.read_training(HeadSettings(task="classification", train=train, **settings))


TEXTS, VECTORS = {"task": "classification"}, {"task": "embedding"}
MAPPED = {**TEXTS, "label_map": {"a": "b"}}
SPARSE = {"task": "sparse-embedding"}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {**MAPPED, "task": "ner"},
            "label_map and drop_labels require classification with a single label",
        ),
        ({**MAPPED, "problem_type": "regression"}, "require classification with a single label"),
        ({**MAPPED, "drop_labels": ["a"]}, "label_map and drop_labels both contain 'a'"),
        (
            {"task": "ner", "join_sentences": 0},
            "join_sentences: Input should be greater than or equal to 1, not 0",
        ),
        ({"task": "qa", "join_sentences": 2}, "join_sentences: for ner"),
        ({"task": "ner", "class_weights": "balanced"}, "class_weights: for classification"),
        (
            {**TEXTS, "problem_type": "regression", "class_weights": {"a": 2.0}},
            "class_weights: for class",
        ),
        ({**TEXTS, "class_weights": "equal"}, "class_weights: 'equal' is none of balanced"),
        ({**TEXTS, "class_weights": {"a": 0.0}}, "class_weights: 0.0 of 'a' is not above 0"),
        ({**VECTORS, "loss": "mse"}, "loss: 'mse' is none of cosent, cosine"),
        ({**VECTORS, "contrast": "hard"}, "contrast: 'hard' is none of ranking, triplet"),
        (
            {**VECTORS, "distance": "manhattan"},
            "distance: 'manhattan' is none of euclidean, cosine",
        ),
        ({**VECTORS, "scale": 0.0}, "scale: Input should be greater than 0, not 0.0"),
        ({**VECTORS, "margin": -1.0}, "margin: Input should be greater than 0, not -1.0"),
        ({"task": "late-interaction"}, "task: heads of late-interaction are not trained here"),
        (
            {**SPARSE, "flops_ramp": -0.1},
            "flops_ramp: Input should be .* than or equal to 0, not -0.1",
        ),
        (
            {**SPARSE, "flops_ramp": 1.1},
            "flops_ramp: Input should be .* than or equal to 1, not 1.1",
        ),
        (
            {**SPARSE, "flops": -1.0},
            r"flops: Input should be greater than or equal to 0, not -1\.0",
        ),
    ],
)
def test_settings_are_checked(settings, message):
    """A setting of another task, a value out of range and an unknown word are refused by name."""
    with pytest.raises(ValueError, match=message):
        HeadSettings(train=[], **settings)


def test_adjacent_sentences_are_joined_to_more_rows(tmp_path):
    """The single sentences stay, rows are of one file, and the last row may have fewer sentences."""
    files = []
    for name, count in (("a", 5), ("b", 3), ("c", 1)):
        files.append(tmp_path / f"{name}.conll")
        rows = [f"{name}{i} B-PER\n. O\n" for i in range(count)]
        files[-1].write_text("\n".join(rows), encoding="utf-8")
    head = HeadSettings(task="ner", train=[*map(str, files)], join_sentences=2)
    found = head_rows.read_training(head)
    joined = ["a0 . a1 .", "a2 . a3 .", "b0 . b1 ."]  # a4, b2 and c0 have no next sentence
    singles = [
        f"{name}{i} ." for name, count in (("a", 5), ("b", 3), ("c", 1)) for i in range(count)
    ]
    assert [row.text for row in found] == singles + joined
    assert {tuple(row.tags) for row in found[len(singles) :]} == {("B-PER", "O") * 2}
    assert found[len(singles) + 1].where == f"{files[0]}:7"
    (three,) = head_rows.join_sentences(found[5:8], 4)
    assert three.text == "b0 . b1 . b2 ."


def weighted(settings: HeadSettings, labels: Sequence[str]) -> tuple[Head, list[ExampleStream]]:
    """The head of rows with these labels, and its streams."""
    rows = [Text("", "a", None, (label,)) for label in labels]
    head = examples.describe(settings, rows, hidden_size=32)
    drawable = [Example((window(3),), examples.text_labels(row, head)) for row in rows]
    return head, examples.streams("mood", settings, head, drawable)


def test_balanced_classes_weigh_the_same():
    """One row in four counts as much as the other three together; so do weights that the settings state."""
    balanced = HeadSettings(task="classification", train=[], class_weights="balanced")
    stated = HeadSettings(
        task="classification", train=[], class_weights={"bad": 2.0, "good": 2 / 3}
    )
    logits = torch.tensor([[1.0, 0.5], [0.0, 1.0], [0.3, 0.3], [2.0, -1.0]])
    labels = [np.asarray(label) for label in (0, 1, 1, 1)]

    each = -logits.log_softmax(-1)[range(4), [0, 1, 1, 1]]
    expected = (each[0] + each[1:].mean()) / 2
    for settings in (balanced, stated):
        _, [stream] = weighted(settings, ["bad", "good", "good", "good"])
        torch.testing.assert_close(stream.loss(logits, Batch([], labels)).value, expected)


def test_classes_of_several_labels_are_balanced():
    """A label of one row in four weighs three times as much where it holds."""
    kind = "multi_label_classification"
    settings = HeadSettings(
        task="classification", train=[], problem_type=kind, class_weights="balanced"
    )
    head = Head(task="classification", labels=("rare", "half"), problem_type=kind)
    rows = [[1, 0], [0, 1], [0, 1], [0, 0]]
    drawable = [Example((window(3),), np.asarray(row, np.float32)) for row in rows]

    weights = examples.class_weights(settings, head, drawable)

    assert [3.0, 1.0] == weights.tolist()


def test_a_weight_of_an_unknown_label_is_an_error():
    """A misspelled label must not leave its weight at 1."""
    settings = HeadSettings(task="classification", train=[], class_weights={"god": 2.0})
    with pytest.raises(ValueError, match="class_weights: 'god' is none of the labels bad, good"):
        weighted(settings, ["bad", "good"])


def test_tags_always_come_in_pairs():
    """A type of one-word entities needs its I- too, for the word's further tokens."""
    head = examples.describe(
        HeadSettings(task="ner", train=[]), [sentence("Ada Turin", "B-PER B-LOC")], 32
    )
    assert head.labels == ("O", "B-LOC", "I-LOC", "B-PER", "I-PER")


def test_an_embedding_is_described_by_its_pooling():
    """The vector has the encoder's size, and no labels."""
    head = examples.describe(
        HeadSettings(task="embedding", train=[], pooling="cls"), [], hidden_size=32
    )
    assert (head.pooling, head.dimensions, head.labels) == ("cls", 32, ())


def test_an_unknown_label_is_named_with_its_place(encoder):
    """A label that the head does not have is an error of the data."""
    head = Head(task="classification", labels=("x", "y"))
    with pytest.raises(DataError, match="f:3: 'z' is none of the labels x, y"):
        list(examples.examples([Text("f:3", "a", None, ("z",))], head, encoder, 0))


def test_several_labels_are_a_row_of_zeros_and_ones(encoder):
    """In the order of the head's labels."""
    head = Head(
        task="classification", labels=("x", "y", "z"), problem_type="multi_label_classification"
    )
    (example,) = examples.examples([Text("", "a", None, ("z", "x"))], head, encoder, 0)
    assert example.labels.tolist() == [1.0, 0.0, 1.0]


def test_texts_and_pairs_keep_their_order(encoder):
    """They are encoded apart, and come back in the order of the rows."""
    head = Head(task="classification", labels=("x",))
    found = [Text("", "a", "b", ("x",)), Text("", "ab", None, ("x",)), Text("", "b", "a", ("x",))]
    encoded = [e.encodings[0].input_ids for e in examples.examples(found, head, encoder, 0)]
    alone = [encoder.pairs(["a"], ["b"]), encoder.texts(["ab"]), encoder.pairs(["b"], ["a"])]
    for ids, (expected,) in zip(encoded, alone, strict=True):
        np.testing.assert_array_equal(ids, expected.windows[0].input_ids)


# -- named entities -------------------------------------------------------------------------------


SENTENCES = [
    sentence("Ada drew Turin", "B-PER O B-LOC"),
    sentence("Mr. Chien-Shiung Wu's U.S. visit", "O B-PER I-PER B-LOC O"),
    sentence("café tables", "B-LOC I-LOC"),
    sentence("Ada Grace Emmy", "B-PER B-PER I-PER"),
    sentence("日本 x Ada 🙂🙂 Zoë", "B-LOC O B-PER O B-PER"),
    sentence("cafe\N{COMBINING ACUTE ACCENT} \N{ZERO WIDTH SPACE} Ada", "B-LOC O B-PER"),
]


@pytest.mark.parametrize("row", SENTENCES, ids=lambda row: row.text)
def test_every_token_has_the_tag_of_its_characters(row, encoder):
    """Whatever the tokenizer makes of a word: B- on its first token, I- on the others."""
    (encoded,) = encoder.texts([row.text])
    (labels,) = examples.token_labels(row, encoded.windows, LABELS)
    word_at = [number for number, word in enumerate(row.words) for _ in f"{word} "]
    seen = set()
    for label, (start, end), sequence in zip(
        labels, encoded.windows[0].offsets, encoded.windows[0].sequence, strict=True
    ):
        if sequence < 0:
            assert label == IGNORE_INDEX
        elif start < end:
            word = word_at[start]
            tag = row.tags[word]
            assert LABELS[label] == (tag.replace("B-", "I-") if word in seen else tag)
            seen.add(word)
    assert len(seen) >= len(row.words) - ("\N{ZERO WIDTH SPACE}" in row.words)


def test_words_split_at_punctuation_are_inside_their_entity(encoder):
    """The service sees four words in U.S., the data one; all four are one entity."""
    row = sentence("U.S.", "B-LOC")
    (encoded,) = encoder.texts([row.text])
    (labels,) = examples.token_labels(row, encoded.windows, LABELS)
    assert encoded.windows[0].words.max() == 3
    tags = [LABELS[label] for label in labels if label != IGNORE_INDEX]
    assert tags == ["B-LOC", "I-LOC", "I-LOC", "I-LOC"]


def test_entities_in_the_scheme_of_the_head(encoder):
    """An entity of the data has the labels of the head's scheme: at its first token, its last, and between."""
    row = sentence("U.S. b A c A", "B-LOC I-LOC I-LOC O B-LOC")
    expected = {
        "BIES": "B-LOC I-LOC I-LOC I-LOC I-LOC E-LOC O S-LOC",
        "BILU": "B-LOC I-LOC I-LOC I-LOC I-LOC L-LOC O U-LOC",
        "I": "I-LOC I-LOC I-LOC I-LOC I-LOC I-LOC O I-LOC",
        "": "LOC LOC LOC LOC LOC LOC O LOC",
    }
    for positions, wanted in expected.items():
        names = ["O", *(f"{position}-LOC" for position in positions)] if positions else ["O", "LOC"]
        windows = encoder.texts([row.text])[0].windows
        (labels,) = examples.token_labels(row, windows, names)
        assert [names[label] for label in labels if label != IGNORE_INDEX] == wanted.split()
        examples.check([row], Head(task="ner", labels=tuple(names)))
        logits = np.eye(len(names), dtype=np.float32)[np.maximum(labels, 0)]
        assert evaluate.word_tags(row, windows, [logits], names) == row.tags
    with pytest.raises(DataError, match="'I-LOC' is none of the labels O, B-LOC"):
        examples.token_labels(row, encoder.texts([row.text])[0].windows, ["O", "B-LOC"])


def test_a_type_may_have_a_tag_in_its_name(encoder):
    """Only the prefix of a tag marks a word's position in its entity."""
    row = sentence("U.S. U.S.", "B-JOB-TITLE B-SUB-ORG")
    names = ("O", "B-JOB-TITLE", "I-JOB-TITLE", "B-SUB-ORG", "I-SUB-ORG")
    (labels,) = examples.token_labels(row, encoder.texts([row.text])[0].windows, names)
    told = [names[label] for label in labels if label != IGNORE_INDEX]
    assert told == ["B-JOB-TITLE", *["I-JOB-TITLE"] * 3, "B-SUB-ORG", *["I-SUB-ORG"] * 3]


def test_a_window_that_begins_within_a_word_is_inside_its_entity(tokenizer_file):
    """Each token has the same label in every window."""
    encoder = Encoder.from_file(tokenizer_file, 6)
    row = sentence("U.S.A.F. Ada", "B-LOC B-PER")
    (encoded,) = encoder.texts([row.text], truncate="window", stride=1)
    assert len(encoded.windows) > 2
    labels = examples.token_labels(row, encoded.windows, LABELS)
    found = {
        (int(start), LABELS[label])
        for window, ids in zip(encoded.windows, labels, strict=True)
        for label, (start, _) in zip(ids, window.offsets, strict=True)
        if label != IGNORE_INDEX
    }
    assert found >= {(0, "B-LOC"), (9, "B-PER"), *((start, "I-LOC") for start in range(1, 8))}
    assert len({start for start, _ in found}) == len(found)


BYTES = sentence("Émile Ødegård in 日本 x Ада", "B-PER I-PER O B-LOC O B-PER")


@pytest.fixture(scope="module")
def of_bytes() -> Tokenizer:
    """A tokenizer that knows single bytes only: a letter outside ASCII is several tokens."""
    return tokenizer.train(["a"], vocab_size=261, family=FAMILIES["roberta"])


def test_a_word_begins_once_where_its_first_letter_is_several_tokens(of_bytes):
    """They all have its offsets; the first begins the entity, the others are inside it."""
    (encoded,) = Encoder(of_bytes, 64).texts([BYTES.text])
    (labels,) = examples.token_labels(BYTES, encoded.windows, LABELS)
    told = [LABELS[label] for label in labels if label != IGNORE_INDEX]
    assert sum(tag.startswith("B-") for tag in told) == 3
    assert told[:3] == ["B-PER", "I-PER", "I-PER"]


@pytest.mark.parametrize("stride", [0, 1, 2])
def test_a_window_that_begins_within_a_letter_begins_no_word(of_bytes, stride):
    """Each word begins with the same token in every window."""
    (whole,) = Encoder(of_bytes, 64).texts([BYTES.text])
    (placed,) = examples.place_words(BYTES, whole.windows)
    first = {
        (word, token)
        for word, token in zip(
            placed.words[placed.begins],
            whole.windows[0].input_ids[placed.rows[placed.begins]],
            strict=True,
        )
    }
    assert len(first) == len(BYTES.words)
    (cut,) = Encoder(of_bytes, 7).texts([BYTES.text], truncate="window", stride=stride)
    found = {
        (word, token)
        for window, (rows, words, begins) in zip(
            cut.windows, examples.place_words(BYTES, cut.windows), strict=True
        )
        for word, token in zip(words[begins], window.input_ids[rows[begins]], strict=True)
    }
    assert found == first


# -- answers --------------------------------------------------------------------------------------


CONTEXT = "Grace forgot the old engine in Turin. Zoë, at dawn, sold 40 comets. " * 3


def asked(answer: str, occurrence: int = 0, context: str = CONTEXT) -> QuestionRow:
    start = -1
    for _ in range(occurrence + 1):
        start = context.index(answer, start + 1)
    return QuestionRow("here", "Who?", context, ((answer, start),))


def text_of(span: Sequence[int], window: Encoding, context: str) -> str:
    first, last = span
    return context[window.offsets[first, 0] : window.offsets[last, 1]]


@pytest.mark.parametrize("answer", ["Grace", "the old engine", "Zoë, at dawn", "40", "Turin. Zoë"])
def test_the_labelled_tokens_are_the_answer(answer, narrow):
    """In every window that holds it whole; in the others, the null answer."""
    question = asked(answer, occurrence=1)
    (encoded,) = narrow.questions(["Who?"], [CONTEXT], stride=8)
    spans = examples.answer_tokens(question, encoded.windows)
    (_, start), end = question.answers[0], question.answers[0][1] + len(answer)
    whole = 0
    for window, span in zip(encoded.windows, spans, strict=True):
        context = window.offsets[window.sequence == 1]
        if context[0, 0] <= start and end <= context[-1, 1]:
            assert text_of(span, window, CONTEXT) == answer
            whole += 1
        else:
            assert span.tolist() == [0, 0]
    assert 0 < whole < len(encoded.windows)


def test_an_answer_within_a_token_is_that_token(encoder):
    """Data may answer 40 where the text says 40s; the nearest tokens around it are labelled."""
    context = "Ada sold the comet"
    question = QuestionRow("here", "Who?", context, (("om", 14),))
    (encoded,) = encoder.questions(["Who?"], [context])
    (span,) = examples.answer_tokens(question, encoded.windows)
    assert "om" in text_of(span, encoded.windows[0], context)


@pytest.mark.parametrize("answers", [(), ((CONTEXT, 0),)], ids=["none", "longer than any window"])
def test_an_answer_that_no_window_holds_is_null(answers, narrow):
    """Both ends at [CLS], in every window."""
    (encoded,) = narrow.questions(["Who?"], [CONTEXT], stride=8)
    spans = examples.answer_tokens(QuestionRow("here", "Who?", CONTEXT, answers), encoded.windows)
    assert np.asarray(spans).tolist() == [[0, 0]] * len(encoded.windows)


def test_an_answer_that_stands_elsewhere_is_an_error(encoder):
    """A wrong offset would teach nonsense."""
    (encoded,) = encoder.questions(["Who?"], [CONTEXT])
    with pytest.raises(DataError, match="here: the answer 'Ada' does not stand at 3"):
        examples.answer_tokens(QuestionRow("here", "Who?", CONTEXT, (("Ada", 3),)), encoded.windows)


# -- batches --------------------------------------------------------------------------------------


def test_an_epoch_takes_every_row_once():
    """Batches run over the end of an epoch into the next, in another order."""
    drawn = [row for step in range(10) for row in examples.draw(5, 4, (1, 0), step)]
    epochs = np.reshape(drawn, (8, 5))
    assert {tuple(sorted(epoch)) for epoch in epochs.tolist()} == {(0, 1, 2, 3, 4)}
    assert len({tuple(epoch) for epoch in epochs.tolist()}) > 4


def test_a_batch_follows_from_seed_and_step_alone():
    """The same seed and step give the same batch, in any order; other seeds and heads give others."""
    later, first = examples.draw(100, 8, (1, 0), 7), examples.draw(100, 8, (1, 0), 0)
    assert (examples.draw(100, 8, (1, 0), 0), examples.draw(100, 8, (1, 0), 7)) == (first, later)
    assert examples.draw(100, 8, (2, 0), 7) != later != examples.draw(100, 8, (1, 1), 7)


def groups(*sizes: int, negatives: Sequence[int] = ()) -> ExampleStream:
    """Texts that belong together, in groups, with this many negatives; a text's length identifies it."""
    lengths = iter(range(1, sum(sizes) + sum(negatives) + 1))
    found = []
    for number, (size, more) in enumerate(zip_longest(sizes, negatives, fillvalue=0)):
        texts = [next(lengths) for _ in range(size + more)]
        found.append(Example(tuple(map(window, texts)), np.asarray([number, *texts]), more))
    return ExampleStream("s", "s", found, 4, 1.0, losses.ranking_loss)


def test_pairs_are_drawn_from_groups():
    """All first texts come before all second ones; a partner is another text of the same group."""
    stream = groups(5, 2, 3, 5)
    group_of = {len(w): int(e.labels[0]) for e in stream.examples for w in e.encodings}
    partners = set()
    for step in range(20):
        batch = stream.batch((1, 0), step)
        lengths = [len(encoding) for encoding in batch.encodings]
        for first, second, label in zip(lengths[:4], lengths[4:], batch.labels, strict=True):
            assert first != second
            assert label.tolist() == [group_of[first], first, second]
            assert group_of[first] == group_of[second]
            partners.add((first, second))
    assert len(partners) > 20


def test_negatives_come_after_all_pairs():
    """Negatives follow row by row, as many as each row has, after the numbers of the pair."""
    stream = groups(2, 3, 2, 2, negatives=(2, 1, 0, 3))
    negatives = {
        int(e.labels[0]): e.labels[1:][len(e.labels) - 1 - e.negatives :] for e in stream.examples
    }
    for step in range(5):
        batch = stream.batch((1, 0), step)
        lengths = [len(encoding) for encoding in batch.encodings]
        assert lengths[8:] == [n for label in batch.labels for n in negatives[int(label[0])]]
        for number, label in enumerate(batch.labels):
            expected = [lengths[number], lengths[4 + number], *negatives[int(label[0])]]
            assert label.tolist()[1:] == expected


def test_equal_texts_have_equal_numbers(encoder):
    """Over all rows of a head, after the number of the row."""
    head = Head(task="embedding", pooling="mean", dimensions=32)
    found = [Similar("", ("a", "b"), None, ("ab", "a b")), Similar("", ("ab", "ba", "b"), None)]
    made = list(examples.examples(found, head, encoder, 0))
    assert [example.labels.tolist() for example in made] == [[0, 0, 1, 2, 3], [1, 2, 4, 1]]
    assert [(len(example.encodings), example.negatives) for example in made] == [(4, 2), (3, 0)]


def test_embeddings_have_the_default_prompt(encoder):
    """Texts of an embedding head are encoded after its default prompt, as the service does."""
    fields = {"prompts": {"query": "ab "}, "default_prompt": "query"}
    head = Head(task="embedding", pooling="mean", dimensions=32)
    rows = [Similar("", ("a", "b"), None)]
    prompted = examples.encode(
        rows, Head.model_validate({**head.model_dump(), **fields}), encoder, 0
    )
    expected = examples.encode([Similar("", ("ab a", "ab b"), None)], head, encoder, 0)
    found, plain = (
        [text.windows[0].input_ids.tolist() for text in row]
        for row in (next(prompted), next(expected))
    )
    assert plain == found


def test_drawn_pairs_follow_from_seed_and_step_alone():
    """Nothing is remembered from one step to the next."""
    lengths = [[len(e) for e in groups(5, 5, 5).batch((1, 0), 3).encodings] for _ in range(2)]
    assert lengths[0] == lengths[1]


def test_scored_texts_and_others_are_learnt_apart(encoder):
    """Each kind has a stream, with a batch size and a loss of its own."""
    found = [Similar("", ("a", "b"), 0.5), Similar("", ("a", "b", "ab"), None)]
    settings = HeadSettings(
        task="embedding", train=[], batch_size=8, scored_batch_size=3, weight=0.5
    )
    head = examples.describe(settings, found, 32)
    made = examples.streams("v", settings, head, list(examples.examples(found, head, encoder, 0)))
    assert [(s.name, s.head, s.batch_size, s.weight, len(s.examples)) for s in made] == [
        ("v/ranking", "v", 8, 0.5, 1),
        ("v/cosent", "v", 3, 0.5, 1),
    ]


# -- losses ---------------------------------------------------------------------------------------


def labelled(*labels: Any, lengths: Sequence[int] = ()) -> Batch:
    return Batch([window(length) for length in lengths], [np.asarray(label) for label in labels])


def pairs(count: int, negatives: Sequence[int] = ()) -> Batch:
    """This many rows of an anchor and its positive; the first rows have this many negatives; all texts differ."""
    texts = iter(range(100))
    more = [*negatives, *[0] * (count - len(negatives))]
    return labelled(*([row, *islice(texts, 2 + extra)] for row, extra in enumerate(more)))


def test_every_loss_starts_at_its_chance():
    """An untrained model has the loss of a uniform prediction, so heads start with similar losses."""
    spans = labelled([1, 2], [0, 0], lengths=[6, 6])
    for encoding in spans.encodings:
        encoding.offsets[:, 1] = 1
        encoding.sequence[:] = 1
    floats = np.float32([0, 1, 0])
    cases = [
        losses.text_loss(torch.zeros(2, 3), labelled(0, 2), None),
        losses.text_loss(torch.zeros(2, 3), labelled(floats, floats), "multi_label_classification"),
        losses.token_loss(torch.zeros(5, 9), labelled([1, IGNORE_INDEX], [2, 3, 8])),
        losses.span_loss(torch.zeros(12, 2), spans),
        losses.text_loss(torch.zeros(2, 1), labelled([0.0], [1.0]), None),
        losses.ranking_loss(torch.ones(8, 4), pairs(4)),
        losses.ranking_loss(torch.ones(11, 4), pairs(4, [3]), symmetric=False),
        losses.triplet_loss(torch.ones(11, 4), pairs(4, [2, 1]), "cosine", None, True),
        losses.cosent_loss(torch.ones(6, 4), labelled(*np.float32([0.1, 0.5, 0.9]))),
    ]
    for value, chance in cases:
        assert value.item() == pytest.approx(chance, abs=1e-6)


def test_spans_compete_within_their_own_sequence(encoder):
    """The packed loss is the mean over sequences, each a softmax over [CLS] and its context."""
    encoded = encoder.questions(["Who?", "What?"], ["Ada drew a comet", "Emmy sold it"])
    windows = [e.windows[0] for e in encoded]
    logits = torch.randn(sum(map(len, windows)), 2, generator=torch.Generator().manual_seed(0))
    labels = [np.array([8, 9]), np.array([0, 0])]
    parts = logits.split([len(window) for window in windows])
    expected = []
    for part, encoding, label in zip(parts, windows, labels, strict=True):
        may = np.flatnonzero(losses.candidates(encoding))
        for side in (0, 1):
            target = int(np.flatnonzero(may == label[side])[0])
            expected.append(-torch.log_softmax(part[may, side], dim=0)[target])
    found = losses.span_loss(logits, Batch(windows, labels)).value
    torch.testing.assert_close(found, torch.stack(expected).mean())


def test_a_gradient_through_spans_is_finite(encoder):
    """Tokens that cannot be answers are ruled out, not divided by."""
    windows = [e.windows[0] for e in encoder.questions(["Who?", "Who?"], ["Ada", "Ada drew"])]
    logits = torch.zeros(sum(map(len, windows)), 2, requires_grad=True)
    losses.span_loss(logits, Batch(windows, [np.array([0, 0])] * 2)).value.backward()
    assert logits.grad is not None
    assert torch.isfinite(logits.grad).all()


def random_vectors(count: int) -> Tensor:
    return torch.randn(count, 5, generator=torch.Generator().manual_seed(count))


@pytest.mark.parametrize(
    ("labels", "right"),
    [
        ([[0, 10, 20], [1, 11, 21], [2, 12, 22]], []),
        ([[0, 10, 20], [1, 11, 21], [0, 12, 22]], [(0, 2), (2, 0)]),
        ([[0, 10, 20], [1, 11, 21], [2, 11, 22]], [(1, 2), (2, 1)]),
        ([[0, 10, 20], [1, 11, 21], [2, 12, 20]], [(0, 2), (2, 0)]),
        ([[0, 10, 20], [1, 11, 21], [2, 12, 22, 20]], [(0, 3)]),
    ],
    ids=["none", "row", "anchor", "positive", "positive as negative"],
)
@pytest.mark.parametrize("symmetric", [True, False])
def test_what_is_right_is_no_negative(labels, right, symmetric):
    """Texts of the same row, of the same anchor, and the own positive wherever it stands do not compete."""
    size, negatives = len(labels), sum(len(label) - 3 for label in labels)
    vectors = random_vectors(2 * size + negatives)
    cosines = F.cosine_similarity(vectors[:size, None], vectors[None, size:], dim=-1)
    for place in right:
        cosines[place] = -math.inf
    sides = [cosines, cosines[:, :size].T][: 1 + symmetric]
    expected = [-torch.log_softmax(20 * side, dim=1).diagonal().mean() for side in sides]
    found = losses.ranking_loss(vectors, labelled(*labels), symmetric=symmetric).value
    torch.testing.assert_close(found, torch.stack(expected).mean())


@pytest.mark.parametrize("distance", losses.TRIPLET_DISTANCES)
def test_a_gradient_through_equal_texts_is_finite(distance):
    """An anchor may be its own positive, at a distance of nothing."""
    vectors = random_vectors(2).repeat(3, 1)[:5].requires_grad_()
    found = losses.triplet_loss(vectors, pairs(2, [1]), distance, None, normalize=False)
    found.value.backward()
    assert vectors.grad is not None
    assert torch.isfinite(vectors.grad).all()


def test_a_triplet_needs_a_negative():
    """The error names the first row that has none; scored pairs and ranking need none."""
    found = [
        Similar("f:1", ("a", "b"), None, ("c",)),
        Similar("f:2", ("a", "b"), 0.5),
        Similar("f:3", ("a", "b"), None),
    ]
    examples.check_contrast(found, HeadSettings(task="embedding", train=[]))
    with pytest.raises(DataError, match="f:3: no negative, which the triplet loss needs"):
        examples.check_contrast(found, HeadSettings(task="embedding", train=[], contrast="triplet"))
    examples.check_contrast(found[:2], HeadSettings(task="embedding", train=[], contrast="triplet"))


# -- grades ---------------------------------------------------------------------------------------


def test_a_single_label_is_a_grade(encoder):
    """From 0 to 1, of a text or a pair."""
    head = examples.describe(
        HeadSettings(task="classification", train=[], labels=["relevant"]), [], 32
    )
    assert head_rows.is_graded(head)
    found = [Text("f:1", "a", "b", score=0.25), Text("f:2", "a", "b", score=1.5)]
    (example,) = examples.examples(found[:1], head, encoder, 0)
    assert example.labels.tolist() == [0.25]
    with pytest.raises(DataError, match=r"f:2: a single label holds from 0 to 1, not 1\.5"):
        list(examples.examples(found, head, encoder, 0))


def test_a_single_unnamed_label_is_a_mistake():
    """A classification with one label has no classes to separate."""
    with pytest.raises(DataError, match="f:1: all rows have the label 'x'"):
        examples.describe(
            HeadSettings(task="classification", train=[]), [Text("f:1", "a", None, ("x",))], 32
        )


def test_cosent_orders_pairs():
    """Every two pairs of different scores count once: log(1 + sum of exp(20 (lower - higher)))."""
    vectors, scores = random_vectors(8), [0.2, 0.9, 0.2, 0.5]
    cosines = F.cosine_similarity(vectors[:4], vectors[4:]).tolist()
    total = sum(
        math.exp(20 * (cosines[low] - cosines[high]))
        for low in range(4)
        for high in range(4)
        if scores[low] < scores[high]
    )
    found = losses.cosent_loss(vectors, labelled(*np.float32(scores))).value
    assert found.item() == pytest.approx(math.log(1 + total), rel=1e-5)


def test_sparse_loss_reads_weights():
    """The loss is that of the weights log(1 + relu(logit)); the regularizer is the sum of squared mean weights."""
    logits, scores = random_vectors(8), [0.2, 0.9, 0.2, 0.5]
    weights = torch.log1p(logits.clamp(min=0))
    batch = labelled(*np.float32(scores))
    expected = losses.cosine_loss(weights, batch).value
    found = losses.sparse_loss(logits, batch, losses.cosine_loss).value
    assert found.item() == pytest.approx(float(expected), rel=1e-5)
    flops = losses.FlopsRegularizer(0.5, 0.0).loss(logits).value
    squares = sum(float(column.mean()) ** 2 for column in weights.T)
    assert flops.item() == pytest.approx(squares, rel=1e-5)


@pytest.mark.parametrize(
    ("ramp", "progress", "expected"),
    [(0.5, 0.0, 0.0), (0.5, 0.25, 0.25), (0.5, 0.5, 1.0), (0.5, 1.0, 1.0), (0.0, 0.0, 1.0)],
)
def test_flops_regularizer_rises(ramp, progress, expected):
    """Its weight rises by the square of the progress, and is constant after the ramp."""
    assert 2.0 * expected == losses.FlopsRegularizer(2.0, ramp).weight_at(progress)


def test_a_sparse_head_knows_the_vocabulary():
    """Its description has the size of the encoder's vocabulary and the activation."""
    settings = HeadSettings(task="sparse-embedding", train=[])
    head = examples.describe(settings, [], hidden_size=32, vocab_size=600)
    assert (600, "relu") == (head.vocabulary_size, head.sparse and head.sparse.activation)


def test_pairs_of_one_score_have_nothing_to_learn():
    """CoSENT has no order to go by, and its gradient is zero rather than undefined."""
    vectors = random_vectors(4).requires_grad_()
    loss, chance = losses.cosent_loss(vectors, labelled(*np.float32([0.5, 0.5])))
    (loss / chance).backward()
    assert loss.item() == 0
    assert vectors.grad is not None
    assert not vectors.grad.any()

"""What is measured is what will be answered: predictions go through the service's own decoding."""

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.stats import spearmanr
from seqeval.metrics import f1_score

from model import evaluate, tokenizer
from model.checkpoints import writer
from model.data import examples, labelled_rows
from model.families.registry import FAMILIES
from model.heads import EncoderWithHeads
from service.core.encode import Encoder, Encoding
from service.core.manifest import Head
from tests.model.helpers import perturb, shape

SENTENCE = "Ada drew a comet in Turin . Grace Wu sold 2 tables , Zoë forgot it at U.S. dawn"
WORDS = SENTENCE.split()
KINDS = {0: "B-PER", 5: "B-LOC", 7: "B-PER", 8: "I-PER", 13: "B-PER", 17: "B-LOC"}
TAGS = [KINDS.get(i, "O") for i in range(len(WORDS))]

HEADS = {
    "sentiment": Head(task="classification", labels=("bad", "good", "so-so")),
    "topics": Head(task="classification", labels=("art", "law", "war"), problem_type="multi_label_classification"),
    "stars": Head(task="classification", labels=("score",), problem_type="regression"),
    "relevance": Head(task="classification", labels=("relevant",)),
    "grades": Head(task="classification", labels=("relevant",)),
    "entities": Head(task="ner", labels=("O", "B-LOC", "I-LOC", "B-PER", "I-PER")),
    "answers": Head(task="qa"),
    "vectors": Head(task="embedding", pooling="mean", dimensions=32),
    "anchors": Head(task="embedding", pooling="mean", dimensions=32),
}  # fmt: skip


@pytest.fixture(scope="module")
def model() -> EncoderWithHeads:
    """Small and untrained, but far from zero, so that its answers differ."""
    torch.manual_seed(0)
    model = EncoderWithHeads(shape(vocab_size=200), HEADS)
    perturb(model)
    return model


@pytest.fixture
def encoder(tokenizer_file: Path) -> Encoder:
    return Encoder.from_file(tokenizer_file, 48)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """A file for each head, with rows of many lengths."""
    folder = tmp_path_factory.mktemp("dev")
    rng = np.random.default_rng(0)
    texts = [" ".join(rng.choice(WORDS, size=size)) for size in range(1, 31)]

    def jsonl(name: str, fields: Callable[[int], dict[str, Any]]) -> Path:
        path = folder / f"{name}.jsonl"
        lines = [json.dumps({"text": text, **fields(i)}) for i, text in enumerate(texts)]
        path.write_text("\n".join(lines))
        return path

    conll = folder / "entities.conll"
    chosen = [rng.integers(len(WORDS), size=size) for size in range(1, 40, 2)]
    sentences = ["\n".join(f"{WORDS[i]} {TAGS[i]}" for i in some) for some in chosen]
    conll.write_text("\n\n".join(sentences), encoding="utf-8")
    squad = folder / "answers.json"
    paragraphs = []
    for number, text in enumerate(texts[4:]):
        first = text.split()[2]
        answers = [{"text": first, "answer_start": text.index(first)}] if number % 3 else []
        paragraphs.append({"context": text, "qas": [{"question": "Who ?", "answers": answers}]})
    squad.write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}), encoding="utf-8")
    labels = ["bad", "good", "so-so"]
    subsets = [["art"], [], ["art", "war"], ["law"]]
    return {
        "sentiment": jsonl("sentiment", lambda i: {"label": labels[i % 3]}),
        "topics": jsonl("topics", lambda i: {"labels": subsets[i % 4]}),
        "stars": jsonl("stars", lambda i: {"label": i % 5}),
        "relevance": jsonl("relevance", lambda i: {"text_pair": texts[-1], "label": i % 2}),
        "grades": jsonl("grades", lambda i: {"text_pair": texts[-1], "score": i % 5 / 4}),
        "entities": conll,
        "answers": squad,
        "vectors": jsonl("vectors", lambda i: {"text_pair": texts[-1 - i], "score": i % 6}),
        "anchors": jsonl("anchors", lambda i: {"anchor": texts[i], "positive": texts[i - 1]}),
    }


def judge(
    model: EncoderWithHeads, encoder: Encoder, name: str, files: Mapping[str, Path], **options: int
) -> evaluate.Evaluation:
    run = evaluate.torch_run(model, [name])
    return evaluate.judge(run, encoder, model.described[name], name, files[name], **options)


def alone(model: EncoderWithHeads, name: str, encoding: Encoding) -> NDArray[np.float32]:
    """One encoding's output, by the model itself."""
    with torch.no_grad():
        return examples.forward(model, [encoding], [name])[name].numpy()


def close(expected: float) -> object:
    # Batched products sum in another order, which may show in the last place of a correlation.
    return pytest.approx(expected, abs=1e-5)


# -- through decode, or directly ------------------------------------------------------------------


def test_accuracy_is_the_share_of_right_argmaxes(model, encoder, files):
    """The same as without decoding, one text at a time."""
    found = labelled_rows.read(files["sentiment"], "classification")
    labels = HEADS["sentiment"].labels
    direct = [
        labels[alone(model, "sentiment", encoder.texts([row.text])[0].windows[0])[0].argmax()]
        for row in found
    ]
    metrics, answers = judge(model, encoder, "sentiment", files)
    assert answers == direct
    right = [answer == row.labels[0] for answer, row in zip(direct, found, strict=True)]
    assert metrics["accuracy"] == np.mean(right)
    assert set(metrics) == {"accuracy", "macro_f1", "matthews"}


def test_a_label_holds_from_one_half(model, encoder, files):
    """Each of several labels is decided by the sign of its own logit."""
    found = labelled_rows.read(files["topics"], "classification", "multi_label_classification")
    direct = [
        alone(model, "topics", encoder.texts([row.text])[0].windows[0])[0] >= 0 for row in found
    ]
    gold = [[label in row.labels for label in ("art", "law", "war")] for row in found]
    both = np.logical_and(direct, gold).sum()
    metrics, answers = judge(model, encoder, "topics", files)
    labels = np.array(["art", "law", "war"])
    assert answers == [labels[chosen].tolist() for chosen in direct]
    assert metrics["micro_f1"] == close(2 * both / (np.sum(direct) + np.sum(gold)))


def test_a_regression_is_judged_by_correlation(model, encoder, files):
    """Spearman's of the logits."""
    found = labelled_rows.read(files["stars"], "classification", "regression")
    direct = [alone(model, "stars", encoder.texts([row.text])[0].windows[0])[0, 0] for row in found]
    metrics, answers = judge(model, encoder, "stars", files)
    largest = max(row.score for row in found)
    assert answers == [round(float(score) / largest, 1) for score in direct]
    assert metrics["spearman"] == close(spearmanr(direct, [row.score for row in found]).statistic)


def test_a_word_has_the_tag_of_its_first_token(model, encoder, files):
    """Found by walking over characters; entities are then compared by seqeval."""
    found = labelled_rows.read(files["entities"], "ner")
    direct = {}
    for number, row in enumerate(found):
        (encoded,) = encoder.texts([row.text], truncate="window")
        if len(encoded.windows) > 1:
            continue
        best = alone(model, "entities", encoded.windows[0]).argmax(axis=1)
        at = {
            int(start): HEADS["entities"].labels[label]
            for label, (start, end), sequence in zip(
                best, encoded.windows[0].offsets, encoded.windows[0].sequence, strict=True
            )
            if sequence == 0 and end > start
        }
        direct[number] = [at[start] for start in row.starts.tolist()]
    metrics, answers = judge(model, encoder, "entities", files)
    assert len(direct) > 3
    assert {number: answers[number] for number in direct} == direct
    assert metrics["f1"] == f1_score([row.tags for row in found], answers)


def test_of_a_letter_that_is_several_tokens_the_first_counts():
    """These tokens begin at one offset, and the later ones do not change the word's tag."""
    of_bytes = tokenizer.train(["a"], vocab_size=261, family=FAMILIES["roberta"])
    row = labelled_rows.Sentence("here", ["日本", "Émile"], ["B-LOC", "O"])
    (encoded,) = Encoder(of_bytes, 48).texts([row.text])
    (placed,) = examples.place_words(row, encoded.windows)
    labels = HEADS["entities"].labels
    logits = np.full((len(encoded.windows[0]), len(labels)), -9, np.float32)
    logits[:, labels.index("I-PER")] = 1
    first_rows = placed.rows[placed.begins]
    logits[first_rows, [labels.index(tag) for tag in row.tags]] = 2
    assert evaluate.word_tags(row, encoded.windows, [logits], labels) == row.tags


def test_an_answer_is_the_likeliest_text(model, encoder, files):
    """Found by trying every start and end, in the one window of each question."""
    found = labelled_rows.read(files["answers"], "qa")
    expected = []
    for row in found:
        (encoded,) = encoder.questions([row.question], [row.context])
        (window,) = encoded.windows
        logits = alone(model, "answers", window).astype(np.float64)
        context = np.flatnonzero(window.sequence == 1)
        spans = [(a, b) for a in context for b in context if a <= b < a + 30]
        likelihood = {(a, b): np.exp(logits[a, 0] + logits[b, 1]) for a, b in spans}
        totals = {}
        for a, b in sorted(spans, key=lambda span: -likelihood[span])[:12]:
            begin, end = (context[window.words[context] == window.words[token]] for token in (a, b))
            text = row.context[window.offsets[begin[0], 0] : window.offsets[end[-1], 1]].lower()
            totals[text] = totals.get(text, 0) + likelihood[a, b]
        best = max(totals, key=lambda text: totals[text])
        expected.append("" if np.exp(logits[0].sum()) > totals[best] else best)
    metrics, answers = judge(model, encoder, "answers", files)
    assert [answer.lower() for answer in answers] == expected
    golds = [[text for text, _ in row.answers] for row in found]
    f1 = [evaluate.answer_f1(a, g) for a, g in zip(expected, golds, strict=True)]
    assert metrics["f1"] == np.mean(f1)


def test_similarity_is_the_cosine_of_vectors(model, encoder, files):
    """Of both texts of a pair, each by itself."""
    found = labelled_rows.read(files["vectors"], "embedding")
    cosines = []
    for row in found:
        first, second = (
            alone(model, "vectors", encoder.texts([text])[0].windows[0])[0] for text in row.texts
        )
        norms = np.linalg.norm(first) * np.linalg.norm(second)
        cosines.append(float(first @ second / norms))
    metrics, answers = judge(model, encoder, "vectors", files)
    assert metrics["spearman"] == close(spearmanr(cosines, [row.score for row in found]).statistic)
    assert len(answers) == 2 * len(found)


# -- running --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", HEADS)
def test_any_run_can_be_asked(name, model, encoder, files):
    """One that takes texts one by one gives the answers of one that batches them."""

    def run(encodings):
        outputs = [alone(model, name, encoding) for encoding in encodings]
        per_token = HEADS[name].per_token
        return [{name: output if per_token else output[0]} for output in outputs]

    slow = evaluate.judge(run, encoder, HEADS[name], name, files[name])
    fast = judge(model, encoder, name, files)
    assert slow.answers == fast.answers
    assert slow.metrics == {metric: close(value) for metric, value in fast.metrics.items()}


def test_outputs_come_in_the_order_of_encodings(encoder):
    """Although like lengths run together, within the budget of slots."""
    texts = [" ".join(WORDS[:size]) for size in (3, 9, 1, 5, 9, 2)] * 300
    encodings = [encoded.windows[0] for encoded in encoder.texts(texts)]
    sizes = []

    def run(batch):
        sizes.append(len(batch) * max(map(len, batch)))
        return [{"length": np.float32([len(encoding)])} for encoding in batch]

    found = evaluate.run_sorted(run, encodings)
    assert [int(output["length"][0]) for output in found] == [len(e) for e in encodings]
    assert len(sizes) > 1
    assert max(sizes) <= evaluate.BATCH_TOKENS


def test_evaluation_is_without_dropout_and_leaves_training_on(encoder):
    """A model in training is the same model when it is evaluated."""
    model = EncoderWithHeads(shape(vocab_size=200), {"a": HEADS["sentiment"]}).train()
    windows = encoder.texts(["Ada"])[0].windows
    run = evaluate.torch_run(model, ["a"])
    # Two batches: some processors round the rows of one batch differently.
    ([first], [second]) = run(windows), run(windows)
    np.testing.assert_array_equal(first["a"], second["a"])
    assert model.training


@pytest.mark.parametrize(
    ("limit", "expected"), [(0, [0, 1, 2, 3, 4]), (3, [0, 2, 4]), (9, [0, 1, 2, 3, 4])]
)
def test_a_limit_spreads_over_the_file(limit, expected):
    """Files are often sorted, so the first rows would not do."""
    assert evaluate.spread([0, 1, 2, 3, 4], limit) == expected


def test_limited_evaluation_counts_only_its_rows(model, encoder, files):
    """Each row has one answer."""
    assert len(judge(model, encoder, "sentiment", files, limit=7).answers) == 7


def test_scores_of_some_pairs_cannot_be_judged(model, encoder, tmp_path):
    """They have no metric in common; the error names the row."""
    path = tmp_path / "a.jsonl"
    scored = '{"text": "a", "text_pair": "b", "score": %d}'
    path.write_text("\n".join([scored % 1, '{"texts": ["a", "b"]}', scored % 0]))
    with pytest.raises(
        labelled_rows.DataError, match=r"a\.jsonl:2: .* for all of its rows or for none"
    ):
        judge(model, encoder, "vectors", {"vectors": path})


def test_a_single_label_holds_or_not(encoder):
    """From one half, and the order of scores has an average precision."""
    found = [labelled_rows.Text("here", "a", "b", score=grade) for grade in (0.0, 1.0, 1.0, 0.0)]
    (pair,) = encoder.pairs(["a"], ["b"])
    texts = [(pair, [np.float32([logit])]) for logit in (-3.0, 0.1, -0.1, 0.2)]
    metrics, answers = evaluate.judge_texts(found, texts, HEADS["relevance"])
    assert metrics == {"average_precision": pytest.approx((1 / 2 + 2 / 3) / 2), "accuracy": 0.5}
    assert answers == [0.0, 0.5, 0.5, 0.5]


# -- metrics --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "normal"),
    [
        ("The  Cat, sat.", "cat sat"),
        ("An apple a day", "apple day"),
        ("U.S.", "us"),
        ("theatre", "theatre"),
        ("the", ""),
        ("Zoë’s", "zoë’s"),  # only ASCII's punctuation goes
        ("3-4", "34"),
    ],
)
def test_answers_are_normalised_as_squad_does(text, normal):
    """Lower case, then no punctuation, no articles, single blanks."""
    assert evaluate.normalize_answer(text) == normal


@pytest.mark.parametrize(
    ("answer", "golds", "em", "f1"),
    [
        ("the Cat.", ["cat"], 1.0, 1.0),
        ("big cat", ["cat"], 0.0, 2 / 3),
        ("big cat", ["dog", "a big black cat"], 0.0, 0.8),
        ("cat cat", ["cat"], 0.0, 2 / 3),
        ("dog", ["cat"], 0.0, 0.0),
        ("", [], 1.0, 1.0),
        ("cat", [], 0.0, 0.0),
        ("", ["cat"], 0.0, 0.0),
        ("", ["the"], 1.0, 1.0),
    ],
)
def test_the_best_right_answer_counts(answer, golds, em, f1):
    """No right answer means that "" is right."""
    assert evaluate.exact_match(answer, golds) == em
    assert evaluate.answer_f1(answer, golds) == pytest.approx(f1)


@pytest.mark.parametrize("seed", range(5))
def test_no_threshold_is_better(seed):
    """Tried at every margin and between, with equal margins among them."""
    rng = np.random.default_rng(seed)
    margins = rng.integers(-5, 5, size=30).astype(float)
    spans, nulls = rng.random(30), (rng.random(30) < 0.5).astype(float)

    def score(threshold):
        return float(np.where(margins > threshold, nulls, spans).mean())

    best, threshold = evaluate.best_threshold(margins.tolist(), spans.tolist(), nulls.tolist())
    assert best == pytest.approx(max(score(t) for t in np.arange(-7, 7, 0.25)))
    assert score(threshold) == pytest.approx(best)


def test_the_best_threshold_gives_the_best_f1(model, encoder, files):
    """Decoding with it reaches what was promised."""
    run = evaluate.torch_run(model, ["answers"])
    judge = partial(evaluate.judge, run, encoder, name="answers", file=files["answers"])
    first = judge(head=HEADS["answers"]).metrics
    tuned = HEADS["answers"].model_copy(update={"null_threshold": first["best_f1_threshold"]})
    second = judge(head=tuned).metrics
    assert second["f1"] == pytest.approx(first["best_f1"])
    assert second["f1"] >= first["f1"]


def test_what_does_not_vary_does_not_correlate():
    """No warning and no NaN where a correlation is not defined."""
    assert evaluate.correlations([1, 1], [0, 1]) == {"pearson": 0.0, "spearman": 0.0}


def test_the_nearest_vector_is_another_one():
    """By cosine, over more vectors than are compared at once."""
    vectors = np.random.default_rng(0).normal(size=(1500, 3)).astype(np.float32)
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    found = evaluate.nearest(vectors)
    for row in (0, 1, 1023, 1024, 1499):
        others = [other for other in range(1500) if other != row]
        assert found[row] == others[(vectors[others] @ vectors[row]).argmax()]


@pytest.mark.parametrize(
    ("name", "metric"),
    [
        ("sentiment", "accuracy"),
        ("topics", "micro_f1"),
        ("stars", "spearman"),
        ("relevance", "average_precision"),
        ("grades", "spearman"),
        ("entities", "f1"),
        ("answers", "f1"),
        ("vectors", "spearman"),
        ("anchors", "mrr"),
    ],
)
def test_every_head_has_a_main_metric(name, metric, model, encoder, files):
    """The first of those that are measured."""
    assert next(iter(judge(model, encoder, name, files).metrics)) == metric


def unit(*degrees: float) -> NDArray[np.float32]:
    """Vectors of length 1 in the plane."""
    angles = np.radians(degrees)
    return np.stack([np.cos(angles), np.sin(angles)], axis=1).astype(np.float32)


def anchored(*texts: str, negatives: Sequence[str] = ()) -> labelled_rows.Similar:
    return labelled_rows.Similar("here", texts, None, tuple(negatives))


def test_positives_are_ranked_among_all_others():
    """The first is found at once, the second after a negative, the third after that and the second."""
    found = [anchored("a", "A"), anchored("b", "B"), anchored("c", "C", negatives=["N", "far"])]
    vectors = unit(0, 5, 40, 70, 60, 90, 50, 180)  # a A b B c C N far
    metrics = evaluate.retrieval(found, vectors)
    assert metrics == {
        "mrr": pytest.approx((1 + 1 / 2 + 1 / 3) / 3),
        "accuracy": pytest.approx(1 / 3),
        "triplets": 0.5,
    }


def test_what_is_right_too_comes_before_nothing():
    """The other positive of an anchor, and its own by another row's name; a group's third text is not asked for."""
    found = [anchored("a", "A"), anchored("a", "B"), anchored("c", "A"), anchored("d", "D", "E")]
    vectors = unit(0, 20, 0, 10, 25, 20, 90, 80, 90)
    assert evaluate.retrieval(found, vectors) == {"mrr": 1.0, "accuracy": 1.0}


def test_vectors_that_are_all_alike_find_nothing():
    """A candidate as similar as the positive ranks before it."""
    found = [anchored(f"{i}", f"of {i}", negatives=["N"]) for i in range(9)]
    metrics = evaluate.retrieval(found, unit(*[33.0] * 27))
    assert metrics == {"mrr": pytest.approx(0.1), "accuracy": 0.0, "triplets": 0.0}


# -- script ---------------------------------------------------------------------------------------


def test_the_command_prints_a_table_and_a_line_of_json(
    model, files, tokenizer_file, tmp_path, monkeypatch, capsys
):
    """A table for people, one JSON line last for machines."""
    writer.save_joint(tmp_path / "joint", model, tokenizer_file)
    asked = [f"--eval={name}={files[name]}" for name in ("sentiment", "answers")]
    command = ["evaluate", str(tmp_path / "joint"), *asked, "--max-length=48"]
    monkeypatch.setattr("sys.argv", command)
    evaluate.main()
    *table, last = capsys.readouterr().out.splitlines()
    assert any("sentiment" in line for line in table)
    encoder = Encoder.from_file(tokenizer_file, 48)
    assert json.loads(last)["metrics"] == {
        f"{name}={files[name]}": judge(model, encoder, name, files).metrics
        for name in ("sentiment", "answers")
    }


@pytest.mark.parametrize(
    ("folder", "asked", "message"),
    [
        ("joint", "mood=a.jsonl", "a head of sentiment, topics"),
        ("joint", "sentiment=a.jsonl", "a.jsonl:1: no text"),
        ("joint", "sentiment=b.jsonl", "evaluate: b.jsonl: No such file or directory"),
        (".", "sentiment=a.jsonl", "config.json"),
    ],
    ids=["unknown head", "no row", "no file", "no checkpoint"],
)
def test_the_command_says_what_is_wrong(
    model, tokenizer_file, tmp_path, monkeypatch, capsys, folder, asked, message
):
    """In a line, not a traceback."""
    monkeypatch.chdir(tmp_path)
    writer.save_joint(tmp_path / "joint", model, tokenizer_file)
    Path("a.jsonl").write_text("{}")
    monkeypatch.setattr("sys.argv", ["evaluate", folder, "--eval", asked])
    with pytest.raises(SystemExit) as ended:
        evaluate.main()
    assert (2, True) == (ended.value.code, message in capsys.readouterr().err)

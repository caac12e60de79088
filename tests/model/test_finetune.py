"""Fine-tuning learns, goes on where it stopped, and leaves a checkpoint that anyone can load."""

import itertools
import json
import shutil
import signal
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from model import finetune
from model.bert import Bert
from model.checkpoints import reader, writer
from model.checkpoints.errors import CheckpointError
from model.config import preset
from model.data import labelled_rows
from model.families.nomic_bert import NomicBert, NomicBertConfig
from model.finetune import FinetuneSettings
from model.heads import EncoderWithHeads
from model.training import defaults, optim
from model.training.distillation import TrainingTask
from model.training.token_matching_init import init_token_matching
from service.core.manifest import Head
from tests.model.helpers import interrupted, run_with_signal, shape, stopped, watch_steps
from tests.model.report.test_page import EXTERNAL

NAMES = ["Ada", "Grace", "Emmy", "Sofya"]
THINGS = ["a comet", "the old engine", "every river", "some tables"]
PLACES = ["Turin", "the harbour", "dawn", "Dr. Noether"]
TEXTS = [
    f"{name} drew {thing} near {place}." for name in NAMES for thing in THINGS for place in PLACES
]


@dataclass(frozen=True)
class Start:
    """Runs a small training; settings as in a TOML file."""

    data: Mapping[str, str]
    source: Path
    folder: Path

    def __call__(self, heads: dict[str, Any], **settings: Any) -> dict[str, Any]:
        given = {
            "output": str(self.folder / "run"),
            "init_from": str(self.source),
            "max_length": 64,
            "precision": "fp32",
            "steps": 15,
            "lr": 5e-3,
            "dropout": 0.0,
            "attention_dropout": 0.0,
            **settings,
        }
        return finetune.finetune(FinetuneSettings(heads=heads, **given))

    def judged_table(self) -> dict[str, Any]:
        """The table of one head, which has rows to judge it."""
        return {"head": {**self.tables()["names"], "dev": self.data["names"]}}

    def tables(self, *names: str, batch_size: int = 4) -> dict[str, Any]:
        """The tables of these heads, else one of each task."""
        size = {"batch_size": batch_size}
        every: dict[str, Any] = {
            "names": {"task": "classification", "train": [self.data["names"]], **size},
            "entities": {"task": "ner", "train": [self.data["entities"]], **size},
            "answers": {"task": "qa", "train": [self.data["answers"]], **size},
            "vectors": {
                "task": "embedding",
                "train": [self.data["pairs"], self.data["groups"]],
                "scored_batch_size": 3,
                **size,
            },
        }
        return {name: every[name] for name in names or every}


def jsonl(path: Path, lines: list[dict[str, Any]]) -> str:
    path.write_text("\n".join(map(json.dumps, lines)), encoding="utf-8")
    return str(path)


def squad(path: Path, unanswerable: bool) -> str:
    """Texts with drawn objects and prices; with `unanswerable`, every other question has no answer."""
    paragraphs = []
    for number, text in enumerate(TEXTS[::4]):
        thing = THINGS[number % 4]
        start = text.find(thing)
        answers = [{"text": thing, "answer_start": start}] if start >= 0 else []
        known = {"question": "What was drawn?", "answers": answers}
        unknown = {"question": "What did it cost?", "answers": []}
        asked = unknown if unanswerable and number % 2 else known
        paragraphs.append({"context": text, "qas": [asked]})
    path.write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """Sixteen examples for every task."""
    folder = tmp_path_factory.mktemp("data")
    conll = folder / "entities.conll"
    sentences = [
        f"{name} B-PER\ndrew O\na O\ncomet O\nnear O\nNew B-LOC\n{place}-U.S. I-LOC"
        for name in NAMES
        for place in ("Turin", "Ada", "Emmy", "York")
    ]
    conll.write_text("\n\n".join(sentences))
    names = [{"text": text, "label": text.split()[0]} for text in TEXTS[::4]]
    several = [
        {"text": t, "labels": [w for w in ("comet", "Ada", "river") if w in t]} for t in TEXTS[::4]
    ]
    comets = [{"text": t, "labels": ["comet"] if "comet" in t else []} for t in TEXTS[::4]]
    stars = [{"text": t, "label": NAMES.index(t.split()[0]) / 2} for t in TEXTS[::4]]
    # Graded by the drawn object alone, not by the subject: 0 to 3.
    pairs = [
        {"text": f"{a} drew {x}.", "text_pair": f"{b} drew {y}.", "score": 3 - abs(i - j)}
        for i, (x, a) in enumerate(zip(THINGS, NAMES, strict=True))
        for j, (y, b) in enumerate(zip(THINGS, reversed(NAMES), strict=True))
    ]
    groups = [{"texts": [f"{n} drew {t}.", f"{t} by {n}"]} for n in NAMES for t in THINGS]
    return {
        "names": jsonl(folder / "names.jsonl", names),
        "few": jsonl(folder / "few.jsonl", names[::4]),
        "several": jsonl(folder / "several.jsonl", several),
        "comets": jsonl(folder / "comets.jsonl", comets),
        "stars": jsonl(folder / "stars.jsonl", stars),
        "entities": str(conll),
        "answers": squad(folder / "answers.json", unanswerable=False),
        "perhaps": squad(folder / "perhaps.json", unanswerable=True),
        "pairs": jsonl(folder / "pairs.jsonl", pairs),
        "groups": jsonl(folder / "groups.jsonl", groups),
    }


@pytest.fixture(scope="module")
def source(tokenizer_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fresh encoder, small enough to learn sixteen examples in a second."""
    torch.manual_seed(0)
    config = shape(vocab_size=200, hidden_size=64, intermediate_size=128, initializer_range=0.05)
    folder = tmp_path_factory.mktemp("source")
    writer.save_encoder(folder, Bert(config), tokenizer_file)
    return folder


@pytest.fixture
def start(data: Mapping[str, str], source: Path, tmp_path: Path) -> Start:
    return Start(data, source, tmp_path)


def losses(folder: Path) -> list[tuple[int, float]]:
    return torch.load(folder / "last.pt", weights_only=True)["history"]


# -- learning -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "head", "metric", "least"),
    [
        ("names", {"task": "classification"}, "accuracy", 1.0),
        ("several", {"task": "classification", "problem_type": "multi_label_classification"}, "micro_f1", 1.0),
        (
            "comets",
            {
                "task": "classification",
                "problem_type": "multi_label_classification",
                "labels": ["comet"],
            },
            "micro_f1",
            1.0,
        ),
        ("stars", {"task": "classification", "problem_type": "regression"}, "spearman", 0.9),
        ("entities", {"task": "ner"}, "f1", 1.0),
        ("answers", {"task": "qa"}, "em", 1.0),
        ("pairs", {"task": "embedding"}, "spearman", 0.9),
        ("pairs", {"task": "embedding", "loss": "cosine"}, "spearman", 0.9),
        ("pairs", {"task": "sparse-embedding", "flops": 1e-4}, "spearman", 0.9),
    ],
)  # fmt: skip
def test_sixteen_examples_are_learnt(name, head, metric, least, start):
    """A model that sees them again and again answers them, as the service would read it."""
    sizes = {"batch_size": 16, "scored_batch_size": 16}
    table = {"train": [start.data[name]], "dev": start.data[name], **sizes}
    result = start({"head": {**table, **head}})
    assert result["heads"]["head"][metric] >= least


def test_equal_texts_find_each_other(start, tmp_path):
    """The contrastive loss falls far below that of guessing."""
    table = {"task": "embedding", "train": [start.data["groups"]], "batch_size": 16}
    start({"vectors": table})
    history = losses(tmp_path / "run")
    assert history[0][1] > 2
    assert history[-1][1] < 0.5


def asked(name: str, thing: str, place: str) -> dict[str, Any]:
    """A question, its answer, and an answer that shares more words with it."""
    wrong = PLACES[PLACES.index(place) - 1]
    anchor, alike = f"{thing} by {name}, {place}?", f"{thing} by {name}, {wrong}."
    return {"anchor": anchor, "positive": f"{place}: {name}, {thing}.", "negative": alike}


@pytest.fixture(scope="module")
def anchors(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """Questions to learn from, and sixteen others about the same names, things and places."""
    folder = tmp_path_factory.mktemp("anchors")
    every = [asked(n, t, p) for n in NAMES for t in THINGS for p in PLACES]
    held = [i for i in range(64) if (i // 16 + i // 4 + i) % 4 == 0]
    learnt = [row for i, row in enumerate(every) if i not in held]
    return {
        "train": jsonl(folder / "train.jsonl", learnt),
        "dev": jsonl(folder / "dev.jsonl", [every[i] for i in held]),
    }


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"symmetric": False},
        {"contrast": "triplet"},
        {"contrast": "triplet", "distance": "cosine"},
        {"contrast": "triplet", "normalize": False},
    ],
    ids=["ranking", "one way", "triplet", "cosine", "any length"],
)
def test_anchors_find_their_positives(how, anchors, start, tmp_path):
    """Of texts that were never seen, and among negatives that share more words: before, hardly one does."""
    table = {"task": "embedding", "train": [anchors["train"]], "dev": anchors["dev"], **how}
    tables = {"v": {**table, "batch_size": 16}}
    before = start(tables, steps=1, lr=0.0, output=str(tmp_path / "before"))["heads"]["v"]
    after = start(tables, steps=120, lr=1e-3)["heads"]["v"]
    assert before["accuracy"] < 0.2
    assert after["accuracy"] > 0.5
    assert after["triplets"] > max(before["triplets"], 0.95)


@pytest.fixture(scope="module")
def relevance(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """Is it the same thing? Half of the time it is."""
    folder = tmp_path_factory.mktemp("relevance")
    every = itertools.product(range(4), repeat=4)
    labelled_rows = [
        {"text": f"{THINGS[a]} {NAMES[m]}", "text_pair": f"{NAMES[n]} {THINGS[b]}", "same": a == b}
        for a, b, m, n in every
        if a == b or (a + b + m + n) % 3 == 0
    ]
    binary = [{**row, "label": int(row["same"])} for row in labelled_rows]
    graded = [{**row, "score": 0.9 if row["same"] else 0.2} for row in labelled_rows]
    return {
        "binary": jsonl(folder / "binary.jsonl", binary[::2]),
        "graded": jsonl(folder / "graded.jsonl", graded[::2]),
    }


@pytest.mark.parametrize(
    ("name", "how", "metric"),
    [
        ("binary", {"labels": ["relevant"]}, "average_precision"),
        ("graded", {"labels": ["relevant"]}, "spearman"),
        ("graded", {"problem_type": "regression"}, "spearman"),
    ],
)
def test_pairs_are_graded(name, how, metric, relevance, start):
    """By a head that reads both texts at once; a grade of two values correlates by 0.87 at most."""
    table = {"task": "classification", "train": [relevance[name]], "dev": relevance[name]}
    result = start({"v": {**table, **how}}, steps=150, lr=2e-3)["heads"]["v"]
    assert result[metric] > {"average_precision": 0.95, "spearman": 0.8}[metric]


# -- resuming -------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", optim.OPTIMIZERS)
def test_a_resumed_run_is_an_uninterrupted_run(start, tmp_path, optimizer):
    """Every loss is the same, bit for bit, with dropout, over heads and epochs of all lengths."""
    rates = {"dropout": 0.1, "attention_dropout": 0.1}
    settings = {"steps": 8, "save_every": 3, "optimizer": optimizer, **rates}
    start(start.tables(), output=str(tmp_path / "whole"), **settings)
    with interrupted(at=4):
        start(start.tables(), output=str(tmp_path / "cut"), **settings)
    assert len(losses(tmp_path / "cut")) == 3
    start(start.tables(), output=str(tmp_path / "cut"), **settings)

    assert losses(tmp_path / "cut") == losses(tmp_path / "whole")
    weights = [(tmp_path / name / "checkpoint/model.safetensors") for name in ("cut", "whole")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "status", "saved"),
    [(signal.SIGINT, 130, 5), (signal.SIGTERM, 143, 5), (signal.SIGKILL, -signal.SIGKILL, 3)],
)
def test_a_signaled_run_is_an_uninterrupted_run(start, source, tmp_path, number, status, saved):
    """Ctrl-C and SIGTERM finish the step and save; resumed, the run has the same bytes. So it has after SIGKILL."""
    table = {
        "names": {**start.tables()["names"], "dev": start.data["names"]},
        "answers": start.tables()["answers"],
    }
    settings = {"steps": 8, "save_every": 3, "eval_every": 4, "dropout": 0.1}
    start(table, output=str(tmp_path / "whole"), **settings)
    cut = tmp_path / "cut"
    given = {"init_from": str(source), "max_length": 64, "precision": "fp32", "lr": 5e-3}
    given |= {**settings, "heads": table, "output": str(cut), "attention_dropout": 0.0}
    options = [
        f"--{name.replace('_', '-')}={value if isinstance(value, str) else json.dumps(value)}"
        for name, value in given.items()
    ]

    ended = run_with_signal("model.finetune", number, *options, step=4)
    assert ended.returncode == status, ended.stderr
    assert len(losses(cut)) == saved
    if number != signal.SIGKILL:
        assert "Traceback" not in ended.stderr
        assert f"{number.name}: stopped after step 5 of 8 and saved to {cut}" in ended.stdout
        assert (cut / "loss.png").read_bytes().startswith(b"\x89PNG")
        assert reader.load_model(cut / "checkpoint").described.keys() == {"names", "answers"}
    start(table, output=str(cut), **settings)

    assert losses(cut) == losses(tmp_path / "whole")
    weights = [(tmp_path / name / "checkpoint/model.safetensors") for name in ("cut", "whole")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


def test_a_run_that_is_stopped_before_its_first_evaluation(start, tmp_path):
    """Its checkpoint has the weights of the last step, and the settings and the step that made it."""
    with stopped(at=1):
        start(start.tables("names"), steps=8, lr=1e-3)
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL
    reader.load_model(tmp_path / "run/checkpoint")
    document = json.loads((tmp_path / "run/checkpoint/training_settings.json").read_text())
    assert (document["step"], document["settings"]["lr"]) == (2, 1e-3)


def test_another_run_into_the_same_directory_is_refused(start, tmp_path):
    """Other settings and other labels are named before training; the old model stays until --fresh is given."""
    start(start.tables("names"), steps=2)
    folder = tmp_path / "run/checkpoint"
    kept = (folder / "model.safetensors").read_bytes()
    with pytest.raises(ValueError, match=r"run has a run that differs: lr: 0.25 \(was 0.005\)"):
        start(start.tables("names"), steps=2, lr=0.25)
    other = {**start.tables()["names"], "train": [start.data["several"]]}
    other["problem_type"] = "multi_label_classification"
    with pytest.raises(
        ValueError, match=r"heads\.names\.train: .*several\.jsonl \(was .*names\.jsonl"
    ):
        start({"names": other}, steps=2)
    assert (folder / "model.safetensors").read_bytes() == kept

    assert start({"names": other}, steps=2, fresh=True)["steps"] == 2
    assert reader.load_model(folder).described["classification"].labels == ("Ada", "comet", "river")


def test_a_longer_run_continues(start, tmp_path):
    """More epochs add their steps to the saved ones."""
    table = start.tables("names")
    start(table, steps=0, epochs=1)
    assert len(losses(tmp_path / "run")) == 4
    start(table, steps=0, epochs=2)
    assert [step for step, _ in losses(tmp_path / "run")] == [*range(8)]


def test_the_seed_is_all_that_chance_depends_on(start, tmp_path):
    """The same seed gives the same losses, another one others."""
    table = start.tables("names")
    for output, seed in (("a", 1), ("b", 1), ("c", 2)):
        start(table, output=str(tmp_path / output), seed=seed, steps=3)
    first, same, other = (losses(tmp_path / output) for output in "abc")
    assert first == same != other


def test_accumulated_batches_are_one_batch(start, tmp_path):
    """Two micro-batches of four rows have the loss and the gradient of one batch of eight."""
    for output, size, count in (("one", 8, 1), ("two", 4, 2)):
        table = {"names": {**start.tables()["names"], "batch_size": size}}
        start(table, output=str(tmp_path / output), steps=6, gradient_accumulation=count)

    one, two = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert [loss for _, loss in one] == pytest.approx([loss for _, loss in two], rel=1e-4)
    # An epoch of sixteen rows is two steps of two batches of four.
    epoch = start(start.tables("names"), steps=0, epochs=1.0, gradient_accumulation=2)
    assert 2 == epoch["steps"]


# -- data without a dev file ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def unsplit(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Sixty-four rows of four labels, without a dev file."""
    rows = [{"text": text, "label": text.split()[0]} for text in TEXTS]
    return jsonl(tmp_path_factory.mktemp("unsplit") / "rows.jsonl", rows)


def test_a_tenth_is_held_out(unsplit, start, tmp_path, capsys):
    """Without a dev file a tenth of the rows measures the head, is not trained on, and is listed."""
    result = start({"names": {"task": "classification", "train": [unsplit]}}, steps=2)

    held = json.loads((tmp_path / "run/held_out.json").read_text())["names"]
    assert 6 <= len(held) <= 7
    assert all(where.startswith(f"{unsplit}:") for where in held)
    assert "accuracy" in result["heads"]["names"]
    out = capsys.readouterr().out
    assert f"names: {64 - len(held)} examples\n" in out
    assert f"names is evaluated on {len(held)} of 64 rows of {unsplit}, held out by seed 1" in out


def test_no_row_is_held_out(unsplit, start, tmp_path):
    """With a share of 0 the run trains on all rows, and evaluates nothing."""
    table = {"names": {"task": "classification", "train": [unsplit]}}
    assert {} == start(table, steps=2, dev_share=0.0)["heads"]
    assert not (tmp_path / "run/held_out.json").exists()


def test_defaults_follow_rows_and_width(unsplit, start, tmp_path, capsys):
    """Few rows get more epochs, a narrow encoder a higher learning rate, and a run ten evaluations or more."""
    table = {"names": {"task": "classification", "train": [unsplit], "batch_size": 16}}
    result = start(table, steps=0, lr=None, patience=0)

    settings = json.loads((tmp_path / "run/settings.json").read_text())
    assert (15.0, 3e-4, 5) == tuple(settings[name] for name in ("epochs", "lr", "eval_every"))
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step ")]
    assert (54, 11) == (result["steps"], len(lines))
    assert lines[0].startswith("step 5 of 54: names: accuracy 0.")
    assert lines[0].endswith(" (best so far)")


# -- the report -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "head", "expected"),
    [
        ("names", {"task": "classification"}, ["Confusion matrix", "Scores by label", "Sofya"]),
        (
            "several",
            {"task": "classification", "problem_type": "multi_label_classification"},
            ["Scores by label", "score of the error"],
        ),
        ("stars", {"task": "classification", "problem_type": "regression"}, ["spearman", "grade"]),
        ("entities", {"task": "ner"}, ["Scores by type", "PER Ada"]),
        ("answers", {"task": "qa"}, ["exact match", "What was drawn?"]),
        ("pairs", {"task": "embedding"}, ["difference of ranks", "Ada drew a comet."]),
        ("groups", {"task": "embedding"}, ["MRR", "nearest", "a comet by Ada"]),
        ("pairs", {"task": "sparse-embedding"}, ["difference of ranks", "active"]),
    ],
)
def test_the_report_of_a_head(name, head, expected, start, tmp_path, capsys):
    """The page has the curves of the run and, for every task, scores and the worst errors with their texts."""
    start(
        {"head": {"train": [start.data[name]], "dev": start.data[name], **head}}, steps=1, lr=1e-6
    )

    page = (tmp_path / "run/report.html").read_text(encoding="utf-8")
    assert not EXTERNAL.search(page)
    every = ["Loss of training", "Evaluations", "Learning rate", "Throughput", "Worst errors"]
    assert [] == [text for text in [*every, *expected] if text not in page]
    assert f"report: {tmp_path / 'run/report.html'}" in capsys.readouterr().out


def test_texts_in_the_report_are_escaped(start, tmp_path):
    """A text, a label and a file name with markup are shown as they are."""
    hostile = "<img src=x onerror=alert(1)>"
    rows = [{"text": f"{text} {hostile}", "label": f"<b>{text[:3]}"} for text in TEXTS]
    train = jsonl(tmp_path / "a<b>.jsonl", rows)
    start({"head": {"task": "classification", "train": [train]}}, steps=1, lr=1e-6)

    page = (tmp_path / "run/report.html").read_text(encoding="utf-8")
    assert hostile not in page
    assert "&lt;img src=x onerror=alert(1)&gt;" in page
    assert "<b>" not in page


def test_a_head_is_calibrated(unsplit, start, tmp_path):
    """A temperature is fitted on the dev rows, carried in the checkpoint, and reported with both errors."""
    table = {"task": "classification", "train": [unsplit], "dev": unsplit}
    result = start({"names": table, "other": table}, steps=30, lr=1e-3)

    found = result["calibration"]["names"]
    assert {"temperature", "error_before", "error_after"} == found.keys()
    joint = reader.load_model(tmp_path / "run/checkpoint").described
    assert found["temperature"] == joint["names"].calibration_temperature
    page = (tmp_path / "run/report.html").read_text(encoding="utf-8")
    assert f"{found['error_before']:.4f}" in page
    assert f"{found['error_after']:.4f}" in page
    assert "Reliability" in page

    start({"names": table}, steps=1, output=str(tmp_path / "single"))
    [head] = reader.load_model(tmp_path / "single/checkpoint").described.values()
    assert head.calibration_temperature > 0


@pytest.mark.parametrize(("steps", "evaluations"), [(3, 3), (7, 7), (141, 10), (20_000, 40)])
def test_evaluations_of_a_run(steps, evaluations):
    """A run is evaluated at least five times, as far as it has steps."""
    assert evaluations <= steps // defaults.eval_every_for(steps) <= evaluations + 1


def test_patience_ends_a_run(start, tmp_path, monkeypatch, capsys):
    """The run ends after two evaluations without a better score; repeated or longer, it adds no step and logs it."""
    scores = iter([0.5, 0.7, 0.7, 0.4, *[0.7] * 3])
    evaluate = {"head": {"accuracy": 0.0}}
    monkeypatch.setattr(
        finetune, "evaluate_heads", lambda *_: evaluate | {"head": {"accuracy": next(scores)}}
    )
    table = start.judged_table()

    first = start(table, steps=20, eval_every=2, patience=2)
    assert "no step is added" not in capsys.readouterr().out
    again = start(table, steps=20, eval_every=2, patience=2)
    longer = start(table, steps=30, eval_every=2, patience=2)

    for result in (first, again, longer):
        assert (result["steps"], result["best_step"]) == (8, 6)
    assert len(losses(tmp_path / "run")) == 8
    assert capsys.readouterr().out.count("ended early at step 8") == 2


# -- heads together -------------------------------------------------------------------------------


def test_heads_that_know_nothing_weigh_the_same(start, tmp_path):
    """At the first step each stream adds about its weight: five ones, of which one counts half."""
    tables = start.tables(batch_size=16)
    tables["answers"]["weight"] = 0.5
    start(tables, steps=1)
    # The vectors of a fresh encoder are nearly alike but not all, and so are its other outputs.
    assert losses(tmp_path / "run")[0][1] == pytest.approx(4.5, rel=0.1)


def test_steep_heads_weigh_no_more(start, monkeypatch):
    """With equal gradients, the norm of a head's gradient is its weight, independent of its loss."""
    lengths = []
    add = optim.add_normalized_gradients

    def watched(loss, learnt, norm, of):
        before = [0 if p.grad is None else p.grad.clone() for p in of]
        add(loss, learnt, norm, of)
        sent = [p.grad - old for p, old in zip(of, before, strict=True) if p.grad is not None]
        lengths.append(torch.nn.utils.get_total_norm(sent).item())

    monkeypatch.setattr(optim, "add_normalized_gradients", watched)
    tables = start.tables()
    tables["answers"]["weight"] = 0.5
    start(tables, steps=2, equal_gradients=True)
    assert lengths == pytest.approx(2 * [1.0, 1.0, 0.5, 1.0, 1.0], rel=1e-3)


def test_few_rows_are_sampled_less_at_first(start, monkeypatch):
    """Annealed sampling: a quarter of the rows has a quarter of the batches at first, and equal shares at the end."""
    few = {"task": "classification", "train": [start.data["few"]], "batch_size": 4}
    tables = {"names": start.tables()["names"], "few": few}
    asked = {"names": [], "few": []}
    heard = []  # the steps in which few are
    batch = TrainingTask.batch

    def watched(lesson, seed, step, *progress):
        asked[lesson.stream.name].append(step)
        if lesson.stream.name == "few":
            heard.append(asked["names"][-1])
        return batch(lesson, seed, step, *progress)

    monkeypatch.setattr(TrainingTask, "batch", watched)
    start(tables, steps=16, anneal_sampling=True)
    assert asked == {"names": [*range(16)], "few": [*range(10)]}
    assert heard == [3, 5, 7, 8, *range(10, 16)]


def test_a_joint_checkpoint_keeps_heads_in_order(start, tmp_path):
    """With what each of them is; the first of a task is the service's default."""
    tables = start.tables()
    tables["answers"] |= {"max_answer_tokens": 12, "demo": True}
    start(tables, steps=1)
    model = reader.load_model(tmp_path / "run/checkpoint")
    assert list(model.described) == ["names", "entities", "answers", "vectors"]
    assert model.described["names"].labels == ("Ada", "Emmy", "Grace", "Sofya")
    assert model.described["entities"].labels == ("O", "B-LOC", "I-LOC", "B-PER", "I-PER")
    assert model.described["answers"] == Head(task="qa", max_answer_tokens=12, demo=True)
    assert model.described["vectors"].dimensions == 64


def test_a_run_ends_after_its_minutes(start, capsys):
    """It has the steps so far; the learning rate falls to 0 in that time."""
    result = start(start.tables("names"), steps=5000, minutes=1e-6)
    assert 1 == result["steps"]
    assert "1e-06 minutes are over: the run ends at step 1 of 5,000" in capsys.readouterr().out


def test_steps_follow_from_the_epochs_of_the_longest_stream(start):
    """Sixteen groups in fours are four steps, however few the pairs of another stream."""
    tables = {"vectors": {**start.tables()["vectors"], "scored_batch_size": 16}}
    assert start(tables, steps=0, epochs=1.5)["steps"] == 6


# -- what a run leaves ----------------------------------------------------------------------------


def test_one_head_becomes_an_ordinary_checkpoint(start, tmp_path):
    """Named after its task, as in any checkpoint of the hub."""
    start({"mood": start.tables()["names"]}, steps=1)
    config = json.loads((tmp_path / "run/checkpoint/config.json").read_text())
    assert config["architectures"] == ["BertForSequenceClassification"]
    assert list(reader.load_model(tmp_path / "run/checkpoint").described) == ["classification"]


def test_one_of_several_alone(start, tmp_path):
    """A head's twin learns from the same table, by itself."""
    start(start.tables(), only="entities", steps=1)
    start(start.tables("entities"), output=str(tmp_path / "twin"), steps=1)

    runs = [torch.load(tmp_path / run / "last.pt", weights_only=True) for run in ("run", "twin")]
    assert runs[0]["history"] == runs[1]["history"]
    assert reader.load_model(tmp_path / "run/checkpoint").described.keys() == {"ner"}


def test_the_null_threshold_is_the_best_on_dev(start, tmp_path):
    """It is kept with the head, and evaluation goes by it."""
    table = {
        "task": "qa",
        "train": [start.data["perhaps"]],
        "dev": start.data["perhaps"],
        "batch_size": 16,
    }
    found = start({"answers": table}, steps=5)["heads"]["answers"]
    head = reader.load_model(tmp_path / "run/checkpoint").described["qa"]
    assert head.null_threshold == found["best_f1_threshold"] != 0
    assert found["f1"] == pytest.approx(found["best_f1"])


def test_the_best_on_dev_is_kept(start, tmp_path, monkeypatch):
    """Not the last; and its metrics are what is reported."""
    scores = iter([0.1, 0.7, 0.3, 0.5])
    metrics = iter([{"head": {"accuracy": score}} for score in [*scores, 0.75]])
    monkeypatch.setattr(finetune, "evaluate_heads", lambda *_: next(metrics))
    kept = []
    save = finetune.save_checkpoint

    def spy(folder, model, **rest):
        kept.append(model.encoder.embeddings.word.weight.detach().clone())
        save(folder, model, **rest)

    monkeypatch.setattr(finetune, "save_checkpoint", spy)
    result = start(start.judged_table(), steps=8, eval_every=2)
    assert (result["best_step"], result["heads"]["head"]["accuracy"]) == (4, 0.75)
    assert len(kept) == 3  # at steps 2 and 4, and at last what step 4 gave
    torch.testing.assert_close(kept[1], kept[2], rtol=0, atol=0)


def test_the_best_on_dev_survives_an_interruption(start, monkeypatch):
    """A resumed run knows how good the checkpoint is that it has, and judges it on all rows at last."""
    scores = iter([0.9, 0.3, 0.2, 0.8])
    limits = []

    def judged(model, s, encoders, dev, dtype, limit=0, *_):
        limits.append((limit, dtype))
        return {"head": {"accuracy": next(scores)}}

    monkeypatch.setattr(finetune, "evaluate_heads", judged)
    table = start.judged_table()
    settings = {"eval_every": 2, "save_every": 2, "dev_limit": 3, "precision": "bf16"}
    with interrupted(at=4):
        start(table, steps=6, **settings)
    result = start(table, steps=6, **settings)

    assert result["best_step"] == 2
    assert limits == [(3, torch.bfloat16)] * 3 + [(0, torch.float32)]


def test_the_recipe_is_followed(start, monkeypatch):
    """Heads have their own rate, and gradients are clipped."""
    rates, norms = watch_steps(monkeypatch)
    start({"a": start.tables()["names"]}, steps=4, lr=1e-3, head_lr=4e-3, warmup=0.0, clip=0.01)

    assert [sorted(each) for each in rates] == [
        pytest.approx([1e-3 * share, 4e-3 * share]) for share in (1, 1, 2 / 3, 1 / 3)
    ]
    assert norms == pytest.approx([0.01] * 4, rel=1e-3)


@pytest.mark.usefixtures("pictures")
def test_a_run_records_its_settings_and_results(start, tmp_path):
    """FinetuneSettings, metrics and a picture of the loss."""
    table = {**start.tables()["names"], "dev": start.data["names"]}
    result = start({"names": table}, steps=2)
    asked = json.loads((tmp_path / "run/settings.json").read_text())
    assert asked["heads"]["names"]["train"] == [start.data["names"]]
    assert json.loads((tmp_path / "run/metrics.json").read_text()) == result
    assert (tmp_path / "run/loss.png").read_bytes().startswith(b"\x89PNG")
    assert result["tokens_per_second"] > 0
    provenance = json.loads((tmp_path / "run/checkpoint/provenance.json").read_text())
    expected = {
        "examples": 16,
        "files": [Path(start.data["names"]).name],
        "metrics": result["heads"]["names"],
        "measured_on": start.data["names"],
    }
    assert {"names": expected} == provenance["training"]["heads"]
    start({"names": table}, steps=2)  # of which nothing is left to train
    assert json.loads((tmp_path / "run/metrics.json").read_text()) == result


@pytest.mark.parametrize("replaced", [False, True])
def test_a_run_goes_on_after_it_died_replacing_its_checkpoint(start, tmp_path, replaced):
    """A crash before or after the checkpoint is replaced leaves one checkpoint and no other file."""
    table = {"names": {**start.tables()["names"], "dev": start.data["names"]}}
    first = start(table, steps=2)
    folder, old = tmp_path / "run/checkpoint", tmp_path / "run/checkpoint.partial.old"
    kept = (folder / "model.safetensors").read_bytes()
    if replaced:
        old.mkdir()
        (old / "config.json").touch()
    else:
        folder.rename(old)

    assert start(table, steps=2)["heads"] == first["heads"]
    assert (folder / "model.safetensors").read_bytes() == kept
    assert [path.name for path in folder.parent.glob("checkpoint*")] == ["checkpoint"]


def test_training_starts_from_a_checkpoint(start, tmp_path):
    """Its encoder, its tokenizer, and its rates of dropout unless others are given."""
    start(start.tables("names"), steps=1, output=str(tmp_path / "first"), dropout=0.3)
    first = str(tmp_path / "first/checkpoint")
    options = {"init_from": first, "lr": 0.0, "dropout": None, "attention_dropout": 0.2}
    start(start.tables("entities"), steps=1, **options)
    before, after = (reader.load_model(p) for p in (first, tmp_path / "run/checkpoint"))
    for ours, theirs in zip(after.encoder.parameters(), before.encoder.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    rates = asdict(after.config)
    assert (rates["hidden_dropout_prob"], rates["attention_probs_dropout_prob"]) == (0.3, 0.2)


@pytest.mark.parametrize("keep", [True, False])
def test_heads_are_kept_with_keep_heads(start, tmp_path, keep):
    """A kept head must exist in the checkpoint; without `keep_heads`, all heads are new."""
    tables = start.tables()
    start({"names": tables["names"]}, steps=1, output=str(tmp_path / "first"))
    first = str(tmp_path / "first/checkpoint")
    both = {"names": tables["names"], "entities": tables["entities"]}
    start(both, steps=1, init_from=first, lr=0.0, seed=2, keep_heads=keep)
    before, after = (reader.load_model(p) for p in (first, tmp_path / "run/checkpoint"))
    (old,) = before.heads.values()
    new = after.heads["names"].state_dict()
    same = [torch.equal(new[name], tensor) for name, tensor in old.state_dict().items()]
    assert all(same) is keep
    assert set(after.heads) == {"names", "entities"}


def test_kept_heads_answer_by_their_labels(start, tmp_path, capsys):
    """The labels may be in any order in the checkpoint; new heads are logged."""
    tables = start.tables()
    turned = {
        "names": {**tables["names"], "labels": ["Sofya", "Ada", "Grace", "Emmy"]},
        "entities": {**tables["entities"], "labels": ["B-PER", "I-LOC", "O", "I-PER", "B-LOC"]},
    }
    start(turned, steps=1, output=str(tmp_path / "first"))
    first = str(tmp_path / "first/checkpoint")
    assert "heads kept" not in capsys.readouterr().out
    start(tables, steps=1, init_from=first, lr=0.0, seed=2, keep_heads=True)
    assert "\nheads kept: names, entities; new: answers, vectors\n" in capsys.readouterr().out
    before, after = (reader.load_model(p) for p in (first, tmp_path / "run/checkpoint"))
    for name in turned:
        old, new = by_label(before, name), by_label(after, name)
        assert [*old] != [*new]
        torch.testing.assert_close([new[label] for label in old], [*old.values()], rtol=0, atol=0)


def by_label(model: EncoderWithHeads, name: str) -> dict[str, Tensor]:
    """The classifier's weights and bias of each label of a head, in the head's order."""
    classifier = model.heads[name].classifier
    labelled_rows = torch.cat([classifier.weight, classifier.bias[:, None]], dim=1)
    return dict(zip(model.described[name].labels, labelled_rows, strict=True))


def test_no_head_to_keep(start, tmp_path):
    """Is said before training, with the heads that were looked for."""
    tables = start.tables()
    start({"names": tables["names"]}, steps=1, output=str(tmp_path / "first"))
    first = str(tmp_path / "first/checkpoint")
    with pytest.raises(ValueError, match=r"keep_heads: .*checkpoint has none of entities"):
        start({"entities": tables["entities"]}, steps=1, init_from=first, keep_heads=True)
    assert not (tmp_path / "run").exists()
    with pytest.raises(ValueError, match="keep_heads: there is no checkpoint"):
        FinetuneSettings(output="x", tokenizer="t", heads={}, keep_heads=True)


def test_heads_begin_by_matching(start, tokenizer_file, tmp_path):
    """Token-matching initialization applies to the configured layers."""
    config = preset("tiny", NomicBertConfig, vocab_size=200)
    encoder = NomicBert(config, pooler=False)
    writer.save_encoder(tmp_path / "begun", encoder, tokenizer_file)
    told = {"init_from": str(tmp_path / "begun"), "matching_layers": 1, "steps": 1, "lr": 0.0}
    start(start.tables("names"), seed=3, **told)
    trained = reader.load_encoder(tmp_path / "run/checkpoint", pooler=False).state_dict()
    init_token_matching(encoder, 1, seed=3)
    for name, tensor in encoder.state_dict().items():
        torch.testing.assert_close(trained[name], tensor, rtol=0, atol=0)


# -- what goes wrong ------------------------------------------------------------------------------


def test_case_is_kept_where_the_configuration_says_so(start, source, tmp_path):
    """A checkpoint's tokenizer cuts as other libraries read it, in what is trained from it, too."""
    shutil.copytree(source, tmp_path / "cased")
    told = {"tokenizer_class": "BertTokenizer", "do_lower_case": False}
    (tmp_path / "cased/tokenizer_config.json").write_text(json.dumps(told))
    start(start.tables("names"), init_from=str(tmp_path / "cased"), steps=1)
    document = json.loads((tmp_path / "run/checkpoint/tokenizer.json").read_text())
    assert document["normalizer"]["lowercase"] is False


def test_windows_must_fit_the_positions(start):
    """Before anything is read."""
    with pytest.raises(CheckpointError, match=r"64 positions .* do not hold 65 tokens"):
        start(start.tables("names"), max_length=65)


@pytest.mark.parametrize(
    ("head", "lines", "message"),
    [
        ("names", None, "CoNLL files are for ner"),
        ("names", [{"text": "a", "label": "Mileva"}], r"dev\.jsonl:1: 'Mileva' is none of the labels Ada, "),
        (
            "vectors",
            [
                {"text": "a", "text_pair": "b", "score": 1},
                {"texts": ["a", "b"]},
                {"text": "a", "text_pair": "b", "score": 0},
            ],
            r"dev\.jsonl:2: a file has scores for all of its rows or for none",
        ),
    ],
)  # fmt: skip
def test_a_wrong_dev_file_is_found_before_training(start, tmp_path, head, lines, message):
    """A file of another task, and rows that the head could never be judged on."""
    dev = start.data["entities"] if lines is None else jsonl(tmp_path / "dev.jsonl", lines)
    with pytest.raises(labelled_rows.DataError, match=message):
        start({"head": {**start.tables()[head], "dev": dev}})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"precision": "fp16"}, "precision: 'fp16' is none of auto, fp32, bf16"),
        ({"optimizer": "sgd"}, "optimizer: 'sgd' is none of adamw, muon"),
        ({"preset": "huge"}, "preset: 'huge' is none of tiny, mini"),
        ({"only": "b", "heads": {"a": {}}}, "only: 'b' is none of a"),
        ({"heads": {"a": {"task": "nre", "train": []}}}, "task: 'nre' is none of classification"),
        (
            {"heads": {"a": {"task": "ner", "train": [], "batchsize": 3}}},
            r"heads\.a: unknown setting 'batchsize'",
        ),
        ({"tokenizer": ""}, "init_from, or the tokenizer"),
        ({"init_from": "c"}, "tokenizer: what it begins from has its own"),
        ({"max_length": "128"}, "^max_length: Input should be a valid integer, not '128'$"),
        ({"keep_heads": 1}, "^keep_heads: Input should be a valid boolean, not 1$"),
        ({"eval_every": 0}, "^eval_every: Input should be greater than or equal to 1, not 0$"),
        ({"save_every": 0}, "^save_every: Input should be greater than or equal to 1, not 0$"),
    ],
)
def test_refused_settings(settings, message):
    """They are named before anything is read, with what there is to choose from."""
    with pytest.raises(ValueError, match=message):
        FinetuneSettings(**{"output": "x", "tokenizer": "t", "heads": {}, **settings})


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"train": "/a/file"}, "train: Input should be a valid list, not '/a/file'"),
        ({"dev": ["a"]}, r"dev: Input should be a valid string, not \['a'\]"),
        ({"labels": ["a", 1]}, "labels: Input should be a valid string, not 1"),
        ({"batch_size": 0}, "batch_size: Input should be greater than or equal to 1, not 0"),
        ({"scored_batch_size": -1}, "scored_batch_size: Input should be greater than or equal to 1, not -1"),
        ({"problem_type": "multi_label"}, "problem_type: 'multi_label' is none of single_label_.*"),
        (
            {"pooling": "median"},
            "pooling: 'median' is none of mean, cls, max, lasttoken, weightedmean, mean_sqrt_len_tokens",
        ),
        ({"train": []}, "no rows to train on"),
        ({"problem_type": "regression", "labels": ["a", "b"]}, "labels: a regression has one, not a, b"),
    ],
)  # fmt: skip
def test_settings_of_a_head_are_checked(settings, message):
    """Before anything is read; the head and the setting are named."""
    table = {"task": "classification", "train": ["f"], **settings}
    with pytest.raises(ValueError, match=rf"^heads\.a: {message}$"):
        FinetuneSettings(output="x", tokenizer="t", heads={"a": table})


@pytest.mark.parametrize("name", ["données", "a+b", "it's", "-x", "a b"])
def test_names_of_runs_that_no_bundle_can_have(name):
    """`make train` names run and bundle after the file: a name that export refuses ends it before training."""
    with pytest.raises(ValueError, match=r"^output: .* cannot be the name of a bundle.* NAME="):
        FinetuneSettings(output=f"runs/{name}", init_from="t", data=f"{name}.csv")


@pytest.mark.parametrize(
    "name", ["lengths", "cu_seqlens", "my head", "-a", "", "type", "keys", "a.b"]
)
def test_names_that_no_head_can_have(start, name):
    """Known before training: no bundle can have them, or they are methods of the model's."""
    with pytest.raises(ValueError, match=f"^heads: '{name}' |a head cannot be named '{name}'"):
        start({name: start.tables()["names"]})


def test_the_command_reads_a_toml_file(data, tokenizer_file, tmp_path, monkeypatch):
    """A table for each head, and other settings before or after it."""
    config = tmp_path / "run.toml"
    config.write_text(
        f"tokenizer = '{tokenizer_file}'\npreset = 'tiny'\nsteps = 9\n"
        f"[heads.names]\ntask = 'classification'\ntrain = ['{data['names']}']\n"
    )
    output = tmp_path / "out"
    monkeypatch.setattr("sys.argv", ["finetune", str(config), "--steps=1", f"--output={output}"])
    finetune.main()
    assert json.loads((output / "metrics.json").read_text())["steps"] == 1


def test_the_command_says_what_is_wrong_with_the_data(tokenizer_file, tmp_path, monkeypatch):
    """In one line, without a traceback."""
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"text": 1, "label": "x"}')
    table = json.dumps({"a": {"task": "classification", "train": [str(bad)]}})
    options = [f"--heads={table}", "--output=x", f"--tokenizer={tokenizer_file}"]
    monkeypatch.setattr("sys.argv", ["finetune", *options])
    with pytest.raises(SystemExit, match=r"bad\.jsonl:1: text may not be 1"):
        finetune.main()

"""A student begins as layers of its teacher or fresh, learns from it, goes on where it stopped, and is a checkpoint."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer, normalizers

from model import distill, evaluate, finetune, tokenizer
from model.bert import Bert
from model.checkpoints import reader, writer
from model.distill import DistillSettings
from model.families.registry import FAMILIES
from model.heads import EncoderWithHeads
from model.run_settings import read_config
from model.training import distillation
from model.training.capture import capture
from service.core.encode import Encoder, load_tokenizer
from service.core.manifest import Head
from tests.model.helpers import batch, interrupted, ours, perturb, shape, stopped

pytestmark = pytest.mark.slow

NAMES = ["Ada", "Grace", "Emmy", "Sofya"]
THINGS = ["a comet", "the old engine", "every river", "some tables"]
PLACES = ["in Turin", "near the harbour", "at dawn", "for Dr. Noether"]
TEXTS = [f"{name} drew {thing} {place}." for name in NAMES for thing in THINGS for place in PLACES]
LAYERS = 3
SINGLE = "single_label_classification"


def write(path: Path, rows: Iterable[Any]) -> str:
    path.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return str(path)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """A file for each task, and half of the names to judge by."""
    folder = tmp_path_factory.mktemp("data")
    names = [{"text": text, "label": text.split()[0]} for text in TEXTS]
    (folder / "entities.conll").write_text(
        "\n\n".join(f"{name} B-PER\ndrew O\n{name} B-PER" for name in NAMES)
    )
    paragraphs = [
        {
            "context": text,
            "qas": [
                {"question": "Who?", "answers": [{"text": text.split()[0], "answer_start": 0}]}
            ],
        }
        for text in TEXTS[::4]
    ]
    (folder / "answers.json").write_text(json.dumps({"data": [{"paragraphs": paragraphs}]}))
    pairs = [{"texts": [text, text.replace("drew", "painted")]} for text in TEXTS[::4]]
    return {
        "names": write(folder / "names.jsonl", names[::2]),
        "names dev": write(folder / "names-dev.jsonl", names[1::2]),
        "entities": str(folder / "entities.conll"),
        "answers": str(folder / "answers.json"),
        "vectors": write(folder / "vectors.jsonl", pairs),
    }


@pytest.fixture(scope="module")
def joint(tokenizer_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A teacher of three layers with a head of each task, whose results differ for every text."""
    described = {
        "names": Head(
            task="classification",
            labels=("Ada", "Emmy", "Grace", "Sofya"),
            problem_type="single_label_classification",
        ),
        "entities": Head(task="ner", labels=("O", "B-PER", "I-PER")),
        "answers": Head(task="qa"),
        "vectors": Head(task="embedding", pooling="mean", dimensions=32),
    }
    model = perturb(EncoderWithHeads(shape(vocab_size=200, num_hidden_layers=LAYERS), described))
    folder = tmp_path_factory.mktemp("joint") / "checkpoint"
    writer.save_joint(folder, model, tokenizer_file)
    return folder


@pytest.fixture(scope="module")
def taught(
    data: Mapping[str, str], tokenizer_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A teacher fine-tuned on entities from random weights."""
    folder = tmp_path_factory.mktemp("taught")
    torch.manual_seed(0)
    fresh = shape(
        vocab_size=200,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        initializer_range=0.05,
    )
    writer.save_encoder(folder / "encoder", Bert(fresh), tokenizer_file)
    finetune.finetune(
        finetune.FinetuneSettings(
            output=str(folder / "run"),
            heads={
                "names": {
                    "task": "classification",
                    "train": [data["names"]],
                    "dev": data["names dev"],
                }
            },
            init_from=str(folder / "encoder"),
            **{**QUICK, "steps": 40},
        )
    )
    return folder / "run/checkpoint"


QUICK: dict[str, Any] = {
    "max_length": 32,
    "precision": "fp32",
    "steps": 1,
    "lr": 5e-3,
    "dropout": 0.0,
    "attention_dropout": 0.0,
}


@dataclass(frozen=True)
class Start:
    """Runs a small distillation; settings as in a TOML file."""

    data: Mapping[str, str]
    corpus: list[str]
    folder: Path

    def __call__(
        self, teacher: Path | str, losses: dict[str, float], **settings: Any
    ) -> dict[str, Any]:
        places = {"output": str(self.folder / "run"), "cache": str(self.folder / "cache")}
        given = {**places, **QUICK, **settings}
        return distill.distill(DistillSettings(teacher=str(teacher), losses=losses, **given))

    def finetune(self, **settings: Any) -> dict[str, Any]:
        """Fine-tune instead."""
        given = {"output": str(self.folder / "run"), **QUICK, **settings}
        return finetune.finetune(finetune.FinetuneSettings(**given))

    def tables(self, *names: str) -> dict[str, Any]:
        """The tables of these heads, else one of each task."""
        return {
            name: {"task": task, "train": [self.data[name]], "batch_size": 4}
            for name, task in KINDS.items()
            if name in names or not names
        }


KINDS = {"names": "classification", "entities": "ner", "answers": "qa", "vectors": "embedding"}


@pytest.fixture
def start(data: Mapping[str, str], corpus_file: Path, tmp_path: Path) -> Start:
    return Start(data, [str(corpus_file)], tmp_path)


def history(folder: Path) -> list[float]:
    return [loss for _, loss in torch.load(folder / "last.pt", weights_only=True)["history"]]


ALL = {"logits": 1.0, "hidden": 1.0, "relations": 1.0, "embedding": 1.0, "similarity": 1.0}


# -- what a student begins as -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("distance", distillation.VECTOR_DISTANCES)
def test_a_student_of_all_layers_is_the_teacher(distance, joint, start, tmp_path):
    """It has nothing to learn: of every task, from text, by every loss."""
    every = {"heads": start.tables(), "corpus": start.corpus, "lr": 0.0, "distance": distance}
    start(joint, ALL, num_layers=LAYERS, **every)
    assert abs(history(tmp_path / "run")[0]) < 1e-5
    for name, weight in ALL.items():  # and one of fewer layers has something to learn by each
        start(joint, {name: weight}, output=str(tmp_path / name), **{**every, **only(start, name)})
        assert history(tmp_path / name)[0] > 1e-4


def only(start: Start, loss: str) -> dict[str, Any]:
    """Heads that learn by a loss, and no text where that does not."""
    return {
        "logits": {"heads": start.tables("names", "entities", "answers"), "corpus": []},
        "embedding": {"heads": start.tables("vectors")},
        "similarity": {"heads": start.tables("vectors")},
    }.get(loss, {})


def family_checkpoint(family: str, folder: Path, documents: list[list[str]], layers: int) -> Path:
    """A bare encoder of a family, of random weights, with a tokenizer of its kind."""
    known = FAMILIES[family]
    texts = [text for document in documents for text in document]
    trained = tokenizer.train(texts, vocab_size=400, family=known)
    folder.mkdir(parents=True)
    trained.save(str(folder / "trained.json"))
    fields = {
        **known.config.released,
        "vocab_size": trained.get_vocab_size(),
        "hidden_size": 32,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "pad_token_id": trained.token_to_id(known.special_tokens["pad"]),
    }
    encoder = perturb(known.encoder(known.config(**fields), pooler=False))
    writer.save_encoder(folder, encoder, folder / "trained.json")
    return folder


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gives_layers(family, documents, start, tmp_path):
    """A student with all layers equals the teacher; one with every second layer has those weights."""
    source = family_checkpoint(family, tmp_path / "teacher", documents, 3)
    losses = {"hidden": 1.0, "relations": 1.0}
    text = {"corpus": start.corpus, "lr": 0.0}
    start(source, losses, num_layers=3, output=str(tmp_path / "all"), **text)
    assert abs(history(tmp_path / "all")[0]) < 1e-5
    start(source, losses, layers=[0, 2], **text)
    whole, half = (
        reader.load_encoder(p, pooler=False) for p in (source, tmp_path / "run/checkpoint")
    )
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    assert half.config == replace(whole.config.keeping([0, 2]), **rates)
    if family != "albert":  # whose layers are one
        kept = [whole.layers[0], whole.layers[2]]
        for mine, its in zip(half.layers, kept, strict=True):
            for name, tensor in its.state_dict().items():
                torch.testing.assert_close(mine.state_dict()[name], tensor, rtol=0, atol=0)
    packed = ours(batch([7, 4], vocab_size=whole.config.vocab_size))
    with capture(whole) as of_whole, capture(half) as of_half:
        whole(*packed), half(*packed)
    first, both = of_whole.hidden_states, of_half.hidden_states
    torch.testing.assert_close(both[1], first[1])  # after the layer that is in the same place
    assert torch.allclose(both[2], first[2]) == (family == "albert")


@pytest.mark.parametrize("family", ["modernbert", "deberta-v2"])
def test_a_first_layer_that_is_another_stays_first(family, documents, start, tmp_path):
    """ModernBERT's first layer has no norm before it, and DeBERTa's may have a convolution next to it."""
    source = family_checkpoint(family, tmp_path / "teacher", documents, 3)
    if family == "deberta-v2":
        changed = reader.read_config(source)
        changed = replace(changed, conv_kernel_size=3)
        encoder = FAMILIES[family].encoder(changed, pooler=False)
        writer.save_encoder(source, encoder, source / "tokenizer.json")
    with pytest.raises(ValueError, match=f"{family}'s first layer differs from the others"):
        start(source, {"hidden": 1.0}, layers=[1, 2], corpus=start.corpus)


def test_a_layer_stays_local_or_global():
    """In ModernBERT, whatever its place has become."""
    whole = FAMILIES["modernbert"].config(num_hidden_layers=5)
    types = whole.layer_types
    assert whole.keeping([0, 1, 3]).layer_types == (types[0], types[1], types[3])
    assert len({*types}) == 2
    assert types[2] != types[3]


@pytest.mark.parametrize(
    ("given", "depth", "expected"),
    [
        ({}, 6, [0, 2, 4]),
        ({}, 5, [0, 1, 3]),
        ({"num_layers": 4}, 6, [0, 1, 3, 4]),
        ({"num_layers": 6}, 6, [0, 1, 2, 3, 4, 5]),
        ({"num_layers": 1}, 12, [0]),
        ({"layers": [1, 3, 5]}, 6, [1, 3, 5]),
    ],
)
def test_which_layers(given, depth, expected):
    """Those that are said, or every second one."""
    s = DistillSettings(output="x", teacher="t", losses={"hidden": 1.0}, corpus=["c"], **given)
    assert distill.choose_layers(s, depth) == expected


def test_which_hidden_states():
    """The last layers correspond, and the others are spread evenly, or as configured."""
    s = DistillSettings(output="x", teacher="t", losses={"hidden": 1.0}, corpus=["c"])
    assert distill.hidden_pairs(s, 3, 6) == [(1, 2), (2, 4), (3, 6)]
    assert distill.hidden_pairs(s, 4, 4) == [(1, 1), (2, 2), (3, 3), (4, 4)]
    s.hidden_layers = [[0, 0], [3, 5]]
    assert distill.hidden_pairs(s, 3, 6) == [(0, 0), (3, 5)]


def test_heads_come_with_the_layers(joint, start, tmp_path, capsys):
    """A student gets the teacher's heads, label by label, except for heads with other labels, which are logged."""
    heads = start.tables("names", "answers")
    heads["turned"] = {**heads["names"], "labels": ["Sofya", "Grace", "Emmy", "Ada"]}
    heads["mood"] = {**heads["names"], "labels": ["Sofya", "Grace", "Emmy", "Ada", "Mileva"]}
    start(joint, {"labels": 1.0}, heads=heads, lr=0.0)
    assert "\nheads kept: names, answers, turned; new: mood\n" in capsys.readouterr().out
    student, teacher = (reader.load_model(p) for p in (tmp_path / "run/checkpoint", joint))
    for name in ("names", "answers"):
        for mine, its in zip(
            student.heads[name].parameters(), teacher.heads[name].parameters(), strict=True
        ):
            torch.testing.assert_close(mine, its, rtol=0, atol=0)
    turned, mood, names = (
        model.heads[name].classifier.weight
        for model, name in ((student, "turned"), (student, "mood"), (teacher, "names"))
    )
    labels = teacher.described["names"].labels
    rows = [labels.index(label) for label in student.described["turned"].labels]
    torch.testing.assert_close(turned, names[rows], rtol=0, atol=0)
    assert not torch.allclose(mood[:4], names[rows])


@pytest.mark.parametrize("family", ["bert", "electra", "distilbert"])
def test_a_fresh_student(family, joint, start, tmp_path):
    """Of any family that has the tokenizer's special tokens, and of any width."""
    small = {
        "num_hidden_layers": 1,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "intermediate_size": 24,
    }
    text = {"heads": start.tables(), "corpus": start.corpus, "relation_heads": 8}
    start(joint, {**ALL, "labels": 1.0}, preset="tiny", family=family, shape=small, steps=4, **text)
    student = reader.load_model(tmp_path / "run/checkpoint")
    assert (student.config.model_type, student.config.hidden_size) == (family, 16)
    assert [*student.described] == ["names", "entities", "answers", "vectors"]
    assert not [name for name in student.state_dict() if "map" in name]
    assert student.described["vectors"].dimensions == 16


# -- learning ---------------------------------------------------------------------------------------------------------


def answers(folder: Path, file: str) -> list[str]:
    model = reader.load_model(folder)
    (name,) = model.described
    encoder = Encoder.from_file(folder / "tokenizer.json", 32)
    run = evaluate.torch_run(model, [name])
    return evaluate.judge(run, encoder, model.described[name], name, file).answers


@pytest.mark.parametrize(
    "losses", [{"logits": 1.0}, {"logits": 1.0, "hidden": 0.5, "relations": 0.5}]
)
def test_a_student_comes_to_agree_with_its_teacher(losses, taught, start, tmp_path):
    """From its answers alone, on texts that neither has seen: the loss falls, and agreement rises."""
    table = {**start.tables("names")["names"], "batch_size": 16, "dev": start.data["names dev"]}
    fresh = {"preset": "tiny", "heads": {"names": table}, "shape": {"initializer_range": 0.05}}
    found = start(taught, losses, steps=60, lr=2e-3, **fresh)
    start(taught, losses, output=str(tmp_path / "before"), lr=0.0, **fresh)
    costs = history(tmp_path / "run")
    assert np.mean(costs[-5:]) < np.mean(costs[:5]) / 3
    told = answers(taught, start.data["names dev"])
    agreement = [
        np.mean(
            [
                a == b
                for a, b in zip(
                    answers(tmp_path / name / "checkpoint", start.data["names dev"]),
                    told,
                    strict=True,
                )
            ]
        )
        for name in ("before", "run")
    ]
    assert agreement[0] < 0.5 < 0.9 < agreement[1]
    assert found["heads"]["names"]["accuracy"] > 0.8


def test_text_alone_teaches(joint, start, tmp_path):
    """The student learns vectors from sentences, and is evaluated on other rows."""
    table = {"vectors": {"task": "embedding", "train": [], "dev": start.data["vectors"]}}
    text = {"corpus": start.corpus, "heads": table, "corpus_batch_size": 16}
    found = start(joint, {"embedding": 1.0}, steps=30, lr=1e-3, num_layers=2, **text)
    costs = history(tmp_path / "run")
    assert np.mean(costs[-5:]) < np.mean(costs[:5]) / 2
    assert set(found["heads"]["vectors"]) == set(found["teachers"][str(joint)]["heads"]["vectors"])
    described = reader.load_model(tmp_path / "run/checkpoint").described
    assert described == {"embedding": Head(task="embedding", pooling="mean", dimensions=32)}


@pytest.mark.parametrize("unit", get_args(distill.Unit))
def test_text_without_heads_gives_a_bare_encoder(unit, joint, start, tmp_path):
    """The general kind: by what is in the layers, for whatever comes after."""
    text = {"corpus": start.corpus, "unit": unit, "corpus_batch_size": 4}
    start(joint, {"hidden": 1.0, "relations": 1.0}, steps=20, lr=1e-3, num_layers=2, **text)
    costs = history(tmp_path / "run")
    assert np.mean(costs[-4:]) < np.mean(costs[:4]) / 1.5
    theirs = transformers.AutoModel.from_pretrained(tmp_path / "run/checkpoint")
    assert (type(theirs).__name__, theirs.config.num_hidden_layers) == ("BertModel", 2)
    assert not (tmp_path / "run/checkpoint/modules.json").exists()


def test_what_a_text_is(tokenizer_file, corpus_file, joint, tmp_path):
    """A sentence with its special tokens, cut where there is no room; or a block that fills it."""
    text = {
        "corpus": [str(corpus_file)],
        "cache": str(tmp_path),
        "max_length": 12,
        "corpus_batch_size": 5,
    }
    known = load_tokenizer(tokenizer_file)
    teacher = distillation.load(str(joint), torch.device("cpu"))
    for unit in get_args(distill.Unit):
        s = DistillSettings(
            output="x", teacher=str(joint), losses={"hidden": 1.0}, unit=unit, **text
        )
        lesson = distill.text_task(s, shape(), Encoder(known, 12), tokenizer_file, {}, teacher)
        assert lesson.retokenized == {}
        stream = lesson.stream
        for step in range(20):
            drawn = stream.batch((1, 0), step).encodings
            assert len(drawn) == 5
            for window in drawn:
                assert (window.input_ids[0], window.input_ids[-1]) == (2, 3)
                assert len(window) == 12 if unit == "blocks" else 3 < len(window) <= 12
                assert 4 not in window.input_ids  # nothing is hidden
        again = stream.batch((1, 0), 3).encodings
        assert [w.input_ids.tolist() for w in again] == [
            w.input_ids.tolist() for w in stream.batch((1, 0), 3).encodings
        ]
        assert [w.input_ids.tolist() for w in again] != [
            w.input_ids.tolist() for w in stream.batch((1, 0), 4).encodings
        ]
    sentences = {
        known.decode(w.input_ids)
        for step in range(40)
        for w in stream.batch((2, 0), step).encodings
    }
    assert len(sentences) > 20


# -- other tokenizers -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def other(documents: list[list[str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of another vocabulary."""
    path = tmp_path_factory.mktemp("other") / "tokenizer.json"
    tokenizer.train((t for d in documents for t in d), vocab_size=120).save(str(path))
    return path


def test_answers_and_vectors_go_from_one_tokenizer_to_another(joint, other, start, tmp_path):
    """Each text is encoded by both tokenizers, and the teacher's result is the same as alone."""
    heads = start.tables("names", "vectors")
    fresh = {"preset": "tiny", "tokenizer": str(other), "corpus": start.corpus, "heads": heads}
    start(joint, {"logits": 1.0, "embedding": 1.0}, steps=60, lr=1e-3, **fresh)
    costs = history(tmp_path / "run")
    assert np.mean(costs[-5:]) < np.mean(costs[:5]) / 2
    saved = Tokenizer.from_file(str(tmp_path / "run/checkpoint/tokenizer.json"))
    assert saved.get_vocab_size() == Tokenizer.from_file(str(other)).get_vocab_size()


def test_both_read_the_same_texts(joint, other, start, monkeypatch):
    """Of rows and of text, each in tokens of its own."""
    read = []
    look = distillation.run_batch

    def watched(model, encodings, *rest):
        read.append([window.input_ids.tolist() for window in encodings])
        return look(model, encodings, *rest)

    monkeypatch.setattr(distillation, "run_batch", watched)
    heads = start.tables("names", "vectors")
    fresh = {"preset": "tiny", "tokenizer": str(other), "corpus": start.corpus, "heads": heads}
    start(joint, {"logits": 1.0, "embedding": 1.0}, steps=2, **fresh)
    known = [load_tokenizer(path) for path in (other, joint / "tokenizer.json")]
    assert len(read) == 2 * 2 * 3
    for mine, its in zip(read[0::2], read[1::2], strict=True):
        assert [known[0].decode(ids) for ids in mine] == [known[1].decode(ids) for ids in its]
        assert mine != its


@pytest.mark.parametrize(
    ("losses", "heads", "message"),
    [
        ({"hidden": 1.0}, ["names"], "losses.hidden is learnt token by token"),
        ({"relations": 1.0, "logits": 1.0}, ["names"], "losses.relations is learnt"),
        ({"logits": 1.0}, ["names", "entities"], "heads.entities is learnt"),
        ({"logits": 1.0}, ["answers"], "heads.answers is learnt"),
    ],
)
def test_tokens_do_not_go_from_one_tokenizer_to_another(
    losses, heads, message, joint, other, start
):
    """Tokens of different tokenizers do not correspond, and the error has the difference."""
    fresh = {"preset": "tiny", "tokenizer": str(other)}
    with pytest.raises(
        ValueError, match=rf"{message}.* differ in their vocabularies \(of \d+ and \d+"
    ):
        start(joint, losses, heads=start.tables(*heads), **fresh)


def test_normalisation_counts(joint, tokenizer_file, start, tmp_path):
    """The same vocabulary makes no same tokens."""
    cased = Tokenizer.from_file(str(tokenizer_file))
    cased.normalizer = normalizers.BertNormalizer(lowercase=False)
    cased.save(str(tmp_path / "cased.json"))
    fresh = {"preset": "tiny", "tokenizer": str(tmp_path / "cased.json")}
    with pytest.raises(ValueError, match="differ in their normalisation"):
        start(joint, {"hidden": 1.0}, heads=start.tables("names"), **fresh)


@pytest.mark.parametrize("unit", ["blocks", "passages"])
def test_blocks_are_read_by_one_tokenizer(unit, joint, other, start):
    """They end where their tokens do, as passages do."""
    table = {"vectors": {"task": "embedding", "train": []}}
    text = {"corpus": start.corpus, "unit": unit, "heads": table}
    with pytest.raises(ValueError, match=f"a corpus in {unit} is learnt token by token"):
        start(joint, {"embedding": 1.0}, preset="tiny", tokenizer=str(other), **text)


def test_a_head_has_its_own_teacher_on_text(joint, other, tokenizer_file, tmp_path, start):
    """A head's own teacher, which may be wider than the run's teacher, distills it on plain text, too."""
    wide = shape(vocab_size=200, hidden_size=48)
    writer.save_encoder(tmp_path / "wide", Bert(wide), tokenizer_file)
    heads = {"vectors": {"task": "embedding", "train": [], "teacher": str(tmp_path / "wide")}}
    found = start(joint, {"embedding": 1.0}, heads=heads, corpus=start.corpus, steps=2)
    assert [*found["teachers"]] == [str(tmp_path / "wide")]


def test_passages_of_a_step_are_of_one_length(tokenizer_file, corpus_file, joint, tmp_path):
    """Short in some steps and long in others, with as many tokens in each, of whole sentences where they fit."""
    known = load_tokenizer(tokenizer_file)
    s = DistillSettings(
        output="x",
        teacher=str(joint),
        losses={"hidden": 1.0},
        corpus=[str(corpus_file)],
        cache=str(tmp_path),
        unit="passages",
        max_length=64,
        corpus_batch_size=8,
    )
    teacher = distillation.load(str(joint), torch.device("cpu"))
    lesson = distill.text_task(s, shape(), Encoder(known, 64), tokenizer_file, {}, teacher)
    steps = [lesson.stream.batch((1, 0), step).encodings for step in range(40)]
    text = lesson.stream.corpus
    ends = set(text.sentence_starts[1:].tolist())
    tokens = text.ids.tolist()
    crowded = 0
    for drawn in steps:
        longest = max(map(len, drawn))
        assert longest <= 8 * 64 // len(drawn) + 1
        assert 8 <= len(drawn) <= 8 * 64 // distill.SHORTEST_PASSAGE
        for window in drawn:
            passage = window.input_ids[1:-1].tolist()
            places = [
                i for i in text.sentence_starts[:-1] if tokens[i : i + len(passage)] == passage
            ]
            assert places
            whole = any(int(place) + len(passage) in ends for place in places)
            assert whole or len(window) >= longest
            crowded += len(window) > longest / 2
    assert len({len(drawn) for drawn in steps}) > 5
    assert crowded > sum(map(len, steps)) / 2


# -- teachers of heads ------------------------------------------------------------------------------------------------


def test_single_teachers_of_a_joint_student(taught, start, tokenizer_file, tmp_path):
    """BAM: each head learns from its own teacher, and in the end from the labels; one has none."""
    heads = start.tables("names", "entities")
    heads["names"] |= {"teacher": str(taught), "dev": start.data["names dev"], "batch_size": 16}
    found = start.finetune(heads=heads, init_from=str(taught), anneal=True, steps=30, lr=2e-3)
    assert found["heads"]["names"]["accuracy"] > 0.8
    assert found["teachers"] == {
        str(taught): {
            "parameters": finetune.count_parameters(reader.load_model(taught)),
            "heads": {
                "names": json.loads((taught.parent / "metrics.json").read_text())["heads"]["names"]
            },
        }
    }
    assert teachers_of(tmp_path / "run") == [str(taught)]


def test_annealing_ends_with_the_labels(taught, start, tmp_path, monkeypatch):
    """It begins with the teacher's answers alone, and every step gives a little to the labels."""
    shares = []
    forward = distillation.DistillationObjective.forward

    def watched(*given):
        parts = forward(*given)
        shares.append([weight for weight, _ in parts.values()])
        return parts

    monkeypatch.setattr(distillation.DistillationObjective, "forward", watched)
    heads = start.tables("names")
    heads["names"]["teacher"] = str(taught)
    start.finetune(heads=heads, init_from=str(taught), anneal=True, steps=5)
    assert shares == [[step / 4, 1 - step / 4] for step in range(5)]


def test_a_head_needs_a_teacher_that_has_it(taught, start, tmp_path):
    """Else it is said what there is."""
    heads = start.tables("entities")
    heads["entities"]["teacher"] = str(taught)
    with pytest.raises(
        ValueError, match=r"heads\.entities: .* no such head: it has classification"
    ):
        start.finetune(heads=heads, init_from=str(taught))


def test_maps_are_learnt(joint, start, tmp_path):
    """By the rate of heads, for they are as new; and with no rate they stay what they were drawn as."""
    small = {"num_hidden_layers": 1, "hidden_size": 16, "num_attention_heads": 2}
    fresh = {"preset": "tiny", "shape": small, "heads": start.tables("vectors"), "lr": 1e-3}
    found = {}
    for name, rates in (("slow", {}), ("fast", {"head_lr": 1e-2}), ("none", {"lr": 0.0})):
        given = {**fresh, **rates, "output": str(tmp_path / name), "warmup": 0.0}
        start(joint, {"hidden": 1.0, "embedding": 1.0}, **given)
        found[name] = torch.load(tmp_path / name / "last.pt", weights_only=True)["maps"]
    assert [*found["none"]] == [
        f"maps.{name}.{part}"
        for name in ("hidden_1_3", "vectors_vectors")
        for part in ("weight", "bias")
    ]
    for name, drawn in found["none"].items():
        slow, fast = ((found[rate][name] - drawn).abs().median() for rate in ("slow", "fast"))
        assert (slow.item(), fast.item()) == pytest.approx((1e-3, 1e-2), rel=0.1)


# -- resuming ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("end", "saved"), [(interrupted, 3), (stopped, 5)])
def test_a_resumed_run_is_an_uninterrupted_run(end, saved, joint, start, tmp_path, monkeypatch):
    """Bit for bit, with dropout, of all losses, with the maps that they learn."""
    small = {
        "num_hidden_layers": 2,
        "hidden_size": 16,
        "num_attention_heads": 2,
        "intermediate_size": 24,
    }
    settings = {
        "preset": "tiny",
        "shape": small,
        "heads": start.tables(),
        "corpus": start.corpus,
        "unit": "blocks",
        "anneal": True,
        "steps": 8,
        "save_every": 3,
        "dropout": 0.1,
        "attention_dropout": 0.1,
        "head_lr": 1e-2,
    }
    losses = {**ALL, "labels": 1.0}
    start(joint, losses, output=str(tmp_path / "whole"), **settings)
    with end(at=4):
        start(joint, losses, output=str(tmp_path / "cut"), **settings)
    assert len(history(tmp_path / "cut")) == saved
    with pytest.raises(ValueError, match=r"run that differs: losses\.labels: 0\.5 \(was 1\.0\)"):
        start(joint, {**losses, "labels": 0.5}, output=str(tmp_path / "cut"), **settings)
    start(joint, losses, output=str(tmp_path / "cut"), **settings)

    assert history(tmp_path / "cut") == history(tmp_path / "whole")
    weights = [tmp_path / name / "checkpoint/model.safetensors" for name in ("cut", "whole")]
    assert weights[0].read_bytes() == weights[1].read_bytes()
    cut, whole = (
        torch.load(tmp_path / n / "last.pt", weights_only=True)["maps"] for n in ("cut", "whole")
    )
    assert {name.split(".")[1] for name in whole} == {"hidden_1_2", "hidden_2_3", "vectors_vectors"}
    for name, tensor in whole.items():
        torch.testing.assert_close(cut[name], tensor, rtol=0, atol=0)


# -- what a run leaves ------------------------------------------------------------------------------------------------


def test_both_are_judged_on_the_same_rows(taught, start, tmp_path):
    """The results have both sizes, and the checkpoint names its teacher."""
    table = {**start.tables("names")["names"], "dev": start.data["names dev"]}
    found = start(taught, {"logits": 1.0}, heads={"mood": table}, steps=2)
    assert json.loads((tmp_path / "run/metrics.json").read_text()) == found
    known = json.loads((taught.parent / "metrics.json").read_text())
    assert found["teachers"] == {
        str(taught): {"parameters": known["parameters"], "heads": {"mood": known["heads"]["names"]}}
    }
    student = reader.load_model(tmp_path / "run/checkpoint")
    assert found["parameters"] == finetune.count_parameters(student) < known["parameters"]
    assert set(found["heads"]["mood"]) == set(known["heads"]["names"])
    assert teachers_of(tmp_path / "run") == [str(taught)]
    assert "teachers" not in json.loads((taught / "provenance.json").read_text())


def teachers_of(output: Path) -> list[str]:
    told = json.loads((output / "checkpoint/provenance.json").read_text())
    assert told.keys() == {"teachers", "training"}
    return told["teachers"]


def test_teachers_are_not_forgotten(taught, joint, start, tmp_path):
    """Fine-tuning a student keeps its teachers' names, and so does distillation from it, once each."""
    heads, student = start.tables("names"), str(tmp_path / "run/checkpoint")
    start(taught, {"logits": 1.0}, heads=heads)

    tuned = {"output": str(tmp_path / "tuned"), "init_from": student}
    result = start.finetune(heads=start.tables("entities"), **tuned)
    assert teachers_of(tmp_path / "tuned") == [str(taught)]
    assert "teachers" not in result

    for name, teacher, begun, expected in (
        ("other", joint, {"init_from": student}, [str(taught), str(joint)]),
        ("same", taught, {"init_from": student}, [str(taught)]),
        ("layers", student, {}, [str(taught), student]),
        ("fresh", student, {"preset": "tiny"}, [student]),
    ):
        start(teacher, {"logits": 1.0}, heads=heads, output=str(tmp_path / name), **begun)
        assert teachers_of(tmp_path / name) == expected


def test_the_student_is_an_ordinary_checkpoint(taught, start, tmp_path):
    """Anyone's library opens it, and it answers there as here."""
    start(taught, {"logits": 1.0}, heads=start.tables("names"))
    folder = tmp_path / "run/checkpoint"
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    text = TEXTS[5]
    read = transformers.AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt")
    window = Encoder.from_file(folder / "tokenizer.json", 32).texts([text])[0].windows[0]
    seen = distillation.run_batch(reader.load_model(folder), [window], ["classification"])
    torch.testing.assert_close(
        seen.outputs["classification"], theirs(**read).logits, rtol=0, atol=1e-5
    )


# -- what goes wrong --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"teacher": ""}, "missing: teacher"),
        ({"losses": {}}, "losses: none of .*, embedding, similarity counts"),
        ({"losses": {"logits": 0}}, "losses: none of"),
        ({"losses": {"attention": 1}}, "losses: 'attention' is none of labels"),
        ({"losses": {"hidden": -1}}, "losses: hidden counts -1.0, which is below 0"),
        ({"corpus": []}, "missing: heads with rows, or a corpus"),
        ({"temperature": 0}, "temperature: Input should be greater than 0, not 0"),
        ({"corpus_batch_size": 0}, "corpus_batch_size: Input should be greater than or equal to 1, not 0"),
        ({"layers": "all"}, "layers: Input should be a valid list"),
        ({"unit": "words"}, "unit: 'words' is none of sentences, blocks, passages"),
        ({"distance": "l1"}, "distance: 'l1' is none of cosine, mse"),
        ({"preset": "huge"}, "preset: 'huge' is none of tiny"),
        ({"preset": "tiny", "family": "gpt"}, "family: 'gpt' is none of bert"),
        ({"preset": "tiny", "layers": [0]}, "preset: a fresh student, of which layers says nothing"),
        ({"preset": "tiny", "init_from": "x"}, "of which init_from says nothing"),
        ({"shape": {"hidden_size": 8}}, "shape is for a fresh student, which begins from a preset"),
        ({"tokenizer": "x"}, "tokenizer is for a fresh student"),
        ({"layers": [0], "num_layers": 1}, "layers and num_layers: one of them says it"),
        ({"keep_heads": True}, "keep_heads is for fine-tuning"),
        ({"anneal": True}, "anneal: losses.labels counts nothing"),
        ({"relation_layer": 0}, "relation_layer: losses.relations counts nothing"),
        ({"relation_heads": 2}, "relation_heads: losses.relations counts nothing"),
        ({"losses": {"embedding": 1.0}, "hidden_layers": [[1, 1]]}, "hidden_layers: losses.hidden counts nothing"),
    ],
)  # fmt: skip
def test_settings_that_do_not_go_together(settings, message):
    """Are refused at once."""
    given = {"output": "x", "teacher": "t", "losses": {"hidden": 1.0}, "corpus": ["c"], **settings}
    with pytest.raises(ValueError, match=message):
        DistillSettings(**given)


@pytest.mark.parametrize(
    ("losses", "settings", "message"),
    [
        ({"hidden": 1.0}, {"layers": [0, 3]}, r"layers: \[0, 3\] are not some of 0 to 2, in order"),
        ({"hidden": 1.0}, {"layers": [1, 0]}, r"layers: \[1, 0\] are not"),
        ({"hidden": 1.0}, {"num_layers": 4}, "num_layers: 4 of 3 layers"),
        ({"hidden": 1.0}, {"hidden_layers": [[1, 4]]}, r"\[1, 4\] is not \[0 to 2, 0 to 3\]"),
        ({"relations": 1.0}, {"relation_heads": 5}, "5 does not divide the widths 32 and 32"),
        ({"relations": 1.0}, {"relation_layer": 3}, "relation_layer: 3 is none of the teacher's 3"),
        ({"embedding": 1.0}, {}, "losses.embedding: there is no head of embeddings"),
        ({"similarity": 1.0}, {}, "losses.similarity: there is no head of embeddings"),
        ({"logits": 1.0}, {}, "answers for none of the heads"),
        ({"labels": 1.0, "hidden": 1.0}, {}, "losses.labels: no head has rows"),
        ({"hidden": 1.0}, {"max_length": 65}, "64 positions .* do not hold 65 tokens"),
        ({"hidden": 1.0}, {"preset": "tiny", "family": "roberta"}, "lacks roberta's special tokens"),
        (
            {"hidden": 1.0},
            {"heads": {"a": {"task": "ner", "train": [], "labels": ["O"]}}},
            "heads.a: no rows to train on",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_learnt(losses, settings, message, joint, start, tmp_path):
    """Is said before anything is trained."""
    with pytest.raises(ValueError, match=message):
        start(joint, losses, **{"corpus": start.corpus, **settings})
    assert not (tmp_path / "run").exists()


def test_a_head_that_nothing_teaches(joint, start):
    """Its labels do not count, and the teacher has no such head."""
    heads = start.tables("names")
    heads["letters"] = {**heads["names"], "labels": ["Ada", "Emmy", "Grace", "Sofya", "Lise"]}
    with pytest.raises(ValueError, match=r"heads\.letters: neither its labels nor a teacher's"):
        start(joint, {"logits": 1.0}, heads=heads)


def test_a_teacher_whose_answers_do_not_count(taught, start):
    """It was named for nothing."""
    heads = start.tables("names")
    heads["names"]["teacher"] = str(taught)
    with pytest.raises(
        ValueError, match=r"heads\.names: it has a teacher, and losses\.logits counts"
    ):
        start(taught, {"hidden": 1.0}, heads=heads)


def test_a_teacher_that_is_too_short(joint, start):
    """Its positions are as many as they are."""
    with pytest.raises(ValueError, match="has 64 positions for 100 tokens"):
        start(joint, {"logits": 1.0}, heads=start.tables("names"), preset="tiny", max_length=100)


def test_albert_with_several_groups(documents, start, tmp_path):
    """An ALBERT with several groups, whose layers share parameters."""
    source = family_checkpoint("albert", tmp_path / "teacher", documents, 4)
    grouped = replace(reader.read_config(source), num_hidden_groups=2)
    writer.save_encoder(
        source, FAMILIES["albert"].encoder(grouped, pooler=False), source / "tokenizer.json"
    )
    with pytest.raises(ValueError, match="layers: 2 groups of layers share them"):
        start(source, {"hidden": 1.0}, corpus=start.corpus)


def test_the_shipped_settings_are_read():
    """They keep half of the layers of a teacher that other shipped settings train."""
    configs = Path(finetune.__file__).parent / "configs"
    half, whole = (
        read_config(configs / f"{name}.toml") for name in ("minilm-sst2-half", "minilm-sst2")
    )
    s = DistillSettings(**half)
    assert s.teacher == f"{finetune.FinetuneSettings(**whole).output}/checkpoint"
    assert distill.choose_layers(s, 6) == [0, 2, 4]
    assert s.heads["sentiment"].dev == whole["heads"]["sentiment"]["dev"]


def test_the_distilled_default_is_a_chain_of_shipped_settings():
    """Each stage begins from the one before, and each head's teacher is what another configuration trains."""
    configs = Path(finetune.__file__).parent / "configs"
    general, questions, joint = (
        DistillSettings(**read_config(configs / f"distilled-{name}.toml"))
        for name in ("general", "questions", "joint")
    )
    trained = {
        f"{read_config(path)['output']}/checkpoint": set(read_config(path)["heads"])
        for path in configs.glob("minilm-*.toml")
    }
    assert questions.init_from == f"{general.output}/checkpoint"
    assert joint.init_from == f"{questions.output}/checkpoint"
    assert [*joint.heads] == ["sentiment", "topic", "entities", "answers", "embeddings"]
    for s in (questions, joint):
        assert s.layers == [*range(general.shape["num_hidden_layers"])]
        assert s.losses["labels"] > 0
        for name, head in s.heads.items():
            assert trained[head.teacher] == {name}


def test_the_everyday_recipe_makes_what_its_next_stage_reads():
    """Checkpoints and rows of each stage of `everyday.sh` come from the stages before it."""
    configs = Path(finetune.__file__).parent / "configs"
    script = (configs / "everyday.sh").read_text(encoding="utf-8")
    script = script.replace("\\\n", " ").replace("$rows", "runs/everyday/rows")
    (heads,) = re.findall(r"for head in (.*); do", script)
    rows = "sentiment entities answers embeddings"  # the files of model.everyday
    made = {f"runs/everyday/rows/{name}.jsonl.gz" for name in rows.split()}
    stages = 0
    for line in script.splitlines():
        if found := re.match(r"once (\S+) ", line):
            made.add(found[1])
        for name in re.findall(r"configs/everyday-(\S+)\.toml", line):
            for head in heads.split() if name == "$head" else [name]:
                kind = finetune.FinetuneSettings if name == "$head" else DistillSettings
                s = kind(**read_config(configs / f"everyday-{head}.toml"))
                each = s.heads.values()
                needs = {s.init_from, getattr(s, "teacher", "")} | {h.teacher for h in each}
                needs |= {file for h in each for file in h.train if file.startswith("runs/")}
                assert needs - {""} <= made, head
                made.add(f"{s.output}/checkpoint")
                stages += 1
    assert stages == 8


def test_the_command_reads_a_toml_file(taught, data, tmp_path, monkeypatch):
    """Heads and losses are tables of it; and what is wrong is said in a line."""
    settings = tmp_path / "run.toml"
    settings.write_text(
        f"teacher = '{taught}'\nsteps = 9\nmax_length = 32\n[losses]\nlogits = 1.0\n"
        f"[heads.names]\ntask = 'classification'\ntrain = ['{data['names']}']\n"
    )
    output = tmp_path / "out"
    monkeypatch.setattr("sys.argv", ["distill", str(settings), "--steps=1", f"--output={output}"])
    distill.main()
    assert json.loads((output / "metrics.json").read_text())["steps"] == 1
    monkeypatch.setattr(
        "sys.argv", ["distill", str(settings), "--layers=[7]", f"--output={output}-other"]
    )
    with pytest.raises(SystemExit, match=r"layers: \[7\] are not some of 0 to 1"):
        distill.main()

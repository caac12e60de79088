"""What a teacher's answers, relations, states and vectors cost is what their definitions say."""

import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tokenizers import normalizers, pre_tokenizers, processors
from torch import Tensor

from model import tokenizer
from model.attention import PackedLayout
from model.bert import Bert
from model.checkpoints import writer
from model.checkpoints.errors import CheckpointError
from model.data import examples as tasks
from model.data import head_rows
from model.data.losses import Batch, candidates
from model.families.registry import FAMILIES
from model.heads import IGNORE_INDEX, EncoderWithHeads, Pretraining
from model.training import distillation
from model.training.distillation import DistillationObjective, Teacher, TeacherHead, TrainingTask
from service.core import packing
from service.core.encode import Encoder, load_tokenizer
from service.core.manifest import Head
from tests import hub
from tests.json_files import edit_json
from tests.model.helpers import LENGTHS, batch, shape
from tests.model.helpers import ours as arguments

CLASSES = Head(
    task="classification", labels=("a", "b", "c"), problem_type="single_label_classification"
)
SEVERAL = Head(
    task="classification", labels=("a", "b", "c"), problem_type="multi_label_classification"
)
GRADED = Head(task="classification", labels=("score",), problem_type="regression")
TAGS = Head(task="ner", labels=("O", "B-X", "I-X"))
SPANS = Head(task="qa")
VECTORS = Head(task="embedding", pooling="mean", dimensions=32)
# fp32 sums in another order.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}


def logits(*size: int, seed: int = 0) -> Tensor:
    return 3 * torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def kl(ours: Tensor, theirs: Tensor, temperature: float) -> Tensor:
    """torch's, over the last axis, of all rows together."""
    p, q = (F.log_softmax(x / temperature, dim=-1) for x in (theirs, ours))
    return F.kl_div(q, p, reduction="sum", log_target=True) * temperature**2


# -- answers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 2.5])
class TestAnswers:
    def test_of_texts(self, temperature):
        """KL of the softmax, the mean over texts."""
        ours, theirs = logits(4, 3), logits(4, 3, seed=1)
        found = distillation.logits_loss(CLASSES, ours, theirs, Batch([], []), temperature)
        torch.testing.assert_close(found.value, kl(ours, theirs, temperature) / 4, **CLOSE)
        assert found.uniform == math.log(3)

    def test_of_several_labels(self, temperature):
        """KL of each label's two probabilities, the mean over texts and labels."""
        ours, theirs = logits(4, 3), logits(4, 3, seed=1)
        found = distillation.logits_loss(SEVERAL, ours, theirs, Batch([], []), temperature)
        p, q = (torch.sigmoid(x / temperature) for x in (theirs, ours))
        terms = p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()
        torch.testing.assert_close(found.value, terms.mean() * temperature**2, rtol=1e-4, atol=1e-5)

    def test_of_one_label(self, temperature):
        """A softmax over one label is always 1, so a head with one label uses its sigmoid."""
        head = CLASSES.model_copy(update={"labels": ("relevant",)})
        found = distillation.logits_loss(
            head, logits(4, 1), logits(4, 1, seed=1), Batch([], []), temperature
        )
        assert found.value > 0.1

    def test_of_numbers(self, temperature):
        """Squared error, at any temperature."""
        ours, theirs = logits(4, 1), logits(4, 1, seed=1)
        found = distillation.logits_loss(GRADED, ours, theirs, Batch([], []), temperature)
        torch.testing.assert_close(found.value, ((ours - theirs) ** 2).mean())

    def test_of_tokens(self, temperature):
        """The mean over the tokens of the text; special tokens are asked about nowhere."""
        ours, theirs = logits(7, 3), logits(7, 3, seed=1)
        labels = [
            np.array([IGNORE_INDEX, 1, 0, IGNORE_INDEX]),
            np.array([IGNORE_INDEX, 2, IGNORE_INDEX]),
        ]
        found = distillation.logits_loss(TAGS, ours, theirs, Batch([], labels), temperature)
        text = [1, 2, 5]
        torch.testing.assert_close(
            found.value, kl(ours[text], theirs[text], temperature) / 3, **CLOSE
        )

    def test_of_spans(self, small_tokenizer, temperature):
        """Start and end each by a softmax over where an answer may begin or end, in each window by itself."""
        encoder = Encoder(small_tokenizer, 64)
        contexts = ["Ada drew a comet in Turin.", "Grace sold every river at dawn, twice."]
        encoded = encoder.questions(
            ["What?", "Who sold it?"], contexts, stride=8, max_query_tokens=16
        )
        windows = [window for text in encoded for window in text.windows]
        lengths = [len(window) for window in windows]
        ours, theirs = logits(sum(lengths), 2), logits(sum(lengths), 2, seed=1)
        ours.requires_grad_()
        found = distillation.logits_loss(SPANS, ours, theirs, Batch(windows, []), temperature)
        each = []
        for window, a, b in zip(windows, ours.split(lengths), theirs.split(lengths), strict=True):
            may = torch.as_tensor(candidates(window))
            each += [kl(a[may, side], b[may, side], temperature) for side in (0, 1)]
        torch.testing.assert_close(found.value, torch.stack(each).mean(), **CLOSE)
        found.value.backward()
        assert ours.grad.isfinite().all()
        assert ours.grad.any()


def test_equal_answers_cost_nothing():
    """And unequal ones do, so that it is no wonder."""
    for head, size in ((CLASSES, (4, 3)), (SEVERAL, (4, 3)), (GRADED, (4, 1))):
        same = distillation.logits_loss(head, logits(*size), logits(*size), Batch([], []), 2.0)
        other = distillation.logits_loss(
            head, logits(*size), logits(*size, seed=1), Batch([], []), 2.0
        )
        assert same.value.abs() < 1e-6 < 0.1 < other.value


# -- relations --------------------------------------------------------------------------------------------------------


def relations_by_hand(
    ours: Sequence[Tensor], theirs: Sequence[Tensor], lengths: list[int], num_heads: int
) -> Tensor:
    """MiniLMv2's definition: one sequence, one relation head and one query at a time."""
    total = torch.zeros(())
    for part in range(3):
        costs = []
        for a, b in zip(ours[part].split(lengths), theirs[part].split(lengths), strict=True):
            for x, y in zip(a.chunk(num_heads, dim=1), b.chunk(num_heads, dim=1), strict=True):
                for row in range(len(x)):
                    q = torch.softmax(x @ x[row] / math.sqrt(x.shape[1]), dim=0)
                    p = torch.softmax(y @ y[row] / math.sqrt(y.shape[1]), dim=0)
                    costs.append((p * (p.log() - q.log())).sum())
        total = total + torch.stack(costs).mean()
    return total


@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("num_heads", [1, 4])
def test_relations_are_as_defined(lengths, num_heads):
    """Of widths that differ, in batches of any lengths; and their gradient is finite."""
    total = sum(lengths)
    ours, theirs = logits(total, 3 * 8) / 3, logits(total, 3 * 16, seed=1) / 3
    ours.requires_grad_()
    layout = PackedLayout.of(packing.make_layout(lengths))
    parts = [x.chunk(3, dim=1) for x in (ours, theirs)]
    found = distillation.relation_loss(*parts, layout, num_heads).value
    by_hand = relations_by_hand(*parts, lengths, num_heads)
    torch.testing.assert_close(found, by_hand, rtol=1e-4, atol=1e-5)
    (gradient,) = torch.autograd.grad(found, ours)
    (expected,) = torch.autograd.grad(by_hand, ours)
    torch.testing.assert_close(gradient, expected, rtol=1e-3, atol=1e-5)


def test_vectors():
    """1 - cosine, or the mean of squares."""
    ours, theirs = logits(4, 8), logits(4, 8, seed=1)
    cosines = (F.normalize(ours, dim=1) * F.normalize(theirs, dim=1)).sum(dim=1)
    torch.testing.assert_close(
        distillation.vector_loss(ours, theirs, "cosine").value, (1 - cosines).mean()
    )
    torch.testing.assert_close(
        distillation.vector_loss(ours, theirs, "mse").value, ((ours - theirs) ** 2).mean()
    )


def test_similarities_of_a_batch():
    """The squared error of the cosines of any two vectors, whatever their width; of one vector there is none."""
    ours, theirs = logits(4, 8), logits(4, 12, seed=1)
    differences = [
        F.cosine_similarity(ours[i], ours[j], dim=0)
        - F.cosine_similarity(theirs[i], theirs[j], dim=0)
        for i in range(4)
        for j in range(4)
        if i != j
    ]
    expected = torch.stack(differences).square().mean()
    torch.testing.assert_close(distillation.similarity_loss(ours, theirs).value, expected)
    assert distillation.similarity_loss(ours[:1], theirs[:1]).value == 0


# -- the teachers ------------------------------------------------------------------------------------------------------


def teacher(tokenizer_file: Path, **heads: Head) -> Teacher:
    model = EncoderWithHeads(shape(vocab_size=200), heads).eval().requires_grad_(False)
    return Teacher("some teacher", model, load_tokenizer(tokenizer_file))


def test_the_head_that_answers(tokenizer_file):
    """That of the same name; else the only one with the same labels."""
    asked = teacher(tokenizer_file, mood=CLASSES, tone=CLASSES, tags=TAGS)
    assert distillation.match_teacher_head(asked, "tone", CLASSES).head == "tone"
    assert distillation.match_teacher_head(asked, "entities", TAGS).head == "tags"
    assert distillation.match_teacher_head(asked, "colour", CLASSES) is None  # two heads fit
    assert distillation.match_teacher_head(asked, "answers", SPANS) is None


def test_labels_in_another_order(tokenizer_file):
    """Are looked up by their names."""
    turned = CLASSES.model_copy(update={"labels": ("c", "a", "b")})
    answers = distillation.match_teacher_head(
        teacher(tokenizer_file, classification=CLASSES), "mood", turned
    )
    assert answers == TeacherHead(answers.teacher, "classification", (2, 0, 1))


def test_another_head_of_the_same_name(tokenizer_file):
    """Is refused, with what each of them is."""
    other = CLASSES.model_copy(update={"labels": ("a", "b")})
    with pytest.raises(
        ValueError, match=r"heads\.mood: .* of a, b, and in some teacher .* of a, b, c"
    ):
        distillation.match_teacher_head(teacher(tokenizer_file, mood=CLASSES), "mood", other)
    with pytest.raises(ValueError, match=r"single_label.*multi_label"):
        distillation.match_teacher_head(teacher(tokenizer_file, mood=SEVERAL), "mood", CLASSES)


@pytest.mark.parametrize("family", FAMILIES)
def test_heads_of_every_task_are_kept(family, tokenizer_file):
    """In every family, whatever its heads are made of."""
    known = FAMILIES[family]
    fields = {
        **known.config.released,
        "vocab_size": 200,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "pad_token_id": 0,
    }
    described = {"mood": CLASSES, "tags": TAGS, "spans": SPANS, "vectors": VECTORS}
    ours, theirs = (EncoderWithHeads(known.config(**fields), dict(described)) for _ in range(2))
    whole = Teacher("other", theirs, load_tokenizer(tokenizer_file))
    assert distillation.keep_heads(ours, whole) == [*described]
    for name, head in ours.heads.items():
        for key, tensor in head.state_dict().items():
            torch.testing.assert_close(tensor, theirs.heads[name].state_dict()[key], rtol=0, atol=0)


def test_any_teacher_has_vectors(tokenizer_file):
    """Its hidden states, pooled as ours are."""
    asked = teacher(tokenizer_file, mood=CLASSES)
    answers = distillation.match_teacher_head(asked, "vectors", VECTORS)
    inputs = arguments(batch([5, 3]))
    states = asked.model.encoder(*inputs)
    found = asked.model(*inputs, heads=[answers.head])[answers.head]
    torch.testing.assert_close(
        found, torch.stack([part.mean(dim=0) for part in states.split([5, 3])])
    )


def test_in_what_tokenizers_differ(tokenizer_file, documents):
    """Vocabulary, normalization, word splitting, special tokens; or no difference."""
    texts = [text for document in documents for text in document]
    ours = load_tokenizer(tokenizer_file)
    assert distillation.tokenizer_difference(ours, load_tokenizer(tokenizer_file)) == ""
    smaller = tokenizer.train(texts, vocab_size=120)
    said = f"vocabularies (of {ours.get_vocab_size()} and 120 tokens)"
    assert distillation.tokenizer_difference(ours, smaller) == said
    for part, other, said in (
        ("normalizer", normalizers.BertNormalizer(lowercase=False), "normalisation"),
        ("pre_tokenizer", pre_tokenizers.Whitespace(), "splitting into words"),
        (
            "post_processor",
            processors.BertProcessing(("[SEP]", 3), ("[SEP]", 3)),
            "special tokens around a text",
        ),
    ):
        theirs = load_tokenizer(tokenizer_file)
        setattr(theirs, part, other)
        assert distillation.tokenizer_difference(ours, theirs) == said


# -- lessons ----------------------------------------------------------------------------------------------------------


def lesson(answers: TeacherHead | None, trunk: Teacher | None = None) -> tuple[TrainingTask, Batch]:
    """Of three texts with labels."""
    windows = [
        Encoder(load_tokenizer(FILE[0]), 32).texts([text])[0].windows[0]
        for text in ("Ada drew a comet.", "Grace sold every river at dawn.", "Emmy forgot.")
    ]
    examples = [tasks.Example((w,), np.asarray(i % 3)) for i, w in enumerate(windows)]
    (stream,) = tasks.streams("mood", SETTINGS, CLASSES, examples)
    return TrainingTask(stream, {"mood": answers}, trunk), stream.batch((1, 0), 0)


SETTINGS = head_rows.HeadSettings(task="classification", train=[], batch_size=3)
FILE: list[Path] = []


@pytest.fixture(autouse=True)
def _file(tokenizer_file: Path) -> None:
    FILE[:] = [tokenizer_file]


def test_a_lesson_replaces_words_before_both_read_them(tokenizer_file):
    """The rate is that of the progress, and a lesson without a teacher's neighbors gives the texts as they are."""
    answers = distillation.match_teacher_head(
        teacher(tokenizer_file, mood=CLASSES), "mood", CLASSES
    )
    settings = head_rows.HeadSettings(
        task="classification", train=[], batch_size=2, replace_words=1.0
    )
    encoder = Encoder(load_tokenizer(tokenizer_file), 32)
    rows = [tasks.Text("here", "Ada drew a comet.", None, (label,)) for label in "ab"]
    (found,) = distillation.training_tasks(rows, "mood", CLASSES, settings, encoder, answers)
    plain = found.stream.batch((1, 0), 0).encodings
    for progress, same in ((0.0, False), (1.0, True)):
        drawn, twins = found.batch((1, 0), 0, progress)
        assert twins == {}
        ids = [window.input_ids.tolist() for window in drawn.encodings]
        assert (ids == [window.input_ids.tolist() for window in plain]) == same


def test_from_the_teacher_to_the_labels(tokenizer_file):
    """The weight of the labels rises from 0 to 1, and the weight of the teacher falls (BAM)."""
    answers = distillation.match_teacher_head(
        teacher(tokenizer_file, mood=CLASSES), "mood", CLASSES
    )
    student = EncoderWithHeads(shape(vocab_size=200), {"mood": CLASSES}).eval()
    taught, drawn = lesson(answers)
    weights = {"labels": 2.0, "logits": 3.0}
    cases = [
        (True, 0.0, (0, 3)),
        (True, 0.25, (0.5, 2.25)),
        (True, 1.0, (2, 0)),
        (False, 0.25, (2, 3)),
    ]
    for anneal, progress, expected in cases:
        teaching = DistillationObjective(
            student, [taught], {"mood": answers}, weights, anneal=anneal
        )
        parts = teaching(student, taught, drawn, {}, progress)
        assert (parts["mood"][0], parts["mood/logits"][0]) == expected


def test_labels_alone_are_not_annealed(tokenizer_file):
    """A head without a teacher, next to heads with a teacher."""
    student = EncoderWithHeads(shape(vocab_size=200), {"mood": CLASSES}).eval()
    taught, drawn = lesson(None)
    teaching = DistillationObjective(student, [taught], {}, {"labels": 1.0}, anneal=True)
    assert {
        name: weight for name, (weight, _) in teaching(student, taught, drawn, {}, 0.0).items()
    } == {"mood": 1.0}


def test_sparse_weights_are_regularized_by_progress():
    """The regularizer is a loss of its own, whose weight rises with the progress; it counts by the labels' weight."""
    settings = head_rows.HeadSettings(task="sparse-embedding", train=[], flops=0.5, flops_ramp=0.5)
    head = tasks.describe(settings, [], hidden_size=32, vocab_size=200)
    encoder = Encoder(load_tokenizer(FILE[0]), 32)
    encodings = tuple(
        one.windows[0] for one in encoder.texts(["Ada drew a comet.", "Emmy forgot."])
    )
    rows = [tasks.Example(encodings, np.asarray(score, np.float32)) for score in (0.1, 0.9)]
    (stream,) = tasks.streams("weights", settings, head, rows)
    taught, drawn = TrainingTask(stream, {"weights": None}), stream.batch((1, 0), 0)
    student = EncoderWithHeads(shape(vocab_size=200), {"weights": head}).eval()
    objective = DistillationObjective(student, [taught], {}, {"labels": 2.0})
    for progress, weight in ((0.0, 0.0), (0.25, 0.25), (1.0, 1.0)):
        parts = objective(student, taught, drawn, {}, progress)
        assert {"weights/cosent": 2.0, "weights/cosent/flops": weight} == {
            name: found for name, (found, _) in parts.items()
        }
    (logits,) = distillation.run_batch(student, drawn.encodings, ["weights"]).outputs.values()
    expected = torch.log1p(logits.clamp(min=0)).mean(dim=0).square().sum()
    torch.testing.assert_close(parts["weights/cosent/flops"][1].value, expected)


def test_columns_are_compared_by_their_labels(tokenizer_file):
    """A student that answers with the same labels in another order has nothing to learn."""
    asked = teacher(tokenizer_file, mood=CLASSES)
    turned = CLASSES.model_copy(update={"labels": ("c", "a", "b")})
    student = EncoderWithHeads(shape(vocab_size=200), {"mood": turned}).eval()
    student.load_state_dict(asked.model.state_dict())
    for name in ("weight", "bias"):
        getattr(student.heads["mood"].classifier, name).data = getattr(
            asked.model.heads["mood"].classifier, name
        )[[2, 0, 1]]
    answers = distillation.match_teacher_head(asked, "mood", turned)
    taught, drawn = lesson(answers)
    teaching = DistillationObjective(student, [taught], {"mood": answers}, {"logits": 1.0})
    ((_, loss),) = teaching(student, taught, drawn, {}, 0.0).values()
    assert loss.value.abs() < 1e-6
    straight = TeacherHead(asked, "mood", (0, 1, 2))
    taught, drawn = lesson(straight)
    ((_, loss),) = DistillationObjective(student, [taught], {"mood": straight}, {"logits": 1.0})(
        student, taught, drawn, {}, 0.0
    ).values()
    assert loss.value > 1e-5


def test_hidden_states_are_those_of_the_layers(tokenizer_file):
    """The mean of squares between each pair, through a map of its own where widths differ."""
    asked = teacher(tokenizer_file)
    narrow = EncoderWithHeads(shape(vocab_size=200, hidden_size=16), {"mood": CLASSES}).eval()
    taught, drawn = lesson(None, asked)
    pairs = [(0, 0), (1, 2)]
    teaching = DistillationObjective(narrow, [taught], {}, {"hidden": 1.0}, hidden=pairs)
    ((_, loss),) = teaching(narrow, taught, drawn, {}, 0.0).values()
    ours, theirs = (
        distillation.run_batch(model, drawn.encodings, []).hidden for model in (narrow, asked.model)
    )
    assert [*teaching.maps] == ["hidden_0_0", "hidden_1_2"]
    maps = [teaching.maps[f"hidden_{a}_{b}"] for a, b in pairs]
    errors = [
        ((ours[a] @ linear.weight.T + linear.bias - theirs[b]) ** 2).mean()
        for linear, (a, b) in zip(maps, pairs, strict=True)
    ]
    torch.testing.assert_close(loss.value, torch.stack(errors).mean())


def test_relations_are_those_of_the_layer(tokenizer_file):
    """The last layer of the student and the selected layer of the teacher, for a packed batch."""
    asked = teacher(tokenizer_file)
    student = EncoderWithHeads(shape(vocab_size=200, hidden_size=16), {"mood": CLASSES}).eval()
    taught, drawn = lesson(None, asked)
    ours, theirs = (
        distillation.run_batch(model, drawn.encodings, [], relations=True).qkv
        for model in (student, asked.model)
    )
    assert [part.shape[1] for layer in (*ours, *theirs) for part in layer] == [16] * 6 + [32] * 6
    lengths = [len(window) for window in drawn.encodings]
    for layer in (0, -1):
        teaching = DistillationObjective(
            student, [taught], {}, {"relations": 1.0}, relation_layer=layer, relation_heads=4
        )
        ((_, loss),) = teaching(student, taught, drawn, {}, 0.0).values()
        expected = relations_by_hand(ours[-1], theirs[layer], lengths, 4)
        torch.testing.assert_close(loss.value, expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_family_shows_its_projections(model_type, tokenizer_file):
    """One projection of each layer, in order, for each forward pass; afterwards no hook is left."""
    family = FAMILIES[model_type]
    fields = {
        "vocab_size": 200,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
    }
    small = {**fields, "intermediate_size": 64, "max_position_embeddings": 64}
    config = family.config(**{**family.config.released, **small})
    model = EncoderWithHeads(config, {}).eval()
    _, drawn = lesson(None)
    seen = distillation.run_batch(model, drawn.encodings, [], relations=True)
    assert [part.shape for layer in seen.qkv for part in layer] == [(drawn.tokens, 32)] * 9
    assert len(seen.hidden) == 4
    assert distillation.run_batch(model, drawn.encodings, []).qkv == []


def test_a_bare_encoder_is_a_teacher(tokenizer_file, tmp_path):
    """And so is one with what it was pretrained with: it has no heads that are ours."""
    for folder, save, model in (
        ("encoder", writer.save_encoder, Bert(shape(vocab_size=200))),
        ("pretraining", writer.save_pretraining, Pretraining(shape(vocab_size=200))),
    ):
        save(tmp_path / folder, model, tokenizer_file)
        found = distillation.load(str(tmp_path / folder), torch.device("cpu"))
        ours = model.encoder if folder == "pretraining" else model
        inputs = arguments(batch([4, 2]))
        torch.testing.assert_close(found.model.encoder(*inputs), ours.eval()(*inputs))
        assert not any(p.requires_grad for p in found.model.parameters())
        assert (
            not found.model.described
        )  # so that vectors are made of its states as the student's are


def test_a_teacher_that_cannot_be_read_is_refused(tokenizer_file, tmp_path):
    """It is not taken for a bare encoder because its heads are broken."""
    writer.save_encoder(tmp_path, Bert(shape(vocab_size=200)), tokenizer_file)
    (tmp_path / "heads.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"heads\.json is not JSON"):
        distillation.load(str(tmp_path), torch.device("cpu"))


def test_a_teacher_with_a_default_prompt(tmp_path):
    """It would read the student's tokens without its prompt, so it is refused."""
    hub.save_sentence_transformer("bert", tmp_path / "teacher", num_hidden_layers=1)
    prompts = {"prompts": {"query": "query: "}, "default_prompt_name": "query"}
    edit_json(tmp_path / "teacher/config_sentence_transformers.json", **prompts)
    with pytest.raises(CheckpointError, match="head embedding has the default prompt 'query'"):
        distillation.load(str(tmp_path / "teacher"), torch.device("cpu"))

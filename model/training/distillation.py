"""What a model is taught, by labels and by other models: answers, vectors, hidden states, how tokens relate.

A *lesson* is a stream of batches and those who are asked about them. `Teaching` gives its losses, each with its weight.

T tokens, B sequences, S longest, C labels, H hidden, N relation heads, D vector
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import tokenizers
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.attention import PackedLayout, real_slots, to_slots
from model.checkpoints import reader
from model.checkpoints.source import read_source, read_tokenizer
from model.data import examples
from model.data.examples import Batch, Loss
from model.data.word_replacement import Replacement, find_neighbors
from model.heads import IGNORE_INDEX, EncoderWithHeads, make_head
from model.training.capture import capture
from service.core import bundle
from service.core.encode import Encoder, Window

LOSSES = ("labels", "logits", "hidden", "relations", "embedding", "similarity")
BY_TOKEN = ("hidden", "relations")  # what needs the same tokens in both models
DISTANCES = ("cosine", "mse")


# -- teachers ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Teacher:
    """A model that is asked and not changed; `name` is what it was asked for by."""

    name: str
    model: EncoderWithHeads
    tokenizer: tokenizers.Tokenizer

    @property
    def longest(self) -> int:
        """Tokens that it has positions for."""
        return self.model.config.max_length


def load(source: str, device: torch.device) -> Teacher:
    """Any checkpoint with its heads, or a bare encoder. Raises CheckpointError."""
    folder = reader.locate(source)
    if reader.has_heads(folder):
        whole = read_source(folder)
        model, tokenizer = whole.model, whole.tokenizer
    else:
        model, tokenizer = EncoderWithHeads(reader.read_config(folder), {}), read_tokenizer(folder)
        model.encoder = reader.load_encoder(folder, pooler=False)
    model.requires_grad_(False)
    return Teacher(source, model.eval().to(device), tokenizer)


def difference(ours: tokenizers.Tokenizer, theirs: tokenizers.Tokenizer) -> str:
    """In what two tokenizers differ; nothing where every text becomes the same tokens."""
    if ours.get_vocab() != theirs.get_vocab():
        return f"vocabularies (of {ours.get_vocab_size():,} and {theirs.get_vocab_size():,} tokens)"
    documents = [json.loads(tokenizer.to_str()) for tokenizer in (ours, theirs)]
    parts = {
        "normalizer": "normalisation",
        "pre_tokenizer": "splitting into words",
        "model": "splitting of words",
        "post_processor": "special tokens around a text",
    }
    first, second = documents
    return next((said for part, said in parts.items() if first[part] != second[part]), "")


@dataclass(frozen=True)
class TeacherOutputs:
    """The head of a teacher that answers for one of ours; `columns` of its logits are our labels, in order."""

    teacher: Teacher
    head: str
    columns: tuple[int, ...] = ()

    @property
    def described(self) -> bundle.Head:
        return self.teacher.model.described[self.head]


def kinds_of(task: str) -> tuple[str, ...]:
    """List the losses by which a head of this task learns a teacher's answers."""
    return ("embedding", "similarity") if task == "embedding" else ("logits",)


def ask(teacher: Teacher, name: str, head: bundle.Head) -> TeacherOutputs | None:
    """Who answers for a head; None if nobody does. Of vectors, any teacher's pooled hidden states will do.

    Raises ValueError for a head of that name that is another.
    """
    described = teacher.model.described
    if name in described and not _answers_alike(described[name], head):
        told = f"{_told(head)}, and in {teacher.name} {_told(described[name])}"
        raise ValueError(f"heads.{name}: {told}")
    if chosen := find_head(teacher, name, head):
        return TeacherOutputs(teacher, chosen, _columns(described[chosen].labels, head.labels))
    if head.task != "embedding":
        return None
    pooled = head.model_copy(update={"dimensions": teacher.model.config.hidden_size})
    described[name] = pooled
    teacher.model.heads[name] = make_head(teacher.model.config, pooled)
    return TeacherOutputs(teacher, name)


def find_head(teacher: Teacher, name: str, head: bundle.Head) -> str | None:
    """The teacher's head that answers as ours does: that of the same name, else the only one."""
    described = teacher.model.described
    alike = [n for n, other in described.items() if _answers_alike(other, head)]
    return name if name in alike else alike[0] if len(alike) == 1 else None


def keep_heads(student: EncoderWithHeads, whole: Teacher) -> list[str]:
    """Begin with the heads that another model has, too, label by label; gives the names of these."""
    kept = []
    for name, head in student.described.items():
        if found := find_head(whole, name, head):
            theirs = whole.model.heads[found].state_dict()
            rows = list(_columns(whole.model.described[found].labels, head.labels))
            if rows:  # some families classify the ends of answers, which have no labels
                theirs |= {n: t[rows] for n, t in theirs.items() if n.startswith("classifier.")}
            if _shapes(theirs) == _shapes(student.heads[name].state_dict()):
                student.heads[name].load_state_dict(theirs)
                kept.append(name)
    return kept


def _columns(theirs: Sequence[str], ours: Sequence[str]) -> tuple[int, ...]:
    """Which of their labels are ours, in order; a grade is one, whatever it is called."""
    in_order = ours if set(theirs) == set(ours) else theirs
    return tuple(theirs.index(label) for label in in_order)


def _shapes(state: dict[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in state.items()}


def _answers_alike(theirs: bundle.Head, ours: bundle.Head) -> bool:
    """Are two heads of one task, and do they answer with the same labels in the same manner?"""
    if theirs.task != ours.task or ours.task in ("qa", "embedding"):
        return theirs.task == ours.task
    manners = {head.problem_type or "single_label_classification" for head in (ours, theirs)}
    graded = examples.is_graded(ours) and examples.is_graded(theirs)
    return len(manners) == 1 and (graded or set(theirs.labels) == set(ours.labels))


def _told(head: bundle.Head) -> str:
    labels = f" of {', '.join(head.labels)}" if head.labels else ""
    return f"{head.problem_type or head.task}{labels}"


# -- lessons ----------------------------------------------------------------------------------------------------------


class BatchStream(Protocol):
    """`tasks.Stream`, or what gives batches as it does; `head` is "" for texts that are for none."""

    name: str
    head: str
    batch_size: int
    weight: float

    @property
    def size(self) -> int: ...

    def batch(self, seed: tuple[int, ...], step: int) -> Batch: ...


@dataclass(frozen=True)
class Lesson:
    """A stream of batches, and those who are asked about them.

    answers: by each head that the batches are for, who is asked; None where labels are all there is
    trunk: whose hidden states and relations are learnt
    twins: the same rows as tokens of a teacher whose tokenizer is another, by its name
    replacement: of words by similar words, in the texts that student and teacher read
    """

    stream: BatchStream
    answers: Mapping[str, TeacherOutputs | None]
    trunk: Teacher | None = None
    twins: Mapping[str, BatchStream] = field(default_factory=dict)
    replacement: Replacement | None = None

    @property
    def teachers(self) -> list[Teacher]:
        """Each once."""
        return _each_once([self], self.answers)

    def batch(
        self, seed: tuple[int, ...], step: int, progress: float = 1.0
    ) -> tuple[Batch, dict[str, Batch]]:
        """The batch of a step, and the same as tokens of each teacher that has others, by its name.

        progress: from 0 at the first step of the run to 1 at the last
        """
        twins = {name: twin.batch(seed, step) for name, twin in self.twins.items()}
        batch = self.stream.batch(seed, step)
        if self.replacement:
            batch = self.replacement.apply(batch, [*seed, step], progress)
        return batch, twins


def _each_once(
    lessons: Sequence[Lesson], answers: Mapping[str, TeacherOutputs | None]
) -> list[Teacher]:
    asked = [each.teacher for each in answers.values() if each]
    trunks = [each.trunk for each in lessons if each.trunk]
    return list({teacher.name: teacher for teacher in (*asked, *trunks)}.values())


def lessons(
    rows: Sequence[Any],
    name: str,
    head: bundle.Head,
    settings: examples.HeadSettings,
    encoder: Encoder,
    answers: TeacherOutputs | None,
    trunk: Teacher | None = None,
) -> list[Lesson]:
    """What a head's rows teach it: a lesson for each stream of them.

    Raises DataError for rows that are not the head's, and ValueError where a teacher of each token's answer reads
    other tokens, or words are to be replaced and no teacher with the same tokens answers.
    """

    def read(encoder: Encoder) -> list[examples.ExampleStream]:
        found = list(examples.examples(rows, head, encoder, settings.stride))
        return examples.streams(name, settings, head, found)

    other = None
    if answers:
        other = read_alike(answers.teacher, encoder, f"heads.{name}", head.per_token)
    replacement = None
    if settings.replace_words:
        if not answers or other:
            raise ValueError(
                f"heads.{name}: replace_words requires a teacher with the student's tokenizer, whose answers count"
            )
        embeddings = answers.teacher.model.encoder.embeddings.word.weight
        neighbors = find_neighbors(answers.teacher.tokenizer, embeddings)
        replacement = Replacement(neighbors, settings.replace_words)
    streams = read(encoder)
    twins = [{answers.teacher.name: twin} for twin in read(other)] if other else [{}] * len(streams)
    return [
        Lesson(stream, {name: answers}, trunk, twin, replacement)
        for stream, twin in zip(streams, twins, strict=True)
    ]


def read_alike(teacher: Teacher, encoder: Encoder, what: str, by_token: bool) -> Encoder | None:
    """The teacher's own encoder, or None where ours gives its tokens, too.

    Raises ValueError for texts that are too long for it, and for other tokens where they are needed one by one.
    """
    if encoder.max_length > teacher.longest:
        raise ValueError(
            f"{what}: {teacher.name} has {teacher.longest} positions for {encoder.max_length} tokens"
        )
    differ = difference(encoder.tokenizer, teacher.tokenizer)
    if differ and by_token:
        raise ValueError(
            f"{what} is learnt token by token, and the tokenizers of student and {teacher.name} "
            f"differ in their {differ}"
        )
    return Encoder(teacher.tokenizer, encoder.max_length) if differ else None


# -- losses -----------------------------------------------------------------------------------------------------------


class CapturedBatch(NamedTuple):
    """What a model makes of a batch.

    outputs: of heads by name, in full precision
    hidden: `[T, H]` of the embeddings and after each layer
    qkv: `[T, 3H]` each layer's queries, keys and values, where they were asked for
    """

    outputs: dict[str, Tensor]
    hidden: list[Tensor]
    qkv: list[Tensor]
    layout: PackedLayout


def look(
    model: EncoderWithHeads,
    encodings: Sequence[Window],
    heads: Sequence[str],
    dtype: torch.dtype = torch.float32,
    relations: bool = False,
) -> CapturedBatch:
    """Pass a batch through a model on its own device, computing in `dtype`."""
    device = next(model.parameters()).device
    inputs = examples.pack(encodings, device)
    with (
        torch.autocast(device.type, dtype, enabled=dtype != torch.float32),
        capture(model.encoder, projections=relations) as captured,
    ):
        outputs = model(*inputs, heads=list(heads))
    full = {name: output.float() for name, output in outputs.items()}
    return CapturedBatch(full, captured.hidden_states, captured.projections, inputs[-1])


def divergence(ours: Tensor, theirs: Tensor, temperature: float, dim: int = -1) -> Tensor:
    """KL of softmax(ours / temperature) from softmax(theirs / temperature), times temperature squared: as large a
    gradient at any temperature (Hinton et al. 2015). What both rule out, by minus infinity, adds nothing."""
    log_p = F.log_softmax(theirs / temperature, dim=dim)
    log_q = F.log_softmax(ours / temperature, dim=dim)
    terms = (log_p.exp() * (log_p - log_q)).masked_fill(log_p == -math.inf, 0.0)
    return terms.sum(dim) * temperature**2


def answer_loss(
    head: bundle.Head, logits: Tensor, taught: Tensor, batch: Batch, temperature: float
) -> Loss:
    """How far a head's answers are from its teacher's, where its own loss would look, and the same chance.

    logits, taught: `[B, C]` or `[T, C]`, as its task has them. A regression learns the teacher's numbers by their
    squared error.
    """
    match head.task:
        case "classification" if head.problem_type == "regression":
            return Loss(F.mse_loss(logits, taught), 1.0)
        case "classification" if (
            head.problem_type == "multi_label_classification" or logits.shape[1] == 1
        ):
            yes_or_no = [torch.stack([x, torch.zeros_like(x)], dim=-1) for x in (logits, taught)]
            return Loss(divergence(*yes_or_no, temperature).mean(), examples.evenly(2))
        case "classification":
            chance = examples.evenly(logits.shape[1])
            return Loss(divergence(logits, taught, temperature).mean(), chance)
        case "ner":
            meant = examples.tagged(batch, logits) != IGNORE_INDEX
            found = divergence(logits[meant], taught[meant], temperature)
            return Loss(found.mean(), examples.evenly(logits.shape[1]))
        case "qa":
            slots, choices = examples.among_candidates(logits, batch)
            taught, _ = examples.among_candidates(taught, batch)
            return Loss(
                divergence(slots, taught, temperature, dim=1).mean(), examples.evenly(choices)
            )
    raise AssertionError(f"{head.task} has no logits; this is a bug")


def vector_loss(ours: Tensor, theirs: Tensor, distance: str) -> Loss:
    """`[B, D]` pooled vectors: 1 - cosine, or the squared error of each number."""
    if distance == "mse":
        return Loss(F.mse_loss(ours, theirs), 1.0)
    return Loss((1 - F.cosine_similarity(ours, theirs)).mean(), 1.0)


def similarity_loss(ours: Tensor, theirs: Tensor) -> Loss:
    """Compare the cosines of all pairs of a batch's vectors by their squared error: `[B, D]`, of any two widths.

    The vectors of the student itself come to be as similar as the teacher's, with no map between widths.
    """
    if len(ours) < 2:
        return Loss(ours.sum() * 0.0, 1.0)
    cosines = [x @ x.T for x in (F.normalize(ours, dim=1), F.normalize(theirs, dim=1))]  # [B, B]
    others = ~torch.eye(len(ours), dtype=torch.bool, device=ours.device)
    return Loss(F.mse_loss(*(each[others] for each in cosines)), 1.0)


def relation_loss(ours: Tensor, theirs: Tensor, layout: PackedLayout, num_heads: int) -> Loss:
    """How a sequence's queries relate to each other, its keys, and its values: MiniLMv2 (Wang et al. 2021).

    ours, theirs: `[T, 3H]`, of widths that may differ. Each third is cut into `num_heads` relation heads; of every
    token there, softmax(x @ x.T / sqrt(size)) over its own sequence; KL from the teacher's, the mean over tokens and
    heads, the sum over the three.
    """
    found = [
        divergence(_relations(a, layout, num_heads), _relations(b, layout, num_heads), 1.0)
        for a, b in zip(ours.float().chunk(3, dim=1), theirs.float().chunk(3, dim=1), strict=True)
    ]
    real = real_slots(layout)[:, None].expand_as(found[0])
    return Loss(torch.stack([each[real].mean() for each in found]).sum(), 1.0)


def _relations(x: Tensor, layout: PackedLayout, num_heads: int) -> Tensor:
    """`[T, H]` to scores `[B, N, S, S]`, minus infinity for keys that are none."""
    slots = to_slots(x, layout)
    heads = slots.view(*slots.shape[:2], num_heads, -1).transpose(1, 2)  # [B, N, S, H / N]
    scores = heads @ heads.transpose(-1, -2) * heads.shape[-1] ** -0.5
    return scores.masked_fill(~real_slots(layout)[:, None, None, :], -math.inf)


Part = tuple[float, Loss]  # what it counts, and itself


class Teaching(nn.Module):
    """The losses of lessons. Its parameters are maps between widths, which are learnt and then dropped.

    answers: by head, who is asked for its answers
    weights: how much each of LOSSES counts; nothing if it is not there
    anneal: for heads with labels and a teacher, the weight goes from the teacher's answers to the labels over the steps
        (Clark et al. 2019)
    hidden: pairs of a student's and a teacher's hidden states: 0 for the embeddings', k for those after k layers
    relation_layer: of the teacher, from 0; the student's is its last
    """

    def __init__(
        self,
        model: EncoderWithHeads,
        lessons: Sequence[Lesson],
        answers: Mapping[str, TeacherOutputs | None],
        weights: Mapping[str, float],
        *,
        temperature: float = 1.0,
        anneal: bool = False,
        hidden: Sequence[tuple[int, int]] = (),
        relation_layer: int = -1,
        relation_heads: int = 1,
        distance: str = "cosine",
    ):
        super().__init__()
        self.lessons = lessons
        self.answers = answers
        self.weights = {name: weights.get(name, 0.0) for name in LOSSES}
        self.temperature = temperature
        self.anneal = anneal
        self.pairs = tuple(hidden) if self.weights["hidden"] else ()
        self.relation_layer = relation_layer
        self.relation_heads = relation_heads
        self.distance = distance
        self.maps = nn.ModuleDict()
        width = model.config.hidden_size
        for lesson in lessons:
            if lesson.trunk:
                theirs = lesson.trunk.model.config.hidden_size
                for pair in self.pairs if theirs != width else ():
                    self._add_map(_hidden_map(*pair), width, theirs)
            for name, asked in lesson.answers.items():
                if asked and asked.described.task == "embedding":
                    wide = model.described[name].dimensions, asked.described.dimensions
                    if wide[0] != wide[1]:
                        self._add_map(f"vectors_{name}", *wide)

    @property
    def teachers(self) -> list[Teacher]:
        """Each once."""
        return _each_once(self.lessons, self.answers)

    def _add_map(self, name: str, ours: int, theirs: int) -> None:
        if name not in self.maps:
            self.maps[name] = nn.Linear(ours, theirs)

    def forward(
        self,
        model: EncoderWithHeads,
        lesson: Lesson,
        batch: Batch,
        read: Mapping[str, Batch],
        progress: float,
        dtype: torch.dtype = torch.float32,
    ) -> dict[str, Part]:
        """The losses of a batch by name, the labels' under that of the stream.

        read: the batch as tokens of each teacher that has others, by its name
        progress: from 0 at the first step to 1 at the last
        """
        relations = bool(self.weights["relations"] and lesson.trunk)
        ours = look(model, batch.encodings, [*lesson.answers], dtype, relations)
        theirs: dict[str, CapturedBatch] = {}
        with torch.no_grad():
            for teacher in lesson.teachers:
                asked = [a.head for a in lesson.answers.values() if a and a.teacher is teacher]
                seen = read.get(teacher.name, batch).encodings
                wanted = relations and teacher is lesson.trunk
                theirs[teacher.name] = look(teacher.model, seen, asked, dtype, wanted)
        found = self._answers(model, lesson, batch, ours, theirs, progress)
        if lesson.trunk:
            found |= self._trunk(lesson, ours, theirs[lesson.trunk.name], relations)
        return found

    def _answers(
        self,
        model: EncoderWithHeads,
        lesson: Lesson,
        batch: Batch,
        ours: CapturedBatch,
        theirs: Mapping[str, CapturedBatch],
        progress: float,
    ) -> dict[str, Part]:
        stream, found = lesson.stream, {}
        annealed = self.anneal and lesson.answers.get(stream.head) is not None
        if stream.head and self.weights["labels"]:
            share = progress if annealed else 1.0
            loss = stream.loss(ours.outputs[stream.head], batch)
            found[stream.name] = (self.weights["labels"] * share, loss)
        for name, asked in lesson.answers.items():
            head = model.described[name]
            if asked is None:
                continue
            output, taught = ours.outputs[name], theirs[asked.teacher.name].outputs[asked.head]
            losses: dict[str, Loss] = {}
            if head.task == "embedding":
                key = f"vectors_{name}"
                mapped = self.maps[key](output) if key in self.maps else output
                if self.weights["embedding"]:
                    losses["embedding"] = vector_loss(mapped, taught, self.distance)
                if self.weights["similarity"]:
                    losses["similarity"] = similarity_loss(output, taught)
            else:
                if asked.columns:
                    taught = taught[:, list(asked.columns)]
                losses["logits"] = answer_loss(head, output, taught, batch, self.temperature)
            share = 1 - progress if annealed else 1.0
            for kind, loss in losses.items():
                part = kind if name == stream.head else f"{name} {kind}"
                found[f"{stream.name}/{part}"] = (self.weights[kind] * share, loss)
        return found

    def _trunk(
        self, lesson: Lesson, ours: CapturedBatch, theirs: CapturedBatch, relations: bool
    ) -> dict[str, Part]:
        name, found = lesson.stream.name, {}
        if self.pairs:
            errors = [
                F.mse_loss(self._mapped(a, b, ours.hidden[a].float()), theirs.hidden[b].float())
                for a, b in self.pairs
            ]
            loss = Loss(torch.stack(errors).mean(), 1.0)
            found[f"{name}/hidden"] = (self.weights["hidden"], loss)
        if relations:
            qkv = theirs.qkv[self.relation_layer]
            loss = relation_loss(ours.qkv[-1], qkv, ours.layout, self.relation_heads)
            found[f"{name}/relations"] = (self.weights["relations"], loss)
        return found

    def _mapped(self, a: int, b: int, states: Tensor) -> Tensor:
        key = _hidden_map(a, b)
        return self.maps[key](states) if key in self.maps else states


def _hidden_map(ours: int, theirs: int) -> str:
    return f"hidden_{ours}_{theirs}"

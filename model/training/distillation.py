"""Training on labels and on teachers: logits, vectors, hidden states, and relations between tokens.

A `TrainingTask` is a stream of batches with the teachers of each head. `DistillationObjective` computes its weighted
losses.

Shapes as in `model/bert.py`, except N relation heads and D numbers of a vector.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import tokenizers
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model.attention import PackedLayout, real_slots, to_slots
from model.checkpoints import reader
from model.checkpoints.errors import CheckpointError
from model.checkpoints.source import read_source
from model.checkpoints.source_files import read_tokenizer
from model.data import examples, head_rows
from model.data.losses import Batch, Loss, among_candidates, tagged, uniform_loss
from model.data.word_replacement import Replacement, find_neighbors
from model.heads import IGNORE_INDEX, EncoderWithHeads, make_head
from model.training.capture import capture
from service.core.encode import Encoder, Window
from service.core.manifest import Head

LOSSES = ("labels", "logits", "hidden", "relations", "embedding", "similarity")
TOKEN_LOSSES = ("hidden", "relations")  # require the same tokens in student and teacher
VECTOR_DISTANCES = ("cosine", "mse")


# -- teachers ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Teacher:
    """A frozen model. name: as the settings name its checkpoint"""

    name: str
    model: EncoderWithHeads
    tokenizer: tokenizers.Tokenizer

    @property
    def longest(self) -> int:
        """The maximum length, in tokens."""
        return self.model.config.max_length


def load(source: str, device: torch.device) -> Teacher:
    """Load any checkpoint with its heads, or an encoder alone. Raises CheckpointError."""
    folder = reader.locate(source)
    if reader.has_heads(folder):
        whole = read_source(folder)
        for name, head in whole.model.described.items():
            if head.default_prompt_text:
                raise CheckpointError(
                    f"{folder}: head {name} has the default prompt {head.default_prompt!r}, which a teacher would not"
                    " get: remove default_prompt_name"
                )
        model, tokenizer = whole.model, whole.tokenizer
    else:
        encoder, tokenizer = reader.load_encoder(folder, pooler=False), read_tokenizer(folder)
        model = EncoderWithHeads(encoder.config, {}, encoder)
    model.requires_grad_(False)
    return Teacher(source, model.eval().to(device), tokenizer)


def tokenizer_difference(ours: tokenizers.Tokenizer, theirs: tokenizers.Tokenizer) -> str:
    """Return the difference of two tokenizers, "" where every text becomes the same tokens."""
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
    return next((name for part, name in parts.items() if first[part] != second[part]), "")


@dataclass(frozen=True)
class TeacherHead:
    """The head of a teacher that teaches one of ours. columns: those of its logits for our labels, in our order"""

    teacher: Teacher
    head: str
    columns: tuple[int, ...] = ()

    @property
    def described(self) -> Head:
        return self.teacher.model.described[self.head]


def output_losses(task: str) -> tuple[str, ...]:
    """List the losses by which a head of this task learns a teacher's outputs."""
    return ("embedding", "similarity") if task == "embedding" else ("logits",)


def match_teacher_head(teacher: Teacher, name: str, head: Head) -> TeacherHead | None:
    """Return the teacher's head that teaches one of ours; for embeddings its pooled hidden states; None if it has none.

    Raises ValueError where the teacher's head of the same name is incompatible.
    """
    described = teacher.model.described
    if name in described and not _is_compatible(described[name], head):
        raise ValueError(
            f"heads.{name}: {_describe_head(head)}, and in {teacher.name} {_describe_head(described[name])}"
        )
    if chosen := find_matching_head(teacher, name, head):
        return TeacherHead(teacher, chosen, _columns(described[chosen].labels, head.labels))
    if head.task != "embedding":
        return None
    pooled = head.model_copy(update={"dimensions": teacher.model.config.hidden_size})
    described[name] = pooled
    teacher.model.heads[name] = make_head(teacher.model.config, pooled)
    return TeacherHead(teacher, name)


def find_matching_head(teacher: Teacher, name: str, head: Head) -> str | None:
    """Return the name of the teacher's compatible head: the one of the same name, else the only one."""
    described = teacher.model.described
    compatible = [n for n, other in described.items() if _is_compatible(other, head)]
    return name if name in compatible else compatible[0] if len(compatible) == 1 else None


def keep_heads(student: EncoderWithHeads, whole: Teacher) -> list[str]:
    """Initialize the student's heads from another model's compatible heads, label by label. Returns their names."""
    kept = []
    for name, head in student.described.items():
        if found := find_matching_head(whole, name, head):
            theirs = whole.model.heads[found].state_dict()
            rows = list(_columns(whole.model.described[found].labels, head.labels))
            if rows:  # some families classify the ends of answers, which have no labels
                theirs |= {n: t[rows] for n, t in theirs.items() if n.startswith("classifier.")}
            if _shapes(theirs) == _shapes(student.heads[name].state_dict()):
                student.heads[name].load_state_dict(theirs)
                kept.append(name)
    return kept


def _columns(theirs: Sequence[str], ours: Sequence[str]) -> tuple[int, ...]:
    """Return the indices of our labels in theirs, in our order. Names of a graded head's single label may differ."""
    in_order = ours if set(theirs) == set(ours) else theirs
    return tuple(theirs.index(label) for label in in_order)


def _shapes(state: dict[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in state.items()}


def _is_compatible(theirs: Head, ours: Head) -> bool:
    """Return whether two heads have the same task, problem type and labels."""
    if theirs.task != ours.task or ours.task in ("qa", "embedding"):
        return theirs.task == ours.task
    problem_types = {head.problem_type or "single_label_classification" for head in (ours, theirs)}
    graded = head_rows.is_graded(ours) and head_rows.is_graded(theirs)
    return len(problem_types) == 1 and (graded or set(theirs.labels) == set(ours.labels))


def _describe_head(head: Head) -> str:
    labels = f" of {', '.join(head.labels)}" if head.labels else ""
    return f"{head.problem_type or head.task}{labels}"


# -- training tasks ---------------------------------------------------------------------------------------------------


class BatchStream(Protocol):
    """The interface of `examples.ExampleStream`. head: "" for plain text, which has no head"""

    name: str
    head: str
    batch_size: int
    weight: float

    @property
    def size(self) -> int: ...

    def batch(self, seed: tuple[int, ...], step: int) -> Batch: ...


@dataclass(frozen=True)
class TrainingTask:
    """A stream of batches with the teachers for them."""

    stream: BatchStream
    # The teacher's head for each head that the batches train; None where it has labels only.
    teacher_heads: Mapping[str, TeacherHead | None]
    encoder_teacher: Teacher | None = None  # the teacher of hidden states and relations
    # The same rows as tokens of each teacher with another tokenizer, by the teacher's name.
    retokenized: Mapping[str, BatchStream] = field(default_factory=dict)
    # Replaces words by similar words, in the texts of student and teacher.
    replacement: Replacement | None = None

    @property
    def teachers(self) -> list[Teacher]:
        """The distinct teachers."""
        return _unique_teachers([self], self.teacher_heads)

    def batch(
        self, seed: tuple[int, ...], step: int, progress: float = 1.0
    ) -> tuple[Batch, dict[str, Batch]]:
        """Return the batch of a step, and by teacher its texts as other tokens. progress: from 0 to 1 over the run"""
        retokenized = {n: stream.batch(seed, step) for n, stream in self.retokenized.items()}
        batch = self.stream.batch(seed, step)
        if self.replacement:
            batch = self.replacement.apply(batch, [*seed, step], progress)
        return batch, retokenized


def _unique_teachers(
    tasks: Sequence[TrainingTask], teacher_heads: Mapping[str, TeacherHead | None]
) -> list[Teacher]:
    of_heads = [each.teacher for each in teacher_heads.values() if each]
    of_encoders = [each.encoder_teacher for each in tasks if each.encoder_teacher]
    return list({teacher.name: teacher for teacher in (*of_heads, *of_encoders)}.values())


def training_tasks(
    rows: Sequence[Any],
    name: str,
    head: Head,
    settings: head_rows.HeadSettings,
    encoder: Encoder,
    teacher_head: TeacherHead | None,
    encoder_teacher: Teacher | None = None,
) -> list[TrainingTask]:
    """Return a training task for each stream of a head's rows.

    Raises DataError for rows that do not fit the head. Raises ValueError where a teacher of single tokens has another
    tokenizer, and where words are to be replaced without a teacher that has the same tokenizer.
    """

    def read(encoder: Encoder, head: Head) -> list[examples.ExampleStream]:
        drawable = list(examples.examples(rows, head, encoder, settings.stride))
        return examples.streams(name, settings, head, drawable)

    other = None
    if teacher_head:
        other = teacher_encoder(teacher_head.teacher, encoder, f"heads.{name}", head.per_token)
    replacement = None
    if settings.replace_words:
        if not teacher_head or other:
            raise ValueError(
                f"heads.{name}: replace_words requires a teacher with the student's tokenizer, whose answers count"
            )
        embeddings = teacher_head.teacher.model.encoder.embeddings.word.weight
        neighbors = find_neighbors(teacher_head.teacher.tokenizer, embeddings)
        replacement = Replacement(neighbors, settings.replace_words)
    streams = read(encoder, head)
    retokenized: list[dict[str, BatchStream]] = [{}] * len(streams)
    if teacher_head and other:
        # The teacher's own text of a pair.
        asked = head.model_copy(update={"pair_prompt": teacher_head.described.pair_prompt})
        retokenized = [{teacher_head.teacher.name: stream} for stream in read(other, asked)]
    return [
        TrainingTask(stream, {name: teacher_head}, encoder_teacher, others, replacement)
        for stream, others in zip(streams, retokenized, strict=True)
    ]


def teacher_encoder(
    teacher: Teacher, encoder: Encoder, what: str, by_token: bool
) -> Encoder | None:
    """Return an encoder with the teacher's tokenizer, or None where the student's gives the same tokens.

    Raises ValueError, with the setting `what`, for too long texts, and for other tokens where `by_token` forbids them.
    """
    if encoder.max_length > teacher.longest:
        raise ValueError(
            f"{what}: {teacher.name} has {teacher.longest} positions for {encoder.max_length} tokens"
        )
    difference = tokenizer_difference(encoder.tokenizer, teacher.tokenizer)
    if difference and by_token:
        raise ValueError(
            f"{what} is learnt token by token, and the tokenizers of student and {teacher.name} "
            f"differ in their {difference}"
        )
    return Encoder(teacher.tokenizer, encoder.max_length) if difference else None


# -- losses -----------------------------------------------------------------------------------------------------------


class CapturedBatch(NamedTuple):
    """The tensors of a model's forward pass."""

    outputs: dict[str, Tensor]  # of heads by name, in full precision
    hidden: list[Tensor]  # `[T, H]` of the embeddings and after each layer
    qkv: list[tuple[Tensor, ...]]  # each layer's queries, keys and values, where requested
    layout: PackedLayout


def run_batch(
    model: EncoderWithHeads,
    encodings: Sequence[Window],
    heads: Sequence[str],
    dtype: torch.dtype = torch.float32,
    relations: bool = False,
) -> CapturedBatch:
    """Run a model on a batch, on the model's device and in `dtype`. relations: capture qkv, too"""
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
    """Return KL(softmax(theirs / temperature) || softmax(ours / temperature)) * temperature^2, summed over `dim`.

    The factor keeps the size of the gradient at any temperature (Hinton et al. 2015). Places where both are minus
    infinity add nothing.
    """
    log_p = F.log_softmax(theirs / temperature, dim=dim)
    log_q = F.log_softmax(ours / temperature, dim=dim)
    terms = (log_p.exp() * (log_p - log_q)).masked_fill(log_p == -math.inf, 0.0)
    return terms.sum(dim) * temperature**2


def logits_loss(
    head: Head, logits: Tensor, targets: Tensor, batch: Batch, temperature: float
) -> Loss:
    """Return the divergence of a head's logits from its teacher's, at the places that the task's own loss uses.

    logits, targets: `[B, C]` or `[T, C]`, the student's and the teacher's. A regression has their squared error.
    """
    match head.task:
        case "classification" if head.problem_type == "regression":
            return Loss(F.mse_loss(logits, targets), 1.0)
        case "classification" if (
            head.problem_type == "multi_label_classification" or logits.shape[1] == 1
        ):
            binary = [torch.stack([x, torch.zeros_like(x)], dim=-1) for x in (logits, targets)]
            return Loss(divergence(*binary, temperature).mean(), uniform_loss(2))
        case "classification":
            uniform = uniform_loss(logits.shape[1])
            return Loss(divergence(logits, targets, temperature).mean(), uniform)
        case "ner":
            labeled = tagged(batch, logits) != IGNORE_INDEX  # [T]
            each = divergence(logits[labeled], targets[labeled], temperature)
            return Loss(each.mean(), uniform_loss(logits.shape[1]))
        case "qa":
            slots, choices = among_candidates(logits, batch)
            targets, _ = among_candidates(targets, batch)
            return Loss(
                divergence(slots, targets, temperature, dim=1).mean(), uniform_loss(choices)
            )
    raise AssertionError(f"{head.task} has no logits; this is a bug")


def vector_loss(ours: Tensor, theirs: Tensor, distance: str) -> Loss:
    """Return the distance of pooled vectors `[B, D]`: 1 - cosine, or the squared error of each number."""
    if distance == "mse":
        return Loss(F.mse_loss(ours, theirs), 1.0)
    return Loss((1 - F.cosine_similarity(ours, theirs)).mean(), 1.0)


def similarity_loss(ours: Tensor, theirs: Tensor) -> Loss:
    """Return the squared error of the cosines of all pairs of a batch's vectors: `[B, D]`, of any two widths."""
    if len(ours) < 2:
        return Loss(ours.sum() * 0.0, 1.0)
    cosines = [x @ x.T for x in (F.normalize(ours, dim=1), F.normalize(theirs, dim=1))]  # [B, B]
    others = ~torch.eye(len(ours), dtype=torch.bool, device=ours.device)
    return Loss(F.mse_loss(*(each[others] for each in cosines)), 1.0)


def relation_loss(
    ours: Iterable[Tensor], theirs: Iterable[Tensor], layout: PackedLayout, num_heads: int
) -> Loss:
    """Return the loss of the self-relations of queries, keys and values: MiniLMv2 (Wang et al. 2021).

    ours, theirs: queries, keys and values, of widths that may differ. Each is split into `num_heads` relation heads,
    with softmax(x @ x.T / sqrt(size)) over each token's sequence. The loss is the KL divergence from the teacher's: the
    mean over tokens and heads, the sum over the three.
    """
    each_third = [
        divergence(*(_relations(x.float(), layout, num_heads) for x in pair), 1.0)
        for pair in zip(ours, theirs, strict=True)
    ]
    real = real_slots(layout)[:, None].expand_as(each_third[0])  # [B, N, S]
    return Loss(torch.stack([each[real].mean() for each in each_third]).sum(), 1.0)


def _relations(x: Tensor, layout: PackedLayout, num_heads: int) -> Tensor:
    """`[T, H]` to scores `[B, N, S, S]`, minus infinity for keys without a token."""
    slots = to_slots(x, layout)  # [B, S, H]
    heads = slots.view(*slots.shape[:2], num_heads, -1).transpose(1, 2)  # [B, N, S, H / N]
    scores = heads @ heads.transpose(-1, -2) * heads.shape[-1] ** -0.5  # [B, N, S, S]
    return scores.masked_fill(~real_slots(layout)[:, None, None, :], -math.inf)


WeightedLoss = tuple[float, Loss]  # weight and loss


class DistillationObjective(nn.Module):
    """The losses of training tasks. Its parameters are projections between widths, which only training uses.

    teacher_heads: the teacher's head, by head
    weights: of each of LOSSES, 0 if absent
    anneal: for heads with labels and a teacher, the weight moves from the teacher's loss to the labels' over the steps
        (Clark et al. 2019)
    hidden: pairs of a student's and a teacher's hidden states: 0 after the embeddings, k after k layers
    relation_layer: of the teacher, from 0; the student's is its last
    distance: of vectors, one of VECTOR_DISTANCES
    """

    def __init__(
        self,
        model: EncoderWithHeads,
        tasks: Sequence[TrainingTask],
        teacher_heads: Mapping[str, TeacherHead | None],
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
        self.tasks = tasks
        self.teacher_heads = teacher_heads
        self.weights = {name: weights.get(name, 0.0) for name in LOSSES}
        self.temperature = temperature
        self.anneal = anneal
        self.pairs = tuple(hidden) if self.weights["hidden"] else ()
        self.relation_layer = relation_layer
        self.relation_heads = relation_heads
        self.distance = distance
        self.maps = nn.ModuleDict()
        width = model.config.hidden_size
        for task in tasks:
            if task.encoder_teacher:
                theirs = task.encoder_teacher.model.config.hidden_size
                for pair in self.pairs if theirs != width else ():
                    self._add_map(_hidden_map(*pair), width, theirs)
            for name, teacher_head in task.teacher_heads.items():
                if teacher_head and teacher_head.described.task == "embedding":
                    widths = model.described[name].dimensions, teacher_head.described.dimensions
                    if widths[0] != widths[1]:
                        self._add_map(f"vectors_{name}", *widths)

    @property
    def teachers(self) -> list[Teacher]:
        """The distinct teachers."""
        return _unique_teachers(self.tasks, self.teacher_heads)

    def _add_map(self, name: str, ours: int, theirs: int) -> None:
        if name not in self.maps:
            self.maps[name] = nn.Linear(ours, theirs)

    def forward(
        self,
        model: EncoderWithHeads,
        task: TrainingTask,
        batch: Batch,
        retokenized: Mapping[str, Batch],
        progress: float,
        dtype: torch.dtype = torch.float32,
    ) -> dict[str, WeightedLoss]:
        """Return the weighted losses of a batch by name; the loss of labels has the stream's name."""
        relations = bool(self.weights["relations"] and task.encoder_teacher)
        ours = run_batch(model, batch.encodings, [*task.teacher_heads], dtype, relations)
        theirs: dict[str, CapturedBatch] = {}
        with torch.no_grad():
            for teacher in task.teachers:
                heads = [h.head for h in task.teacher_heads.values() if h and h.teacher is teacher]
                encodings = retokenized.get(teacher.name, batch).encodings
                with_relations = relations and teacher is task.encoder_teacher
                theirs[teacher.name] = run_batch(
                    teacher.model, encodings, heads, dtype, with_relations
                )
        losses = self._head_losses(model, task, batch, ours, theirs, progress)
        if task.encoder_teacher:
            losses |= self._encoder_losses(task, ours, theirs[task.encoder_teacher.name], relations)
        return losses

    def _head_losses(
        self,
        model: EncoderWithHeads,
        task: TrainingTask,
        batch: Batch,
        ours: CapturedBatch,
        theirs: Mapping[str, CapturedBatch],
        progress: float,
    ) -> dict[str, WeightedLoss]:
        stream, weighted = task.stream, {}
        annealed = self.anneal and task.teacher_heads.get(stream.head) is not None
        if stream.head and self.weights["labels"]:
            share = progress if annealed else 1.0
            loss = stream.loss(ours.outputs[stream.head], batch)
            weighted[stream.name] = (self.weights["labels"] * share, loss)
            if regularizer := stream.regularizer:
                weight = self.weights["labels"] * share * regularizer.weight_at(progress)
                flops = regularizer.loss(ours.outputs[stream.head])
                weighted[f"{stream.name}/flops"] = (weight, flops)
        for name, teacher_head in task.teacher_heads.items():
            head = model.described[name]
            if teacher_head is None:
                continue
            output, targets = (
                ours.outputs[name],
                theirs[teacher_head.teacher.name].outputs[teacher_head.head],
            )
            losses: dict[str, Loss] = {}
            if head.task == "embedding":
                key = f"vectors_{name}"
                mapped = self.maps[key](output) if key in self.maps else output
                if self.weights["embedding"]:
                    losses["embedding"] = vector_loss(mapped, targets, self.distance)
                if self.weights["similarity"]:
                    losses["similarity"] = similarity_loss(output, targets)
            else:
                if teacher_head.columns:
                    targets = targets[:, list(teacher_head.columns)]
                losses["logits"] = logits_loss(head, output, targets, batch, self.temperature)
            share = 1 - progress if annealed else 1.0
            for kind, loss in losses.items():
                part = kind if name == stream.head else f"{name} {kind}"
                weighted[f"{stream.name}/{part}"] = (self.weights[kind] * share, loss)
        return weighted

    def _encoder_losses(
        self, task: TrainingTask, ours: CapturedBatch, theirs: CapturedBatch, relations: bool
    ) -> dict[str, WeightedLoss]:
        name, weighted = task.stream.name, {}
        if self.pairs:
            errors = [
                F.mse_loss(self._mapped(a, b, ours.hidden[a].float()), theirs.hidden[b].float())
                for a, b in self.pairs
            ]
            loss = Loss(torch.stack(errors).mean(), 1.0)
            weighted[f"{name}/hidden"] = (self.weights["hidden"], loss)
        if relations:
            qkv = theirs.qkv[self.relation_layer]
            loss = relation_loss(ours.qkv[-1], qkv, ours.layout, self.relation_heads)
            weighted[f"{name}/relations"] = (self.weights["relations"], loss)
        return weighted

    def _mapped(self, a: int, b: int, states: Tensor) -> Tensor:
        key = _hidden_map(a, b)
        return self.maps[key](states) if key in self.maps else states


def _hidden_map(ours: int, theirs: int) -> str:
    return f"hidden_{ours}_{theirs}"

"""Distil a model into a smaller one: `python -m model.distill model/configs/minilm-sst2-half.toml [--name value ...]`.

The student is a subset of a checkpoint's layers, or a new encoder of any family. It learns from rows, as in
fine-tuning, from plain text, as in pretraining, or from both; the table `losses` has the weight of each loss. The
training loop and the resumption of an interrupted run are the same as in `finetune`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import numpy as np
import tokenizers
import torch
from pydantic import model_validator

from model import config, finetune, pretrain
from model.checkpoints import reader, source
from model.data import corpus, examples
from model.data.corpus import Corpus
from model.data.losses import Batch
from model.data.pretraining_batches import Sampler, Specials
from model.families.registry import FAMILIES, family_of
from model.heads import EncoderWithHeads
from model.run_settings import check_choice, setting
from model.training import distillation, optim
from model.training.distillation import DistillationObjective, Teacher, TeacherHead, TrainingTask
from model.training.run_record import check_output
from model.training.training_run import run_script
from service.core.encode import Encoder, Window, load_tokenizer

Unit = Literal["sentences", "blocks", "passages"]  # of plain text
SHORTEST_PASSAGE = 16  # tokens, special tokens included
# Settings of a loss, and the loss.
SETTINGS_OF_LOSSES = {
    "hidden_layers": "hidden",
    "relation_layer": "relations",
    "relation_heads": "relations",
    "anneal": "labels",
}


class DistillSettings(finetune.FinetuneSettings, pretrain.TextSettings):
    """The settings of distillation; heads need no rows."""

    teacher: str = setting("", "checkpoint to learn from, like `init_from`", "runs/big/checkpoint")
    losses: dict[str, float] = setting(
        dict,
        "weight of each loss: labels, logits, hidden, relations, embedding, similarity",
        '\'{"labels": 0.5, "logits": 1.0}\'',
    )
    layers: list[int] = setting(list, "layers that the student gets, from 0", "'[0, 2, 4]'")
    num_layers: int = setting(
        0, "number of layers that the student gets, evenly spaced; 0 for half of them", "3"
    )
    preset: str = setting("", "shape of a new encoder: tiny, mini, small, base or large", "mini")
    hidden_layers: list[list[int]] = setting(
        list, "pairs of a student's and a teacher's layer, 0: embeddings", "'[[1, 2], [2, 4]]'"
    )
    relation_layer: int = setting(
        -1, "teacher's layer of relations, from 0; negative: from the end", "-1"
    )
    relation_heads: int = setting(0, "heads of relations; 0 for the teacher's number", "32")
    distance: Literal["cosine", "mse"] = setting("cosine", "of vectors: cosine or mse", "mse")
    unit: Unit = setting("sentences", "samples of text: sentences, blocks or passages", "passages")
    corpus_batch_size: int = setting(32, "texts in a batch of plain text", "32", ge=1)

    @model_validator(mode="after")
    def _losses_fit(self) -> Self:
        for name, weight in self.losses.items():
            check_choice("losses", name, distillation.LOSSES)
            if weight < 0:
                raise ValueError(f"losses: {name} counts {weight}, which is below 0")
        if not any(self.losses.values()):
            raise ValueError(f"losses: none of {', '.join(distillation.LOSSES)} counts")
        for name, loss in SETTINGS_OF_LOSSES.items():
            default = type(self).model_fields[name].get_default(call_default_factory=True)
            if getattr(self, name) != default and not self.counts(loss):
                raise ValueError(f"{name}: losses.{loss} counts nothing")
        if not (self.heads or self.corpus):
            raise ValueError("missing: heads with rows, or a corpus")
        return self

    def check_heads(self) -> None:
        """Accept settings without heads: plain text trains a student, too."""

    def check_start(self) -> None:
        if not self.teacher:
            raise ValueError("missing: teacher")
        if self.keep_heads:
            raise ValueError(
                "keep_heads is for fine-tuning: a student of layers keeps heads anyway"
            )
        of_layers = [n for n in ("init_from", "layers", "num_layers") if getattr(self, n)]
        fresh = ("preset", "family", "shape", "max_position_embeddings", "tokenizer")
        of_fresh = [n for n in fresh if getattr(self, n)]
        if self.preset:
            check_choice("preset", self.preset, config.PRESETS)
            if of_layers:
                raise ValueError(f"preset: a fresh student, of which {of_layers[0]} says nothing")
        elif of_fresh:
            raise ValueError(f"{of_fresh[0]} is for a fresh student, which begins from a preset")
        if self.layers and self.num_layers:
            raise ValueError("layers and num_layers: one of them says it")
        if self.family:
            check_choice("family", self.family, FAMILIES)

    def counts(self, *names: str) -> bool:
        """Return whether any of these losses has a weight."""
        return any(self.losses.get(name) for name in names)


# -- the student ------------------------------------------------------------------------------------------------------


class StudentInit(NamedTuple):
    """The initial state of a student: its configuration, and a checkpoint's layers unless it is new."""

    shape: config.BertConfig
    tokenizer: tokenizers.Tokenizer
    tokenizer_file: Path
    layers: Sequence[int] = ()
    whole: Teacher | None = None


def init_student_shape(s: DistillSettings, teachers: Mapping[str, Teacher]) -> StudentInit:
    """Return the student's initial state. Raises ValueError for unknown layers, and for missing special tokens."""
    if s.preset:
        teacher = reader.locate(s.teacher)
        file = Path(s.tokenizer) if s.tokenizer else source.tokenizer_file(teacher, Path(s.output))
        tokenizer = load_tokenizer(file)
        family, shape = pretrain.read_shape(s, tokenizer)
        Specials.of(tokenizer, family)
        return StudentInit(shape, tokenizer, file)
    name = s.init_from or s.teacher
    whole = teachers.get(name) or distillation.load(name, torch.device("cpu"))
    shape = whole.model.config
    layers = choose_layers(s, shape.num_hidden_layers)
    file = source.tokenizer_file(reader.locate(name), Path(s.output))
    return StudentInit(shape.keeping(layers), whole.tokenizer, file, layers, whole)


def choose_layers(s: DistillSettings, depth: int) -> list[int]:
    """Return which of `depth` layers the student gets. Raises ValueError for layers out of range."""
    count = s.num_layers or (depth + 1) // 2
    if not 0 < count <= depth:
        raise ValueError(f"num_layers: {count} of {depth} layers")
    chosen = s.layers or [place * depth // count for place in range(count)]
    if sorted(set(chosen)) != chosen or not set(chosen) <= set(range(depth)):
        raise ValueError(f"layers: {chosen} are not some of 0 to {depth - 1}, in order")
    return chosen


def keep_layers(student: torch.nn.Module, encoder: torch.nn.Module, layers: Sequence[int]) -> None:
    """Fill an encoder from some layers of a deeper one. Raises ValueError where a layer differs in structure."""
    weights = encoder.state_dict()
    if len(encoder.layers) == encoder.config.num_hidden_layers:  # else layers share weights
        rest = {name: t for name, t in weights.items() if not name.startswith("layers.")}
        kept = {
            f"layers.{place}.{name}": tensor
            for place, layer in enumerate(layers)
            for name, tensor in encoder.layers[layer].state_dict().items()
        }
        weights = rest | kept
    if odd := sorted(student.state_dict().keys() ^ weights.keys()):
        family = encoder.config.model_type
        raise ValueError(
            f"layers: {odd[0]}: {family}'s first layer differs from the others: keep it first"
        )
    student.load_state_dict(weights)


def init_student(student: EncoderWithHeads, whole: Teacher, layers: Sequence[int]) -> list[str]:
    """Initialize the student from layers and compatible heads of a checkpoint. Returns the heads' names."""
    reader.init_from(student, whole.name)  # poolers, too
    keep_layers(student.encoder, whole.model.encoder, layers)
    return distillation.keep_heads(student, whole)


# -- plain text -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlainTexts:
    """A stream of plain text without a head: sentences, passages, or blocks of running text from the `sampler`."""

    corpus: Corpus
    specials: Specials
    batch_size: int
    length: int
    unit: str = "sentences"
    sampler: Sampler | None = None
    name: str = "text"
    head: str = ""
    weight: float = 1.0

    @property
    def size(self) -> int:
        """The number of examples in an epoch."""
        if self.unit == "sentences":
            return self.corpus.num_sentences
        return math.ceil(len(self.corpus.ids) / self.specials.room(self.length))

    def batch(self, seed: tuple[int, ...], step: int) -> Batch:
        """Return the batch of a step, a pure function of seed and step: the same sentences for any tokenizer."""
        if self.unit == "passages":
            return self._passages(seed, step)
        if self.sampler is None:
            room = self.specials.room(self.length)
            drawn = examples.draw(self.size, self.batch_size, seed, step)
            texts = (self.corpus.tokens(i, i + 1)[:room] for i in drawn)
            return Batch([Window(*self.specials.around(text)) for text in texts], [])
        number = int(np.random.SeedSequence(seed).generate_state(1)[0])
        size, length = self.batch_size, self.length
        blocks = self.sampler.samples(seed=number, step=step, size=size, length=length, rate=0.0)
        rows = zip(blocks.original_ids.numpy(), blocks.token_type_ids.numpy(), strict=True)
        return Batch([Window(ids, types) for ids, types in rows], [])

    def _passages(self, seed: tuple[int, ...], step: int) -> Batch:
        """Draw passages of similar length, so that little of a batch is padding.

        The logarithm of a step's longest length is uniform from SHORTEST_PASSAGE to `length`. A passage has as many
        whole sentences of a document as fit, or the beginning of a longer sentence. The number of passages is
        inversely proportional to their length, so every step has about as many tokens.
        """
        rng = np.random.default_rng([*seed, step])
        shortest = min(SHORTEST_PASSAGE, self.length)
        length = round(shortest * (self.length / shortest) ** rng.random())
        room = self.specials.room(length)
        number = self.batch_size * self.length // length
        firsts = rng.integers(self.corpus.num_sentences, size=number)
        starts = self.corpus.sentence_starts
        texts = []
        for first in map(int, firsts):
            _, end = self.corpus.document_of(first)
            limit = starts[first] + room
            fitting = int(np.searchsorted(starts[first : end + 1], limit, side="right"))
            texts.append(self.corpus.tokens(first, first + max(1, fitting - 1))[:room])
        return Batch([Window(*self.specials.around(text)) for text in texts], [])


def text_task(
    s: DistillSettings,
    shape: config.BertConfig,
    encoder: Encoder,
    file: Path,
    teacher_heads: Mapping[str, TeacherHead | None],
    encoder_teacher: Teacher | None,
) -> TrainingTask:
    """Return the task of plain text, tokenized for student (`file`) and teachers. Raises ValueError if it cannot be."""
    by_token = s.unit != "sentences"
    what = f"a corpus in {s.unit}" if by_token else "a corpus"

    def read(file: Path, tokenizer: tokenizers.Tokenizer, shape: config.BertConfig) -> PlainTexts:
        text = corpus.load(corpus.corpus_files(s.corpus), file, Path(s.cache))
        specials = Specials.of(tokenizer, family_of(shape))
        sampler = Sampler(text, specials, None) if s.unit == "blocks" else None
        return PlainTexts(text, specials, s.corpus_batch_size, s.max_length, s.unit, sampler)

    task = TrainingTask(read(file, encoder.tokenizer, shape), teacher_heads, encoder_teacher)
    retokenized: dict[str, PlainTexts] = {}
    for teacher in task.teachers:
        if distillation.teacher_encoder(teacher, encoder, what, by_token):
            own = source.tokenizer_file(reader.locate(teacher.name), Path(s.output) / "teacher")
            retokenized[teacher.name] = read(own, teacher.tokenizer, teacher.model.config)
    return replace(task, retokenized=retokenized)


# -- losses -----------------------------------------------------------------------------------------------------------


def check_losses(
    s: DistillSettings, tasks: Sequence[TrainingTask], teacher_heads: dict[str, Any]
) -> None:
    """Raise ValueError for a loss that no task has, and for a head that no loss trains."""
    embeddings = [name for name, h in s.heads.items() if h.task == "embedding"]
    labelled = [task for task in tasks if task.stream.head]
    for loss in ("embedding", "similarity"):
        if s.counts(loss) and not embeddings:
            raise ValueError(f"losses.{loss}: there is no head of embeddings, with rows or without")
    if s.counts("logits") and not any(
        teacher_heads[task.stream.head] and task.stream.head not in embeddings for task in labelled
    ):
        raise ValueError(f"losses.logits: {s.teacher} answers for none of the heads")
    if s.counts("labels") and not labelled:
        raise ValueError("losses.labels: no head has rows")
    for name, h in s.heads.items():
        kinds = distillation.output_losses(h.task)
        if h.teacher and not s.counts(*kinds):
            raise ValueError(
                f"heads.{name}: it has a teacher, and losses.{kinds[0]} counts nothing"
            )
    if s.corpus and len(labelled) == len(tasks):
        raise ValueError("corpus: none of the losses that count can be learnt from plain text")
    for name in dict.fromkeys(task.stream.head for task in labelled):
        kinds = distillation.output_losses(s.heads[name].task)
        is_taught = teacher_heads[name] and s.counts(*kinds)
        if not (s.counts("labels", *distillation.TOKEN_LOSSES) or is_taught):
            raise ValueError(f"heads.{name}: neither its labels nor a teacher's answers count")


def hidden_pairs(s: DistillSettings, ours: int, theirs: int) -> list[tuple[int, int]]:
    """Return the pairs of compared hidden states, by default each student's layer with evenly spaced teacher's."""
    every = [(i, max(1, round(i * theirs / ours))) for i in range(1, ours + 1)]
    pairs = [tuple(pair) for pair in s.hidden_layers] or every
    for pair in pairs:
        if len(pair) != 2 or not (0 <= pair[0] <= ours and 0 <= pair[1] <= theirs):
            raise ValueError(
                f"hidden_layers: {[*pair]} is not [0 to {ours}, 0 to {theirs}]: student's, teacher's"
            )
    return pairs


def relation_heads(s: DistillSettings, ours: config.BertConfig, theirs: config.BertConfig) -> int:
    """Return the number of relation heads. Raises ValueError where it or `relation_layer` does not fit."""
    heads = s.relation_heads or theirs.num_attention_heads
    if heads < 1 or ours.hidden_size % heads or theirs.hidden_size % heads:
        raise ValueError(
            f"relation_heads: {heads} does not divide the widths {ours.hidden_size} and {theirs.hidden_size}"
        )
    depth = theirs.num_hidden_layers
    if not -depth <= s.relation_layer < depth:
        raise ValueError(f"relation_layer: {s.relation_layer} is none of the teacher's {depth}")
    return heads


def distill(s: DistillSettings) -> dict[str, Any]:
    """Train, and return the content of `metrics.json`. The best or last checkpoint is in `<output>/checkpoint`."""
    record = check_output(s)
    device = optim.pick_device()

    # teachers
    sources = {s.teacher, *(h.teacher for h in s.heads.values() if h.teacher)}
    teachers = {source: distillation.load(source, device) for source in sorted(sources)}
    main_teacher = teachers[s.teacher]
    teacher_of = {name: teachers[h.teacher or s.teacher] for name, h in s.heads.items()}

    # data
    shape, tokenizer, tokenizer_file, layers, whole = init_student_shape(s, teachers)
    encoders = {n: Encoder(tokenizer, h.max_length or s.max_length) for n, h in s.heads.items()}
    longest = max(each.max_length for each in encoders.values()) if encoders else 0
    longest = max(longest, s.max_length if s.corpus else 0)
    finetune.check_fits(s.preset or s.init_from or s.teacher, shape, tokenizer, longest)
    encoder_teacher = main_teacher if s.counts(*distillation.TOKEN_LOSSES) else None
    if encoder_teacher:
        weighted = ", ".join(f"losses.{n}" for n in distillation.TOKEN_LOSSES if s.counts(n))
        encoder = Encoder(tokenizer, longest)
        distillation.teacher_encoder(main_teacher, encoder, weighted, by_token=True)
    described, teacher_heads, tasks, dev = finetune.read_tasks(
        s, encoders, shape, teacher_of, s.losses, encoder_teacher
    )
    if s.corpus:
        vectors = {n: teacher_heads[n] for n, h in described.items() if h.task == "embedding"}
        of_text = vectors if s.counts(*distillation.output_losses("embedding")) else {}
        if encoder_teacher or of_text:
            texts = Encoder(tokenizer, s.max_length)
            tasks.append(text_task(s, shape, texts, tokenizer_file, of_text, encoder_teacher))
    check_losses(s, tasks, teacher_heads)

    # student
    torch.manual_seed(s.seed)
    student = EncoderWithHeads(finetune.with_dropout(s, shape), described)
    kept = init_student(student, whole, layers) if whole else None
    theirs = main_teacher.model.config
    options: dict[str, Any] = {}
    if s.counts("hidden"):
        options["hidden"] = hidden_pairs(s, shape.num_hidden_layers, theirs.num_hidden_layers)
    if s.counts("relations"):
        options |= {"relation_layer": s.relation_layer}
        options |= {"relation_heads": relation_heads(s, shape, theirs)}
    objective = DistillationObjective(
        student,
        tasks,
        teacher_heads,
        s.losses,
        temperature=s.temperature,
        anneal=s.anneal,
        distance=s.distance,
        **options,
    )

    before = reader.read_teachers(whole.name) if whole else []
    return finetune.train(
        s, student, objective, encoders, tokenizer_file, dev, before, kept, record=record
    )


def main() -> None:
    run_script(DistillSettings, __doc__ or "", distill)


if __name__ == "__main__":
    main()

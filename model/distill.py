"""Distil a model into a smaller one: `python -m model.distill model/configs/minilm-sst2-half.toml [--name value ...]`.

The student is some layers of a checkpoint, or a fresh encoder of any family. It learns from rows, as in fine-tuning,
from plain text, as in pretraining, or from both; how much each loss counts stands in the table `losses`. The loop is
that of `finetune`, and so is what an interruption costs: nothing.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import tokenizers
import torch

from model import config, finetune, pretrain, settings_checks
from model.checkpoints import reader, source
from model.data import corpus, examples
from model.data.corpus import Corpus
from model.data.pretraining_batches import Sampler, Specials
from model.families.registry import FAMILIES, family_of
from model.heads import EncoderWithHeads
from model.training import distillation, optim
from model.training.distillation import Lesson, Teacher, TeacherOutputs, Teaching
from model.training.training_run import command
from service.core.encode import Encoder, Window, load_tokenizer

UNITS = ("sentences", "blocks", "passages")
SHORTEST_PASSAGE = 16  # tokens, special tokens included
# Settings that say how a loss is taken, and which.
OF_LOSSES = {
    "hidden_layers": "hidden",
    "relation_layer": "relations",
    "relation_heads": "relations",
    "anneal": "labels",
}


@dataclass
class DistillSettings(finetune.FinetuneSettings):
    heads: dict[str, Any] = field(default_factory=dict)  # as in fine-tuning; rows are optional
    teacher: str = ""  # any checkpoint: a directory, a hub name or package:NAME/FOLDER
    losses: dict[str, float] = field(default_factory=dict)  # how much each of teach.LOSSES counts
    # A student of layers: of `init_from`, which is the teacher unless given.
    layers: list[int] = field(default_factory=list)  # which, from 0, in order
    num_layers: int = 0  # or how many, spread evenly from the first on; half of them, unless given
    # A fresh student.
    preset: str = ""
    family: str = ""  # a model_type; bert, unless given
    shape: dict[str, Any] = field(default_factory=dict)  # fields of its own beside the preset
    max_position_embeddings: int | None = None  # the family's, unless given
    # How the losses are taken.
    # Pairs of a student's and a teacher's layer, 0 the embeddings.
    hidden_layers: list[list[int]] = field(default_factory=list)
    # The teacher's, from 0 on or from the end back; the student's is its last.
    relation_layer: int = -1
    relation_heads: int = 0  # 0: as many as the teacher has heads
    distance: str = "cosine"  # of vectors; or mse
    # Plain text.
    corpus: list[str] = field(default_factory=list)  # files or folders of .txt, .gz, .xz
    unit: str = (
        "sentences"  # or blocks, as long as max_length; or passages, of all lengths up to it
    )
    corpus_batch_size: int = 32  # for passages: of max_length tokens each; of shorter ones more
    cache: str = "runs/cache"

    def __post_init__(self) -> None:
        super().__post_init__()
        settings_checks.check_counts(self, "corpus_batch_size")
        settings_checks.check_choice("unit", self.unit, UNITS)
        settings_checks.check_choice("distance", self.distance, distillation.DISTANCES)
        for name, weight in self.losses.items():
            settings_checks.check_choice("losses", name, distillation.LOSSES)
            if weight < 0:
                raise ValueError(f"losses: {name} counts {weight}, which is below 0")
        if not any(self.losses.values()):
            raise ValueError(f"losses: none of {', '.join(distillation.LOSSES)} counts")
        for name, loss in OF_LOSSES.items():
            if getattr(self, name) != getattr(DistillSettings, name, []) and not self.counts(loss):
                raise ValueError(f"{name}: losses.{loss} counts nothing")
        if not (self.heads or self.corpus):
            raise ValueError("missing: heads with rows, or a corpus")

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
            settings_checks.check_choice("preset", self.preset, config.PRESETS)
            if of_layers:
                raise ValueError(f"preset: a fresh student, of which {of_layers[0]} says nothing")
        elif of_fresh:
            raise ValueError(f"{of_fresh[0]} is for a fresh student, which begins from a preset")
        if self.layers and self.num_layers:
            raise ValueError("layers and num_layers: one of them says it")
        if self.family:
            settings_checks.check_choice("family", self.family, FAMILIES)

    def counts(self, *names: str) -> bool:
        """Does any of these losses count?"""
        return any(self.losses.get(name) for name in names)


# -- the student ------------------------------------------------------------------------------------------------------


class Begin(NamedTuple):
    """What a student begins as: a shape, and these layers of a checkpoint where it is not fresh."""

    shape: config.BertConfig
    tokenizer: tokenizers.Tokenizer
    tokenizer_file: Path
    layers: Sequence[int] = ()
    whole: Teacher | None = None


def begin(s: DistillSettings, teachers: Mapping[str, Teacher]) -> Begin:
    """Raises ValueError for layers that there are not, and where a family's special tokens are missing."""
    if s.preset:
        teacher = reader.locate(s.teacher)
        file = Path(s.tokenizer) if s.tokenizer else source.tokenizer_file(teacher, Path(s.output))
        tokenizer = load_tokenizer(file)
        family, shape = pretrain.read_shape(s, tokenizer)
        Specials.of(tokenizer, family)
        return Begin(shape, tokenizer, file)
    name = s.init_from or s.teacher
    whole = teachers.get(name) or distillation.load(name, torch.device("cpu"))
    shape = whole.model.config
    layers = choose_layers(s, shape.num_hidden_layers)
    file = source.tokenizer_file(reader.locate(name), Path(s.output))
    return Begin(shape.keeping(layers), whole.tokenizer, file, layers, whole)


def choose_layers(s: DistillSettings, depth: int) -> list[int]:
    """Which of `depth` layers are kept. Raises ValueError for such as there are not."""
    count = s.num_layers or (depth + 1) // 2
    if not 0 < count <= depth:
        raise ValueError(f"num_layers: {count} of {depth} layers")
    chosen = s.layers or [place * depth // count for place in range(count)]
    if sorted(set(chosen)) != chosen or not set(chosen) <= set(range(depth)):
        raise ValueError(f"layers: {chosen} are not some of 0 to {depth - 1}, in order")
    return chosen


def keep_layers(student: torch.nn.Module, encoder: torch.nn.Module, layers: Sequence[int]) -> None:
    """Fill an encoder with these layers of a deeper one, and with all else of it.

    Raises ValueError where a layer is not made as the one in whose place it comes.
    """
    weights = encoder.state_dict()
    if len(encoder.layers) == encoder.config.num_hidden_layers:  # else depths share their weights
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


def inherit(student: EncoderWithHeads, whole: Teacher, layers: Sequence[int]) -> list[str]:
    """Begin as some layers of a checkpoint, and with its heads where it has the same; gives the names of these."""
    reader.init_from(student, whole.name)  # poolers, too
    keep_layers(student.encoder, whole.model.encoder, layers)
    return distillation.keep_heads(student, whole)


# -- plain text -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PlainTexts:
    """A stream of plain text, for no head: sentences, passages, or blocks of running text from the `sampler`."""

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
        """The examples of an epoch."""
        if self.unit == "sentences":
            return self.corpus.num_sentences
        return math.ceil(len(self.corpus.ids) / self.specials.room(self.length))

    def batch(self, seed: tuple[int, ...], step: int) -> examples.Batch:
        """The batch of a step: a pure function of seed and step, and the same sentences in any tokens."""
        if self.unit == "passages":
            return self._passages(seed, step)
        if self.sampler is None:
            room = self.specials.room(self.length)
            drawn = examples.draw(self.size, self.batch_size, seed, step)
            texts = (self.corpus.tokens(i, i + 1)[:room] for i in drawn)
            return examples.Batch([Window(*self.specials.around(text)) for text in texts], [])
        number = int(np.random.SeedSequence(seed).generate_state(1)[0])
        size, length = self.batch_size, self.length
        blocks = self.sampler.samples(seed=number, step=step, size=size, length=length, rate=0.0)
        rows = zip(blocks.original_ids.numpy(), blocks.token_type_ids.numpy(), strict=True)
        return examples.Batch([Window(ids, types) for ids, types in rows], [])

    def _passages(self, seed: tuple[int, ...], step: int) -> examples.Batch:
        """Draw passages of similar length, so that little of a batch is padding.

        The logarithm of a step's longest length is uniform from SHORTEST_PASSAGE to `length`. A passage has as many
        whole sentences of a document as fit, or the beginning of a longer sentence. The number of passages is
        inversely proportional to their length, so every step has about as many tokens.
        """
        rng = np.random.default_rng([*seed, step])
        shortest = min(SHORTEST_PASSAGE, self.length)
        length = round(shortest * (self.length / shortest) ** rng.random())
        room = self.specials.room(length)
        firsts = rng.integers(
            self.corpus.num_sentences, size=self.batch_size * self.length // length
        )
        starts = self.corpus.sentence_starts
        texts = []
        for first in map(int, firsts):
            _, end = self.corpus.document_of(first)
            fitting = int(
                np.searchsorted(starts[first : end + 1], starts[first] + room, side="right")
            )
            texts.append(self.corpus.tokens(first, first + max(1, fitting - 1))[:room])
        return examples.Batch([Window(*self.specials.around(text)) for text in texts], [])


def read_texts(
    s: DistillSettings,
    shape: config.BertConfig,
    encoder: Encoder,
    file: Path,
    answers: Mapping[str, TeacherOutputs | None],
    trunk: Teacher | None,
) -> Lesson:
    """What plain text teaches, as the student and each teacher reads it.

    file: of the student's tokenizer
    Raises ValueError for blocks and passages where their tokens are others.
    """
    by_token = s.unit != "sentences"
    what = f"a corpus in {s.unit}" if by_token else "a corpus"

    def read(file: Path, tokenizer: tokenizers.Tokenizer, shape: config.BertConfig) -> PlainTexts:
        text = corpus.load(pretrain.corpus_files(s.corpus), file, Path(s.cache))
        specials = Specials.of(tokenizer, family_of(shape))
        sampler = Sampler(text, specials, None) if s.unit == "blocks" else None
        return PlainTexts(text, specials, s.corpus_batch_size, s.max_length, s.unit, sampler)

    lesson = Lesson(read(file, encoder.tokenizer, shape), answers, trunk)
    twins: dict[str, PlainTexts] = {}
    for teacher in lesson.teachers:
        if distillation.read_alike(teacher, encoder, what, by_token):
            its = source.tokenizer_file(reader.locate(teacher.name), Path(s.output) / "teacher")
            twins[teacher.name] = read(its, teacher.tokenizer, teacher.model.config)
    return replace(lesson, twins=twins)


# -- what is taught ---------------------------------------------------------------------------------------------------


def check_taught(s: DistillSettings, lessons: Sequence[Lesson], answers: dict[str, Any]) -> None:
    """Raises ValueError for a loss that nothing is there for, and for a head that nothing teaches."""
    embeddings = [name for name, h in s.heads.items() if h.task == "embedding"]
    labelled = [lesson for lesson in lessons if lesson.stream.head]
    for loss in ("embedding", "similarity"):
        if s.counts(loss) and not embeddings:
            raise ValueError(f"losses.{loss}: there is no head of embeddings, with rows or without")
    if s.counts("logits") and not any(
        answers[lesson.stream.head] and lesson.stream.head not in embeddings for lesson in labelled
    ):
        raise ValueError(f"losses.logits: {s.teacher} answers for none of the heads")
    if s.counts("labels") and not labelled:
        raise ValueError("losses.labels: no head has rows")
    for name, h in s.heads.items():
        kinds = distillation.kinds_of(h.task)
        if h.teacher and not s.counts(*kinds):
            raise ValueError(
                f"heads.{name}: it has a teacher, and losses.{kinds[0]} counts nothing"
            )
    if s.corpus and len(labelled) == len(lessons):
        raise ValueError("corpus: none of the losses that count can be learnt from plain text")
    for name in dict.fromkeys(lesson.stream.head for lesson in labelled):
        asked = answers[name] and s.counts(*distillation.kinds_of(s.heads[name].task))
        if not (s.counts("labels", *distillation.BY_TOKEN) or asked):
            raise ValueError(f"heads.{name}: neither its labels nor a teacher's answers count")


def hidden_pairs(s: DistillSettings, ours: int, theirs: int) -> list[tuple[int, int]]:
    """Which hidden states are compared: those after every student's layer with as many teacher's, spread evenly.

    Raises ValueError for such as there are not.
    """
    every = [(i, max(1, round(i * theirs / ours))) for i in range(1, ours + 1)]
    pairs = [tuple(pair) for pair in s.hidden_layers] or every
    for pair in pairs:
        if len(pair) != 2 or not (0 <= pair[0] <= ours and 0 <= pair[1] <= theirs):
            raise ValueError(
                f"hidden_layers: {[*pair]} is not [0 to {ours}, 0 to {theirs}]: student's, teacher's"
            )
    return pairs


def relation_heads(s: DistillSettings, ours: config.BertConfig, theirs: config.BertConfig) -> int:
    """Raises ValueError for a number of them that does not divide both widths, and for a layer that there is not."""
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
    """Train, and give what goes into `metrics.json`; the best on dev, or else the last, is in `<output>/checkpoint`."""
    device = optim.pick_device()

    # teachers
    sources = {s.teacher, *(h.teacher for h in s.heads.values() if h.teacher)}
    teachers = {source: distillation.load(source, device) for source in sorted(sources)}
    trunk = teachers[s.teacher]
    teacher_of = {name: teachers[h.teacher or s.teacher] for name, h in s.heads.items()}

    # data
    shape, tokenizer, tokenizer_file, layers, whole = begin(s, teachers)
    encoders = {n: Encoder(tokenizer, h.max_length or s.max_length) for n, h in s.heads.items()}
    longest = max(each.max_length for each in encoders.values()) if encoders else 0
    longest = max(longest, s.max_length if s.corpus else 0)
    finetune.check_fits(s.preset or s.init_from or s.teacher, shape, tokenizer, longest)
    of_trunk = trunk if s.counts(*distillation.BY_TOKEN) else None
    if of_trunk:
        counting = ", ".join(f"losses.{name}" for name in distillation.BY_TOKEN if s.counts(name))
        distillation.read_alike(trunk, Encoder(tokenizer, longest), counting, by_token=True)
    described, answers, lessons = finetune.read_lessons(
        s, encoders, shape.hidden_size, teacher_of, s.losses, of_trunk
    )
    if s.corpus:
        vectors = {n: answers[n] for n, h in described.items() if h.task == "embedding"}
        asked = vectors if s.counts(*distillation.kinds_of("embedding")) else {}
        if of_trunk or asked:
            texts = Encoder(tokenizer, s.max_length)
            lessons.append(read_texts(s, shape, texts, tokenizer_file, asked, of_trunk))
    check_taught(s, lessons, answers)

    # student
    torch.manual_seed(s.seed)
    student = EncoderWithHeads(finetune.with_rates(s, shape), described)
    kept = inherit(student, whole, layers) if whole else None
    theirs = trunk.model.config
    how: dict[str, Any] = {}
    if s.counts("hidden"):
        how["hidden"] = hidden_pairs(s, shape.num_hidden_layers, theirs.num_hidden_layers)
    if s.counts("relations"):
        how |= {"relation_layer": s.relation_layer}
        how |= {"relation_heads": relation_heads(s, shape, theirs)}
    teaching = Teaching(
        student,
        lessons,
        answers,
        s.losses,
        temperature=s.temperature,
        anneal=s.anneal,
        distance=s.distance,
        **how,
    )

    before = reader.read_teachers(whole.name) if whole else []
    return finetune.train(s, student, teaching, encoders, tokenizer_file, before, kept)


def main() -> None:
    command(DistillSettings, __doc__ or "", distill)


if __name__ == "__main__":
    main()

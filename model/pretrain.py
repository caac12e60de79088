"""Pretrain an encoder: `python -m model.pretrain model/configs/mini-pretrain.toml [--name value ...]`.

What it is taught is its family's matter: to fill in what was hidden, and for some whether two texts belong together, or
which tokens were replaced. Interrupt it at any time: the same command goes on where it stopped, with the losses that an
uninterrupted run would have had. `torchrun --nproc-per-node N -m model.pretrain ...` runs it on N devices.
"""

import dataclasses
import functools
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
import torch
from torch import Tensor, nn

from model import config, settings_checks
from model.checkpoints import reader, writer
from model.checkpoints.hub_names import CheckpointError
from model.checkpoints.source import read_tokenizer
from model.checkpoints.tokenizer_files import has_tokenizer
from model.data import corpus, pretraining_batches
from model.data.pretraining_batches import PretrainingBatch, Sampler, Samples, Specials
from model.families.bert_names import BERT
from model.families.registry import FAMILIES, family_of
from model.families.spec import Family
from model.heads import make_pretraining
from model.training import optim
from model.training.data_parallel import Ranks
from model.training.token_matching_init import begin_matching
from model.training.training_run import TrainingRun, command
from service.core.encode import load_tokenizer


@dataclass
class PretrainSettings:
    output: str
    corpus: list[str]  # files or folders of .txt, .gz, .xz
    tokenizer: str  # a tokenizer.json
    family: str = ""  # a model_type; the checkpoint's to go on from, or bert
    preset: str = "mini"
    shape: dict[str, Any] = dataclasses.field(default_factory=dict)  # fields of its own beside it
    max_position_embeddings: int | None = None  # the family's, unless given
    init_from: str = ""  # a checkpoint to go on from, a local directory or a hub name
    # half of the heads of the first so many layers begin by looking at equal tokens
    matching_layers: int = 0
    steps: int = 10_000
    minutes: float = 0.0  # instead of steps: as many as are taken in that time
    # [share of the steps, tokens per sample] in order, and tokens per step where others than
    phases: list[list[float]] | None = None
    batch_tokens: int = 8192
    micro_batch_tokens: int = 0  # so many at a time (all at once, unless given)
    mask_rate: float | None = None  # the family's, unless given
    final_mask_rate: float | None = None  # it falls or rises evenly to this one
    whole_words: bool = False  # hide all pieces of a word or none
    next_sentence: bool | None = None  # ask about pairs of texts; as the family does, unless given
    weights: dict[str, float] = dataclasses.field(default_factory=dict)  # of losses by name
    optimizer: str = "adamw"  # or muon, for the layers' matrices
    lr: float = 1e-3
    muon_lr: float = 0.02
    warmup: float = 0.05
    hold: float = 0.0  # share of the steps after the warm-up at the peak rate
    weight_decay: float = 0.01
    beta2: float = 0.98
    clip: float = 1.0
    dropout: float = 0.1
    seed: int = 1
    precision: str = "auto"  # auto, fp32 or bf16
    compile: str = "auto"  # the step: yes, no or auto, which is on a GPU
    save_every: int = 200
    eval_every: int = 500
    cache: str = "runs/cache"

    def __post_init__(self) -> None:
        settings_checks.check_types(self)
        if not 0 <= self.hold <= 1:
            raise ValueError(f"hold: {self.hold} is not from 0 to 1")
        settings_checks.check_counts(self, "steps", "batch_tokens", "eval_every", "save_every")
        settings_checks.check_choice("optimizer", self.optimizer, optim.OPTIMIZERS)
        settings_checks.check_choice("precision", self.precision, optim.PRECISIONS)
        settings_checks.check_choice("compile", self.compile, ("auto", "yes", "no"))
        settings_checks.check_choice("preset", self.preset, config.PRESETS)
        if self.family:
            settings_checks.check_choice("family", self.family, FAMILIES)
        for name in ("mask_rate", "final_mask_rate"):
            rate = getattr(self, name)
            if rate is not None and not 0 < rate < 1:
                raise ValueError(f"{name}: {rate} is not between 0 and 1")


class Phase(NamedTuple):
    """A part of a run: its share of the steps, the tokens of a sample, and those of a step."""

    share: float
    length: int
    batch_tokens: int

    @property
    def size(self) -> int:
        """Samples of a step."""
        return max(1, self.batch_tokens // self.length)


def phases_of(s: PretrainSettings) -> list[Phase]:
    """Raises ValueError for what is no list of phases."""
    found = []
    for given in s.phases or [[0.9, 128], [0.1, 512]]:
        if len(given) not in (2, 3):
            raise ValueError(f"phases: {given} is not [share, tokens per sample (, per step)]")
        share, length, *tokens = given
        found.append(Phase(share, int(length), int(tokens[0]) if tokens else s.batch_tokens))
    return found


def phase_at(step: int, steps: int, phases: list[Phase]) -> Phase:
    end = 0.0
    for phase in phases:
        end += phase.share
        if step < round(end * steps):
            return phase
    return phases[-1]


def rate_at(step: int, steps: int, first: float, last: float) -> float:
    """What share of the text is hidden, from the first rate evenly to the last (Ankner et al. 2023)."""
    return first + (last - first) * step / max(steps - 1, 1)


def losses(
    model: nn.Module, batch: PretrainingBatch, shares: Mapping[str, float] | None = None
) -> dict[str, Tensor]:
    """The mean loss of everything that the model is taught, and as `loss` their weighted sum.

    shares: what the batch is of the whole one that a step reads, by loss: each counts so much
    """
    found = model.losses(batch.inputs, batch.masked, batch.labels, batch.is_next)
    parts = {name: part * (shares[name] if shares else 1.0) for name, part in found.items()}
    whole = sum(model.weights[name] * part for name, part in parts.items())
    return {"loss": whole, **parts}


class Objective(nn.Module):
    """A model's losses as a module's output, which is what can be compiled, and shared between processes."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, batch: PretrainingBatch, shares: Mapping[str, float]) -> dict[str, Tensor]:
        return losses(self.model, batch, shares)


def in_pieces(
    whole: Samples, tokens: int, counted: Mapping[str, int]
) -> Iterator[tuple[PretrainingBatch, dict[str, float]]]:
    """Samples as batches of so many tokens (0: all at once), with what each is of what is `counted`, by loss."""
    pieces = math.ceil(whole.tokens / (tokens or whole.tokens))
    pieces = min(pieces, len(whole))  # of a sample at least
    for number in range(pieces):
        piece = whole.part(number, pieces)
        yield piece.pack(), {name: count / counted[name] for name, count in piece.counts.items()}


@torch.no_grad()
def evaluate(model: nn.Module, held: Sequence[Samples], tokens: int = 0) -> dict[str, float]:
    """Mean losses of fixed samples, of so many tokens at once, with the same draws each time where a model draws."""
    model.eval()
    found: dict[str, float] = {}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for whole in held:
            for batch, shares in in_pieces(whole, tokens, whole.counts):
                for name, part in losses(model, batch, shares).items():
                    found[name] = found.get(name, 0.0) + part.item() / len(held)
    model.train()
    return found


def corpus_files(paths: list[str]) -> list[Path]:
    """The files that are named, and those of folders that can be read and are no lists of titles."""
    found = []
    for path in map(Path, paths):
        if not path.is_dir():
            found.append(path)
            continue
        texts = [file for file in sorted(path.iterdir()) if file.suffix in corpus.OPENERS]
        found += [file for file in texts if ".titles." not in file.name]
    return found


def read_shape(
    s: PretrainSettings, tokenizer: tokenizers.Tokenizer
) -> tuple[Family, config.BertConfig]:
    """Of the encoder: a checkpoint's, or a preset's with what is given beside it.

    Raises ValueError for fields that the family does not have, and for a checkpoint of another one, or of other tokens.
    """
    if s.init_from:
        folder = reader.locate(s.init_from)
        begun = reader.read_config(folder)
        if s.family not in ("", begun.model_type):
            raise CheckpointError(f"{s.init_from} is {begun.model_type}, not {s.family}")
        told = {**s.shape, "max_position_embeddings": s.max_position_embeddings}
        told = {name: value for name, value in told.items() if value is not None}
        if unknown := told.keys() - vars(begun).keys():
            raise CheckpointError(f"{s.init_from} has no {min(unknown)!r}")
        if dataclasses.replace(begun, **told) != begun:
            raise CheckpointError(f"{s.init_from} is of another shape than {told}")
        if has_tokenizer(folder) and read_tokenizer(folder).get_vocab() != tokenizer.get_vocab():
            raise CheckpointError(f"{s.init_from} knows other tokens than {s.tokenizer}")
        return family_of(begun), begun
    family = FAMILIES[s.family or BERT.model_type]
    given = {
        "vocab_size": tokenizer.get_vocab_size(),
        "max_position_embeddings": s.max_position_embeddings,
        "pad_token_id": tokenizer.token_to_id(family.special_tokens["pad"]),
        **s.shape,
    }
    known = {name: value for name, value in given.items() if value is not None}
    return family, config.preset(s.preset, family.config, **known)


class Trainer:
    """A model with its optimiser, which takes one step after the other."""

    def __init__(self, s: PretrainSettings, shape: config.BertConfig, in_pairs: bool, ranks: Ranks):
        self.s, self.ranks = s, ranks
        self.dtype = optim.precision(s.precision, ranks.device)
        torch.manual_seed(s.seed)
        rates = {"hidden_dropout_prob": s.dropout, "attention_probs_dropout_prob": s.dropout}
        self.model = make_pretraining(dataclasses.replace(shape, **rates), in_pairs)
        if s.init_from:
            reader.init_pretraining(self.model, s.init_from)
        for part in self.model.parts().values():
            begin_matching(part.encoder, s.matching_layers, s.seed)
        if unknown := sorted(set(s.weights) - set(self.model.weights)):
            raise ValueError(f"weights: {unknown[0]!r} is none of {', '.join(self.model.weights)}")
        self.model.weights |= s.weights
        self.model.to(ranks.device).train()

        compiled = s.compile == "yes" or (s.compile == "auto" and ranks.device.type == "cuda")
        self.objective = Objective(self.model)
        if compiled:
            self.objective.compile()

        named, betas = self.model.named_parameters(), (0.9, s.beta2)
        self.optimizer = optim.optimizer(s.optimizer, named, s.lr, s.muon_lr, s.weight_decay, betas)

    def step(self, whole: Samples, step: int, lr: float) -> dict[str, float]:
        """Learn from the samples of a step, this process from its part of them; the losses are of all."""
        s, ranks = self.s, self.ranks
        optim.set_lr(self.optimizer, lr)
        optim.seed_dropout(s.seed, step, ranks.rank)
        self.optimizer.zero_grad(set_to_none=True)
        own = whole.part(ranks.rank, ranks.world)
        found: dict[str, float] = {}
        for batch, shares in in_pieces(own, s.micro_batch_tokens, whole.counts):
            with torch.autocast(ranks.device.type, self.dtype, enabled=self.dtype != torch.float32):
                parts = self.objective(batch, shares)
            parts["loss"].backward()
            found = {name: found.get(name, 0.0) + part.item() for name, part in parts.items()}
        ranks.add_up(self.model.parameters())
        found = ranks.total(found)
        optim.check_finite(found["loss"], step)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), s.clip)
        self.optimizer.step()
        return found


def plan_steps(
    s: PretrainSettings,
    phases: list[Phase],
    make: Callable[[], Trainer],
    draw: Callable[..., Samples],
) -> int:
    """How many steps there is time for: measured where a run begins, and kept in `<output>/plan.json` for it.

    Three steps of each phase are timed after two that are not, with a model that is then thrown away.
    """
    kept = Path(s.output) / "plan.json"
    if kept.is_file() and kept.with_name("last.pt").is_file():
        return int(json.loads(kept.read_text())["steps"])
    trainer, seconds = make(), 0.0
    for phase in phases:
        for number in range(5):
            if number == 2:
                begun = time.monotonic()
            trainer.step(draw(number, phase), number, 0.0)
        seconds += phase.share * (time.monotonic() - begun) / 3
    steps = trainer.ranks.agreed(max(1, round(60 * s.minutes / seconds)))
    if trainer.ranks.leads:
        kept.parent.mkdir(parents=True, exist_ok=True)
        plan = {"steps": steps, "minutes": s.minutes, "seconds_per_step": seconds}
        kept.write_text(json.dumps(plan, indent=2) + "\n")
    return steps


def main() -> None:
    command(PretrainSettings, __doc__ or "", pretrain)


def pretrain(s: PretrainSettings) -> None:
    """Train, and leave the last checkpoint in `<output>/checkpoint`."""
    with Ranks.join() as ranks:
        _pretrain(s, ranks)


def _pretrain(s: PretrainSettings, ranks: Ranks) -> None:
    phases = phases_of(s)

    # data
    tokenizer = load_tokenizer(s.tokenizer)
    family, shape = read_shape(s, tokenizer)
    specials = Specials.of(tokenizer, family)
    in_pairs = family.pairs is not None if s.next_sentence is None else s.next_sentence
    if in_pairs and not family.pairs:
        raise ValueError(f"next_sentence: {family.model_type} is given one text at a time")
    with ranks.leader_first():
        text = corpus.load(corpus_files(s.corpus), Path(s.tokenizer), Path(s.cache))
    sampler = Sampler(
        text,
        specials,
        family.pairs if in_pairs else None,
        ranks.device,
        pretraining_batches.continues(tokenizer) if s.whole_words else None,
    )
    begun = family.mask_rate if s.mask_rate is None else s.mask_rate
    ended = begun if s.final_mask_rate is None else s.final_mask_rate
    mean = (begun + ended) / 2

    # model
    teachers = reader.read_teachers(s.init_from) if s.init_from else []
    make = functools.partial(Trainer, s, shape, in_pairs, ranks)
    longest = max(phase.length for phase in phases)
    if longest > shape.max_length or specials.vocab_size > shape.vocab_size:
        raise SystemExit(
            f"{specials.vocab_size} tokens and samples of {longest} do not fit the model's vocabulary of "
            f"{shape.vocab_size} and {shape.max_length} positions"
        )
    smallest = min(phase.size for phase in phases)
    if smallest < ranks.world:
        raise ValueError(f"{ranks.world} processes cannot share steps of {smallest} samples")

    def draw(step: int, phase: Phase, seed: int = s.seed, rate: float = mean) -> Samples:
        return sampler.samples(
            seed=seed, step=step, size=phase.size, length=phase.length, rate=rate
        )

    steps = plan_steps(s, phases, make, draw) if s.minutes else s.steps
    fixed = Phase(1.0, min(128, longest), s.batch_tokens)
    held = [draw(step, fixed, s.seed + 10_000) for step in range(8)]

    def work(step: int) -> float:
        return phase_at(step, steps, phases).batch_tokens

    # loop
    trainer = make()
    model, optimizer = trainer.model, trainer.optimizer
    with TrainingRun.open(s.output, steps, s, ranks.leads, work=work) as run:
        run.say(
            f"{len(text.ids):,} tokens in {text.num_documents:,} documents; "
            f"{ranks.world} x {ranks.device.type}, {trainer.dtype}"
        )
        first = run.resume(model, optimizer)["step"]
        for step in range(first, steps):
            lr = s.lr * optim.linear_schedule(step, steps, s.warmup, s.hold)
            rate = rate_at(step, steps, begun, ended)
            whole = draw(step, phase_at(step, steps, phases), rate=rate)
            run.step(step, trainer.step(whole, step, lr), whole.tokens, lr)
            last = step + 1 == steps
            if ranks.leads and ((step + 1) % s.eval_every == 0 or last):
                found = evaluate(model, held, s.micro_batch_tokens)
                for name, value in found.items():
                    run.scalar(f"held/{name}", value, step)
                run.say(f"step {step + 1}: fixed-batch losses {found}")
            if (step + 1) % s.save_every == 0 or last:
                run.save(step + 1, model, optimizer)
        if ranks.leads:
            with writer.replacing(run.output / "checkpoint") as partial:
                writer.save_pretraining(partial, model, Path(s.tokenizer))
                writer.save_teachers(partial, teachers)
            found = evaluate(model, held, s.micro_batch_tokens)
            speed = run.tokens_per_second()
            run.finish({"fixed_batches": found, "tokens_per_second": speed})


if __name__ == "__main__":
    main()

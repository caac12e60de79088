"""Pretrain an encoder: `python -m model.pretrain model/configs/mini-pretrain.toml [--name value ...]`.

The family decides the objectives: masked language modeling, and for some families next sentence or sentence order
prediction, or replaced token detection. After Ctrl-C or SIGTERM a run saves its state, and the same
command resumes the run, with the losses of an uninterrupted run. `torchrun --nproc-per-node N -m model.pretrain ...`
runs it on N devices.
"""

import dataclasses
import functools
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import tokenizers
import torch
from pydantic import model_validator
from torch import Tensor, nn

from model import cloze_examples, config
from model.checkpoints import reader, writer
from model.checkpoints.errors import CheckpointError
from model.checkpoints.source_files import read_tokenizer
from model.checkpoints.tokenizer_files import has_tokenizer
from model.data import corpus, pretraining_batches
from model.data.pretraining_batches import PretrainingBatch, Sampler, Samples, Specials
from model.families.bert_names import BERT
from model.families.registry import FAMILIES, PRETRAINABLE, family_of
from model.families.spec import Family
from model.heads import Predictions, accuracies_of, losses_of, make_pretraining
from model.report import page
from model.report.curves import curves
from model.report.page import Report, Section
from model.run_settings import TrainingSettings, check_choice, setting
from model.training import optim
from model.training.data_parallel import Ranks
from model.training.run_record import check_output
from model.training.token_matching_init import init_token_matching
from model.training.training_run import TrainingRun, run_script
from service.core.encode import load_tokenizer


class TextSettings(TrainingSettings):
    """The settings of a run that reads plain text and can make a new encoder of any family."""

    family: str = setting(
        "", "model_type of a new encoder; by default bert, or that of `init_from`", "electra"
    )
    shape: dict[str, Any] = setting(
        dict, "further fields of a new encoder's config.json", "'{\"num_hidden_layers\": 3}'"
    )
    max_position_embeddings: int | None = setting(
        None, "positions of a new encoder; by default the family's", "512"
    )
    corpus: list[str] = setting(list, "files or folders: .txt, .gz or .xz", "'[\"corpus/\"]'")
    cache: str = setting("runs/cache", "directory of tokenized text", "runs/cache")


class PretrainSettings(TextSettings):
    """The settings of pretraining."""

    corpus: list[str] = setting(..., "files or folders: .txt, .gz or .xz", "'[\"corpus/\"]'")
    tokenizer: str = setting(..., "tokenizer.json of a new encoder", "runs/mini/tokenizer.json")
    steps: int = setting(10_000, "optimizer steps", "2000", ge=1)
    minutes: float = setting(0.0, "duration of the run, instead of `steps`; 0 for none", "90")
    phases: list[list[float]] | None = setting(
        None,
        "list of [share of the steps, tokens per sample (, tokens per step)]; by default [[0.9, 128], [0.1, 512]]",
        "'[[0.9, 128], [0.1, 384]]'",
    )
    batch_tokens: int = setting(8192, "tokens of a step", "8192", ge=1)
    micro_batch_tokens: int = setting(
        0, "tokens of a micro-batch; 0 for all tokens of a step", "2048"
    )
    mask_rate: float | None = setting(
        None, "share of the tokens that are masked; by default the family's", "0.3", gt=0, lt=1
    )
    final_mask_rate: float | None = setting(
        None, "share of masked tokens at the last step; by default `mask_rate`", "0.15", gt=0, lt=1
    )
    whole_words: bool = setting(False, "mask all pieces of a word or none", "true")
    next_sentence: bool | None = setting(
        None, "train on pairs of texts; by default as the family was trained", "false"
    )
    weights: dict[str, float] = setting(
        dict, "weight of each loss by name: mlm, nsp, sop, rtd", "'{\"rtd\": 20}'"
    )
    lr: float = setting(1e-3, "peak learning rate", "3e-4")
    muon_lr: float = setting(0.02, "peak learning rate of muon", "0.01")
    warmup: float = setting(0.05, "share of the steps in which the learning rate rises", "0.1")
    beta2: float = setting(0.98, "decay of AdamW's second moment", "0.98")
    dropout: float = setting(0.1, "dropout rate", "0.1")
    compile: Literal["auto", "yes", "no"] = setting(
        "auto", "compile the step with torch.compile: auto (on a GPU only), yes or no", "yes"
    )
    save_every: int = setting(200, "steps between saved states, to resume from", "200", ge=1)
    eval_every: int = setting(500, "steps between two evaluations", "100", ge=1)
    held_out: float = setting(
        0.01, "share of the documents held out to evaluate on, 0 for none", "0.01", ge=0, le=0.5
    )

    @model_validator(mode="after")
    def _fit(self) -> Self:
        check_choice("preset", self.preset, config.PRESETS)
        if self.family:
            check_choice("family", self.family, PRETRAINABLE)
        return self


class Phase(NamedTuple):
    """A part of a run: its share of the steps, tokens per sample, and tokens per step."""

    share: float
    length: int
    batch_tokens: int

    @property
    def size(self) -> int:
        """The number of samples per step."""
        return max(1, self.batch_tokens // self.length)


def phases_of(s: PretrainSettings) -> list[Phase]:
    """Return the phases of a run. Raises ValueError for a malformed one."""
    phases = []
    for entry in s.phases or [[0.9, 128], [0.1, 512]]:
        if len(entry) not in (2, 3):
            raise ValueError(f"phases: {entry} is not [share, tokens per sample (, per step)]")
        share, length, *tokens = entry
        phases.append(Phase(share, int(length), int(tokens[0]) if tokens else s.batch_tokens))
    return phases


def phase_at(step: int, steps: int, phases: list[Phase]) -> Phase:
    end = 0.0
    for phase in phases:
        end += phase.share
        if step < round(end * steps):
            return phase
    return phases[-1]


def losses(
    model: nn.Module, batch: PretrainingBatch, shares: Mapping[str, float] | None = None
) -> dict[str, Tensor]:
    """Return the mean loss of each objective times its share, and as `loss` their weighted sum."""
    return weighted_losses(model, predict(model, batch), shares)


def predict(model: nn.Module, batch: PretrainingBatch) -> Predictions:
    """Return the logits and targets of each objective."""
    return model.predictions(batch.inputs, batch.masked, batch.labels, batch.is_next)


def weighted_losses(
    model: nn.Module, predictions: Predictions, shares: Mapping[str, float] | None
) -> dict[str, Tensor]:
    """Return the mean loss of each objective, scaled by its share, and as `loss` their weighted sum."""
    means = losses_of(predictions)
    parts = {name: mean * (shares[name] if shares else 1.0) for name, mean in means.items()}
    whole = sum(model.weights[name] * part for name, part in parts.items())
    return {"loss": whole, **parts}


class Objective(nn.Module):
    """A model's losses as a module's output, so that they can be compiled."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, batch: PretrainingBatch, shares: Mapping[str, float]) -> dict[str, Tensor]:
        return losses(self.model, batch, shares)


def micro_batches(
    whole: Samples, tokens: int, counts: Mapping[str, int]
) -> Iterator[tuple[PretrainingBatch, dict[str, float]]]:
    """Yield samples as micro-batches of about `tokens` (0: one), with each one's share of `counts`, by loss."""
    number = math.ceil(whole.tokens / (tokens or whole.tokens))
    number = min(number, len(whole))  # at least one sample each
    for index in range(number):
        part = whole.part(index, number)
        yield part.pack(), {name: count / counts[name] for name, count in part.counts.items()}


@torch.no_grad()
def evaluate(model: nn.Module, held: Sequence[Samples], tokens: int = 0) -> dict[str, float]:
    """Return the mean losses and accuracies (`mlm_accuracy`) of fixed samples. tokens: see `micro_batches`"""
    model.eval()
    means: dict[str, float] = {}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for whole in held:
            for batch, shares in micro_batches(whole, tokens, whole.counts):
                predictions = predict(model, batch)
                parts = weighted_losses(model, predictions, shares)
                parts |= {
                    f"{name}_accuracy": accuracy * shares[name]
                    for name, accuracy in accuracies_of(predictions).items()
                }
                for name, part in parts.items():
                    means[name] = means.get(name, 0.0) + part.item() / len(held)
    model.train()
    return means


def describe(means: Mapping[str, float]) -> str:
    """Return an evaluation as text: `MLM loss 5.123, accuracy 18.2 %; NSP loss 0.645, accuracy 63.1 %`."""
    names = [name.removesuffix("_accuracy") for name in means if name.endswith("_accuracy")]
    return "; ".join(
        f"{name.upper()} loss {means[name]:.3f}, accuracy {means[f'{name}_accuracy']:.1%}"
        for name in names
    )


def read_shape(
    s: TextSettings, tokenizer: tokenizers.Tokenizer
) -> tuple[Family, config.BertConfig]:
    """Return the encoder's family and configuration: a checkpoint's or a preset's. Raises ValueError."""
    if s.init_from:
        folder = reader.locate(s.init_from)
        shape = reader.read_config(folder)
        if s.family not in ("", shape.model_type):
            raise CheckpointError(f"{s.init_from} is {shape.model_type}, not {s.family}")
        requested = {**s.shape, "max_position_embeddings": s.max_position_embeddings}
        requested = {name: value for name, value in requested.items() if value is not None}
        if unknown := requested.keys() - vars(shape).keys():
            raise CheckpointError(f"{s.init_from} has no {min(unknown)!r}")
        if dataclasses.replace(shape, **requested) != shape:
            raise CheckpointError(f"{s.init_from} is of another shape than {requested}")
        if has_tokenizer(folder) and read_tokenizer(folder).get_vocab() != tokenizer.get_vocab():
            raise CheckpointError(f"{s.init_from} knows other tokens than {s.tokenizer}")
        return family_of(shape), shape
    family = FAMILIES[s.family or BERT.model_type]
    fields = {
        "vocab_size": tokenizer.get_vocab_size(),
        "max_position_embeddings": s.max_position_embeddings,
        "pad_token_id": tokenizer.token_to_id(family.special_tokens["pad"]),
        **s.shape,
    }
    known = {name: value for name, value in fields.items() if value is not None}
    return family, config.preset(s.preset, family.config, **known)


class Trainer:
    """A model with its optimizer."""

    def __init__(self, s: PretrainSettings, shape: config.BertConfig, in_pairs: bool, ranks: Ranks):
        self.s, self.ranks = s, ranks
        self.dtype = optim.precision(s.precision, ranks.device)
        torch.manual_seed(s.seed)
        rates = {"hidden_dropout_prob": s.dropout, "attention_probs_dropout_prob": s.dropout}
        self.model = make_pretraining(dataclasses.replace(shape, **rates), in_pairs)
        if s.init_from:
            reader.init_pretraining(self.model, s.init_from)
        for part in self.model.parts().values():
            init_token_matching(part.encoder, s.matching_layers, s.seed)
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
        """Train on this process' part of a step's samples, and return the losses over all of them."""
        s, ranks = self.s, self.ranks
        optim.set_lr(self.optimizer, lr)
        optim.seed_dropout(s.seed, step, ranks.rank)
        self.optimizer.zero_grad(set_to_none=True)
        own = whole.part(ranks.rank, ranks.world)
        losses: dict[str, float] = {}
        for batch, shares in micro_batches(own, s.micro_batch_tokens, whole.counts):
            with torch.autocast(ranks.device.type, self.dtype, enabled=self.dtype != torch.float32):
                parts = self.objective(batch, shares)
            parts["loss"].backward()
            losses = {name: losses.get(name, 0.0) + part.item() for name, part in parts.items()}
        ranks.sum_gradients(self.model.parameters())
        losses = ranks.total(losses)
        optim.check_finite(losses["loss"], step)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), s.clip)
        self.optimizer.step()
        return losses


def plan_steps(
    s: PretrainSettings,
    phases: list[Phase],
    make: Callable[[], Trainer],
    draw: Callable[..., Samples],
    ranks: Ranks,
) -> int:
    """Return the number of steps that fit into `minutes`: measured once, and stored in `<output>/plan.json`.

    It times three steps of each phase, after two untimed ones, with a model that it discards.
    """
    path = Path(s.output) / "plan.json"
    if not s.fresh and path.is_file() and path.with_name("last.pt").is_file():
        plan = json.loads(path.read_text())
        if plan["minutes"] == s.minutes:
            return int(plan["steps"])
        seconds = plan["seconds_per_step"]
    else:
        trainer, seconds = make(), 0.0
        for phase in phases:
            for number in range(5):
                if number == 2:
                    started = time.monotonic()
                trainer.step(draw(number, phase), number, 0.0)
            seconds += phase.share * (time.monotonic() - started) / 3
    steps = ranks.broadcast(max(1, round(60 * s.minutes / seconds)))
    if ranks.is_leader:
        path.parent.mkdir(parents=True, exist_ok=True)
        plan = {"steps": steps, "minutes": s.minutes, "seconds_per_step": seconds}
        path.write_text(json.dumps(plan, indent=2) + "\n")
    return steps


def main() -> None:
    run_script(PretrainSettings, __doc__ or "", pretrain)


def pretrain(s: PretrainSettings) -> None:
    """Train, and write `<output>/checkpoint` whenever the run is saved. Raises StoppedRun after a signal."""
    with Ranks.join() as ranks:
        _pretrain(s, ranks)


def _pretrain(s: PretrainSettings, ranks: Ranks) -> None:
    record = check_output(s)
    phases = phases_of(s)

    # data
    tokenizer = load_tokenizer(s.tokenizer)
    family, shape = read_shape(s, tokenizer)
    specials = Specials.of(tokenizer, family)
    in_pairs = family.pairs is not None if s.next_sentence is None else s.next_sentence
    if in_pairs and not family.pairs:
        raise ValueError(f"next_sentence: {family.model_type} is given one text at a time")
    with ranks.leader_first():
        text = corpus.load(corpus.corpus_files(s.corpus), Path(s.tokenizer), Path(s.cache))
    text, held_text = text.split(s.held_out, s.seed)
    pairs = family.pairs if in_pairs else None
    pieces = pretraining_batches.continues(tokenizer) if s.whole_words else None
    sampler = Sampler(text, specials, pairs, ranks.device, pieces)
    held_sampler = (
        Sampler(held_text, specials, pairs, ranks.device, pieces) if held_text else sampler
    )
    first_rate = family.mask_rate if s.mask_rate is None else s.mask_rate
    last_rate = first_rate if s.final_mask_rate is None else s.final_mask_rate
    mean_rate = (first_rate + last_rate) / 2

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

    def draw(step: int, phase: Phase, rate: float = mean_rate) -> Samples:
        sizes = {"size": phase.size, "length": phase.length}
        return sampler.samples(seed=s.seed, step=step, rate=rate, **sizes)

    steps = plan_steps(s, phases, make, draw, ranks) if s.minutes else s.steps
    fixed = Phase(1.0, min(128, longest), s.batch_tokens)
    sizes = {"size": fixed.size, "length": fixed.length, "rate": mean_rate}
    held = [held_sampler.samples(seed=s.seed + 10_000, step=step, **sizes) for step in range(8)]
    what = "held-out text" if held_text else "training text"
    chosen = cloze_examples.choose(held_text or text, specials, tokenizer, longest, s.seed)

    def work(step: int) -> float:
        return phase_at(step, steps, phases).batch_tokens

    # loop
    trainer = make()
    model, optimizer = trainer.model, trainer.optimizer
    with TrainingRun.open(s.output, steps, s, ranks.is_leader, record, work=work) as run:
        run.log(
            f"{len(text.ids):,} tokens in {text.num_documents:,} documents; "
            f"{ranks.world} x {ranks.device.type}, {trainer.dtype}"
        )
        if held_text:
            run.log(
                f"{len(held_text.ids):,} tokens in {held_text.num_documents:,} documents are held out"
            )
        else:
            run.log("no text is held out: evaluations are on training text")
        writer.put_back(run.output / "checkpoint")

        def save(step: int) -> None:
            """Write the checkpoint after `step` steps."""
            if ranks.is_leader:
                with writer.replacing(run.output / "checkpoint") as partial:
                    writer.save_pretraining(partial, model, Path(s.tokenizer))
                    writer.save_provenance(partial, teachers)
                    run.describe_checkpoint(partial, step)

        def report(step: int, **results: float) -> None:
            """Write the page of the run after `step` steps."""
            values = {
                "steps": step,
                "parameters": sum(parameter.numel() for parameter in model.parameters()),
                "tokens of text": len(text.ids),
                "tokens per second": round(run.tokens_per_second()),
                **results,
            }
            document = Report(f"Pretraining {run.output}")
            document.add(Section("run", "Run", page.facts(values)))
            document.add(curves(run.series))
            if chosen and clozes:
                document.add(cloze_examples.describe(chosen, clozes, what))
                document.add(cloze_examples.attention(model, chosen[0], tokenizer))
            document.write(run.output)
            run.log(f"report: {run.output / page.PAGE}")

        state = run.resume(model, optimizer)
        clozes = [(at, found) for at, found in state.get("clozes", [])]
        first = state["step"]
        for step in range(first, steps):
            lr = s.lr * optim.linear_schedule(step, steps, s.warmup, s.hold)
            # Linear from the first to the last (Ankner et al. 2023).
            rate = first_rate + (last_rate - first_rate) * step / max(steps - 1, 1)
            whole = draw(step, phase_at(step, steps, phases), rate=rate)
            run.step(step, trainer.step(whole, step, lr), whole.tokens, lr)
            last = step + 1 == steps
            if ranks.is_leader and ((step + 1) % s.eval_every == 0 or last):
                means = evaluate(model, held, s.micro_batch_tokens)
                scalars = {f"held/{name}": value for name, value in means.items()}
                run.evaluated(step, scalars, f"{what}: {describe(means)}")
                clozes.append((step + 1, cloze_examples.predict(model, chosen, tokenizer)))
            received = run.signals.received_by_any(ranks.total)
            is_stopped = received and not last
            if (step + 1) % s.save_every == 0 or last or is_stopped:
                run.save(step + 1, model, optimizer, clozes=clozes)
                save(step + 1)
            if is_stopped:
                if ranks.is_leader:
                    report(step + 1)
                run.stop(step + 1, received)
        if first == steps:  # a process may have ended between its two last writes
            save(steps)
        if ranks.is_leader:
            means = evaluate(model, held, s.micro_batch_tokens)
            speed = run.tokens_per_second()
            name = "held_out" if held_text else "fixed_batches"
            run.finish({name: means, "tokens_per_second": speed})
            report(steps, **means)


if __name__ == "__main__":
    main()

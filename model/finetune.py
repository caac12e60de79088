"""Fine-tune heads: `python -m model.finetune model/configs/minilm-sst2.toml [--name value ...]`.

One head or several on one trunk. A step adds up one micro-batch of each head, so that every update
hears all tasks (MUPPET, Aghajanyan et al. 2021). A head may have a teacher of its own beside its labels
(BAM, Clark et al. 2019). Interrupt it at any time: the same command goes on where it stopped, with the
losses that an uninterrupted run would have had.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch

from model import config, evaluate, settings_checks
from model.checkpoints import reader, writer
from model.checkpoints.hub_names import CheckpointError
from model.checkpoints.source import tokenizer_file as own_tokenizer
from model.data import examples
from model.heads import EncoderWithHeads
from model.training import distillation, optim
from model.training.distillation import Lesson, Teacher, TeacherOutputs, Teaching
from model.training.token_matching_init import begin_matching
from model.training.training_run import TrainingRun, command
from service.core import bundle
from service.core.encode import Encoder, load_tokenizer


@dataclass
class FinetuneSettings:
    output: str
    heads: dict[str, Any]  # a table for each, in the manifest's order: see tasks.HeadSettings
    only: str = ""  # one of them alone
    init_from: str = ""  # any checkpoint: a directory, a hub name or package:NAME/FOLDER
    keep_heads: bool = False  # begin with those that it has, too; else all are new
    preset: str = "mini"  # without init_from: the shape of a fresh encoder
    tokenizer: str = ""  # of a fresh encoder, a tokenizer.json
    max_length: int = 128
    # half of the heads of the first so many layers begin anew, by looking at equal tokens
    matching_layers: int = 0
    # heads' gradients of the encoder count by their weights alone, not by how steep their losses are
    equal_gradients: bool = False
    # heads with few rows are heard in as few of the first steps, and in every one of the last
    anneal_sampling: bool = False
    anneal: bool = False  # for heads with a teacher: from its answers to the labels over the steps
    temperature: float = 1.0  # of the answers of teacher and student
    epochs: float = 3.0  # of the rows, or else the text, that take longest for one
    steps: int = 0  # 0: what `epochs` comes to
    optimizer: str = "adamw"  # or muon, for the layers' matrices
    lr: float = 5e-5
    muon_lr: float = 0.01
    head_lr: float | None = None  # the same, unless given
    warmup: float = 0.06
    hold: float = 0.0  # share of the steps after the warm-up at the peak rate
    weight_decay: float = 0.01
    beta2: float = 0.999
    clip: float = 1.0
    dropout: float | None = None  # the checkpoint's, unless given
    attention_dropout: float | None = None  # likewise; 0 lets attention take its fastest way
    seed: int = 1
    precision: str = "auto"  # auto, fp32 or bf16
    eval_every: int = 500
    dev_limit: int = 0  # evaluate on so many rows of each dev file while training (0: all)
    save_every: int = 500

    def __post_init__(self) -> None:
        settings_checks.check_types(self)
        if not 0 <= self.hold <= 1:
            raise ValueError(f"hold: {self.hold} is not from 0 to 1")
        self.check_start()
        settings_checks.check_choice("optimizer", self.optimizer, optim.OPTIMIZERS)
        settings_checks.check_choice("precision", self.precision, optim.PRECISIONS)
        if not self.temperature > 0:
            raise ValueError(f"temperature: {self.temperature} is not above 0")
        settings_checks.check_counts(self, "eval_every", "save_every")
        if self.only:
            settings_checks.check_choice("only", self.only, self.heads)
            self.heads = {self.only: self.heads[self.only]}
        self.heads = {name: read_head(name, table) for name, table in self.heads.items()}

    def check_start(self) -> None:
        """Raises ValueError where it is not said what to begin from."""
        if not (self.init_from or self.tokenizer):
            raise ValueError("missing: init_from, or the tokenizer of a fresh encoder")
        if self.init_from and self.tokenizer:
            raise ValueError("tokenizer: what it begins from has its own")
        if self.keep_heads and not self.init_from:
            raise ValueError("keep_heads: there is no checkpoint to begin from")
        settings_checks.check_choice("preset", self.preset, config.PRESETS)


def read_head(name: str, table: dict[str, Any]) -> examples.HeadSettings:
    """Raises ValueError for a name that a bundle cannot have, and for what is wrong with the settings."""
    if not re.fullmatch(bundle.NAME, name):
        raise ValueError(f"heads: {name!r} is not of letters and digits, and . _ - behind them")
    if name in bundle.INPUTS:
        raise ValueError(f"heads: {name!r} is the name of a graph's input: choose another name")
    known = {field.name for field in dataclasses.fields(examples.HeadSettings)}
    if unknown := sorted(set(table) - known):
        raise ValueError(f"heads.{name}: unknown setting {unknown[0]!r}")
    try:
        head = examples.HeadSettings(**table)
    except (TypeError, ValueError) as error:
        raise ValueError(f"heads.{name}: {error}") from None
    if not (head.train or head.task == "embedding"):  # which plain text may teach
        raise ValueError(f"heads.{name}: no rows to train on")
    return head


def evaluate_heads(
    model: EncoderWithHeads,
    s: FinetuneSettings,
    encoders: dict[str, Encoder],
    dtype: torch.dtype,
    limit: int = 0,
) -> dict[str, dict[str, float]]:
    """Metrics of every head that has a dev file, by the settings' names.

    Where that has questions without an answer, the head's null threshold becomes the best for it.
    """
    metrics = {}
    for (name, h), saved in zip(s.heads.items(), list(model.described), strict=True):
        if not h.dev:
            continue
        judge = functools.partial(
            evaluate.judge,
            evaluate.torch_run(model, [saved], dtype),
            encoders[name],
            name=saved,
            file=h.dev,
            stride=h.stride,
            limit=limit,
        )
        head = model.described[saved]
        metrics[name] = judge(head=head).metrics
        if "best_f1_threshold" in metrics[name]:
            threshold = metrics[name]["best_f1_threshold"]
            head = model.described[saved] = head.model_copy(update={"null_threshold": threshold})
            metrics[name] = judge(head=head).metrics
    return metrics


def judge_teachers(
    teaching: Teaching, s: FinetuneSettings, encoders: Mapping[str, Encoder]
) -> dict[str, dict[str, Any]]:
    """Of each teacher its size, and its own metrics on the dev files of the heads that it answers for."""
    found = {
        teacher.name: {"parameters": count_parameters(teacher.model), "heads": {}}
        for teacher in teaching.teachers
    }
    for name, asked in teaching.answers.items():
        if asked and s.heads[name].dev:
            encoder = Encoder(asked.teacher.tokenizer, encoders[name].max_length)
            found[asked.teacher.name]["heads"][name] = evaluate.judge(
                evaluate.torch_run(asked.teacher.model, [asked.head]),
                encoder,
                asked.described,
                asked.head,
                s.heads[name].dev,
                stride=s.heads[name].stride,
            ).metrics
    return found


def count_parameters(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def save_checkpoint(folder: Path, model: EncoderWithHeads, tokenizer: Path, *teachers: str) -> None:
    """An ordinary checkpoint of one head or none, or a joint one of several; never half of it.

    teachers: who taught it, which is kept beside it for its provenance
    """
    with writer.replacing(folder) as partial:
        if not model.described:
            writer.save_encoder(partial, model.encoder, tokenizer)
        elif len(model.described) == 1:
            writer.save_head(partial, model, next(iter(model.described)), tokenizer)
        else:
            writer.save_joint(partial, model, tokenizer)
        writer.save_teachers(partial, teachers)


def check_fits(
    name: str, shape: config.BertConfig, tokenizer: tokenizers.Tokenizer, longest: int
) -> None:
    """Raises CheckpointError for texts or tokens that an encoder of this shape cannot read."""
    positions, vocabulary = shape.max_length, shape.vocab_size
    if longest > positions or tokenizer.get_vocab_size() > vocabulary:
        raise CheckpointError(
            f"{name}: {positions} positions and a vocabulary of {vocabulary} "
            f"do not hold {longest} tokens of {tokenizer.get_vocab_size()}"
        )


def read_lessons(
    s: FinetuneSettings,
    encoders: Mapping[str, Encoder],
    hidden_size: int,
    teacher_of: Mapping[str, Teacher],
    weights: Mapping[str, float],
    trunk: Teacher | None = None,
) -> tuple[dict[str, bundle.Head], dict[str, TeacherOutputs | None], list[Lesson]]:
    """What each head is, who answers for it, and the lessons that its rows make.

    weights: how much each of `teach.LOSSES` counts
    Raises ValueError for a head's own teacher that has no such head.
    """
    described, answers, lessons = {}, {}, []
    for name, h in s.heads.items():
        found = examples.read_training(h)
        examples.check_contrast(found, h)
        described[name] = head = examples.describe(h, found, hidden_size)
        if h.dev:  # what is wrong with it is said now
            examples.check(examples.read(h.dev, head), head)
        teacher = teacher_of.get(name)
        answers[name] = distillation.ask(teacher, name, head) if teacher else None
        if h.teacher and answers[name] is None:
            has = ", ".join(teacher.model.described) or "none"
            raise ValueError(f"heads.{name}: {h.teacher} has no such head: it has {has}")
        if found:
            asked = answers[name] if any(map(weights.get, distillation.kinds_of(h.task))) else None
            lessons += distillation.lessons(found, name, head, h, encoders[name], asked, trunk)
    return described, answers, lessons


def with_rates(s: FinetuneSettings, shape: config.BertConfig) -> config.BertConfig:
    """With the rates of dropout that are given."""
    rates = {
        "hidden_dropout_prob": s.dropout,
        "attention_probs_dropout_prob": s.attention_dropout,
    }
    given = {name: rate for name, rate in rates.items() if rate is not None}
    return dataclasses.replace(shape, **given)


def finetune(s: FinetuneSettings) -> dict[str, Any]:
    """Train, and give what goes into `metrics.json`; the best on dev is in `<output>/checkpoint`."""
    # data
    source = reader.locate(s.init_from) if s.init_from else None
    tokenizer_file = own_tokenizer(source, Path(s.output)) if source else Path(s.tokenizer)
    tokenizer = load_tokenizer(tokenizer_file)
    encoders = {n: Encoder(tokenizer, h.max_length or s.max_length) for n, h in s.heads.items()}
    fresh = functools.partial(config.preset, s.preset, vocab_size=tokenizer.get_vocab_size())
    shape = reader.read_config(source) if source else fresh()
    longest = max(encoder.max_length for encoder in encoders.values())
    check_fits(s.init_from or s.preset, shape, tokenizer, longest)
    own = {name: h.teacher for name, h in s.heads.items() if h.teacher}
    teachers = {name: distillation.load(name, optim.pick_device()) for name in {*own.values()}}
    teacher_of = {name: teachers[source] for name, source in own.items()}
    weights = {"labels": 1.0, "logits": 1.0, "embedding": 1.0}
    described, answers, lessons = read_lessons(s, encoders, shape.hidden_size, teacher_of, weights)

    # model
    torch.manual_seed(s.seed)
    model = EncoderWithHeads(with_rates(s, shape), described)
    if source:
        reader.init_from(model, source)
    kept = None
    if s.keep_heads:
        kept = distillation.keep_heads(model, distillation.load(s.init_from, torch.device("cpu")))
    if kept == []:
        raise ValueError(f"keep_heads: {s.init_from} has none of {', '.join(described)}")
    given = {"temperature": s.temperature, "anneal": s.anneal}
    teaching = Teaching(model, lessons, answers, weights, **given)

    before = reader.read_teachers(source) if source else []
    return train(s, model, teaching, encoders, tokenizer_file, before, kept)


def train(
    s: FinetuneSettings,
    model: EncoderWithHeads,
    teaching: Teaching,
    encoders: dict[str, Encoder],
    tokenizer_file: Path,
    before: Sequence[str] = (),
    kept: Sequence[str] | None = None,
) -> dict[str, Any]:
    """Optimiser and loop, for all that has heads or teachers; gives what goes into `metrics.json`.

    encoders: by head, of what it is judged on
    before: who taught what the model begins from
    kept: which heads come from there, if it was asked for any
    """
    device = optim.pick_device()
    dtype = optim.precision(s.precision, device)
    lessons = teaching.lessons
    teachers = list(dict.fromkeys([*before, *(each.name for each in teaching.teachers)]))
    if not lessons:
        raise ValueError("there is nothing to train on")
    of_rows = [lesson.stream for lesson in lessons if lesson.stream.head]
    streams = of_rows or [lesson.stream for lesson in lessons]
    epoch = max(stream.size / stream.batch_size for stream in streams)
    most = max(stream.size for stream in streams)
    heard_at_first = [
        min(1.0, lesson.stream.size / most) if s.anneal_sampling else 1.0 for lesson in lessons
    ]
    if s.matching_layers:
        begin_matching(model.encoder, s.matching_layers, s.seed)
    steps = s.steps or math.ceil(s.epochs * epoch)
    model.to(device).train()
    teaching.to(device)

    # optimiser; a map is as new as a head
    named = [*model.named_parameters(), *teaching.named_parameters("heads")]
    betas = (0.9, s.beta2)
    optimizer = optim.optimizer(
        s.optimizer, named, s.lr, s.muon_lr, s.weight_decay, betas, s.head_lr
    )
    learnt, trunk = [parameter for _, parameter in named], [*model.encoder.parameters()]

    # loop
    with TrainingRun.open(s.output, steps, s) as run:
        for lesson in lessons:
            run.say(f"{lesson.stream.name}: {lesson.stream.size:,} examples")
        if kept is not None and model.described:
            new = [name for name in model.described if name not in kept]
            run.say(f"heads kept: {', '.join(kept) or 'none'}; new: {', '.join(new) or 'none'}")
        run.say(f"{steps:,} steps; {device.type}, {dtype}")
        state = run.resume(model, optimizer)
        writer.put_back(run.output / "checkpoint")
        teaching.load_state_dict(state.get("maps", teaching.state_dict()))
        best, best_step = state.get("best", -math.inf), state.get("best_step", 0)
        for step in range(state["step"], steps):
            lr = s.lr * optim.linear_schedule(step, steps, s.warmup, s.hold)
            optim.set_lr(optimizer, lr)
            optim.seed_dropout(s.seed, step)
            optimizer.zero_grad(set_to_none=True)
            losses, tokens = {"loss": 0.0}, 0
            for number, (lesson, least) in enumerate(zip(lessons, heard_at_first, strict=True)):
                turn = optim.heard(step, steps, least)
                if turn == optim.heard(step + 1, steps, least):
                    continue
                progress = step / max(1, steps - 1)
                batch, read = lesson.batch((s.seed, number), turn, progress)
                parts = teaching(model, lesson, batch, read, progress, dtype)
                share = lesson.stream.weight * sum(
                    weight * loss.value / (loss.chance if len(lessons) > 1 else 1.0)
                    for weight, loss in parts.values()
                )
                optim.check_finite(share.item(), step)
                if s.equal_gradients:
                    optim.add_gradients(share, learnt, lesson.stream.weight, trunk)
                else:
                    share.backward()
                losses["loss"] += share.item()
                losses |= {name: loss.value.item() for name, (_, loss) in parts.items()}
                tokens += batch.tokens
            torch.nn.utils.clip_grad_norm_(learnt, s.clip)
            optimizer.step()
            run.step(step, losses, tokens, lr)
            last = step + 1 == steps
            if (step + 1) % s.eval_every == 0 or last:
                metrics = evaluate_heads(model, s, encoders, dtype, s.dev_limit)
                main = {n: next(iter(found.values())) for n, found in metrics.items()}
                for name, value in main.items():
                    run.scalar(f"dev/{name}", value, step)
                if main:
                    told = "  ".join(f"{name} {value:.4f}" for name, value in main.items())
                    run.say(f"step {step + 1}: {told}")
                score = float(np.mean(list(main.values()))) if main else 0.0
                if score >= best:
                    best, best_step = score, step + 1
                    save_checkpoint(run.output / "checkpoint", model, tokenizer_file, *teachers)
            if (step + 1) % s.save_every == 0 or last:
                maps = teaching.state_dict()
                run.save(step + 1, model, optimizer, best=best, best_step=best_step, maps=maps)

        metrics = {}
        if s.heads:
            kept = reader.load_model(run.output / "checkpoint").to(device)
            metrics = evaluate_heads(kept, s, encoders, torch.float32)
            save_checkpoint(run.output / "checkpoint", kept, tokenizer_file, *teachers)
        result = {
            "heads": metrics,
            "parameters": count_parameters(model),
            "steps": steps,
            "best_step": best_step,
            "tokens_per_second": run.tokens_per_second(),
        }
        if teaching.teachers:
            result["teachers"] = judge_teachers(teaching, s, encoders)
        run.finish(result)
        for name, found in metrics.items():
            told = "  ".join(f"{metric} {value:.4f}" for metric, value in found.items())
            run.say(f"{name}: {told}")
    return result


def main() -> None:
    command(FinetuneSettings, __doc__ or "", finetune)


if __name__ == "__main__":
    main()

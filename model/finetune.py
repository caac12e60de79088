"""Fine-tune heads: `python -m model.finetune model/configs/minilm-sst2.toml [--name value ...]`.

One head or several on one shared encoder. A step adds up the gradients of one micro-batch of each head,
so that every update includes all tasks (MUPPET, Aghajanyan et al. 2021). A head may learn from its own
teacher in addition to its labels (BAM, Clark et al. 2019). After Ctrl-C or SIGTERM a run saves its state, and
the same command resumes the run, with the losses of an uninterrupted run.
"""

import dataclasses
import functools
import json
import math
import signal
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.finetune_settings import FinetuneSettings, check_files

if __name__ == "__main__":  # before torch is imported, which takes seconds
    at_interrupt = signal.signal(signal.SIGINT, signal.SIG_DFL)  # no traceback of an import
    check_files(__doc__ or "")

import numpy as np
import tokenizers
import torch

from model import config, dev_report, evaluate
from model.checkpoints import reader, writer
from model.checkpoints.card import read_license
from model.checkpoints.errors import CheckpointError
from model.checkpoints.source import tokenizer_file as own_tokenizer
from model.data import examples, head_rows
from model.data.held_out import hold_out
from model.evaluate import HeadOutputs
from model.heads import EncoderWithHeads
from model.report import page
from model.report.curves import curves
from model.report.page import Report, Section
from model.training import defaults, distillation, optim
from model.training.distillation import DistillationObjective, Teacher, TeacherHead, TrainingTask
from model.training.run_record import RunRecord, check_output
from model.training.token_matching_init import init_token_matching
from model.training.training_run import TrainingRun, run_script, show_metrics
from service.core.data_files import sources
from service.core.encode import Encoder, load_tokenizer
from service.core.manifest import Head


@dataclass(frozen=True)
class DevRows:
    """The rows that a head is evaluated on, and a description of their origin."""

    rows: list[Any]
    origin: str
    is_held_out: bool = False


def evaluate_heads(
    model: EncoderWithHeads,
    s: FinetuneSettings,
    encoders: dict[str, Encoder],
    dev: Mapping[str, DevRows],
    dtype: torch.dtype,
    limit: int = 0,
    kept: dict[str, HeadOutputs] | None = None,
) -> dict[str, dict[str, float]]:
    """Return the metrics of every head that has dev rows, by the names in the settings; `kept` receives the outputs.

    Where the rows have questions without an answer, the head's null threshold becomes the best one for the rows.
    """
    metrics = {}
    for (name, h), saved in zip(s.heads.items(), list(model.described), strict=True):
        if name not in dev:
            continue
        rows = evaluate.spread(dev[name].rows, limit)
        run = evaluate.torch_run(model, [saved], dtype)
        head = model.described[saved]
        outputs = evaluate.head_outputs(run, encoders[name], head, saved, rows, h.stride)
        if kept is not None:
            kept[name] = outputs
        metrics[name] = evaluate.judge_outputs(rows, outputs, head).metrics
        if "best_f1_threshold" in metrics[name]:
            threshold = metrics[name]["best_f1_threshold"]
            head = model.described[saved] = head.model_copy(update={"null_threshold": threshold})
            metrics[name] = evaluate.judge_outputs(rows, outputs, head).metrics
    return metrics


def dev_scalars(metrics: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return metrics by the names of their scalars: `dev/HEAD` for the main one, `dev/HEAD/METRIC` for others."""
    return {
        f"dev/{name}/{metric}" if number else f"dev/{name}": value
        for name, values in metrics.items()
        for number, (metric, value) in enumerate(values.items())
    }


def record_held_out(output: Path, dev: Mapping[str, DevRows]) -> None:
    """Write the indices of the rows that are held out of training, by head, to `held_out.json`."""
    held = {n: [row.where for row in each.rows] for n, each in dev.items() if each.is_held_out}
    if held:
        (output / "held_out.json").write_text(json.dumps(held, indent=2) + "\n", encoding="utf-8")


def judge_teachers(
    objective: DistillationObjective,
    s: FinetuneSettings,
    encoders: Mapping[str, Encoder],
    dev: Mapping[str, DevRows],
) -> dict[str, dict[str, Any]]:
    """Return each teacher's size and its own metrics on the dev rows of the heads that it teaches."""
    results = {
        teacher.name: {"parameters": count_parameters(teacher.model), "heads": {}}
        for teacher in objective.teachers
    }
    for name, teacher_head in objective.teacher_heads.items():
        if teacher_head and name in dev:
            encoder = Encoder(teacher_head.teacher.tokenizer, encoders[name].max_length)
            results[teacher_head.teacher.name]["heads"][name] = evaluate.judge_rows(
                evaluate.torch_run(teacher_head.teacher.model, [teacher_head.head]),
                encoder,
                teacher_head.described,
                teacher_head.head,
                dev[name].rows,
                stride=s.heads[name].stride,
            ).metrics
    return results


def complete(s: FinetuneSettings, tasks: Sequence[TrainingTask], hidden_size: int) -> int:
    """Set each unset setting that depends on the data and the encoder; return the number of steps."""
    of_rows = [task.stream for task in tasks if task.stream.head]
    streams = of_rows or [task.stream for task in tasks]
    if s.patience is None:
        s.patience = 0 if s.steps or s.epochs else defaults.PATIENCE
    if s.epochs is None:
        s.epochs = defaults.epochs_for(max(stream.size for stream in streams))
    if s.lr is None:
        s.lr = defaults.learning_rate_for(hidden_size)
    batches = max(stream.size / stream.batch_size for stream in streams)
    steps = s.steps or math.ceil(s.epochs * batches / s.gradient_accumulation)
    if s.eval_every is None:
        s.eval_every = defaults.eval_every_for(steps)
    return steps


def count_parameters(model: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def save_checkpoint(
    folder: Path,
    model: EncoderWithHeads,
    tokenizer: Path,
    teachers: Sequence[str],
    training: Mapping[str, Any],
    describe: Callable[[Path, int], None],
    step: int,
) -> None:
    """Write a checkpoint with none, one or several heads in one rename.

    training: for the card of its bundle
    describe: writes what the run was
    """
    with writer.replacing(folder) as partial:
        if not model.described:
            writer.save_encoder(partial, model.encoder, tokenizer)
        elif len(model.described) == 1:
            writer.save_head(partial, model, next(iter(model.described)), tokenizer)
        else:
            writer.save_joint(partial, model, tokenizer)
        writer.save_provenance(partial, teachers, training)
        describe(partial, step)


def check_fits(
    name: str, shape: config.BertConfig, tokenizer: tokenizers.Tokenizer, longest: int
) -> None:
    """Raise CheckpointError for a maximum length or a vocabulary larger than the encoder's."""
    positions, vocabulary = shape.max_length, shape.vocab_size
    if longest > positions or tokenizer.get_vocab_size() > vocabulary:
        raise CheckpointError(
            f"{name}: {positions} positions and a vocabulary of {vocabulary} "
            f"do not hold {longest} tokens of {tokenizer.get_vocab_size()}"
        )


def read_tasks(
    s: FinetuneSettings,
    encoders: Mapping[str, Encoder],
    shape: config.BertConfig,
    teacher_of: Mapping[str, Teacher],
    weights: Mapping[str, float],
    encoder_teacher: Teacher | None = None,
) -> tuple[dict[str, Head], dict[str, TeacherHead | None], list[TrainingTask], dict[str, DevRows]]:
    """Return each head's description, its teacher's head, the training tasks of its rows, and its dev rows.

    shape: of the encoder
    teacher_of: the teacher by head
    weights: the weight of each of `distillation.LOSSES`
    encoder_teacher: the teacher of hidden states and relations
    Raises ValueError where a head's own teacher has no compatible head.
    """
    described, teacher_heads, tasks, dev = {}, {}, [], {}
    for name, h in s.heads.items():
        rows = head_rows.read_training(h)
        examples.check_contrast(rows, h)
        described[name] = head = examples.describe(h, rows, shape.hidden_size, shape.vocab_size)
        if h.dev:
            dev[name] = DevRows(head_rows.read(h.dev, h), h.dev)
            examples.check(dev[name].rows, head)  # report its errors before training
        else:
            rows, held = hold_out(rows, s.dev_share, s.seed)
            if held:
                whole = f"{len(rows) + len(held):,} rows of {', '.join(h.train)}"
                origin = f"{len(held):,} of {whole}, held out by seed {s.seed} (held_out.json)"
                dev[name] = DevRows(held, origin, is_held_out=True)
        teacher = teacher_of.get(name)
        matched = distillation.match_teacher_head(teacher, name, head) if teacher else None
        teacher_heads[name] = matched
        if h.teacher and teacher_heads[name] is None:
            has = ", ".join(teacher.model.described) or "none"
            raise ValueError(f"heads.{name}: {h.teacher} has no such head: it has {has}")
        if rows:
            is_taught = any(map(weights.get, distillation.output_losses(h.task)))
            tasks += distillation.training_tasks(
                rows,
                name,
                head,
                h,
                encoders[name],
                teacher_heads[name] if is_taught else None,
                encoder_teacher,
            )
    return described, teacher_heads, tasks, dev


def with_dropout(s: FinetuneSettings, shape: config.BertConfig) -> config.BertConfig:
    """Return a configuration with the dropout rates of the settings, where they are given."""
    rates = {"hidden_dropout_prob": s.dropout, "attention_probs_dropout_prob": s.attention_dropout}
    given = {name: rate for name, rate in rates.items() if rate is not None}
    return dataclasses.replace(shape, **given)


def finetune(s: FinetuneSettings) -> dict[str, Any]:
    """Train, and return the content of `metrics.json`. The best checkpoint on dev is in `<output>/checkpoint`."""
    record = check_output(s)

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
    described, teacher_heads, tasks, dev = read_tasks(s, encoders, shape, teacher_of, weights)

    # model
    torch.manual_seed(s.seed)
    model = EncoderWithHeads(with_dropout(s, shape), described)
    if source:
        reader.init_from(model, source)
    kept = None
    if s.keep_heads:
        kept = distillation.keep_heads(model, distillation.load(s.init_from, torch.device("cpu")))
    if kept == []:
        raise ValueError(f"keep_heads: {s.init_from} has none of {', '.join(described)}")
    options = {"temperature": s.temperature, "anneal": s.anneal}
    objective = DistillationObjective(model, tasks, teacher_heads, weights, **options)

    before = reader.read_teachers(source) if source else []
    return train(s, model, objective, encoders, tokenizer_file, dev, before, kept, record=record)


def train(
    s: FinetuneSettings,
    model: EncoderWithHeads,
    objective: DistillationObjective,
    encoders: dict[str, Encoder],
    tokenizer_file: Path,
    dev: Mapping[str, DevRows],
    before: Sequence[str] = (),
    kept: Sequence[str] | None = None,
    *,
    record: RunRecord | None = None,
) -> dict[str, Any]:
    """Run the training loop of fine-tuning and distillation, and return the content of `metrics.json`.

    encoders: the text encoder of each head, for evaluation
    dev: the rows that each head is evaluated on
    before: the teachers of the initial checkpoint
    kept: the heads from the initial checkpoint; None where the settings keep none
    record: the settings before the run chose values, by default `s`
    Raises StoppedRun after a signal, when the run is saved.
    """
    device = optim.pick_device()
    dtype = optim.precision(s.precision, device)
    tasks = objective.tasks
    teachers = list(dict.fromkeys([*before, *(each.name for each in objective.teachers)]))
    if not tasks:
        raise ValueError("there is nothing to train on")
    steps = complete(s, tasks, model.config.hidden_size)
    of_rows = [task.stream for task in tasks if task.stream.head]
    most = max(stream.size for stream in of_rows or [task.stream for task in tasks])
    initial_shares = [
        min(1.0, task.stream.size / most) if s.anneal_sampling else 1.0 for task in tasks
    ]
    if s.matching_layers:
        init_token_matching(model.encoder, s.matching_layers, s.seed)
    model.to(device).train()
    objective.to(device)

    # optimizer; projections between widths have the heads' learning rate
    named = [*model.named_parameters(), *objective.named_parameters("heads")]
    betas = (0.9, s.beta2)
    rates = (s.lr, s.muon_lr, s.weight_decay)
    optimizer = optim.optimizer(s.optimizer, named, *rates, betas, s.head_lr)
    trained, shared = [parameter for _, parameter in named], [*model.encoder.parameters()]

    # loop
    with TrainingRun.open(s.output, steps, s, record=record) as run:
        for task in tasks:
            run.log(f"{task.stream.name}: {task.stream.size:,} examples")
        if kept is not None and model.described:
            new = [name for name in model.described if name not in kept]
            run.log(f"heads kept: {', '.join(kept) or 'none'}; new: {', '.join(new) or 'none'}")
        for name, each in dev.items():
            run.log(f"{name} is evaluated on {each.origin}")
        record_held_out(run.output, dev)
        run.log(f"{steps:,} steps at a learning rate of {s.lr:g}; {device.type}, {dtype}")
        state = run.resume(model, optimizer)
        writer.put_back(run.output / "checkpoint")
        objective.load_state_dict(state.get("maps", objective.state_dict()))
        best, best_step = state.get("best", -math.inf), state.get("best_step", 0)
        improved_step = state.get("improved_step", 0)  # an equal score is the best, too
        end = steps
        if state.get("ended_early"):
            end = state["step"]
            run.log(
                f"{run.output} ended early at step {end:,}, after its minutes or {s.patience} evaluations without a"
                " better score: no step is added. To train further: other --minutes or --patience with --fresh"
            )
        training = describe_training(s, tasks)
        save = functools.partial(
            save_checkpoint,
            run.output / "checkpoint",
            tokenizer=tokenizer_file,
            teachers=teachers,
            training=training,
            describe=run.describe_checkpoint,
        )
        for step in range(state["step"], end):
            place = max(step, math.floor(steps * run.share_of(s.minutes)))  # falls to 0 in time
            lr = s.lr * optim.linear_schedule(min(place, steps - 1), steps, s.warmup, s.hold)
            optim.set_lr(optimizer, lr)
            optim.seed_dropout(s.seed, step)
            optimizer.zero_grad(set_to_none=True)
            losses, tokens = {"loss": 0.0}, 0
            for number, (task, least) in enumerate(zip(tasks, initial_shares, strict=True)):
                turn = optim.scheduled_steps(step, steps, least)
                if turn == optim.scheduled_steps(step + 1, steps, least):
                    continue
                progress = step / max(1, steps - 1)
                weight = task.stream.weight / s.gradient_accumulation
                for micro in range(s.gradient_accumulation):
                    place = turn * s.gradient_accumulation + micro
                    batch, retokenized = task.batch((s.seed, number), place, progress)
                    parts = objective(model, task, batch, retokenized, progress, dtype)
                    share = weight * sum(
                        factor * loss.value / (loss.uniform if len(tasks) > 1 else 1.0)
                        for factor, loss in parts.values()
                    )
                    optim.check_finite(share.item(), step)
                    if s.equal_gradients:
                        optim.add_normalized_gradients(share, trained, weight, shared)
                    else:
                        share.backward()
                    losses["loss"] += share.item()
                    for name, (_, loss) in parts.items():
                        part = loss.value.item() / s.gradient_accumulation
                        losses[name] = losses.get(name, 0.0) + part
                    tokens += batch.tokens
            torch.nn.utils.clip_grad_norm_(trained, s.clip)
            optimizer.step()
            run.step(step, losses, tokens, lr)
            last = step + 1 == steps
            if run.share_of(s.minutes) >= 1 and not last:
                last, end = True, step + 1
                run.log(
                    f"{s.minutes:g} minutes are over: the run ends at step {end:,} of {steps:,}"
                )
            if (step + 1) % s.eval_every == 0 or last:
                metrics = evaluate_heads(model, s, encoders, dev, dtype, s.dev_limit)
                main = [next(iter(values.values())) for values in metrics.values()]
                score = float(np.mean(main)) if main else 0.0
                if metrics:
                    line = "; ".join(f"{n}: {show_metrics(found)}" for n, found in metrics.items())
                    note = " (equal to the best so far, and kept)" if score == best else ""
                    note = " (best so far)" if score > best else note
                    run.evaluated(step, dev_scalars(metrics), line + note)
                if score > best:
                    improved_step = step + 1
                if score >= best:
                    best, best_step = score, step + 1
                    save(model, step=best_step)
                waited = step + 1 - improved_step
                if metrics and s.patience and waited >= s.patience * s.eval_every and not last:
                    last, end = True, step + 1
                    run.log(f"no better score since step {improved_step:,}: the run ends early")
            received = run.signals.received
            is_stopped = received and not last
            if (step + 1) % s.save_every == 0 or last or is_stopped:
                state = {"best": best, "best_step": best_step, "improved_step": improved_step}
                state |= {"ended_early": end < steps, "maps": objective.state_dict()}
                run.save(step + 1, model, optimizer, **state)
            if is_stopped:
                if not (best_step and dev):
                    save(model, step=step + 1)
                write_report(run, s, describe_run(run, model, step + 1, best_step), [])
                run.stop(step + 1, received)
            if last:
                break

        metrics, calibrations, sections = {}, {}, []
        if s.heads:
            best_model, outputs = reader.load_model(run.output / "checkpoint").to(device), {}
            metrics = evaluate_heads(best_model, s, encoders, dev, torch.float32, 0, outputs)
            calibrations, sections = examine(best_model, s, dev, outputs)
            for name, values in metrics.items():
                training["heads"][name] |= {"metrics": values, "measured_on": dev[name].origin}
            save(best_model, step=best_step)
        result = {"heads": metrics, **describe_run(run, model, end, best_step)}
        if calibrations:
            result["calibration"] = calibrations
        if objective.teachers:
            result["teachers"] = judge_teachers(objective, s, encoders, dev)
        run.finish(result)
        for name, values in metrics.items():
            run.log(f"checkpoint of step {best_step:,}: {name}: {show_metrics(values)}")
        write_report(run, s, result, sections)
        run.log(f"report: {run.output / page.PAGE}")
    return result


def describe_training(s: FinetuneSettings, tasks: Sequence[TrainingTask]) -> dict[str, Any]:
    """Return the base checkpoint, its license, and the files and the number of training examples of each head."""
    heads: dict[str, dict[str, Any]] = {
        name: {
            "examples": sum(task.stream.size for task in tasks if task.stream.head == name),
            "files": [Path(sources.split(file)[0]).name for file in head.train],
        }
        for name, head in s.heads.items()
    }
    license_name = read_license(reader.locate(s.init_from)) if s.init_from else ""
    return {"base": s.init_from, "license": license_name, "heads": heads}


def describe_run(
    run: TrainingRun, model: EncoderWithHeads, steps: int, best_step: int
) -> dict[str, Any]:
    """Return the numbers of a run after some steps."""
    return {
        "parameters": count_parameters(model),
        "steps": steps,
        "best_step": best_step,
        "tokens_per_second": run.tokens_per_second(),
    }


def examine(
    model: EncoderWithHeads,
    s: FinetuneSettings,
    dev: Mapping[str, DevRows],
    outputs: Mapping[str, HeadOutputs],
) -> tuple[dict[str, dict[str, float]], list[Section]]:
    """Calibrate the heads by their outputs for the dev rows; return the temperatures, and a section for each head."""
    calibrations, sections = {}, []
    for name, saved in zip(s.heads, list(model.described), strict=True):
        if name not in outputs:
            continue
        rows, head = dev[name].rows, model.described[saved]
        found = dev_report.fit(rows, outputs[name], head)
        if found:
            temperature = found.temperature
            update = {"calibration_temperature": temperature}
            model.described[saved] = head.model_copy(update=update)
            errors = {"error_before": found.error_before, "error_after": found.error_after}
            calibrations[name] = {"temperature": temperature, **errors}
        origin = dev[name].origin
        sections.append(dev_report.describe(name, rows, outputs[name], head, origin, found))
    return calibrations, sections


def write_report(
    run: TrainingRun, s: FinetuneSettings, result: Mapping[str, Any], sections: Sequence[Section]
) -> None:
    """Write the page of a run, with the sections of its heads."""
    values = {
        "steps": result["steps"],
        "checkpoint of step": result["best_step"],
        "parameters": result["parameters"],
        "tokens per second": round(result["tokens_per_second"]),
        "started from": s.init_from or s.tokenizer or getattr(s, "teacher", ""),
        "learning rate": f"{s.lr:g}",
        "seed": s.seed,
    }
    report = Report(f"Training {run.output}")
    report.add(Section("run", "Run", page.facts(values)))
    report.add(curves(run.series))
    for section in sections:
        report.add(section)
    report.write(run.output)


def main() -> None:
    run_script(FinetuneSettings, __doc__ or "", finetune)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, at_interrupt)
    main()

"""Fine-tune heads: `python -m model.finetune model/configs/minilm-sst2.toml [--name value ...]`.

One head or several on one trunk. A step adds up one micro-batch of each head, so that every update
hears all tasks (MUPPET, Aghajanyan et al. 2021). Interrupt it at any time: the same command goes on
where it stopped, with the losses that an uninterrupted run would have had.
"""

import dataclasses
import functools
import math
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from model import checkpoint, config, evaluate, optim, tasks
from model.heads import Model
from model.run import Run, read_settings
from service import bundle
from service.encode import Encoder, load_tokenizer


@dataclass
class Settings:
    output: str
    heads: dict[str, Any]  # a table for each, in the manifest's order: see tasks.HeadSettings
    init_from: str = ""  # any checkpoint: a directory, a hub name or package:NAME/FOLDER
    preset: str = "mini"  # without init_from: the shape of a fresh encoder
    tokenizer: str = ""  # a tokenizer.json; with init_from, its own
    max_length: int = 128
    epochs: float = 3.0  # of the head that takes longest for one
    steps: int = 0  # 0: what `epochs` comes to
    lr: float = 5e-5
    head_lr: float | None = None  # the same, unless given
    warmup: float = 0.06
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
        if not (self.init_from or self.tokenizer):
            raise ValueError("missing: init_from, or the tokenizer of a fresh encoder")
        optim.check_choice("precision", self.precision, optim.PRECISIONS)
        optim.check_choice("preset", self.preset, config.PRESETS)
        known = {field.name for field in dataclasses.fields(tasks.HeadSettings)}
        for name, table in self.heads.items():
            if unknown := sorted(set(table) - known):
                raise ValueError(f"heads.{name}: unknown setting {unknown[0]!r}")
        self.heads = {name: tasks.HeadSettings(**table) for name, table in self.heads.items()}


def evaluate_heads(
    model: Model, s: Settings, encoders: dict[str, Encoder], dtype: torch.dtype, limit: int = 0
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


def save_checkpoint(folder: Path, model: Model, tokenizer: Path) -> None:
    """An ordinary checkpoint of one head, or a joint one of several; never half of it."""
    partial = folder.with_name(f"{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    if len(model.described) == 1:
        checkpoint.save_head(partial, model, next(iter(model.described)), tokenizer)
    else:
        checkpoint.save_joint(partial, model, tokenizer)
    bundle.swap(partial, folder)


def finetune(s: Settings) -> dict[str, Any]:
    """Train, and give what goes into `metrics.json`; the best on dev is in `<output>/checkpoint`."""
    device = optim.pick_device()
    dtype = optim.precision(s.precision, device)

    # data
    source = checkpoint.locate(s.init_from) if s.init_from else None
    tokenizer_file = Path(s.tokenizer or f"{source}/tokenizer.json")
    tokenizer = load_tokenizer(tokenizer_file)
    encoders = {n: Encoder(tokenizer, h.max_length or s.max_length) for n, h in s.heads.items()}
    fresh = functools.partial(config.preset, s.preset, vocab_size=tokenizer.get_vocab_size())
    shape = checkpoint.read_config(source) if source else fresh()
    longest = max(encoder.max_length for encoder in encoders.values())
    positions, vocabulary = shape.max_length, shape.vocab_size
    if longest > positions or tokenizer.get_vocab_size() > vocabulary:
        raise checkpoint.CheckpointError(
            f"{s.init_from or s.preset}: {positions} positions and a vocabulary of {vocabulary} "
            f"do not hold {longest} tokens of {tokenizer.get_vocab_size()}"
        )

    described, streams = {}, []
    for name, h in s.heads.items():
        found = [row for file in h.train for row in tasks.read(file, h)]
        tasks.check_contrast(found, h)
        described[name] = tasks.describe(h, found, shape.hidden_size)
        if h.dev:  # what is wrong with it is said now
            tasks.check(tasks.read(h.dev, described[name]), described[name])
        examples = list(tasks.examples(found, described[name], encoders[name], h.stride))
        streams += tasks.streams(name, h, described[name], examples)
    epoch = max(len(stream.examples) / stream.batch_size for stream in streams)
    steps = s.steps or math.ceil(s.epochs * epoch)

    # model
    torch.manual_seed(s.seed)
    rates = {
        "hidden_dropout_prob": s.dropout,
        "attention_probs_dropout_prob": s.attention_dropout,
    }
    given = {name: rate for name, rate in rates.items() if rate is not None}
    model = Model(dataclasses.replace(shape, **given), described)
    if source:
        checkpoint.init_from(model, source)
    model.to(device).train()

    # optimiser
    optimizer = optim.adamw(
        model.named_parameters(), s.lr, s.weight_decay, (0.9, s.beta2), s.head_lr
    )

    # loop
    with Run.open(s.output, steps, s) as run:
        for stream in streams:
            run.say(f"{stream.name}: {len(stream.examples):,} examples")
        run.say(f"{steps:,} steps; {device.type}, {dtype}")
        state = run.resume(model, optimizer)
        best, best_step = state.get("best", -math.inf), state.get("best_step", 0)
        for step in range(state["step"], steps):
            lr = s.lr * optim.linear_schedule(step, steps, s.warmup)
            optim.set_lr(optimizer, lr)
            optim.seed_dropout(s.seed, step)
            optimizer.zero_grad(set_to_none=True)
            losses, tokens = {"loss": 0.0}, 0
            for number, stream in enumerate(streams):
                batch = stream.batch((s.seed, number), step)
                with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                    outputs = tasks.forward(model, batch.encodings, [stream.head])
                loss, chance = stream.loss(outputs[stream.head], batch)
                share = stream.weight * loss / (chance if len(streams) > 1 else 1.0)
                optim.check_finite(share, step)
                share.backward()
                losses["loss"] += share.item()
                losses[stream.name] = loss.item()
                tokens += batch.tokens
            torch.nn.utils.clip_grad_norm_(model.parameters(), s.clip)
            optimizer.step()
            run.step(step, losses, tokens, lr)
            last = step + 1 == steps
            if (step + 1) % s.eval_every == 0 or last:
                metrics = evaluate_heads(model, s, encoders, dtype, s.dev_limit)
                main = {n: next(iter(found.values())) for n, found in metrics.items()}
                for name, value in main.items():
                    run.scalar(f"dev/{name}", value, step)
                told = "  ".join(f"{name} {value:.4f}" for name, value in main.items())
                run.say(f"step {step + 1}: {told}")
                score = float(np.mean(list(main.values()))) if main else 0.0
                if score >= best:
                    best, best_step = score, step + 1
                    save_checkpoint(run.output / "checkpoint", model, tokenizer_file)
            if (step + 1) % s.save_every == 0 or last:
                run.save(step + 1, model, optimizer, best=best, best_step=best_step)

        kept = checkpoint.load_model(run.output / "checkpoint").to(device)
        metrics = evaluate_heads(kept, s, encoders, torch.float32)
        save_checkpoint(run.output / "checkpoint", kept, tokenizer_file)
        result = {
            "heads": metrics,
            "steps": steps,
            "best_step": best_step,
            "tokens_per_second": run.tokens_per_second(),
        }
        run.finish(result)
        for name, found in metrics.items():
            told = "  ".join(f"{metric} {value:.4f}" for metric, value in found.items())
            run.say(f"{name}: {told}")
    return result


def main() -> None:
    settings = read_settings(Settings, __doc__ or "")
    try:
        finetune(settings)
    except (OSError, ValueError) as error:
        raise SystemExit(f"{error}") from None


if __name__ == "__main__":
    main()

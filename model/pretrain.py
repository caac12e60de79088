"""Pretrain an encoder: `python -m model.pretrain model/configs/mini-pretrain.toml [--name value ...]`.

What it is taught is its family's matter: to fill in what was hidden, and for some whether two texts belong together, or
which tokens were replaced. Interrupt it at any time: the same command goes on where it stopped, with the losses that an
uninterrupted run would have had.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
from torch import Tensor, nn

from model import checkpoint, config, corpus, optim
from model.attention import Layout
from model.bert import BERT
from model.families import FAMILIES, family_of
from model.family import Family
from model.heads import make_pretraining
from model.run import Run, read_settings
from service import packing
from service.encode import load_tokenizer


@dataclass
class Settings:
    output: str
    corpus: list[str]  # files or folders of .txt, .gz, .xz
    tokenizer: str  # a tokenizer.json
    family: str = ""  # a model_type; the checkpoint's to go on from, or bert
    preset: str = "mini"
    shape: dict[str, Any] = dataclasses.field(default_factory=dict)  # fields of its own beside it
    max_position_embeddings: int | None = None  # the family's, unless given
    init_from: str = ""  # a checkpoint to go on from, a local directory or a hub name
    steps: int = 10_000
    phases: list[list[float]] | None = None  # [share of the steps, tokens per sample], in order
    batch_tokens: int = 8192
    mask_rate: float | None = None  # the family's, unless given
    next_sentence: bool | None = None  # ask about pairs of texts; as the family does, unless given
    weights: dict[str, float] = dataclasses.field(default_factory=dict)  # of losses by name
    optimizer: str = "adamw"  # or muon, for the layers' matrices
    lr: float = 1e-3
    muon_lr: float = 0.02
    warmup: float = 0.05
    weight_decay: float = 0.01
    beta2: float = 0.98
    clip: float = 1.0
    dropout: float = 0.1
    seed: int = 1
    precision: str = "auto"  # auto, fp32 or bf16
    save_every: int = 200
    eval_every: int = 500
    cache: str = "runs/cache"

    def __post_init__(self) -> None:
        optim.check_choice("optimizer", self.optimizer, ("adamw", "muon"))
        optim.check_choice("precision", self.precision, optim.PRECISIONS)
        optim.check_choice("preset", self.preset, config.PRESETS)
        if self.family:
            optim.check_choice("family", self.family, FAMILIES)


def sample_length(step: int, steps: int, phases: list[list[float]]) -> int:
    """Tokens per sample at a step."""
    end = 0.0
    for share, length in phases:
        end += share
        if step < round(end * steps):
            return int(length)
    return int(phases[-1][1])


def losses(model: nn.Module, batch: corpus.Batch, device: torch.device) -> dict[str, Tensor]:
    """The mean loss of everything that the model is taught, and as `loss` their weighted sum."""
    layout = Layout.of(batch.layout, device)
    positions = packing.positions(batch.layout)
    tensors = (batch.input_ids, batch.token_type_ids, positions)
    taught = (batch.masked, batch.labels, batch.is_next)
    inputs = (torch.as_tensor(array, device=device) for array in tensors)
    parts = model.losses((*inputs, layout), *(torch.as_tensor(a, device=device) for a in taught))
    whole = sum(model.weights[name] * part for name, part in parts.items())
    return {"loss": whole, **parts}


@torch.no_grad()
def evaluate(
    model: nn.Module, batches: list[corpus.Batch], device: torch.device
) -> dict[str, float]:
    """Mean losses over fixed batches, with the same draws each time where a model draws."""
    model.eval()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        found = [losses(model, batch, device) for batch in batches]
    model.train()
    return {name: float(np.mean([loss[name].item() for loss in found])) for name in found[0]}


def corpus_files(paths: list[str]) -> list[Path]:
    found = [
        file
        for path in map(Path, paths)
        for file in (sorted(path.iterdir()) if path.is_dir() else [path])
    ]
    return [file for file in found if file.suffix in corpus.OPENERS and ".titles." not in file.name]


def main() -> None:
    settings = read_settings(Settings, __doc__ or "")
    try:
        pretrain(settings)
    except (OSError, ValueError) as error:
        raise SystemExit(f"{error}") from None


def read_shape(s: Settings, tokenizer: tokenizers.Tokenizer) -> tuple[Family, config.BertConfig]:
    """Of the encoder: a checkpoint's, or a preset's with what is given beside it.

    Raises ValueError for fields that the family does not have, and for a checkpoint of another one.
    """
    if s.init_from:
        begun = checkpoint.read_config(checkpoint.locate(s.init_from))
        if s.family not in ("", begun.model_type):
            raise checkpoint.CheckpointError(f"{s.init_from} is {begun.model_type}, not {s.family}")
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


def pretrain(s: Settings) -> None:
    """Train, and leave the last checkpoint in `<output>/checkpoint`."""
    device = optim.pick_device()
    dtype = optim.precision(s.precision, device)
    phases = s.phases or [[0.9, 128], [0.1, 512]]

    # data
    tokenizer = load_tokenizer(s.tokenizer)
    family, shape = read_shape(s, tokenizer)
    specials = corpus.Specials.of(tokenizer, family)
    in_pairs = family.pairs is not None if s.next_sentence is None else s.next_sentence
    if in_pairs and not family.pairs:
        raise ValueError(f"next_sentence: {family.model_type} is given one text at a time")
    text = corpus.load(corpus_files(s.corpus), Path(s.tokenizer), Path(s.cache))

    def batch_at(step: int, seed: int, length: int) -> corpus.Batch:
        size = max(1, s.batch_tokens // length)
        return corpus.make_batch(
            text,
            specials,
            seed=seed,
            step=step,
            size=size,
            length=length,
            rate=family.mask_rate if s.mask_rate is None else s.mask_rate,
            pairs=family.pairs if in_pairs else None,
        )

    longest = max(int(length) for _, length in phases)
    held = [batch_at(step, seed=s.seed + 10_000, length=min(128, longest)) for step in range(8)]

    # model
    torch.manual_seed(s.seed)
    rates = {"hidden_dropout_prob": s.dropout, "attention_probs_dropout_prob": s.dropout}
    model = make_pretraining(dataclasses.replace(shape, **rates), in_pairs)
    if s.init_from:
        checkpoint.init_pretraining(model, s.init_from)
    if unknown := sorted(set(s.weights) - set(model.weights)):
        raise ValueError(f"weights: {unknown[0]!r} is none of {', '.join(model.weights)}")
    model.weights |= s.weights
    if longest > model.config.max_length or specials.vocab_size > model.config.vocab_size:
        raise SystemExit(
            f"{specials.vocab_size} tokens and samples of {longest} do not fit the model's vocabulary of "
            f"{model.config.vocab_size} and {model.config.max_length} positions"
        )
    model.to(device).train()

    # optimiser
    betas = (0.9, s.beta2)
    if s.optimizer == "muon":
        optimizer = optim.muon(model.named_parameters(), s.lr, s.muon_lr, s.weight_decay, betas)
    else:
        optimizer = optim.adamw(model.named_parameters(), s.lr, s.weight_decay, betas)

    # loop
    with Run.open(s.output, s.steps, s) as run:
        run.say(
            f"{len(text.ids):,} tokens in {text.num_documents:,} documents; {device.type}, {dtype}"
        )
        first = run.resume(model, optimizer)["step"]
        for step in range(first, s.steps):
            lr = s.lr * optim.linear_schedule(step, s.steps, s.warmup)
            optim.set_lr(optimizer, lr)
            batch = batch_at(step, s.seed, sample_length(step, s.steps, phases))
            optim.seed_dropout(s.seed, step)
            with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
                loss = losses(model, batch, device)
            optim.check_finite(loss["loss"], step)
            optimizer.zero_grad(set_to_none=True)
            loss["loss"].backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), s.clip)
            optimizer.step()
            run.step(
                step, {name: value.item() for name, value in loss.items()}, len(batch.input_ids), lr
            )
            last = step + 1 == s.steps
            if (step + 1) % s.eval_every == 0 or last:
                found = evaluate(model, held, device)
                for name, value in found.items():
                    run.scalar(f"held/{name}", value, step)
                run.say(f"step {step + 1}: fixed-batch losses {found}")
            if (step + 1) % s.save_every == 0 or last:
                run.save(step + 1, model, optimizer)
        checkpoint.save_pretraining(run.output / "checkpoint", model, Path(s.tokenizer))
        run.finish(
            {
                "fixed_batches": evaluate(model, held, device),
                "tokens_per_second": run.tokens_per_second(),
            }
        )


if __name__ == "__main__":
    main()

"""Pretrain a BERT: `python -m model.pretrain model/configs/mini-pretrain.toml [--name value ...]`.

Masked language modelling and, as a switch, next sentence prediction (Devlin et al. 2019). Interrupt it at any time:
the same command goes on where it stopped, with the losses that an uninterrupted run would have had.
"""

import dataclasses
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from model import checkpoint, config, corpus, optim
from model.attention import Layout
from model.heads import Pretraining
from model.run import Run, read_settings
from service import packing
from service.encode import load_tokenizer


@dataclass
class Settings:
    output: str
    corpus: list[str]  # files or folders of .txt, .gz, .xz
    tokenizer: str  # a tokenizer.json
    preset: str = "mini"
    max_position_embeddings: int = 512
    init_from: str = ""  # a checkpoint to go on from, a local directory or a hub name
    steps: int = 10_000
    phases: list[list[float]] | None = None  # [share of the steps, tokens per sample], in order
    batch_tokens: int = 8192
    mask_rate: float = 0.15
    next_sentence: bool = True
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


def sample_length(step: int, steps: int, phases: list[list[float]]) -> int:
    """Tokens per sample at a step."""
    end = 0.0
    for share, length in phases:
        end += share
        if step < round(end * steps):
            return int(length)
    return int(phases[-1][1])


def losses(model: Pretraining, batch: corpus.Batch, device: torch.device) -> dict[str, Tensor]:
    """The mean loss over masked tokens, over pairs, and their sum as `loss`."""
    layout = Layout.of(batch.layout, device)
    positions = packing.positions(batch.layout)
    inputs = (
        torch.as_tensor(a, device=device)
        for a in (batch.input_ids, batch.token_type_ids, positions)
    )
    token_logits, next_logits = model(*inputs, layout, torch.as_tensor(batch.masked, device=device))
    parts = {
        "mlm": F.cross_entropy(token_logits.float(), torch.as_tensor(batch.labels, device=device))
    }
    if next_logits is not None:
        parts["nsp"] = F.cross_entropy(
            next_logits.float(), torch.as_tensor(batch.is_next, device=device)
        )
    return {"loss": sum(parts.values(), torch.zeros((), device=device)), **parts}


@torch.no_grad()
def evaluate(
    model: Pretraining, batches: list[corpus.Batch], device: torch.device
) -> dict[str, float]:
    """Mean losses over fixed batches."""
    model.eval()
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


def pretrain(s: Settings) -> None:
    """Train, and leave the last checkpoint in `<output>/checkpoint`."""
    device = optim.pick_device()
    dtype = optim.precision(s.precision, device)
    phases = s.phases or [[0.9, 128], [0.1, 512]]

    # data
    tokenizer = load_tokenizer(s.tokenizer)
    specials = corpus.Specials.of(tokenizer)
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
            rate=s.mask_rate,
            pairs=s.next_sentence,
        )

    longest = max(int(length) for _, length in phases)
    held = [batch_at(step, seed=s.seed + 10_000, length=min(128, longest)) for step in range(8)]

    # model
    torch.manual_seed(s.seed)
    begun = checkpoint.load_pretraining(s.init_from) if s.init_from else None
    sizes = {
        "vocab_size": specials.vocab_size,
        "max_position_embeddings": s.max_position_embeddings,
    }
    shape = begun.config if begun else config.preset(s.preset, **sizes)
    rates = {"hidden_dropout_prob": s.dropout, "attention_probs_dropout_prob": s.dropout}
    model = Pretraining(dataclasses.replace(shape, **rates), next_sentence=s.next_sentence)
    if begun:
        model.load_state_dict(begun.state_dict(), strict=False)  # it may have a head more or less
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
                run.scalar("held/mlm", found["mlm"], step)
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

"""Compare training speed with transformers: the same model, optimizer, batches and precision, in alternating steps.

    python -m benchmarks.training.step_speed [--only NAME ...] [--precision fp32 bf16] [--rounds N]

Pretraining: BERT's two objectives on pairs of at most 128 tokens, against `BertForPreTraining`, which gets the same
samples, sampled and padded in advance; ours also samples them. Fine-tuning: a classifier of texts with the lengths of
news, packed against padded. Prints tokens of text per second, without padding, the model FLOP utilization (the useful
work as a share of the machine's measured matrix rate), and the ratio of the two, the median of the rounds.
"""

import argparse
import functools
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
import transformers
from torch import Tensor, nn

from benchmarks.lib import goal_checks, machine, run_record
from model import config
from model.data import examples
from model.data.corpus import Corpus, Ints
from model.data.pretraining_batches import Sampler, Samples, Specials
from model.families.bert_names import BERT
from model.heads import EncoderWithHeads
from model.pretrain import PretrainSettings, Trainer
from model.training import optim
from model.training.data_parallel import Ranks
from service.core import bundle
from service.core.encode import Window

T = TypeVar("T")
SIDE = 2048  # of the square matrices whose product is the machine's rate
LENGTH = 128
RATE = 0.15
SPECIALS = Specials(
    {"[CLS]": 1, "[SEP]": 2, "[MASK]": 3}, BERT.frame, sep=2, mask=3, vocab_size=8192
)
MEDIAN, SIGMA, LONGEST = 27 * 1.3, 0.70, 256  # tokens of a text, as in the mix of news


@dataclass(frozen=True)
class Case:
    """What is trained, on how many samples at a time, and how many times as fast as its peer it should be."""

    name: str
    layers: int
    hidden: int
    size: int
    wanted: float
    fine_tuning: bool = False

    @property
    def shape(self) -> config.BertConfig:
        return config.BertConfig(
            vocab_size=SPECIALS.vocab_size,
            num_hidden_layers=self.layers,
            hidden_size=self.hidden,
            num_attention_heads=self.hidden // 64 if self.hidden % 64 == 0 else 12,
            intermediate_size=4 * self.hidden,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )


CASES = {
    case.name: case
    for case in (
        Case("pretrain-4x256", 4, 256, 64, 1.5),
        Case("pretrain-6x384", 6, 384, 32, 1.2),
        Case("finetune-6x384", 6, 384, 32, 2.0, fine_tuning=True),
    )
}

# Takes the step of a number; gives the tokens of text it was on, and what they cost in multiplications and additions.
Step = Callable[[int], tuple[int, float]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--precision", nargs="+", choices=("fp32", "bf16"))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=3, help="of each in a round")
    given = parser.parse_args()
    device = optim.pick_device()
    best = optim.best_precision(device)
    precisions = given.precision or ["fp32"] + ["bf16"] * (best == torch.bfloat16)
    print(machine.describe(), torch.__version__, transformers.__version__)
    found, wishes = [], []
    for precision in precisions:
        rate = matmul_rate(device, optim.precision(precision, device))
        print(f"\n{precision}: {rate / 1e9:.0f} GFLOP/s")
        print(f"{'':<20}{'ours':>12}{'MFU':>7}{'transformers':>14}{'MFU':>7}{'ratio':>8}  (range)")
        for name in given.only:
            one = measure(CASES[name], precision, device, given.rounds, given.steps)
            found.append({"case": name, "precision": precision, "gflops": rate / 1e9, **one})
            show(name, one, rate)
            ratios = one["ratios"]
            wishes.append(goal_checks.Check(f"{name}, {precision}", ratios, CASES[name].wanted))
    goal_checks.show(wishes)
    described = {"run": run_record.describe_run(), "machine": machine.describe()}
    print(json.dumps({**described, "found": found}))


def show(name: str, one: dict[str, Any], rate: float) -> None:
    cells = f"{name:<20}"
    for side in ("ours", "theirs"):
        speed = statistics.median(one[side])
        cells += f"{speed:>{12 if side == 'ours' else 14},.0f}{speed * one['flops'] / rate:>7.2f}"
    ratios = one["ratios"]
    print(f"{cells}{statistics.median(ratios):>8.2f}  ({min(ratios):.2f}-{max(ratios):.2f})")


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of a product of square matrices, the best of 20."""
    a, b = (torch.randn(SIDE, SIDE, device=device, dtype=dtype) for _ in range(2))
    return 2 * SIDE**3 / min(timed(lambda: a @ b, device)[0] for _ in range(20))


def measure(
    case: Case, precision: str, device: torch.device, rounds: int, steps: int
) -> dict[str, Any]:
    """Tokens per second of each round, for us and for transformers, and how they compare."""
    pair = finetuning if case.fine_tuning else pretraining
    ours, theirs = pair(case, precision, device)
    for side in (ours, theirs):  # once before it counts
        side(0)
    speeds: dict[str, list[float]] = {"ours": [], "theirs": []}
    done = []
    for number in range(rounds):
        span = range(1 + number * steps, 1 + (number + 1) * steps)
        for side, take in (("ours", ours), ("theirs", theirs)):
            seconds, taken = timed(functools.partial(list, map(take, span)), device)
            speeds[side].append(sum(tokens for tokens, _ in taken) / seconds)
            done += taken
    ratios = [a / b for a, b in zip(speeds["ours"], speeds["theirs"], strict=True)]
    tokens, cost = map(sum, zip(*done, strict=True))
    return {**speeds, "ratios": ratios, "flops": cost / tokens}


def timed(work: Callable[[], T], device: torch.device) -> tuple[float, T]:
    """Seconds, until the device is done with it, and what came out."""
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    wait()
    began = time.perf_counter()
    found = work()
    wait()
    return time.perf_counter() - began, found


def flops(shape: config.BertConfig, lengths: Ints, guesses: int) -> float:
    """Multiplications and additions that a step needs, forward and backward: of the layers, of attention within each
    text, and of the vocabulary at hidden tokens only."""
    hidden, wide = shape.hidden_size, shape.intermediate_size
    layers = shape.num_hidden_layers * (4 * hidden**2 + 2 * hidden * wide)
    attention = shape.num_hidden_layers * 2 * hidden * float((lengths**2).sum())
    vocabulary = guesses * (hidden * shape.vocab_size + hidden**2)
    return 6 * (layers * float(lengths.sum()) + attention + vocabulary)


# -- pretraining ------------------------------------------------------------------------------------------------------


def pretraining(case: Case, precision: str, device: torch.device) -> tuple[Step, Step]:
    settings = PretrainSettings("", [], "", dropout=0.0, precision=precision)
    trainer = Trainer(settings, case.shape, True, Ranks(0, 1, device))
    sampler = Sampler(made_up(), SPECIALS, "nsp", device)

    def drawn(number: int) -> Samples:
        return sampler.samples(seed=1, step=number, size=case.size, length=LENGTH, rate=RATE)

    def ours(number: int) -> tuple[int, float]:
        samples = drawn(number)
        trainer.step(samples, number, settings.lr)
        lengths = np.asarray(samples.lengths)
        return samples.tokens, flops(case.shape, lengths, sum(samples.predictions))

    peer = transformers.BertForPreTraining(transformers.BertConfig(**case.shape.to_dict()))
    learn = functools.partial(their_step, *with_optimizer(peer, settings, device))
    kept = functools.cache(drawn)

    def theirs(number: int) -> tuple[int, float]:
        samples = kept(number)
        lengths = torch.tensor(samples.lengths, device=device)
        places = torch.arange(samples.input_ids.shape[1], device=device)
        learn(
            precision,
            input_ids=samples.input_ids,
            token_type_ids=samples.token_type_ids,
            attention_mask=(places < lengths[:, None]).long(),
            labels=samples.original_ids.masked_fill(~samples.hidden, -100),
            next_sentence_label=samples.is_next,
        )
        return samples.tokens, flops(
            case.shape, np.asarray(samples.lengths), sum(samples.predictions)
        )

    return ours, theirs


def made_up() -> Corpus:
    """Documents of thirty sentences of 5 to 40 tokens that mean nothing: a step takes as long on any."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(5, 41, size=30_000)
    starts = np.concatenate([[0], np.cumsum(lengths)])
    ids = rng.integers(5, SPECIALS.vocab_size, size=starts[-1]).astype(np.uint16)
    return Corpus(ids, starts, np.arange(0, len(lengths) + 1, 30))


def with_optimizer(
    peer: nn.Module, settings: PretrainSettings, device: torch.device
) -> tuple[nn.Module, torch.optim.Optimizer]:
    peer.to(device).train()
    betas = (0.9, settings.beta2)
    return peer, optim.adamw(peer.named_parameters(), settings.lr, settings.weight_decay, betas)


def their_step(
    peer: nn.Module, optimizer: torch.optim.Optimizer, precision: str, **inputs: Tensor
) -> None:
    """As a loop of one's own around a model of transformers takes it."""
    device = inputs["input_ids"].device
    with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
        loss = peer(**inputs).loss
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(peer.parameters(), 1.0)
    optimizer.step()


# -- fine-tuning ------------------------------------------------------------------------------------------------------


def finetuning(case: Case, precision: str, device: torch.device) -> tuple[Step, Step]:
    settings = PretrainSettings("", [], "", precision=precision)
    labels = ("one", "two", "three", "four")
    model = EncoderWithHeads(
        case.shape, {"topic": bundle.Head(task="classification", labels=labels)}
    )
    model.to(device).train()
    optimizer = optim.adamw(model.named_parameters(), settings.lr, 0.01, (0.9, 0.98))
    peer = transformers.BertForSequenceClassification(
        transformers.BertConfig(**case.shape.to_dict(), num_labels=len(labels))
    )
    learn = functools.partial(their_step, *with_optimizer(peer, settings, device))

    def batch(number: int) -> tuple[list[Window], Tensor]:
        rng = np.random.default_rng(number)
        lengths = np.clip(rng.lognormal(np.log(MEDIAN), SIGMA, case.size), 5, LONGEST).astype(int)
        drawn = (rng.integers(5, SPECIALS.vocab_size, size=length) for length in lengths)
        texts = [Window(ids, np.zeros_like(ids)) for ids in drawn]
        return texts, torch.as_tensor(rng.integers(4, size=case.size), device=device)

    def cost(texts: list[Window]) -> tuple[int, float]:
        lengths = np.asarray([len(text) for text in texts])
        return int(lengths.sum()), flops(case.shape, lengths, 0)

    def ours(number: int) -> tuple[int, float]:
        texts, answers = batch(number)
        with torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16"):
            outputs = examples.forward(model, texts, ["topic"])
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(outputs["topic"], answers).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return cost(texts)

    def theirs(number: int) -> tuple[int, float]:
        texts, answers = batch(number)
        rows = [torch.as_tensor(text.input_ids) for text in texts]
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True).to(device)
        learn(precision, input_ids=ids, attention_mask=(ids > 0).long(), labels=answers)
        return cost(texts)

    return ours, theirs


if __name__ == "__main__":
    main()

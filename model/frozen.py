"""Train heads on the hidden states of a frozen encoder, which a served bundle's own graph computes.

The graph computes the states of a text once, in the precision that the service runs. A head is pooling and one or two
dense layers, so that an epoch takes less than a second for thousands of texts. The head is evaluated by the service's
own code for it (`service.core.state_heads`).

n tokens of a window, T tokens and B windows of a batch, H hidden, D inputs of the dense layers, C outputs
"""

import copy
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from model import config, dev_report, evaluate
from model.finetune import DevRows, complete, read_tasks, record_held_out
from model.finetune_settings import FinetuneSettings
from model.training import optim
from service.core.bundle import Bundle, BundleError
from service.core.cpu import CPU
from service.core.encode import Encoder, Window, load_tokenizer
from service.core.manifest import Activation, Head, Layers
from service.core.packing import golden_windows, pack, split
from service.core.session import Session, SessionOptions
from service.core.state_heads import Floats, StateHead

LEARNING_RATE = 2e-3
EPOCHS = 20.0  # of up to `MANY_ROWS` rows, else `MANY_EPOCHS`
MANY_ROWS, MANY_EPOCHS = 20_000, 8.0
WIDTH = 128  # of the hidden layer
DROPOUT = 0.3
FILLED_AT_ONCE = 2_000  # windows
KEPT_BYTES = (
    4 * 2**30
)  # of features that training keeps; the states of further texts are computed again

ACTIVATIONS: Mapping[Activation, Callable[[Tensor], Tensor]] = {
    "none": lambda x: x,
    "tanh": torch.tanh,
    "gelu": lambda x: nn.functional.gelu(x, approximate="tanh"),
}


class FrozenEncoder:
    """The encoder of a bundle that gives its hidden states. precision: of its graph; None for the default one"""

    def __init__(self, bundle: Bundle, precision: str | None = None) -> None:
        manifest = bundle.manifest
        if manifest.states is None:
            reason = "its graphs give no hidden states: export it again with --states"
            raise BundleError(bundle.path, reason)
        self.bundle = bundle
        self.states_name = manifest.states
        self.hidden_size = manifest.heads[manifest.states].width
        graphs = manifest.graphs_for(CPU, precision or manifest.default_precision)
        if not graphs:
            raise BundleError(bundle.path, f"it has no {precision} graph for a CPU")
        options = SessionOptions(threads=len(os.sched_getaffinity(0)))
        self._session = Session(bundle, graphs[0], CPU, options)

    def run(self, windows: Sequence[Window]) -> list[dict[str, Floats]]:
        """Return the hidden states of each window, `[n, H]`, by the name "states"."""
        packed, name = pack(windows), self.states_name
        outputs = {"states": self._session.run(packed, (name,))[name]}
        return split(outputs, windows, {"states": packed.layout.cu_seqlens})

    def golden_states(self) -> list[Floats]:
        """Return the hidden states of each golden of the bundle, in a batch of its own."""
        windows = golden_windows(self.bundle.golden)
        return [self.run([window])[0]["states"] for window in windows]


class Features:
    """The inputs of a head's dense layers for windows: states, or pooled states. They are computed once and kept."""

    def __init__(self, encoder: FrozenEncoder, layers: Layers) -> None:
        self._encoder = encoder
        self._pool = StateHead(layers, ()).pool
        self._kept: dict[bytes, Floats] = {}
        self._size = 0

    def of(self, windows: Sequence[Window]) -> list[Floats]:
        """Return the features of each window, `[D]` or `[n, D]`."""
        keys = [w.input_ids.tobytes() + w.token_type_ids.tobytes() for w in windows]
        missing = {k: w for k, w in zip(keys, windows, strict=True) if k not in self._kept}
        if not missing:
            return [self._kept[key] for key in keys]
        states = evaluate.run_sorted(self._encoder.run, [*missing.values()])
        found = {
            k: self._pool(own["states"]).copy() for k, own in zip(missing, states, strict=True)
        }
        if self._size < KEPT_BYTES:
            self._kept |= found
            self._size += sum(own.nbytes for own in found.values())
        return [self._kept[key] if key in self._kept else found[key] for key in keys]

    def fill(self, windows: Sequence[Window]) -> None:
        """Compute the features of windows in large batches, as many as are kept."""
        for start in range(0, len(windows), FILLED_AT_ONCE):
            if self._size < KEPT_BYTES:
                self.of(windows[start : start + FILLED_AT_ONCE])


class Dense(nn.Module):
    """The dense layers of a head: `[B, D]` or `[T, D]` -> as many rows of C."""

    def __init__(self, layers: Layers, widths: Sequence[int], dropout: float = 0.0):
        super().__init__()
        self.layers = layers
        self.dense = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        for dense, name in zip(self.dense, self.layers.activations, strict=True):
            x = ACTIVATIONS[name](dense(self.dropout(x)))
        return x

    def export(self) -> StateHead:
        """Return the head as the service computes it."""
        arrays = [
            (d.weight.detach().numpy().copy(), d.bias.detach().numpy().copy()) for d in self.dense
        ]
        return StateHead(self.layers, arrays)


def make_head(head: Head, hidden_size: int) -> Dense:
    """Return a new head. An embedding begins as the pooled states themselves."""
    if head.task == "embedding":
        layers = Layers(pooling=head.pooling_modes, activations=("none",))  # type: ignore[arg-type]
        made = Dense(layers, [hidden_size, hidden_size])
        nn.init.eye_(made.dense[0].weight)
        nn.init.zeros_(made.dense[0].bias)
        return made
    pooling = () if head.per_token else ("mean", "max")
    layers = Layers(pooling=pooling, activations=("gelu", "none"))
    return Dense(layers, [hidden_size * max(len(pooling), 1), WIDTH, head.width], DROPOUT)


@dataclass(frozen=True)
class TrainedHead:
    """A trained head with its metrics on the dev rows, from 0 to 1; empty without dev rows."""

    name: str
    described: Head
    head: StateHead
    metrics: Mapping[str, float]
    origin: str  # of the dev rows
    examples: int


def train(s: FinetuneSettings, encoder: FrozenEncoder, show: Callable[[str], None]) -> TrainedHead:
    """Train the one head of the settings on the states of an encoder. Raises ValueError for settings or rows.

    The best head on the dev rows is returned, and the last one where there are none.
    """
    (name,) = s.heads
    manifest = encoder.bundle.manifest
    tokenizer = load_tokenizer(encoder.bundle.file(manifest.vocabulary.file))
    longest = min(s.heads[name].max_length or s.max_length, manifest.max_length)
    texts = {name: Encoder(tokenizer, longest)}
    sizes = {"hidden_size": encoder.hidden_size, "vocab_size": manifest.vocabulary.size}
    shape = config.BertConfig(**sizes, num_attention_heads=1)
    described, _, tasks, dev = read_tasks(s, texts, shape, {}, {"labels": 1.0})
    if not tasks:
        raise ValueError(f"heads.{name}: there is nothing to train on")
    Path(s.output).mkdir(parents=True, exist_ok=True)
    record_held_out(Path(s.output), dev)
    torch.manual_seed(s.seed)
    module = make_head(described[name], encoder.hidden_size)
    features = Features(encoder, module.layers)
    for task in tasks:
        features.fill([w for each in task.stream.examples for w in each.encodings])
    rows = max(task.stream.size for task in tasks)
    if s.epochs is None:
        s.epochs = EPOCHS if rows <= MANY_ROWS else MANY_EPOCHS
    s.lr = s.lr or LEARNING_RATE
    steps = complete(s, tasks, encoder.hidden_size)
    optimizer = optim.adamw(module.named_parameters(), s.lr, s.weight_decay, (0.9, s.beta2))
    show(f"{name}: {rows:,} examples, {steps:,} steps at a learning rate of {s.lr:g}")

    best, best_score = copy.deepcopy(module), -1.0
    for step in range(steps):
        optim.set_lr(optimizer, s.lr * optim.linear_schedule(step, steps, s.warmup, s.hold))
        optimizer.zero_grad(set_to_none=True)
        for number, task in enumerate(tasks):
            batch, _ = task.batch((s.seed, number), step)
            own = features.of(batch.encodings)  # [D] or [n, D] each
            joined = np.stack(own) if module.layers.pooling else np.concatenate(own)
            loss = task.stream.loss(module(torch.from_numpy(joined)), batch)
            (task.stream.weight * loss.value).backward()
        torch.nn.utils.clip_grad_norm_(module.parameters(), s.clip)
        optimizer.step()
        last = step + 1 == steps
        if last or (step + 1) % (s.eval_every or steps) == 0:
            score = next(
                iter(judge(module, features, described[name], texts, dev, s).values()), 0.0
            )
            if score >= best_score:
                best, best_score = copy.deepcopy(module), score
    s = s.model_copy(update={"dev_limit": 0})
    found = finish(best, features, described[name], texts, dev, s)
    metrics = judge(best, features, found, texts, dev, s)
    origin = dev[name].origin if name in dev else ""
    return TrainedHead(name, found, best.export(), metrics, origin, rows)


def outputs_of(
    module: Dense,
    features: Features,
    head: Head,
    texts: Mapping[str, Encoder],
    dev: Mapping[str, DevRows],
    s: FinetuneSettings,
) -> tuple[Sequence[Any], evaluate.HeadOutputs] | None:
    """Return the dev rows and the head's outputs for them, as the service computes them; None without dev rows."""
    (name,) = s.heads
    if name not in dev:
        return None
    exported = module.export()
    rows = evaluate.spread(dev[name].rows, s.dev_limit)

    def run(encodings: Sequence[Any]) -> list[dict[str, Floats]]:
        return [{name: exported.compute(own)} for own in features.of(encodings)]

    return rows, evaluate.head_outputs(run, texts[name], head, name, rows, s.heads[name].stride)


def judge(*arguments: Any) -> dict[str, float]:
    """Return the metrics of a head on its dev rows, the main one first; empty without dev rows."""
    head, found = arguments[2], outputs_of(*arguments)
    return evaluate.judge_outputs(*found, head).metrics if found else {}


def finish(*arguments: Any) -> Head:
    """Return the description of a head, with the temperature or the null threshold that its dev rows give."""
    head, found = arguments[2], outputs_of(*arguments)
    update: dict[str, float] = {}
    if found:
        if calibrated := dev_report.fit(*found, head):
            update["calibration_temperature"] = calibrated.temperature
        metrics = evaluate.judge_outputs(*found, head).metrics
        if "best_f1_threshold" in metrics:
            update["null_threshold"] = metrics["best_f1_threshold"]
    return head.model_copy(update=update)

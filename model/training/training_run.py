"""A training run on disk and on the terminal: settings, progress, TensorBoard, metrics, the loss, resuming.

<output>/settings.json   what was asked for
<output>/metrics.json    what came out
<output>/loss.png        the loss over the steps
<output>/tensorboard/    scalars
<output>/last.pt         model and optimiser after the last saved step
"""

import argparse
import itertools
import json
import os
import sys
import time
import tomllib
from collections.abc import Callable
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from torch import nn
from torch.utils.tensorboard import SummaryWriter

S = TypeVar("S")


def read_settings(kind: type[S], description: str) -> S:
    """A run's settings: a TOML file first (see `read_config`), then `--name value` for any of its fields.

    Lists and tables are given on the command line as JSON.
    """
    parser = argparse.ArgumentParser(description=description, allow_abbrev=False)
    parser.add_argument(
        "config", nargs="?", type=Path, help="a TOML file, one run each: see model/configs/"
    )
    for field in fields(kind):  # type: ignore[arg-type]
        parser.add_argument(f"--{field.name.replace('_', '-')}", default=argparse.SUPPRESS)
    given = vars(parser.parse_args())
    config = given.pop("config")
    try:
        values = read_config(config) if config else {}
    except (OSError, ValueError) as error:
        parser.error(f"{config}: {error}")
    known = {field.name: field for field in fields(kind)}  # type: ignore[arg-type]
    for name in values:
        if name not in known:
            parser.error(f"{config}: unknown setting {name!r}: one of {', '.join(known)}")
    for name, text in given.items():
        try:
            values[name] = text if known[name].type is str else json.loads(text)
        except ValueError:
            parser.error(
                f"--{name.replace('_', '-')}: {text!r} is not JSON (numbers, true, false, [lists])"
            )
    for name, value in values.items():
        if known[name].type in (int, int | None) and isinstance(value, float):
            if not value.is_integer():
                parser.error(f"{name}: {value} is no whole number")
            values[name] = int(value)
    missing = [
        n
        for n, f in known.items()
        if n not in values and f.default is MISSING and f.default_factory is MISSING
    ]
    if missing:
        parser.error(f"missing: {', '.join(missing)}")
    try:
        return kind(**values)
    except (TypeError, ValueError) as error:
        parser.error(str(error))


def read_config(path: Path, extending: tuple[Path, ...] = ()) -> dict[str, Any]:
    """What a TOML file says, and where it says nothing, the file beside it that it `extends`, table by table.

    extending: the files that led to this one
    Raises OSError for a file that cannot be read, ValueError for one that is no TOML or extends itself.
    """
    values = tomllib.loads(path.read_text(encoding="utf-8"))
    if not (base := values.pop("extends", None)):
        return values
    extended = path.parent / str(base)
    chain = (*extending, path.resolve())
    if extended.resolve() in chain:
        raise ValueError(f"{extended} extends itself")
    try:
        return _over(values, read_config(extended, chain))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{extended}: {error}") from None


def _over(values: dict[str, Any], others: dict[str, Any]) -> dict[str, Any]:
    """Both, and of what both have the former; of tables both again."""
    found = others | values
    for name in others.keys() & values.keys():
        if isinstance(values[name], dict) and isinstance(others[name], dict):
            found[name] = _over(values[name], others[name])
    return found


def command(kind: type[S], description: str, work: Callable[[S], object]) -> None:
    """What a training script does when it is called: read its settings and work; what is wrong is said in a line."""
    settings = read_settings(kind, description)
    try:
        work(settings)
    except (OSError, ValueError, FloatingPointError) as error:
        raise SystemExit(f"{error}") from None


@dataclass
class TrainingRun:
    """Where a run writes, and how it tells of itself."""

    output: Path
    steps: int
    history: list[tuple[int, float]]
    started: float
    settings: Any
    tells: bool = True  # or does another process of the same run?
    work: Callable[[int], float] = lambda _: 1.0  # how long a step takes, beside others

    @classmethod
    def open(cls, output: str, steps: int, settings: Any, tells: bool = True, **more: Any) -> Self:
        folder = Path(output)
        if tells:
            folder.mkdir(parents=True, exist_ok=True)
        return cls(folder, steps, [], time.monotonic(), settings, tells, **more)

    def __post_init__(self) -> None:
        self.writer = SummaryWriter(str(self.output / "tensorboard")) if self.tells else None
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"),
            disable=not (self.tells and sys.stdout.isatty()),
        )
        self.bar = self.progress.add_task("training", total=self.steps, state="")
        self.until = [*itertools.accumulate(map(self.work, range(self.steps)), initial=0.0)]
        self.tokens = 0
        self.taken = 0
        self.smooth: float | None = None

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.progress.stop()
        if self.writer:
            self.writer.close()

    def step(self, step: int, losses: dict[str, float], tokens: int, lr: float) -> None:
        """Record one optimiser step: its losses by name (`loss` is the whole), its tokens, its learning rate."""
        self.tokens += tokens
        self.taken += 1
        loss = losses["loss"]
        self.smooth = loss if self.smooth is None else 0.98 * self.smooth + 0.02 * loss
        self.history.append((step, loss))
        for name, value in losses.items():
            self.scalar(f"train/{name}", value, step)
        self.scalar("train/lr", lr, step)
        left = self.seconds_left(step + 1) / 60
        speed = self.tokens_per_second()
        state = f"loss {self.smooth:.3f}  {speed:,.0f} tokens/s  {left:.0f} min left"
        self.progress.update(self.bar, completed=step + 1, state=state)
        if self.progress.disable and (step + 1) % 50 == 0:
            self.say(f"step {step + 1}/{self.steps}  {state}")

    def seconds_left(self, taken: int) -> float:
        """From the steps of this process, when so many of all are taken."""
        done = self.until[taken] - self.until[taken - self.taken]
        to_do = self.until[self.steps] - self.until[taken]
        return (time.monotonic() - self.started) * to_do / done

    def tokens_per_second(self) -> float:
        return self.tokens / max(time.monotonic() - self.started, 1e-9)

    def scalar(self, name: str, value: float, step: int) -> None:
        if self.writer:
            self.writer.add_scalar(name, value, step)

    def say(self, text: str) -> None:
        if not self.progress.disable:
            self.progress.console.print(text)
        elif self.tells:
            print(text, flush=True)

    def save(self, step: int, model: nn.Module, optimizer: Any, **extra: Any) -> None:
        """Keep all that a resumed run needs, so that a crash leaves the old or the new, never half of one."""
        if not self.tells:
            return
        state = {
            "step": step,
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "history": self.history,
        }
        partial = self.output / "last.pt.partial"
        torch.save({**state, **extra}, partial)
        os.replace(partial, self.output / "last.pt")

    def resume(self, model: nn.Module, optimizer: Any) -> dict[str, Any]:
        """Load the last saved state, if there is one; its `step` is the next to take.

        What was asked for is written where a step is left to take: else it is not what made what is there.
        """
        path = self.output / "last.pt"
        if not path.is_file():
            self._write_settings()
            return {"step": 0}
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        self.history = [tuple(point) for point in state["history"]]
        if state["step"] < self.steps:
            self._write_settings()
        self.say(f"resuming {self.output} at step {state['step']}")
        return state

    def _write_settings(self) -> None:
        if self.tells:
            told = json.dumps(asdict(self.settings), indent=2)
            (self.output / "settings.json").write_text(told + "\n")

    def finish(self, metrics: dict[str, Any]) -> None:
        """Write `metrics.json` and `loss.png`; a run that was at its end already keeps its speed."""
        path = self.output / "metrics.json"
        if not self.taken and path.is_file():
            speed = json.loads(path.read_text())["tokens_per_second"]
            metrics = {**metrics, "tokens_per_second": speed}
        path.write_text(json.dumps(metrics, indent=2) + "\n")
        draw_loss(self.history, self.output / "loss.png")


def draw_loss(history: list[tuple[int, float]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    steps, losses = zip(*history, strict=True)
    window = max(1, len(losses) // 100)
    smooth = [
        sum(losses[max(0, i - window) : i + 1]) / len(losses[max(0, i - window) : i + 1])
        for i in range(len(losses))
    ]
    axes.plot(steps, losses, color="0.8", linewidth=0.5, label="loss")
    axes.plot(steps, smooth, linewidth=1.5, label=f"mean of {window + 1}")
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.legend()
    figure.savefig(path, dpi=120)

"""A training run on disk and on the terminal: settings, progress, TensorBoard, metrics, the loss, resuming.

<output>/settings.json   the settings, with the values that the run chose
<output>/record.json     the settings as given, and the data (see run_record.py)
<output>/metrics.json    the results
<output>/loss.png        the loss over the steps
<output>/tensorboard/    scalars
<output>/last.pt         model and optimizer after the last saved step
"""

import itertools
import json
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Self

import torch
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from torch import nn
from torch.utils.tensorboard import SummaryWriter

from model.run_settings import S, read_settings
from model.training import run_record
from model.training.run_record import OtherRunError, RunRecord
from model.training.series import Series
from model.training.stop_signals import StoppedRun, StopSignals

RECENT = 20  # steps whose mean loss is shown
SECONDS_BETWEEN_LINES = 10  # of progress, where the output is not a terminal


def run_script(kind: type[S], description: str, work: Callable[[S], object]) -> None:
    """Run a training script: read its settings, call `work`, and report an expected error in one line."""
    settings = read_settings(kind, description)
    try:
        work(settings)
    except KeyboardInterrupt:
        print(
            "interrupted: steps since the last save, if there were any, are lost", file=sys.stderr
        )
        raise SystemExit(128 + signal.SIGINT) from None
    except (OSError, ValueError, FloatingPointError) as error:
        raise SystemExit(f"{error}") from None


@dataclass
class TrainingRun:
    """The files and the log of a run."""

    output: Path
    steps: int
    history: list[tuple[int, float]]
    started: float
    settings: Any
    record: RunRecord
    is_leader: bool = True  # False: another process of the run writes and logs
    work: Callable[[int], float] = lambda _: 1.0  # the duration of a step, in any unit

    @classmethod
    def open(
        cls,
        output: str,
        steps: int,
        settings: Any,
        is_leader: bool = True,
        record: RunRecord | None = None,
        **more: Any,
    ) -> Self:
        """Return the run of a directory, which is created, or emptied if `fresh`. Raises OtherRunError."""
        folder = Path(output)
        record = run_record.check_output(settings, record)
        if is_leader:
            if getattr(settings, "fresh", False):
                run_record.delete_run(folder)
            folder.mkdir(parents=True, exist_ok=True)
        return cls(folder, steps, [], time.monotonic(), settings, record, is_leader, **more)

    def __post_init__(self) -> None:
        self.writer = SummaryWriter(str(self.output / "tensorboard")) if self.is_leader else None
        self.progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[state]}"),
            disable=not (self.is_leader and sys.stdout.isatty()),
        )
        self.bar = self.progress.add_task("training", total=self.steps, state="")
        self.work_before = [*itertools.accumulate(map(self.work, range(self.steps)), initial=0.0)]
        self.series: dict[str, Series] = {}
        self.clock = self.last_line = self.started  # of the last step, and of the last line
        self.signals = StopSignals()
        self.tokens = 0
        self.steps_done = 0

    def __enter__(self) -> Self:
        self.signals.__enter__()
        self.progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.signals.__exit__(None, None, None)
        self.progress.stop()
        if self.writer:
            self.writer.close()

    def step(self, step: int, losses: dict[str, float], tokens: int, lr: float) -> None:
        """Record one optimizer step: its losses by name (`loss` is the sum), its tokens, its learning rate."""
        now = time.monotonic()
        self.tokens += tokens
        self.steps_done += 1
        loss = losses["loss"]
        self.history.append((step, loss))
        recent = [value for _, value in self.history[-RECENT:]]
        for name, value in losses.items():
            self.scalar(f"train/{name}", value, step)
        self.scalar("train/lr", lr, step)
        self.scalar("train/tokens_per_second", tokens / max(now - self.clock, 1e-9), step)
        self.clock = now
        left = self.seconds_left(step + 1) / 60
        speed = self.tokens_per_second()
        state = f"loss {sum(recent) / len(recent):.3f}  {speed:,.0f} tokens/s  {left:.0f} min left"
        self.progress.update(self.bar, completed=step + 1, state=state)
        if self.progress.disable and now - self.last_line >= SECONDS_BETWEEN_LINES:
            self.last_line = now
            self.log(f"step {step + 1}/{self.steps}  {state}")

    def share_of(self, minutes: float) -> float:
        """Return how much of a time has passed since this process began the run; 0 for no limit."""
        return (time.monotonic() - self.started) / (60 * minutes) if minutes else 0.0

    def seconds_left(self, step: int) -> float:
        """Estimate the remaining time before `step`, from the speed of this process."""
        done = self.work_before[step] - self.work_before[step - self.steps_done]
        remaining = self.work_before[self.steps] - self.work_before[step]
        return (time.monotonic() - self.started) * remaining / done

    def tokens_per_second(self) -> float:
        return self.tokens / max(time.monotonic() - self.started, 1e-9)

    def evaluated(self, step: int, scalars: dict[str, float], line: str) -> None:
        """Record the results of an evaluation after a step, and log them in a line."""
        for name, value in scalars.items():
            self.scalar(name, value, step)
        self.log(f"step {step + 1:,} of {self.steps:,}: {line}")
        self.clock = time.monotonic()  # the next step does not include the evaluation

    def scalar(self, name: str, value: float, step: int) -> None:
        self.series.setdefault(name, Series()).add(step, value)
        if self.writer:
            self.writer.add_scalar(name, value, step)

    def log(self, text: str) -> None:
        if not self.progress.disable:
            self.progress.console.print(text)
        elif self.is_leader:
            print(text, flush=True)

    def save(self, step: int, model: nn.Module, optimizer: Any, **extra: Any) -> None:
        """Write the state that a resumed run needs, in one rename."""
        if not self.is_leader:
            return
        state = {
            "step": step,
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "history": self.history,
            "series": {name: series.state() for name, series in self.series.items()},
            "steps": self.steps,
        }
        partial = self.output / "last.pt.partial"
        torch.save({**state, **extra}, partial)
        os.replace(partial, self.output / "last.pt")
        self.clock = time.monotonic()

    def resume(self, model: nn.Module, optimizer: Any) -> dict[str, Any]:
        """Load the last saved state, if any; its `step` is the next one. Raises ValueError for fewer steps."""
        path = self.output / "last.pt"
        if not path.is_file() or (getattr(self.settings, "fresh", False) and not self.is_leader):
            self._write_settings()
            return {"step": 0}
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
        done, steps = state["step"], state.get("steps", self.steps)
        if done > self.steps:
            raise OtherRunError(
                f"{self.output} is already at step {done}, beyond the {self.steps} of these settings:"
                " choose another output, more steps, or begin anew with --fresh"
            )
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        self.history = [tuple(point) for point in state["history"]]
        stored = state.get("series", {})
        self.series = {name: Series.restore(each) for name, each in stored.items()}
        self._write_settings()
        length = f", now to step {self.steps} instead of {steps}" if steps != self.steps else ""
        self.log(f"resuming {self.output} at step {done}{length}")
        return state

    def _write_settings(self) -> None:
        if self.is_leader:
            self.record.write(self.output, self.settings)

    def describe_checkpoint(self, folder: Path, step: int) -> None:
        """Write into a checkpoint what made it: the settings, the data and the number of steps."""
        self.record.write_to_checkpoint(folder, step, self.settings)

    def stop(self, step: int, received: int) -> NoReturn:
        """End a saved run after `step` steps, because of the signal `received`. Raises StoppedRun."""
        without = " without --fresh" if getattr(self.settings, "fresh", False) else ""
        if self.is_leader:
            draw_loss(self.history, self.output / "loss.png")
        self.log(
            f"{signal.Signals(received).name}: stopped after step {step} of {self.steps} and saved to"
            f" {self.output}; the same command{without} resumes the run. Its checkpoint is {self.output}/checkpoint"
        )
        raise StoppedRun(received)

    def finish(self, metrics: dict[str, Any]) -> None:
        """Write `metrics.json` and `loss.png`. A run that was already complete keeps its speed."""
        path = self.output / "metrics.json"
        if not self.steps_done and path.is_file():
            speed = json.loads(path.read_text())["tokens_per_second"]
            metrics = {**metrics, "tokens_per_second": speed}
        path.write_text(json.dumps(metrics, indent=2) + "\n")
        draw_loss(self.history, self.output / "loss.png")


def show_metrics(values: dict[str, float]) -> str:
    """Return metrics as text: `accuracy 0.9133, macro F1 0.8851`."""
    return ", ".join(f"{show_metric(name)} {value:.4f}" for name, value in values.items())


def show_metric(name: str) -> str:
    """Return the name of a metric as people write it."""
    words = {"f1": "F1", "mrr": "MRR", "em": "exact match", "mlm": "MLM", "nsp": "NSP"}
    words |= {"sop": "SOP", "rtd": "RTD"}
    return " ".join(words.get(word, word) for word in name.split("_"))


def draw_loss(history: list[tuple[int, float]], path: Path) -> None:
    """Plot the loss over the steps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    steps, losses = zip(*history, strict=True)
    window = max(1, len(losses) // 100)
    sums = [0.0, *itertools.accumulate(losses)]
    starts = [max(0, i - window) for i in range(len(losses))]
    smooth = [(sums[i + 1] - sums[first]) / (i + 1 - first) for i, first in enumerate(starts)]
    axes.plot(steps, losses, color="0.8", linewidth=0.5, label="loss")
    axes.plot(steps, smooth, linewidth=1.5, label=f"mean of {window + 1}")
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    axes.legend()
    partial = path.with_name(f"{path.name}.partial")
    figure.savefig(partial, dpi=120, format="png")
    os.replace(partial, path)

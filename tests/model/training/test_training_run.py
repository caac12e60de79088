"""A run reads its settings, keeps what it learnt, and goes on where it stopped."""

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from matplotlib.image import imread
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

from model.run_settings import RunSettings
from model.training import optim, training_run
from model.training.run_record import OtherRunError
from model.training.stop_signals import StoppedRun
from model.training.training_run import TrainingRun, show_metrics

pytestmark = pytest.mark.usefixtures("pictures")


class Settings(RunSettings):
    output: str
    steps: int
    lr: float = 0.1
    fresh: bool = False


def recorded(settings: Settings) -> dict[str, Any]:
    """Return the settings that a run writes."""
    return {name: value for name, value in vars(settings).items() if name != "fresh"}


def trained(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A layer and its optimiser after a step."""
    torch.manual_seed(seed)
    layer = nn.Linear(3, 3)
    optimizer = optim.adamw(layer.named_parameters(), 0.1, 0.01, (0.9, 0.98))
    layer(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return layer, optimizer


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(output=str(tmp_path / "runs" / "a"), steps=5)


class TestRun:
    def test_writes_its_settings(self, settings):
        """A run that begins has its directory, and what was asked for in it."""
        with TrainingRun.open(settings.output, settings.steps, settings) as training_run:
            training_run.resume(*trained(1))
            assert json.loads((training_run.output / "settings.json").read_text()) == recorded(
                settings
            )

    def test_a_longer_run(self, settings, capsys):
        """More steps continue the run, which reports both numbers and has the settings of the longer one."""
        layer, optimizer = trained(1)
        with TrainingRun.open(settings.output, 5, settings) as training_run:
            training_run.resume(layer, optimizer)
            training_run.save(5, layer, optimizer)
        longer = settings.model_copy(update={"steps": 8})
        with TrainingRun.open(settings.output, 8, longer) as again:
            assert again.resume(layer, optimizer)["step"] == 5

        assert "at step 5, now to step 8 instead of 5" in capsys.readouterr().out
        assert json.loads((again.output / "settings.json").read_text()) == recorded(longer)

    def test_a_run_that_is_already_longer(self, settings):
        """Fewer steps than are done are refused; the old settings stay."""
        layer, optimizer = trained(1)
        with TrainingRun.open(settings.output, 5, settings) as training_run:
            training_run.resume(layer, optimizer)
            training_run.save(5, layer, optimizer)
        with (
            TrainingRun.open(settings.output, 4, settings.model_copy(update={"steps": 4})) as again,
            pytest.raises(OtherRunError, match="is already at step 5, beyond the 4 of these"),
        ):
            again.resume(layer, optimizer)

        assert json.loads((again.output / "settings.json").read_text()) == recorded(settings)

    def test_first_time(self, settings):
        """A run that never saved starts at step 0."""
        with TrainingRun.open(settings.output, settings.steps, settings) as training_run:
            assert training_run.resume(*trained(1)) == {"step": 0}

    def test_resumes(self, settings, capsys):
        """A resumed run has the model, the optimiser, the history and the rest that was saved."""
        layer, optimizer = trained(1)
        with TrainingRun.open(settings.output, settings.steps, settings) as training_run:
            for step in range(3):
                training_run.step(step, {"loss": 3.0 - step}, 10, lr=0.1)
            training_run.save(3, layer, optimizer, best=0.5)
        other, other_optimizer = trained(2)

        with TrainingRun.open(settings.output, settings.steps, settings) as again:
            state = again.resume(other, other_optimizer)

        assert (state["step"], state["best"]) == (3, 0.5)
        assert again.history == [(0, 3.0), (1, 2.0), (2, 1.0)]
        assert again.series["train/loss"].points == again.history
        for name, value in layer.state_dict().items():
            assert torch.equal(other.state_dict()[name], value)
        kept, loaded = optimizer.state_dict()["state"], other_optimizer.state_dict()["state"]
        assert torch.equal(loaded[0]["exp_avg_sq"], kept[0]["exp_avg_sq"])
        assert "resuming" in capsys.readouterr().out

    def test_time_left(self, monkeypatch, settings):
        """Is what the steps to come will take, at the pace of those that this process took."""
        now = iter([0.0, *(60.0,) * 9])
        monkeypatch.setattr(training_run.time, "monotonic", lambda: next(now))
        with TrainingRun.open(
            settings.output, 5, settings, work=[9, 1, 1, 2, 2].__getitem__
        ) as later:
            for step in (1, 2):
                later.step(step, {"loss": 1.0}, 10, lr=0.1)

            assert later.seconds_left(3) == pytest.approx(60 * 4 / 2)

    def test_a_crash_leaves_the_old(self, monkeypatch, settings):
        """A crash in the middle of saving leaves what was saved before."""
        layer, optimizer = trained(1)

        def crash(state, path):
            path.write_bytes(b"half")
            raise OSError("disk full")

        with TrainingRun.open(settings.output, settings.steps, settings) as first:
            first.save(3, layer, optimizer)
            monkeypatch.setattr(training_run.torch, "save", crash)
            with pytest.raises(OSError, match="disk full"):
                first.save(4, layer, optimizer)

            assert first.resume(layer, optimizer)["step"] == 3

    def test_scalars(self, settings):
        """Losses by name, the learning rate and what else was measured go to TensorBoard."""
        with TrainingRun.open(settings.output, settings.steps, settings) as training_run:
            training_run.step(0, {"loss": 3.0, "mlm": 2.5}, 10, lr=0.25)
            training_run.scalar("held/mlm", 2.0, 0)

        events = EventAccumulator(str(training_run.output / "tensorboard"))
        events.Reload()
        tags = events.Tags()["scalars"]
        assert events.Scalars("train/tokens_per_second")[0].value > 0
        tags.remove("train/tokens_per_second")
        assert {tag: events.Scalars(tag)[0].value for tag in tags} == {
            "train/loss": 3.0,
            "train/mlm": 2.5,
            "train/lr": 0.25,
            "held/mlm": 2.0,
        }

    def test_progress_without_a_terminal(self, settings, capsys, monkeypatch):
        """Without a terminal there is a line every ten seconds, however long a step takes."""
        seconds = 0.0
        monkeypatch.setattr(training_run.time, "monotonic", lambda: seconds)
        settings.steps = 100
        with TrainingRun.open(settings.output, settings.steps, settings) as later:
            for step in range(50):
                seconds += 0.5
                later.step(step, {"loss": 2.0 if step < 20 else 0.02}, 10, lr=0.1)

        lines = capsys.readouterr().out.splitlines()
        assert ["step 20/100", "step 40/100"] == [line.split("  ")[0] for line in lines]
        assert lines[0] == "step 20/100  loss 2.000  20 tokens/s  1 min left"
        assert lines[1].startswith("step 40/100  loss 0.020")  # of recent steps

    def test_evaluations(self, settings, capsys):
        """An evaluation is a line that people can read, and its metrics are kept with the run."""
        with TrainingRun.open(settings.output, 470, settings) as later:
            scalars = {"dev/mood": 0.91333, "dev/mood/macro_f1": 0.88512}
            text = show_metrics({"accuracy": 0.91333, "macro_f1": 0.88512})
            later.evaluated(93, scalars, f"mood: {text} (best so far)")

        line = "step 94 of 470: mood: accuracy 0.9133, macro F1 0.8851 (best so far)\n"
        assert line == capsys.readouterr().out
        assert [(93, 0.91333)] == later.series["dev/mood"].points
        assert [(93, 0.88512)] == later.series["dev/mood/macro_f1"].points

    @pytest.mark.parametrize("fresh", [False, True])
    def test_stop(self, settings, capsys, fresh):
        """A stopped run has a picture of its loss, and reports which command resumes it."""
        settings.fresh = fresh
        with TrainingRun.open(settings.output, 5, settings) as stopped:
            stopped.step(0, {"loss": 1.0}, 10, lr=0.1)
            with pytest.raises(StoppedRun):
                stopped.stop(1, signal.SIGTERM)

        command = "the same command without --fresh" if fresh else "the same command"
        said = (
            f"SIGTERM: stopped after step 1 of 5 and saved to {settings.output}; {command} resumes"
        )
        assert said in capsys.readouterr().out
        assert imread(stopped.output / "loss.png").std() > 0

    def test_finish(self, settings):
        """A finished run has its metrics and a picture of its loss."""
        with TrainingRun.open(settings.output, settings.steps, settings) as training_run:
            for step in range(5):
                training_run.step(step, {"loss": 1 / (1 + step)}, 10, lr=0.1)
            training_run.finish({"mlm": 1.5})

        assert json.loads((training_run.output / "metrics.json").read_text()) == {"mlm": 1.5}
        assert imread(training_run.output / "loss.png").std() > 0
        assert training_run.tokens_per_second() > 0

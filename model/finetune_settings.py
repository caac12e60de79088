"""The settings of fine-tuning, in a module of their own, which imports no torch."""

import re
from pathlib import Path
from typing import Any, Self

from pydantic import model_validator

from model import config
from model.data import head_rows
from model.run_settings import TrainingSettings, check_choice, read_settings, setting
from service.core.data_files import sources
from service.core.manifest import INPUTS, NAME


class FinetuneSettings(TrainingSettings):
    """The settings of fine-tuning."""

    heads: dict[str, head_rows.HeadSettings] = setting(
        dict,
        "table of settings for each head, by its name; see below",
        '\'{"mood": {"task": "classification", "train": ["train.jsonl"], "dev": "dev.jsonl"}}\'',
    )
    data: str = setting("", "file to train one head on, instead of `heads`", "questions.csv")
    task: str = setting("classification", "task of the head that `data` trains", "classification")
    dev: str = setting(
        "", "file to evaluate the head of `data` on; if none, `dev_share`", "dev.csv"
    )
    only: str = setting("", "train this head only", "mood")
    keep_heads: bool = setting(False, "initialize heads from `init_from` where it has them", "true")
    tokenizer: str = setting("", "tokenizer.json of a new encoder", "runs/mini/tokenizer.json")
    max_length: int = setting(128, "tokens of the longest input", "128")
    equal_gradients: bool = setting(
        False, "scale each head's gradient of the encoder to the norm of its weight", "true"
    )
    anneal_sampling: bool = setting(
        False, "sample heads in proportion to their rows at first, all at the end", "true"
    )
    anneal: bool = setting(
        False, "for heads with a teacher: from its outputs to the labels over the steps", "true"
    )
    temperature: float = setting(1.0, "temperature of both models' logits", "2.0", gt=0)
    epochs: float | None = setting(
        None,
        "passes over the rows of the head with the longest epoch; by default 15 for up to 500 rows, 6 for up to "
        "2,000, 4 for up to 10,000, else 3",
        "4",
    )
    steps: int = setting(0, "optimizer steps; 0 for as many as `epochs` needs", "2000")
    gradient_accumulation: int = setting(
        1, "micro-batches of each head whose gradients one step adds up", "4", ge=1
    )
    lr: float | None = setting(
        None,
        "peak learning rate; by default 3e-4 for hidden states of up to 256 numbers, 2e-4 up to 384, 1e-4 up to 512, "
        "5e-5 up to 768, else 2e-5",
        "3e-4",
    )
    muon_lr: float = setting(0.01, "peak learning rate of muon", "0.01")
    head_lr: float | None = setting(None, "peak learning rate of heads; by default `lr`", "1e-3")
    warmup: float = setting(0.06, "share of the steps in which the learning rate rises", "0.1")
    beta2: float = setting(0.999, "decay of AdamW's second moment", "0.98")
    dropout: float | None = setting(None, "dropout rate; by default the checkpoint's", "0.1")
    attention_dropout: float | None = setting(None, "of attention weights, like `dropout`", "0.0")
    eval_every: int | None = setting(
        None, "steps between evaluations; by default a tenth of the run, at most 500", "100", ge=1
    )
    minutes: float = setting(
        0.0,
        "end the training after this time, with the best checkpoint so far; 0 for no limit",
        "10",
    )
    patience: int | None = setting(
        None,
        "evaluations without a better score after which the run ends, 0 for none; by default 7 where neither `epochs` "
        "nor `steps` is given, else 0",
        "3",
        ge=0,
    )
    dev_share: float = setting(
        0.1, "share of the rows held out of a head without a dev file", "0.2", ge=0, le=0.5
    )
    dev_limit: int = setting(
        0, "dev rows of each head that are evaluated during training, 0 for all", "400"
    )
    save_every: int = setting(500, "steps between saved states, to resume from", "200", ge=1)

    @model_validator(mode="before")
    @classmethod
    def _one_head(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Make the table of the head that `data` trains, and leave out heads that are not `only`."""
        heads, data = values.get("heads", {}), values.get("data")
        if data and heads:
            raise ValueError("data: the settings have heads, which name their own files in train")
        if values.get("dev") and not data:
            raise ValueError("dev: it belongs to data; a head has its own dev")
        if data:
            task = values.get("task", cls.model_fields["task"].default)
            heads = {task: {"task": task, "train": [data], "dev": values.get("dev", "")}}
        if only := values.get("only"):
            check_choice("only", only, heads)
            heads = {only: heads[only]}
        return {**values, "heads": heads}

    @model_validator(mode="after")
    def _fit(self) -> Self:
        self.check_start()
        folder = Path(self.output).name
        if self.data and not re.fullmatch(NAME, folder):
            raise ValueError(
                f"output: {folder!r} cannot be the name of a bundle, of letters and digits, and . _ - behind them:"
                " choose another, such as runs/questions, or make train NAME=questions"
            )
        for name, head in self.heads.items():
            check_head(name, head)
        self.check_heads()
        return self

    def check_heads(self) -> None:
        """Raise ValueError where there is no head to train."""
        if not self.heads:
            raise ValueError("missing: data, a file to train one head on, or heads")

    def check_start(self) -> None:
        """Raise ValueError where the settings name no initial encoder, or two."""
        if not (self.init_from or self.tokenizer):
            raise ValueError("missing: init_from, or the tokenizer of a fresh encoder")
        if self.init_from and self.tokenizer:
            raise ValueError("tokenizer: what it begins from has its own")
        if self.keep_heads and not self.init_from:
            raise ValueError("keep_heads: there is no checkpoint to begin from")
        check_choice("preset", self.preset, config.PRESETS)


def check_head(name: str, head: head_rows.HeadSettings) -> None:
    """Raise ValueError for a name that a bundle cannot have, and for a head that nothing trains."""
    if not re.fullmatch(NAME, name):
        raise ValueError(f"heads: {name!r} is not of letters and digits, and . _ - behind them")
    if name in INPUTS:
        raise ValueError(f"heads: {name!r} is the name of a graph's input: choose another name")
    if not (head.train or head.task == "embedding"):  # plain text can train an embedding
        raise ValueError(f"heads.{name}: no rows to train on")


def check_files(description: str) -> None:
    """Read the settings of the command line and the rows of their files, without what follows in training.

    Exits with one line for a wrong setting, and for a file that is absent or cannot be read.
    """
    for head in read_settings(FinetuneSettings, description).heads.values():
        for source in filter(None, (*head.train, head.dev)):
            try:
                if not sources.is_hub(source):
                    head_rows.read(source, head)
            except OSError as error:
                raise SystemExit(f"{source}: {error.strerror}") from None
            except ValueError as error:
                raise SystemExit(f"{error}") from None

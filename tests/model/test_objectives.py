"""Every family learns what it is pretrained with: better than by chance, and better than without looking around.

The texts are made so that looking around pays: a document keeps to one of four topics, its sentences go through four
stages in order, and a topic has five words of its own for each stage.
"""

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from model import pretrain, tokenizer
from model.families import FAMILIES

CPU = torch.device("cpu")
WORDS = 80  # in all
OF_ONE_KIND = 5  # of one topic and stage
TOPICS = 4


@pytest.fixture(scope="module")
def topics_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four hundred documents of a sentence of five words for each stage."""
    rng = random.Random(0)

    def document() -> Iterator[str]:
        topic = rng.choice("bdfg")
        for stage in "aeio":
            words = (topic + stage + rng.choice("klmnp") for _ in range(OF_ONE_KIND))
            yield " ".join(words).capitalize() + "."

    path = tmp_path_factory.mktemp("topics") / "topics.txt"
    path.write_text("\n\n".join(" ".join(document()) for _ in range(400)))
    return path


@pytest.fixture(scope="module")
def tokenizer_files(topics_file: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Every family's own kind of tokenizer."""
    folder = tmp_path_factory.mktemp("tokenizers")
    for name, family in FAMILIES.items():
        learnt = tokenizer.train([topics_file.read_text()], vocab_size=400, family=family)
        learnt.save(str(folder / f"{name}.json"))
    return {name: folder / f"{name}.json" for name in FAMILIES}


def settings(name: str, words: Path, text: Path, out: Path, **more: Any) -> pretrain.Settings:
    return pretrain.Settings(
        **{
            "output": str(out),
            "corpus": [str(text)],
            "tokenizer": str(words),
            "family": name,
            "preset": "tiny",
            "shape": {"num_attention_heads": 4},
            "phases": [[1, 32]],
            "batch_tokens": 1024,
            "steps": 2,
            "dropout": 0.0,
            "precision": "fp32",
            "cache": str(out.parent / "cache"),
            **more,
        }
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family(
    name: str, tokenizer_files: dict[str, Path], topics_file: Path, tmp_path: Path
) -> None:
    """A run of each leaves what transformers reads whole, and what another run goes on from."""
    arguments = (name, tokenizer_files[name], topics_file)
    pretrain.pretrain(settings(*arguments, tmp_path / "first"))
    kept = tmp_path / "first" / "checkpoint"

    auto = transformers.AutoModelForPreTraining
    if name == "modernbert":  # which it is not listed for
        auto = transformers.AutoModelForMaskedLM
    _, report = auto.from_pretrained(kept, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]

    further = {"init_from": str(kept), "lr": 1e-9, "steps": 1}
    pretrain.pretrain(settings(*arguments, tmp_path / "second", **further))
    first, second = (
        torch.load(tmp_path / run / "last.pt", weights_only=True)["model"]
        for run in ("first", "second")
    )
    torch.testing.assert_close(second, first, rtol=0, atol=1e-8)

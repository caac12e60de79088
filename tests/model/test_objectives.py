"""Every family learns what it is pretrained with: better than by chance, and better than without looking around.

The texts are made so that looking around pays: a document keeps to one of four topics, its sentences go through four
stages in order, and a topic has five words of its own for each stage.
"""

import functools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from tokenizers import Tokenizer
from torch import nn

from model import pretrain, tokenizer
from model.checkpoints import reader
from model.data import corpus
from model.data.pretraining_batches import PretrainingBatch, Sampler, Samples, Specials
from model.families.registry import FAMILIES, PRETRAINABLE
from model.heads import make_pretraining

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def topics_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four hundred documents of a sentence of five words for each stage."""
    rng = random.Random(0)

    def document() -> Iterator[str]:
        topic = rng.choice("bdfg")
        for stage in "aeio":
            words = (topic + stage + rng.choice("klmnp") for _ in range(5))
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


def settings(
    name: str, words: Path, text: Path, out: Path, **more: Any
) -> pretrain.PretrainSettings:
    return pretrain.PretrainSettings(
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


@pytest.mark.parametrize("name", PRETRAINABLE)
def test_every_family(name, tokenizer_files, topics_file, tmp_path):
    """A run of each leaves what transformers reads whole, and what another run goes on from."""
    arguments = (name, tokenizer_files[name], topics_file)
    pretrain.pretrain(settings(*arguments, tmp_path / "first"))
    kept = tmp_path / "first" / "checkpoint"

    auto = transformers.AutoModelForPreTraining
    if name in (
        "modernbert",
        "nomic_bert",
        "gte",
        "jina_embeddings_v3",
        "eurobert",
    ):  # which are not listed for it
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


SMALL = {
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "initializer_range": 0.1,  # 0.02 is for 768, and takes a model of 64 long to get away from
}
OWN: dict[str, dict[str, Any]] = {
    "roberta": {},
    "bert": {},
    "albert": {"embedding_size": 64},
    "electra": {"embedding_size": 64, "num_hidden_layers": 1},
}
STEPS = {"electra": 300}


@dataclass(frozen=True)
class Learnt:
    """A model of a family after a short run, held-out samples, and the loss of a prediction by frequency."""

    model: nn.Module
    held: list[Samples]
    specials: Specials
    words_alone: float

    @property
    def batches(self) -> list[PretrainingBatch]:
        return [samples.pack() for samples in self.held]


@pytest.fixture(scope="module")
def learn(
    tokenizer_files: dict[str, Path], topics_file: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], Learnt]:
    @functools.cache
    def run(name: str) -> Learnt:
        out, family, words = tmp_path_factory.mktemp(name), FAMILIES[name], tokenizer_files[name]
        recipe = {"batch_tokens": 512, "steps": STEPS.get(name, 200), "lr": 3e-3}
        shape = {**SMALL, **OWN[name]}
        pretrain.pretrain(settings(name, words, topics_file, out / "run", **recipe, shape=shape))
        kept, in_pairs = out / "run" / "checkpoint", family.pairs is not None
        model = make_pretraining(reader.read_config(kept), in_pairs)
        reader.init_pretraining(model, kept)

        text = corpus.load([topics_file], words, out / "cache")
        specials = Specials.of(Tokenizer.from_file(str(words)), family)
        sampler = Sampler(text, specials, family.pairs)
        drawn = {"seed": 99, "size": 32, "length": 32, "rate": 0.15}
        held = [sampler.samples(step=step, **drawn) for step in range(20)]
        shares = np.bincount(text.ids) / len(text.ids)
        shares = shares[shares > 0]
        return Learnt(model.eval(), held, specials, float(-(shares * np.log(shares)).sum()))

    return run


@pytest.mark.parametrize(
    ("name", "of_words_alone"),
    [("roberta", 0.85), ("bert", 0.85), ("albert", 0.95), ("electra", 0.96)],
)
def test_hidden_tokens(name, of_words_alone, learn):
    """Are guessed better than from how frequent words are; by ELECTRA's generator, which is small, a little better."""
    learnt = learn(name)
    found = pretrain.evaluate(learnt.model, learnt.held)
    assert found["mlm"] < of_words_alone * learnt.words_alone


@pytest.mark.parametrize("name", ["bert", "albert"])
def test_pairs(name, learn):
    """Whether a text is the next one (a quarter of the false ones keep to the topic), or two stand in order."""
    learnt = learn(name)
    with torch.no_grad():
        logits = [learnt.model(*batch.inputs)[1] for batch in learnt.batches]
    right = np.concatenate(
        [
            (one.argmax(1) == b.is_next).numpy()
            for one, b in zip(logits, learnt.batches, strict=True)
        ]
    )
    found = pretrain.evaluate(learnt.model, learnt.held)
    assert len(right) == 640
    assert right.mean() > 0.7  # ten standard deviations above a coin
    assert found[FAMILIES[name].pair_objective] < 0.8 * math.log(2)


def test_replaced_tokens(learn):
    """A replaced word has a higher score than an original one, and the loss is below a constant prediction's loss."""
    learnt = learn("electra")
    suspicion, replaced, of_words = [], [], []
    torch.manual_seed(0)
    with torch.no_grad():
        for batch in learnt.batches:
            given = (
                batch.inputs,
                batch.masked,
                learnt.model.generator(*batch.inputs, batch.masked),
            )
            seen = learnt.model.replace(*given)
            real = batch.inputs[0].index_copy(0, batch.masked, batch.labels)
            suspicion.append(learnt.model.discriminator(*seen))
            replaced.append(seen[0] != real)
            of_words.append(~torch.isin(real, torch.tensor([*learnt.specials.ids.values()])))
    words = torch.cat(of_words)
    scores, truth = torch.cat(suspicion)[words], torch.cat(replaced)[words]
    share = float(torch.cat(replaced).float().mean())
    blind = -share * math.log(share) - (1 - share) * math.log(1 - share)
    more_suspect = (scores[truth][:, None] > scores[~truth]).float().mean()
    assert truth.sum() > 1500
    assert more_suspect > 0.65  # by chance 0.5, give or take 0.007
    assert pretrain.evaluate(learnt.model, learnt.held)["rtd"] < 0.9 * blind

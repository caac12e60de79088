"""A checkpoint of every family, as transformers writes it, is exported and served, and answers as in transformers."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from export.__main__ import main as export
from model.families import FAMILIES
from model.tokenizer import train
from tests import samples
from tests.e2e.conftest import Server, serving
from tests.tiny import perturb

pytestmark = pytest.mark.e2e

LABELS = ("sea", "sky", "trade")
TEXTS = [samples.text(words, seed=words) for words in (1, 3, 9, 20, 50)]
PAIRS = [(TEXTS[2], TEXTS[3]), (TEXTS[0], TEXTS[4])]


def save(model_type: str, folder: Path) -> Path:
    """A text classifier of random weights with a tokenizer of its family's kind; returns the folder."""
    family = FAMILIES[model_type]
    tokenizer = train(samples.corpus(), vocab_size=500, family=family)
    shape = {
        "vocab_size": tokenizer.get_vocab_size(),
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 64,
        "max_position_embeddings": 258,
        "embedding_size": 16,
        "pad_token_id": tokenizer.token_to_id(family.special_tokens["pad"]),
        "id2label": dict(enumerate(LABELS)),
    }
    words = {family.config.words.get(name, name): value for name, value in shape.items()}
    config = transformers.AutoConfig.for_model(model_type, **words)
    torch.manual_seed(0)
    model = transformers.AutoModelForSequenceClassification.from_config(config)
    perturb(model, scale=0.2).save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        **{f"{kind}_token": token for kind, token in family.special_tokens.items()},
        model_input_names=["input_ids", "attention_mask"]
        + ["token_type_ids"] * (family.config().type_vocab_size > 1),
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Of every family."""
    folder = tmp_path_factory.mktemp("families")
    return {model_type: save(model_type, folder / model_type) for model_type in FAMILIES}


@pytest.fixture(scope="module")
def server(
    checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    """All of them in one service, at fp32."""
    bundles = tmp_path_factory.mktemp("bundles")
    for model_type, checkpoint in checkpoints.items():
        assert 0 == export([str(checkpoint), str(bundles / model_type)]), model_type
    with serving(*(bundles / model_type for model_type in FAMILIES), "--precision", "fp32") as it:
        yield it


def scores(folder: Path, texts: list[Any]) -> list[dict[str, float]]:
    """What transformers says of each text or pair."""
    model = transformers.AutoModelForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    told = []
    for text in texts:
        both = text if isinstance(text, tuple) else (text,)
        with torch.no_grad():
            logits = model(**tokenizer(*both, return_tensors="pt")).logits[0]
        told.append(dict(zip(LABELS, torch.softmax(logits, -1).tolist(), strict=True)))
    return told


@pytest.mark.parametrize("model_type", FAMILIES)
def test_answers_are_those_of_transformers(
    server: Server, checkpoints: dict[str, Path], model_type: str
) -> None:
    """The scores of every label, of texts and of pairs, to 1e-4."""
    expected = scores(checkpoints[model_type], [*TEXTS, *PAIRS])
    asked = {"model": model_type, "top_k": None}
    texts = server.answer("/classify", {"inputs": TEXTS, **asked})
    firsts, seconds = (list(side) for side in zip(*PAIRS, strict=True))
    pairs = server.answer("/classify", {"inputs": firsts, "text_pair": seconds, **asked})
    found = [
        {said["label"]: said["score"] for said in result}
        for result in texts["results"] + pairs["results"]
    ]
    assert len(expected) == len(found)
    for one, other in zip(expected, found, strict=True):
        assert other == pytest.approx(one, abs=1e-4)
    assert max(abs(found[0][label] - found[3][label]) for label in LABELS) > 1e-2

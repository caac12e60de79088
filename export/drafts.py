"""What an export of a checkpoint and one of an external graph share: the request, and the bundle before its checks."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import ValidationError

from model.checkpoints.head_config import declares_pooling
from service.core import bundle
from service.core.bundle import Bundle
from service.core.encode import Encoder
from service.core.goldens import Golden, save_golden
from service.core.manifest import (
    EMBEDDING_FIELDS,
    FORMAT_VERSION,
    SHARED_VERSION,
    Head,
    Manifest,
    PoolingMode,
    Task,
)
from service.core.session import RUNTIME

TOKENIZER = "tokenizer.json"
# Tokens. Attention on a CPU has a number for each head and pair of tokens: 4 GB in 16 heads.
DEFAULT_LENGTH = 8192
NO_VECTORS = {"matryoshka_dimensions"}  # a field of embedding heads that changes no vector
# Fields that the hash of an embedding space omits where a head does not use them.
OPTIONAL_FIELDS = (
    *("late_interaction", "sparse", "mask_token_id", "vocabulary_size", "calibration_temperature"),
    *("pair_prompt", "label_prompt"),
    *EMBEDDING_FIELDS,
)

Show = Callable[[str], None]


@dataclass(frozen=True)
class ExportRequest:
    """One export: the options of the command line.

    onnx: whether `checkpoint` is an external graph, which keeps its precision
    precisions: graphs to write, in the order of preference; empty for an external graph
    max_length: tokens, None for the checkpoint's own
    evaluations: a labelled file by head
    max_changed: the largest share of answers that int8 may change
    metadata: the content of the `--provenance` file
    memory: whether to measure the memory of the graphs
    dimensions: the numbers of dimensions that vectors may be cut to; empty for the checkpoint's own
    calibration: a file with a text per line, for int8 graphs and the ranges of quantized vectors
    encoder: a directory for the encoder in half precision, None to write none
    pooling: of vectors, where no file of the checkpoint declares it; "none" for a graph that pools
    outputs: names of an external graph's outputs, where they are not the usual ones
    states: whether the graphs give their last hidden states
    attention: whether to write a graph of the attention weights
    adapter: a folder of the checkpoint with an adapter to merge, None for none
    """

    checkpoint: str
    onnx: bool
    out: Path
    precisions: tuple[str, ...]
    name: str
    version: str
    max_length: int | None
    evaluations: Mapping[str, Path]
    max_changed: float
    metadata: Mapping[str, Any]
    replace: bool
    task: Task | None = None
    memory: bool = True
    dimensions: tuple[int, ...] = ()
    calibration: Path | None = None
    encoder: Path | None = None
    pooling: PoolingMode | Literal["none"] | None = None
    outputs: tuple[str, ...] = ()
    states: bool = False
    attention: bool = False
    adapter: str | None = None

    @property
    def default_precision(self) -> str:
        """The precision that `auto` serves on a CPU. Raises ValueError when no requested one runs there."""
        for precision in self.precisions:
            if precision != "fp16":
                return precision
        raise ValueError("--precision: fp16 runs on a GPU only; add fp32 or int8")


@dataclass(frozen=True)
class ExportReport:
    """The result of the checks: a line of text by graph, and the tolerance of the goldens by precision."""

    lines: dict[str, str]
    tolerance: dict[str, dict[str, Any]]


def describe_source(folder: Path, heads: Mapping[str, Head], encoder: Encoder) -> str:
    named = ", ".join(f"{name} ({head.task})" for name, head in heads.items())
    return f"{folder}: {named}; inputs of up to {encoder.max_length} tokens"


def show_assumptions(folder: Path, heads: Mapping[str, Head], assumed: bool, show: Show) -> None:
    """Show what no file of a checkpoint declares about its vectors.

    assumed: whether the pooling is the default
    """
    head = heads.get("embedding")
    if head is None:
        return
    if assumed:
        show(
            f"warning: {folder} has neither modules.json nor 1_Pooling: the pooling is assumed to be {head.pooling}; "
            "--pooling selects another one, such as cls for the bge and arctic models"
        )
    if head.pooling == "none":
        show("the graph pools its vectors itself, in a way that no file declares")
    if head.normalize and not declares_pooling(folder):
        show(
            "vectors are normalized; sentence-transformers does not normalize those of a model without modules.json: "
            '"normalize": false in a request, or in config.json before the export, returns them unchanged'
        )


def check_evaluations(request: ExportRequest, heads: Mapping[str, Head]) -> None:
    """Raise ValueError where --eval names a head that the checkpoint does not have, or that has no labelled data."""
    unknown = set(request.evaluations) - set(heads)
    if unknown:
        raise ValueError(f"--eval: the checkpoint has no head {', '.join(sorted(unknown))}")
    unlabelled = [n for n in request.evaluations if heads[n].per_mask or heads[n].per_pair]
    if unlabelled:
        task = heads[unlabelled[0]].task
        raise ValueError(f"--eval: {unlabelled[0]} is a {task} head, for which there is no metric")


def choose_dimensions(request: ExportRequest, heads: Mapping[str, Head]) -> dict[str, Head]:
    """Return the heads with the requested numbers of dimensions. Raises ValueError for ones that they cannot have.

    Raises ValueError, too, where there are options for embedding heads and no such head.
    """
    embedding = [name for name, head in heads.items() if head.task == "embedding"]
    ranges = request.calibration if "int8" not in request.precisions else None
    for flag, value in (("--dimensions", request.dimensions), ("--calibrate", ranges)):
        if value and not embedding:
            raise ValueError(f"{flag}: the checkpoint has no embedding head")
    fields = {"matryoshka_dimensions": tuple(sorted(request.dimensions))}
    return {
        name: Head.model_validate({**head.model_dump(), **fields})
        if request.dimensions and name in embedding
        else head
        for name, head in heads.items()
    }


def choose_max_length(request: ExportRequest, longest: int | None) -> int:
    """Return the requested length in tokens, else `longest` up to DEFAULT_LENGTH.

    Raises ValueError for none and for one out of range.

    longest: the checkpoint's own length; None if it has none
    """
    chosen = request.max_length or (longest and min(longest, DEFAULT_LENGTH))
    if chosen is None:
        raise ValueError("--max-length: the checkpoint does not say how long its inputs may be")
    if chosen < 8 or chosen > (longest or chosen):
        own = f" to the checkpoint's own {longest}" if longest else ""
        raise ValueError(f"--max-length: from 8{own}")
    return chosen


def draft_manifest(
    request: ExportRequest, encoder: Encoder, rows: int, golden: Golden, folder: Path, **fields: Any
) -> Bundle:
    """Return a bundle before its checks: with goldens, without tolerances and metrics.

    rows: of the embedding table
    fields: further fields of the manifest
    """
    save_golden(folder / "golden.npz", golden)
    precisions = dict.fromkeys(record["precision"] for record in fields["graphs"])
    tolerance: dict[str, dict[str, Any]] = {precision: {} for precision in precisions}
    metadata = request.metadata
    license_field = {key: metadata[key] for key in ("weights_license",) if key in metadata}
    manifest = Manifest.model_validate(
        {
            "format_version": SHARED_VERSION
            if request.states or request.attention
            else FORMAT_VERSION,
            "name": request.name,
            "version": request.version,
            "max_length": encoder.max_length,
            "vocabulary": {**bundle.describe_file(folder / TOKENIZER), "size": rows},
            "goldens": {**bundle.describe_file(folder / "golden.npz"), "tolerance": tolerance},
            "provenance": {**metadata.get("provenance", {}), "runtime": RUNTIME},
            **fields,
            **license_field,
        }
    )
    return Bundle(folder, manifest, "", golden)


def embedding_space(heads: Mapping[str, Head], *files: Path) -> str | None:
    """Return a name that changes whenever vectors stop being comparable; None without a head that gives vectors.

    files: weights and tokenizer, which it is a hash of, with the descriptions of the heads that give vectors
    """
    described = [
        head.model_dump_json(exclude=head.unused_fields(OPTIONAL_FIELDS) | NO_VECTORS)
        for head in heads.values()
        if head.gives_vectors
    ]
    if not described:
        return None
    parts = [bundle.hash_file(file) for file in files]
    return hashlib.sha256("".join([*parts, *described]).encode()).hexdigest()[:16]


def one_line(error: Exception) -> str:
    """Return an error's message in one line."""
    if isinstance(error, ValidationError):
        faults = error.errors(include_url=False)
        return "; ".join(f"{'.'.join(map(str, f['loc']))}: {f['msg']}" for f in faults)
    return " ".join(str(error).split())

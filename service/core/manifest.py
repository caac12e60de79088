"""`manifest.json` of a bundle as typed records, specified in `docs/reference/bundle.md`."""

import math
import re
from bisect import bisect_left
from collections.abc import Collection, Iterable, Mapping
from functools import partial
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    AfterValidator,
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    model_validator,
)

from service.core.cuda import CUDA
from service.core.device_kind import DeviceKind
from service.core.device_table import check_name

# Of manifests; the formats before it were not released.
FORMAT_VERSION = 5
SHARED_VERSION = 6  # of a bundle that gives hidden states, or whose heads read them

Task = Literal[
    "classification",
    "ner",
    "qa",
    "fill-mask",
    "embedding",
    "late-interaction",
    "sparse-embedding",
    "hidden-states",  # of the shared encoder, for the heads of other bundles
    "zero-shot-ner",
    "zero-shot-classification",
]
Precision = Literal["fp32", "fp16", "int8"]
GraphLayout = Literal["packed", "portable", "padded", "alone"]
ProblemType = Literal["single_label_classification", "multi_label_classification", "regression"]
PoolingMode = Literal["mean", "cls", "max", "lasttoken", "weightedmean", "mean_sqrt_len_tokens"]
# "none": the graph's vectors are pooled in a way that is not known.
Pooling = PoolingMode | Literal["none"] | tuple[PoolingMode, ...]
Activation = Literal["none", "tanh", "gelu"]  # after a dense layer of a head on a shared encoder
InputType = Literal["query", "document"]
OutputDtype = Literal["float", "int8", "uint8", "binary", "ubinary"]
# The smallest and the largest number of each dimension.
Ranges = tuple[tuple[float, ...], tuple[float, ...]]
PROMPT_NAMES = ("query", "document")  # prompts that sentence-transformers always has
FIRST_TEXT = "{first}"  # in a `pair_prompt`
EMBEDDING_FIELDS = (
    *("prompts", "default_prompt", "include_prompt", "input_type"),
    *("matryoshka_dimensions", "quantization_ranges"),
)
LABELS_BY_REQUEST: tuple[Task, ...] = ("zero-shot-ner", "zero-shot-classification")
# One output row per token.
PER_TOKEN: frozenset[str] = frozenset({"ner", "qa", "late-interaction", "hidden-states"})
# Tasks whose results are vectors.
VECTORS: frozenset[str] = frozenset({"embedding", "late-interaction", "sparse-embedding"})
# Tasks of heads that may read the hidden states of another bundle.
STATE_TASKS: frozenset[str] = frozenset({"classification", "ner", "qa", "embedding"})

WORD = "[A-Za-z0-9][A-Za-z0-9._-]{0,127}"
NAME = FILE = f"^{WORD}$"
MODEL_NAME = f"^{WORD}(/{WORD})?$"  # as on the hub: name, or owner/name
SHA256 = r"^[0-9a-f]{64}$"
# Names of the inputs of graphs of any layout; no head may have such a name.
ATTENTION = "attention"  # the output of an attention graph; no head may have this name
MOST_ATTENDED = 64  # tokens of a window whose attention weights a service computes
INPUTS = frozenset(
    {
        *("input_ids", "token_type_ids", "position_ids", "attention_mask", "lengths"),
        *("unpack", "pack", "token_offset", "cu_seqlens", "positions"),
        *("words", "labels", "pairs"),
    }
)


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class LateInteraction(_Record):
    """How a late-interaction head reads queries and documents, and how it compares them.

    query_prefix, document_prefix: text before each query and each document
    query_length, document_length: tokens of the longest window, special tokens included; None for the longest of all
    query_expansion: tokens that a shorter query is filled up to, with the token `expansion_token_id`; None for none
    attend_to_expansion: whether tokens attend to those that fill a query up
    skip_token_ids, query_skip_token_ids: tokens that have no vector in a document, or in a query
    similarity: the sum of the best scores of all query tokens, or their mean
    """

    query_prefix: str = ""
    document_prefix: str = ""
    query_length: int | None = Field(default=None, ge=3)
    document_length: int | None = Field(default=None, ge=3)
    query_expansion: int | None = Field(default=None, ge=1)
    expansion_token_id: int | None = Field(default=None, ge=0)
    attend_to_expansion: bool = False
    skip_token_ids: tuple[Annotated[int, Field(ge=0)], ...] = ()
    query_skip_token_ids: tuple[Annotated[int, Field(ge=0)], ...] = ()
    similarity: Literal["maxsim", "meanmaxsim"] = "maxsim"

    @model_validator(mode="after")
    def _complete(self) -> Self:
        floor, ceiling = self.query_expansion, self.query_length
        if floor is not None and self.expansion_token_id is None:
            raise ValueError("query_expansion needs expansion_token_id")
        if floor is not None and ceiling is not None and floor > ceiling:
            raise ValueError(f"query_expansion {floor} exceeds query_length {ceiling}")
        return self

    @property
    def hides_expansion(self) -> bool:
        """Whether queries have tokens that no token attends to."""
        return self.query_expansion is not None and not self.attend_to_expansion


class Sparse(_Record):
    """How the output of a sparse-embedding head makes the weights of tokens.

    source: "vocabulary" for a row of logits for each text, one for each token of the vocabulary, each the largest over
        the text's tokens (SPLADE); "tokens" for a weight for each token of the text (bge-m3)
    activation: how a logit becomes a weight, as in sentence-transformers' SpladePooling; None for weights
    skip_token_ids: tokens that have no weight
    """

    source: Literal["vocabulary", "tokens"] = "vocabulary"
    activation: Literal["relu", "log1p_relu"] | None = None
    skip_token_ids: tuple[Annotated[int, Field(ge=0)], ...] = ()


class LabelPrompt(_Record):
    """How a head reads the labels of a request (GLiNER, GLiClass), and what its scores mean.

    label_token_id, separator_id: tokens before each label, and after the last one
    text_first: whether the labels follow the text
    after_label_token: whether a label's vector is that of the token after `label_token_id`, and not of that token
    max_width: words of the longest span, each of whose widths has a score at its first word; None for scores of each
        word as the first, the last and any word of an entity
    """

    label_token_id: int = Field(ge=0)
    separator_id: int = Field(ge=0)
    after_label_token: bool = False
    text_first: bool = False
    max_width: int | None = Field(default=None, ge=1, le=64)


class Head(_Record):
    """The task and the decoding parameters of one output of the graph.

    mask_token_id: the id of the token that a fill-mask head fills in
    vocabulary_size: the logits of a fill-mask head for each mask token, or the tokens that a sparse head may weigh
    pair_prompt: of a classification head: the text before the second text of a pair, in which FIRST_TEXT stands for the
        first; None for the tokenizer's template of pairs
    calibration_temperature: what logits of a classification head are divided by to calibrate its scores (Guo et al.
        2017); None where it was not fitted
    """

    task: Task
    labels: tuple[str, ...] = ()
    problem_type: ProblemType | None = None
    pooling: Pooling | None = None
    dimensions: int | None = Field(default=None, ge=1)
    normalize: bool = True
    null_threshold: float = 0.0
    max_answer_tokens: int = Field(default=30, ge=1)
    max_query_tokens: int = Field(default=64, ge=1)
    mask_token_id: int | None = Field(default=None, ge=0)
    vocabulary_size: int | None = Field(default=None, ge=1)
    late_interaction: LateInteraction | None = None
    sparse: Sparse | None = None
    label_prompt: LabelPrompt | None = None
    demo: bool = False
    calibration_temperature: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    pair_prompt: str | None = None
    # Of embedding heads:
    prompts: dict[str, str] = {}
    default_prompt: str | None = None
    include_prompt: bool = True
    input_type: InputType | None = None
    matryoshka_dimensions: tuple[Annotated[int, Field(ge=1)], ...] = ()
    quantization_ranges: dict[Annotated[int, Field(ge=1)], Ranges] = {}

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.task in ("classification", "ner") and not self.labels:
            raise ValueError(f"a {self.task} head needs labels")
        if self.task == "embedding":
            self._check_embedding()
        elif used := {*EMBEDDING_FIELDS} - self.unused_fields(EMBEDDING_FIELDS):
            raise ValueError(f"{min(used)} is for embedding heads only")
        if self.calibration_temperature is not None and not self.has_classes:
            raise ValueError("calibration_temperature is for classification heads with labels only")
        if self.pair_prompt is not None and self.task != "classification":
            raise ValueError("pair_prompt is for classification heads only")
        if FIRST_TEXT not in (self.pair_prompt or FIRST_TEXT):
            raise ValueError(f"pair_prompt: {FIRST_TEXT} is missing, where the first text stands")
        if self.task == "late-interaction" and None in (self.late_interaction, self.dimensions):
            raise ValueError("a late-interaction head needs its dimensions and late_interaction")
        if self.task == "hidden-states" and self.dimensions is None:
            raise ValueError("a hidden-states head needs its dimensions")
        if self.late_interaction is not None and self.task != "late-interaction":
            raise ValueError(f"late_interaction: not for a head of the task {self.task}")
        if self.task == "sparse-embedding" and None in (self.sparse, self.vocabulary_size):
            raise ValueError("a sparse-embedding head needs sparse and its vocabulary_size")
        if self.sparse is not None and self.task != "sparse-embedding":
            raise ValueError(f"sparse: not for a head of the task {self.task}")
        if (self.label_prompt is None) == (self.task in LABELS_BY_REQUEST):
            tasks = " or ".join(LABELS_BY_REQUEST)
            raise ValueError(f"label_prompt: a {tasks} head needs it, and no other head has it")
        if self.per_mask and (self.mask_token_id is None or self.vocabulary_size is None):
            raise ValueError("a fill-mask head needs its mask_token_id and its vocabulary_size")
        return self

    def _check_embedding(self) -> None:
        if not self.pooling or self.dimensions is None:
            raise ValueError("an embedding head needs its pooling and its dimensions")
        if self.default_prompt is not None and self.default_prompt not in self.named_prompts:
            known = ", ".join(self.named_prompts)
            raise ValueError(f"default_prompt {self.default_prompt!r} is none of prompts: {known}")
        if not self.include_prompt and any(self.prompts.values()):
            raise ValueError("prompts: must have no text where include_prompt is false")
        for field in ("matryoshka_dimensions", "quantization_ranges"):
            largest = max(getattr(self, field), default=1)
            if largest > self.dimensions:
                raise ValueError(f"{field}: {largest} exceeds dimensions {self.dimensions}")
        for count, ranges in self.quantization_ranges.items():
            if {len(row) for row in ranges} != {count}:
                raise ValueError(
                    f"quantization_ranges.{count}: must have 2 lists of {count} numbers"
                )
            if not all(
                math.isfinite(low) and low <= high < math.inf
                for low, high in zip(*ranges, strict=True)
            ):
                raise ValueError(
                    f"quantization_ranges.{count}: must be finite, smallest numbers first"
                )

    def unused_fields(self, names: Iterable[str]) -> set[str]:
        """Return which of these fields have their default value."""
        return {
            name for name in names if getattr(self, name) == type(self).model_fields[name].default
        }

    @property
    def has_classes(self) -> bool:
        """Whether the outputs are logits of labels of a text, which scores can be calibrated for."""
        return self.task == "classification" and self.problem_type != "regression"

    def before_second(self, first: str) -> str:
        """Return the text before the second text of a pair; empty for a head without a `pair_prompt`."""
        return (self.pair_prompt or "").replace(FIRST_TEXT, first)

    def join(self, first: str, second: str) -> str:
        """Return the text of a pair, for a head with a `pair_prompt`."""
        return self.before_second(first) + second

    @property
    def pooling_modes(self) -> tuple[PoolingMode, ...]:
        """The ways to pool, whose vectors are concatenated in this order; none where they are not known."""
        if isinstance(self.pooling, tuple):
            return self.pooling
        return () if self.pooling is None or self.pooling == "none" else (self.pooling,)

    @property
    def named_prompts(self) -> dict[str, str]:
        """The prompts by name, with those that always exist (PROMPT_NAMES), which are empty by default."""
        return {**dict.fromkeys(PROMPT_NAMES, ""), **self.prompts}

    @property
    def default_prompt_text(self) -> str:
        """The text before each input where a request sets no prompt; empty for none."""
        return self.named_prompts[self.default_prompt] if self.default_prompt else ""

    def reads_as_is(self, *input_types: InputType | None) -> bool:
        """Return whether the head adds nothing to texts of these types (None: no type), and has no length."""
        late, prompts = self.late_interaction or LateInteraction(), self.named_prompts
        query = (late.query_prefix, late.query_length, late.query_expansion)
        document = (late.document_prefix, late.document_length)
        changes = {
            None: (self.default_prompt_text, *document),
            "query": (prompts["query"], *query),
            "document": (prompts["document"], *document),
        }
        return not any(any(changes[input_type]) for input_type in input_types)

    @property
    def output_dtypes(self) -> list[OutputDtype]:
        """The types of vectors that an embedding head has; the integers of 8 bits need ranges."""
        ranged: set[OutputDtype] = {"int8", "uint8"}
        return [t for t in get_args(OutputDtype) if self.quantization_ranges or t not in ranged]

    @property
    def width(self) -> int:
        """Numbers per row of the head's output."""
        if self.sparse is not None and self.sparse.source == "tokens":
            return 1
        if self.label_prompt is not None:
            return 1 if self.scores_texts else self.label_prompt.max_width or 3
        sizes = (len(self.labels), self.dimensions, self.vocabulary_size)
        return 2 if self.task == "qa" else next(filter(None, sizes), 0)

    @property
    def per_sequence(self) -> bool:
        """Whether the output has one row for each sequence, `[B, ...]`."""
        return not (self.per_token or self.per_pair or self.mask_token_id is not None)

    @property
    def per_token(self) -> bool:
        return self.task in PER_TOKEN or (
            self.sparse is not None and self.sparse.source == "tokens"
        )

    @property
    def per_mask(self) -> bool:
        """Whether the output has a row for each mask token, see `packing.mask_positions`."""
        return self.task == "fill-mask"

    @property
    def per_pair(self) -> bool:
        """Whether the output has a row for each word with each label, see `packing.word_label_pairs`."""
        return self.label_prompt is not None

    @property
    def scores_texts(self) -> bool:
        """Whether the labels of a request have a score for a whole text, which then has one word."""
        return self.task == "zero-shot-classification"

    @property
    def gives_vectors(self) -> bool:
        return self.task in VECTORS

    @property
    def gives_numbers(self) -> bool:
        """Whether the output is vectors or hidden states, which decide nothing."""
        return self.gives_vectors or self.task == "hidden-states"


class File(_Record):
    file: str = Field(pattern=FILE)
    sha256: str = Field(pattern=SHA256)


class Memory(_Record):
    """The memory of one session of a graph on a CPU, as `export` measured it, in bytes."""

    opened: int = Field(ge=0)  # what the session adds to a process that has loaded the runtime
    # What a batch of the longest texts adds at its peak, by its tokens.
    batches: dict[Annotated[int, Field(ge=1)], Annotated[int, Field(ge=0)]] = Field(min_length=1)

    def of_batch(self, tokens: int) -> int:
        """Return the bytes that a batch of this many tokens of the longest texts adds at its peak.

        The value is interpolated linearly between two measured batches, and extrapolated from the two nearest ones.
        """
        sizes = sorted(self.batches)
        if len(sizes) == 1:
            return -(-self.batches[sizes[0]] * tokens // sizes[0])
        place = min(max(bisect_left(sizes, tokens), 1), len(sizes) - 1)
        low, high = sizes[place - 1 : place + 1]
        slope = (self.batches[high] - self.batches[low]) / (high - low)
        return max(math.ceil(self.batches[low] + slope * (tokens - low)), 0)


class Graph(File):
    """One ONNX graph; `weights` is the external weight file that it shares with others, if any."""

    precision: Precision
    layout: GraphLayout
    provider: Annotated[str, AfterValidator(partial(check_name, other="any"))]
    opset: int
    weights: File | None = None
    # Whether attention adds a bias to its scores; None where the manifest does not state it.
    attention_bias: bool | None = None
    memory: Memory | None = None  # None where the manifest does not state it


class AttentionGraph(Graph):
    """A portable graph that computes the attention weights of every layer and no head.

    layers, heads: of the encoder
    """

    layers: int = Field(ge=1)
    heads: int = Field(ge=1)


class Layers(_Record):
    """How a head computes its output from the encoder's last hidden states: pooling, then dense layers.

    pooling: of the states of a text, several ways concatenated; empty for a head that has a row for each token
    activations: of each dense layer
    """

    pooling: tuple[Literal["mean", "cls", "max"], ...] = ()
    activations: tuple[Activation, ...] = Field(min_length=1)


class SharedEncoder(_Record):
    """The bundle whose hidden states the heads of this bundle read.

    id: `name@version`, for people
    sha256: of its manifest
    weights: the file of the heads' dense layers
    layers: by head
    """

    id: str
    sha256: str = Field(pattern=SHA256)
    weights: File
    layers: dict[str, Layers]


class Vocabulary(File):
    """The tokenizer's file and the number of rows in the embedding table."""

    size: int = Field(ge=1)


class Goldens(File):
    """Inputs with the outputs of PyTorch, or of an external ONNX model."""

    # Per precision, the largest difference (`max_difference`, see `deviation`) or the smallest cosine per head
    # (`min_cosine`) that the served outputs may have from these outputs.
    tolerance: dict[Precision, "Tolerance"]


class Tolerance(_Record):
    max_difference: float | None = None
    min_cosine: dict[str, float] = {}


class DataSet(_Record):
    name: str
    origin: str
    terms: str
    commercial_use: Literal["yes", "no", "unclear"]
    used_for: str = ""


class Provenance(_Record):
    datasets: tuple[DataSet, ...] = ()
    teachers: tuple[str, ...] = ()  # models that it was distilled from
    recipe: str = ""
    commit: str = ""
    checkpoint: str = ""  # on the hub, with the commit from which it was read: NAME@COMMIT
    seed: int | None = None
    runtime: str = ""  # the runtime that verified the goldens at export

    @property
    def commercial_use(self) -> str:
        """Whether the terms of all data sets allow commercial use: "yes", or the worst value with its data sets."""
        return _commercial_use(self.datasets)

    def commercial_use_by_head(self, heads: Collection[str]) -> dict[str, str]:
        """Summarize, for each head, the terms of the data sets that it was trained on, as `commercial_use` does.

        A data set belongs to the heads that its `used_for` names, and to all heads if it names none.
        """
        words = [set(re.findall(r"\w(?:[\w.-]*\w)?", data.used_for)) for data in self.datasets]
        return {
            head: _commercial_use(
                data
                for data, named in zip(self.datasets, words, strict=True)
                if head in named or not named & set(heads)
            )
            for head in heads
        }


def _commercial_use(datasets: Iterable[DataSet]) -> str:
    known = list(datasets)
    for answer in ("no", "unclear"):
        if names := [data.name for data in known if data.commercial_use == answer]:
            return f"{answer}: {'; '.join(names)}"
    return "yes" if known else "unclear: no data set is named"


class Manifest(_Record):
    """`manifest.json`. The order of `heads` matters: the first head of a task is its default."""

    format_version: Literal[5, 6]
    name: str = Field(pattern=MODEL_NAME)
    version: str = Field(pattern=NAME)
    heads: dict[Annotated[str, StringConstraints(pattern=NAME)], Head] = Field(min_length=1)
    default_precision: Precision
    max_length: int = Field(ge=8, le=1_000_000)
    vocabulary: Vocabulary
    graphs: tuple[Graph, ...] = ()  # none with `encoder`, else at least one
    attention: AttentionGraph | None = None
    encoder: SharedEncoder | None = None
    goldens: Goldens
    metrics: dict[str, dict[Precision, dict[str, float]]] = {}
    embedding_space: str | None = None
    provenance: Provenance = Provenance()
    weights_license: str = "unknown"

    @model_validator(mode="before")
    @classmethod
    def _has_this_format(cls, fields: Any) -> Any:
        if isinstance(fields, dict) and fields.get("format_version", FORMAT_VERSION) not in (
            FORMAT_VERSION,
            SHARED_VERSION,
        ):
            found = fields["format_version"]
            raise ValueError(
                f"format_version {found} is neither {FORMAT_VERSION} nor {SHARED_VERSION}: export the bundle again"
            )
        return fields

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if (self.encoder is None) is not bool(self.graphs):
            raise ValueError("needs either graphs or the encoder that its heads share")
        newer = self.encoder or self.states or self.attention
        if newer and self.format_version < SHARED_VERSION:
            raise ValueError(
                f"hidden states, their heads and attention need format_version {SHARED_VERSION}"
            )
        if ATTENTION in self.heads:
            raise ValueError(f"a head cannot be named {ATTENTION}: that is a graph's output")
        if self.encoder is not None:
            self._check_layers(self.encoder.layers)
        if self.default_precision not in self.precisions:
            raise ValueError(f"default_precision {self.default_precision} has no graph")
        for name, head in self.heads.items():
            if head.late_interaction is not None:
                self._check_late_interaction(name, head.late_interaction)
            if head.label_prompt is not None:
                self._check_label_prompt(name, head.label_prompt)
        missing = set(self.precisions) - set(self.goldens.tolerance)
        if missing:
            raise ValueError(f"no golden tolerance for {sorted(missing)}")
        self._check_masks()
        return self

    def _check_layers(self, layers: Mapping[str, Layers]) -> None:
        for name, head in self.heads.items():
            if head.task not in STATE_TASKS:
                tasks = ", ".join(sorted(STATE_TASKS))
                raise ValueError(
                    f"{name}: a {head.task} head cannot read the hidden states of another bundle; heads of these tasks"
                    f" can: {tasks}"
                )
            if name not in layers or bool(layers[name].pooling) is head.per_token:
                per = "each token" if head.per_token else "pooled tokens"
                raise ValueError(f"{name}: needs encoder.layers, with an output for {per}")

    def _check_masks(self) -> None:
        rows = self.vocabulary.size
        for name, head in self.heads.items():
            if head.per_mask and head.mask_token_id != self.mask_token_id:
                raise ValueError(f"{name}: mask_token_id differs from that of another head")
            if head.per_mask and head.vocabulary_size != rows:
                raise ValueError(f"{name}: vocabulary_size is not that of the vocabulary, {rows}")
            if head.mask_token_id is not None and head.mask_token_id >= rows:
                raise ValueError(f"{name}: mask_token_id must be below vocabulary_size, {rows}")

    @property
    def mask_token_id(self) -> int | None:
        """The mask token's id of all fill-mask heads; None without such a head."""
        return find_mask_token_id(self.heads)

    def _check_label_prompt(self, name: str, prompt: LabelPrompt) -> None:
        rows = self.vocabulary.size
        if max(prompt.label_token_id, prompt.separator_id) >= rows:
            raise ValueError(f"{name}: a token id is not below the size of the vocabulary, {rows}")
        if len(self.heads) > 1:  # token types mark words and labels, and are no segments
            raise ValueError(
                f"{name}: a {self.heads[name].task} head must be the only one of its bundle"
            )

    def _check_late_interaction(self, name: str, late: LateInteraction) -> None:
        for field in ("query_length", "document_length", "query_expansion"):
            length = getattr(late, field)
            if length is not None and length > self.max_length:
                raise ValueError(f"{name}: {field} {length} exceeds max_length {self.max_length}")
        rows = self.vocabulary.size
        if any(i >= rows for i in (late.expansion_token_id or 0, *late.skip_token_ids)):
            raise ValueError(f"{name}: a token id is not below the size of the vocabulary, {rows}")
        for graph in self.graphs:
            if late.hides_expansion and graph.provider == CUDA.name:
                reason = "its attention cannot hide the expansion of queries from other tokens"
                raise ValueError(f"{name} cannot run on the graph {graph.file} for CUDA: {reason}")

    @property
    def id(self) -> str:
        return f"{self.name}@{self.version}"

    @property
    def precisions(self) -> tuple[Precision, ...]:
        """The precisions of the graphs, or the precisions of the encoder for which a head bundle has goldens."""
        of_graphs = dict.fromkeys(graph.precision for graph in self.graphs)
        return tuple(of_graphs or self.goldens.tolerance)

    @property
    def states(self) -> str | None:
        """The name of the head that gives the last hidden states; None without one."""
        return next((n for n, head in self.heads.items() if head.task == "hidden-states"), None)

    def graphs_for(self, kind: DeviceKind, precision: str) -> list[Graph]:
        """Return the graphs for a kind of device, in the order in which they are tried, packed ones first.

        The precision `auto` selects the kind's precisions that the bundle has, or else the default precision.
        """
        reduced = kind.reduced.get(precision)
        wanted = [reduced.graphs if reduced else precision]
        if precision == "auto":
            wanted = [p for p in kind.precisions if p in self.precisions]
            wanted = wanted or [self.default_precision]
        fits = [g for g in self.graphs if g.precision in wanted and g.provider in kind.graphs]
        return sorted(fits, key=lambda g: (wanted.index(g.precision), g.layout != "packed"))

    @property
    def all_graphs(self) -> tuple[Graph, ...]:
        """The graphs that compute heads, and the graph that computes attention weights, if there is one."""
        return (*self.graphs, self.attention) if self.attention else self.graphs

    def files(self) -> dict[str, str]:
        """Return the SHA-256 of every file that the manifest lists, by file name."""
        weights = [graph.weights for graph in self.all_graphs if graph.weights]
        parts: list[File] = [self.goldens, *self.all_graphs, *weights]
        # A head bundle has no tokenizer of its own.
        parts.append(self.encoder.weights if self.encoder else self.vocabulary)
        return {part.file: part.sha256 for part in parts}


def find_mask_token_id(heads: Mapping[str, Head]) -> int | None:
    """Return the mask token's id of the first fill-mask head; None without such a head."""
    return next((head.mask_token_id for head in heads.values() if head.per_mask), None)

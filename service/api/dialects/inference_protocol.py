"""Requests and answers of the Open Inference Protocol, whether they come over HTTP or over gRPC.

A model of the protocol is a bundle, and each of its heads is an output. A request has texts, pairs of texts, questions
with contexts, or token ids as its inputs. One pass of the encoder answers all outputs of texts or of token ids.
"""

import itertools
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property, partial
from typing import Annotated, Any, NamedTuple, Self

import numpy as np
import orjson
from numpy.typing import NDArray
from pydantic import Field, SkipValidation, model_validator

from service.api.native_routes import answer, each, entity, filled_masks, numbers, sparse_vector
from service.api.schemas import Request, numbered
from service.core.decode import LabelScore
from service.core.manifest import Head, Task
from service.core.packing import Ints
from service.engines.engine import Engine, EngineTask, Reply
from service.errors import InvalidInput, TooLarge, UnknownHead
from service.tasks.analysis import Analysis
from service.tasks.classification import Classification
from service.tasks.embedding import Embedding
from service.tasks.fields import (
    AtLeastOne,
    AtLeastZero,
    ServedName,
    Strict,
    TruncateField,
    UpToHundred,
)
from service.tasks.late_interaction import TokenEmbedding
from service.tasks.mask_filling import MaskFilling
from service.tasks.question_answering import QuestionAnswering
from service.tasks.sparse_embedding import SparseEmbedding
from service.tasks.token_sequences import OF_IDS, TokenSequences

BYTES, FLOATS = "BYTES", "FP32"
INTEGERS: Mapping[str, str] = {"INT64": "<i8", "INT32": "<i4", "UINT64": "<u8", "UINT32": "<u4"}
TEXT, PAIR, QUESTION, CONTEXT = "text", "text_pair", "question", "context"
IDS, LENGTHS, BOUNDS = "input_ids", "lengths", "cu_seqlens"
# The inputs that a request may have together, and the datatypes of each input.
COMBINATIONS: Sequence[tuple[str, ...]] = (
    (TEXT,),
    (TEXT, PAIR),
    (QUESTION, CONTEXT),
    (IDS, LENGTHS),
    (IDS, BOUNDS),
)
NUMERIC = (IDS, LENGTHS, BOUNDS)
SEPARATE = frozenset(
    {"qa", "fill-mask", "sparse-embedding", "late-interaction"}
)  # tasks whose head is the only output of its request
LENGTH = struct.Struct("<I")  # before each element of BYTES in binary data


class InferInputParameters(Strict):
    binary_data_size: AtLeastZero | None = Field(
        None, description="bytes of the tensor after the JSON, in place of `data`"
    )


class InferInput(Strict):
    """A tensor of a request. BYTES are texts in UTF-8."""

    name: ServedName = Field(description="text, text_pair, question, context or token ids")
    shape: Annotated[list[AtLeastZero], Field(min_length=1, max_length=2)] = Field(
        description="the number of elements, `[n]` or `[n, 1]`"
    )
    datatype: ServedName = Field(description="BYTES; of token ids INT64, INT32, UINT64 or UINT32")
    parameters: InferInputParameters | None = None
    # Bytes are binary data: JSON has none.
    data: SkipValidation[list[Any] | None] = Field(
        None, description="the elements, in row-major order, flat or nested"
    )


class InferOutputParameters(Strict):
    binary_data: bool | None = Field(None, description="whether the tensor is after the JSON")
    classification: AtLeastOne | None = Field(
        None, description="this many best labels as texts `score:index:label`, in place of scores"
    )


class InferOutput(Strict):
    name: ServedName = Field(description="a head")
    parameters: InferOutputParameters | None = None


class InferParameters(Strict):
    binary_data_output: bool | None = Field(
        None, description="whether the outputs that do not specify it are after the JSON"
    )
    timeout: AtLeastOne | None = Field(None, description="microseconds until the deadline")
    truncate: TruncateField | None = Field(
        None,
        description="read a long text in windows (pairs: cut it), cut it (true) or refuse it (false)",
    )
    top_k: UpToHundred | None = Field(
        None, description="answers to a question, or tokens for a mask token"
    )


class InferRequest(Request):
    task = "infer"

    id: Annotated[str, Field(max_length=256)] | None = Field(None, description="repeated")
    inputs: Annotated[list[InferInput], Field(min_length=1)]
    outputs: list[InferOutput] | None = Field(
        None, description="heads; all that read the inputs when absent"
    )
    parameters: InferParameters | None = None

    @model_validator(mode="after")
    def _readable(self) -> Self:
        _ = self.columns
        return self

    @property
    def given(self) -> InferParameters:
        return self.parameters or InferParameters()

    @cached_property
    def columns(self) -> Mapping[str, Any]:
        """The inputs by name: lists of texts, and the token ids of each sequence. Raises InvalidInput."""
        return read_columns(self.inputs)

    @property
    def wanted_heads(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(output.name for output in self.outputs or ()))

    @property
    def size(self) -> int:
        return len(next(iter(self.columns.values())))

    @property
    def place(self) -> str:
        return next(iter(self.columns)) + "[{}]"

    def texts(self) -> Iterator[tuple[str, str]]:
        for name, column in self.columns.items():
            if name != IDS:
                yield from numbered(name, column)


def check_sizes(body: object, most: int) -> None:
    """Check how many inputs a body claims, before these are read. Raises TooLarge. most: inputs of a request"""
    inputs = body.get("inputs") if isinstance(body, dict) else None
    for tensor in inputs if isinstance(inputs, list) else ():
        name, shape = (
            (tensor.get("name"), tensor.get("shape")) if isinstance(tensor, dict) else (0, 0)
        )
        size = shape[0] if isinstance(shape, list) and shape else 0
        if name != IDS and type(size) is int and size > most + (name == BOUNDS):
            reason = f"has {size} elements; a request may have {most}"
            raise TooLarge(f"{str(name)[:64]}: {reason}", param=str(name)[:64])


def read_columns(inputs: Sequence[InferInput]) -> dict[str, Any]:
    """Return the inputs by name, in the order of `COMBINATIONS`. Raises InvalidInput."""
    tensors = {tensor.name: tensor for tensor in inputs}
    names = next((one for one in COMBINATIONS if {*one} == tensors.keys()), None)
    if names is None or len(tensors) < len(inputs):
        has = ", ".join(tensor.name[:64] for tensor in inputs[:8])
        allowed = "; ".join(" with ".join(one) for one in COMBINATIONS)
        raise InvalidInput(
            f"inputs: {has} cannot be read together; allowed: {allowed}", param="inputs"
        )
    columns = {name: read_tensor(tensors[name]) for name in names}
    if IDS in names:
        return {IDS: split_ids(columns[IDS], names[1], columns[names[1]])}
    sizes = {len(column) for column in columns.values()}
    if len(sizes) > 1:
        raise InvalidInput(f"{' and '.join(names)} must have the same shape", param=names[1])
    for name in (QUESTION, CONTEXT) if QUESTION in names else ():
        for place, text in numbered(name, columns[name]):
            if not text.strip():
                raise InvalidInput(f"{place}: must not be empty", param=place)
    return columns


def read_tensor(tensor: InferInput) -> Any:
    """Return texts, or numbers `[n]` int64. Raises InvalidInput."""
    count = math.prod(tensor.shape)
    if tensor.shape[1:] not in ([], [1]) or not count:
        raise InvalidInput(
            f"{tensor.name}: the shape must be [n] or [n, 1], not {tensor.shape}", param=tensor.name
        )
    is_numeric = tensor.name in NUMERIC
    allowed = [*INTEGERS] if is_numeric else [BYTES]
    if tensor.datatype not in allowed:
        reason = f"the datatype must be {' or '.join(allowed)}, not {tensor.datatype[:64]}"
        raise InvalidInput(f"{tensor.name}: {reason}", param=tensor.name)
    data: object = tensor.data
    if data is None:
        raise InvalidInput(f"{tensor.name}: has no data", param=tensor.name)
    read = read_integers if is_numeric else read_texts
    found = read(data, tensor)
    if len(found) != count:
        reason = f"has {len(found)} elements, its shape {count}"
        raise InvalidInput(f"{tensor.name}: {reason}", param=tensor.name)
    return found


def read_integers(data: object, tensor: InferInput) -> Ints:
    if isinstance(data, bytes):
        dtype = np.dtype(INTEGERS[tensor.datatype])
        if len(data) % dtype.itemsize:
            raise InvalidInput(
                f"{tensor.name}: {len(data)} bytes are not a number of {tensor.datatype}",
                param=tensor.name,
            )
        return np.frombuffer(data, dtype).astype(np.int64)
    found = flatten(data)
    if not all(type(one) is int and abs(one) < 2**31 for one in found):
        raise InvalidInput(f"{tensor.name}: the data must be integers", param=tensor.name)
    return np.array(found, np.int64)


def read_texts(data: object, tensor: InferInput) -> list[str]:
    if isinstance(data, bytes):
        try:
            found = itertools.islice(split_bytes(data), tensor.shape[0] + 1)
            return [element.decode() for element in found]
        except ValueError as error:
            reason = "not UTF-8" if isinstance(error, UnicodeDecodeError) else str(error)
            raise InvalidInput(f"{tensor.name}: {reason}", param=tensor.name) from None
    elements = flatten(data)
    try:
        return [one.decode() if isinstance(one, bytes) else check_text(one) for one in elements]
    except (UnicodeDecodeError, TypeError):
        raise InvalidInput(f"{tensor.name}: the data must be texts", param=tensor.name) from None


def check_text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError
    return value


def flatten(data: object) -> list[Any]:
    """Return the elements of a list, or of a list of lists."""
    if not isinstance(data, list):
        return [None]
    nested = (one if isinstance(one, list) else [one] for one in data)
    return [*itertools.chain.from_iterable(nested)]


def split_bytes(data: bytes) -> Iterator[bytes]:
    """Yield the elements of a BYTES tensor in binary form. Raises ValueError for lengths that do not fit."""
    start = 0
    while start < len(data):
        if start + LENGTH.size > len(data):
            raise ValueError("ends within a length")
        (size,) = LENGTH.unpack_from(data, start)
        start += LENGTH.size
        if start + size > len(data):
            raise ValueError(f"an element of {size} bytes ends after the data")
        yield data[start : start + size]
        start += size


def split_ids(ids: Ints, name: str, numbers: Ints) -> list[Ints]:
    """Return the ids of each sequence. numbers: `lengths` `[B]` or `cu_seqlens` `[B + 1]`; raises InvalidInput"""
    bounds = np.append(0, np.cumsum(numbers)) if name == LENGTHS else numbers
    steps = np.diff(bounds)
    if bounds[0] != 0 or bounds[-1] != len(ids) or not len(steps) or (steps < 1).any():
        reason = f"must divide the {len(ids)} input_ids into sequences of at least one"
        raise InvalidInput(f"{name}: {reason}", param=name)
    return np.split(ids, bounds[1:-1])


# -- from a request to a task, and from results to tensors ----------------------------------------


def make_task(engine: Engine, body: InferRequest) -> EngineTask[Any]:
    """Return the task of a request. Raises InvalidInput for outputs that cannot be computed together."""
    columns, wanted, given = body.columns, body.wanted_heads, body.given
    heads = engine.manifest.heads
    check_outputs(engine, body)
    if IDS in columns:
        refuse_unused(given, "truncate", "top_k")
        return TokenSequences(sequences=columns[IDS])
    truncate = "window" if given.truncate is None else given.truncate
    if QUESTION in columns:
        return QuestionAnswering(
            questions=columns[QUESTION],
            contexts=columns[CONTEXT],
            top_k=given.top_k or 1,
            truncate=truncate,
        )
    if PAIR in columns:
        refuse_unused(given, "top_k")
        cuts = True if given.truncate is None else given.truncate
        return Classification(inputs=columns[TEXT], text_pair=columns[PAIR], truncate=cuts)
    texts = columns[TEXT]
    alone = heads[wanted[0]] if len(wanted) == 1 else None
    match alone.task if alone else None:
        case "fill-mask":
            return MaskFilling(inputs=texts, top_k=given.top_k or 5, truncate=truncate)
        case "sparse-embedding":
            return SparseEmbedding(inputs=texts, top_k=given.top_k, truncate=truncate)
    refuse_unused(given, "top_k")
    match alone.task if alone else None:
        case "late-interaction":
            return TokenEmbedding(inputs=texts, truncate=truncate)
        case "embedding":  # reads a default prompt, too, and encodes faster than `Analysis`
            return Embedding(inputs=texts, truncate=truncate)
        case "classification":
            return Classification(inputs=texts, truncate=truncate)
    return Analysis(inputs=texts, truncate=truncate)


def refuse_unused(given: InferParameters, *names: str) -> None:
    """Raise InvalidInput for a parameter that the outputs of a request do not depend on."""
    for name in names:
        if getattr(given, name) is not None:
            reason = "the outputs of this request do not use it; leave it out"
            raise InvalidInput(f"{name}: {reason}", param=name)


def check_outputs(engine: Engine, body: InferRequest) -> None:
    """Raise UnknownHead for an output that the model lacks, InvalidInput for one that needs a request of its own."""
    heads, wanted = engine.manifest.heads, body.wanted_heads
    for name in wanted:
        if name not in heads:
            has = ", ".join(heads)
            raise UnknownHead(f"{engine.id} has no output {name!r}; it has: {has}", param="outputs")
        if len(wanted) > 1 and (heads[name].task in SEPARATE or PAIR in body.columns):
            raise InvalidInput(f"{name}: must be the only output of its request", param="outputs")
    if len(body.outputs or ()) > len(wanted):
        raise InvalidInput("outputs: an output is named twice", param="outputs")
    for output in body.outputs or ():
        options = output.parameters
        if options and options.classification and heads[output.name].task != "classification":
            raise InvalidInput(f"{output.name}: is no classification", param="outputs")


class OutputTensor(NamedTuple):
    """An output. values: numbers `shape` float32, or the elements of a BYTES tensor"""

    name: str
    shape: list[int]
    values: NDArray[np.float32] | list[bytes]

    @property
    def datatype(self) -> str:
        return BYTES if isinstance(self.values, list) else FLOATS

    def to_binary(self) -> bytes:
        if isinstance(self.values, list):
            return b"".join(LENGTH.pack(len(one)) + one for one in self.values)
        return self.values.astype("<f4").tobytes()

    def to_json(self) -> object:
        if isinstance(self.values, list):
            return [one.decode() for one in self.values]
        return np.ascontiguousarray(self.values.ravel())


def to_tensors(engine: Engine, body: InferRequest, reply: Reply[Any]) -> list[OutputTensor]:
    """Return the outputs of a reply, in the order of the request."""
    rows: list[Any] = reply.results
    if not isinstance(rows[0], dict):
        rows = [{reply.heads[0]: row} for row in rows]
    options = {output.name: output.parameters for output in body.outputs or ()}
    found = []
    for name in body.wanted_heads or reply.heads:
        column = [row[name] for row in rows]
        head, parameters = engine.manifest.heads[name], options.get(name)
        if parameters and parameters.classification:
            found.append(best_labels(name, head, column, parameters.classification))
        else:
            found.append(TENSORS[head.task](name, head, column))
    return found


def scores(name: str, head: Head, column: Sequence[list[LabelScore]]) -> OutputTensor:
    """Return scores `[B, C]` in the order of the head's labels."""
    places = {label: index for index, label in enumerate(head.labels)}
    table = np.zeros((len(column), len(places)), np.float32)
    for row, labels in zip(table, column, strict=True):
        for label, score in labels:
            row[places[label]] = score
    return OutputTensor(name, [*table.shape], table)


def best_labels(
    name: str, head: Head, column: Sequence[list[LabelScore]], count: int
) -> OutputTensor:
    """Return the best labels `[B, count]` as `score:index:label`, as the classification extension has them."""
    places = {label: index for index, label in enumerate(head.labels)}
    count = min(count, len(places))
    values = [
        f"{score:f}:{places[label]}:{label}".encode()
        for labels in column
        for label, score in labels[:count]
    ]
    return OutputTensor(name, [len(column), count], values)


def vectors(name: str, head: Head, column: Sequence[Any]) -> OutputTensor:
    table = np.stack(column).astype(np.float32)
    return OutputTensor(name, [*table.shape], table)


def json_of(show: Callable[[Any], object]) -> Callable[[str, Head, Sequence[Any]], OutputTensor]:
    """Return a function that makes a BYTES tensor `[B]` of JSON."""

    def tensor(name: str, head: Head, column: Sequence[Any]) -> OutputTensor:
        values = [orjson.dumps(show(one), option=orjson.OPT_SERIALIZE_NUMPY) for one in column]
        return OutputTensor(name, [len(column)], values)

    return tensor


TENSORS: Mapping[Task, Callable[[str, Head, Sequence[Any]], OutputTensor]] = {
    "classification": scores,
    "embedding": vectors,
    "ner": json_of(each(lambda found: entity("entity_group", found))),
    "qa": json_of(each(answer)),
    "fill-mask": json_of(filled_masks),
    "sparse-embedding": json_of(partial(sparse_vector, None)),
    "late-interaction": json_of(numbers),
}


# -- metadata -------------------------------------------------------------------------------------


class TensorMetadata(NamedTuple):
    name: str
    datatype: str
    shape: list[int]
    parameters: Mapping[str, object]


def describe_inputs(engine: Engine) -> list[TensorMetadata]:
    """Return the inputs that any request to a model can have."""
    tasks = {head.task for head in engine.manifest.heads.values()} & TENSORS.keys()
    names = [
        *([TEXT] if tasks - {"qa"} else []),
        *([PAIR] if "classification" in tasks else []),
        *([QUESTION, CONTEXT] if "qa" in tasks else []),
    ]
    found = [TensorMetadata(name, BYTES, [-1], {}) for name in names]
    if tasks & OF_IDS:
        found += [TensorMetadata(name, "INT64", [-1], {}) for name in NUMERIC]
    return found


def describe_outputs(engine: Engine) -> list[TensorMetadata]:
    """Return the outputs of a model: its heads. Results without a fixed shape are JSON."""
    found = []
    for name, head in engine.manifest.heads.items():
        parameters: dict[str, object] = {}
        match head.task:
            case "classification":
                shape, parameters = [-1, len(head.labels)], {"labels": [*head.labels]}
            case "embedding":
                shape = [-1, head.dimensions or -1]
            case _:
                shape, parameters = [-1], {"content_type": "application/json"}
        datatype = FLOATS if len(shape) > 1 else BYTES
        found.append(TensorMetadata(name, datatype, shape, {"task": head.task, **parameters}))
    return found

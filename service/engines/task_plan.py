"""The seam between the engine and the tasks: a task makes a plan, and the engine computes its results.

A plan declares what the request costs: characters to tokenize, sequences that the model reads, and bytes of the answer.
The engine checks these before it does the work, for every API.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Generic, TypeVar

from service.core.decode import Floats
from service.core.encode import Cut
from service.engines.result_collector import Decode, DecodeRows
from service.errors import TooLarge
from service.scheduling.entries import Heads, Outputs
from service.settings import Settings

C = TypeVar("C", bound=Cut)
T = TypeVar("T")
S = TypeVar("S")
K = TypeVar("K")

CHARACTER_BYTES = 6  # of the longest character in JSON, "\u0000"
NUMBER_BYTES = 15  # of the longest float32 in JSON, with its comma
SCORED_BYTES = 128  # of an object with a score and positions, without its texts


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of one request; each has the name of its setting."""

    max_inputs_per_request: int
    max_characters_per_input: int
    max_body_bytes: int
    max_response_bytes: int

    @classmethod
    def of(cls, settings: Settings) -> "Limits":
        return cls(*[getattr(settings, one.name) for one in fields(cls)])

    def check(self, plan: "TaskPlan[Any, Any]") -> None:
        """Raise TooLarge for a request that costs more than these limits allow."""
        shared, most = plan.shared, self.max_characters_per_input
        for index, size in enumerate(shared.sizes if shared else ()):
            if size > most:
                place = shared.place.format(index) if shared else ""
                reason = f"has {size} characters to tokenize; max_characters_per_input is {most}"
                raise TooLarge(f"{place} {reason}", param=place)
        sequences = len(plan.sizes) * plan.sequences
        if plan.sequences > 1 and sequences > self.max_inputs_per_request:
            most = self.max_inputs_per_request
            raise TooLarge(f"the model would read {sequences} texts; a request may have {most}")
        if plan.characters > self.max_body_bytes:
            reason = f"the request has {plan.characters} characters to tokenize"
            raise TooLarge(f"{reason}; max_body_bytes is {self.max_body_bytes}")

    def check_response(self, size: int) -> None:
        """Raise TooLarge for a response of at least `size` bytes that exceeds the limit."""
        if size > self.max_response_bytes:
            limit = f"max_response_bytes is {self.max_response_bytes}"
            advice = "send fewer or shorter inputs, or request fewer results of each"
            raise TooLarge(f"the response may have {size} bytes or more; {limit}: {advice}")


@dataclass(frozen=True, slots=True)
class Shared(Generic[S]):
    """Texts of a request that belong to all of its inputs, such as a query. Each is read once, before the inputs."""

    place: str  # the name of a text in error messages, with {} for its index
    sizes: Sequence[int]  # the characters of each text
    read: Callable[[slice], Sequence[S]]  # reads a slice of the texts; may raise InvalidInput
    # What was read of each text, for `TaskPlan.encode` and `TaskPlan.decode`.
    items: list[S] = field(default_factory=list)

    def add(self, part: slice) -> None:
        """Read a slice of the texts; may run in any thread."""
        self.items.extend(self.read(part))


@dataclass(frozen=True, slots=True)
class TaskPlan(Generic[C, T]):
    """How the heads of a model answer the inputs of one request, and what this costs."""

    heads: Heads  # the names of the heads that compute
    sizes: Sequence[int]  # the characters of each input that `encode` tokenizes
    encode: Callable[[slice], Sequence[C]]  # encodes a slice of the inputs; may raise TextError
    # Makes the result of one input from its index, its windows and each window's outputs by head.
    decode: Decode[C, T]
    # Makes the results of several inputs of one window each at once, as `decode` does; None if only `decode` can.
    decode_rows: DecodeRows[T] | None = field(default=None, kw_only=True)
    # Returns the largest size of the result of one input in JSON, from its index and its windows.
    answer_bytes: Callable[[int, C], int]
    shared: Shared[Any] | None = None  # texts that are read before the inputs
    # Returns the size of a result, in addition, where only the model determines it.
    result_bytes: Callable[[T], int] | None = None
    sequences: int = 1  # that the model reads for each input, if none is long
    # Whether the event loop's thread decodes small inputs; otherwise a helper thread decodes all.
    decodes_inline: bool = True

    @property
    def characters(self) -> int:
        """The characters that the request tokenizes."""
        return sum(self.sizes) + (sum(self.shared.sizes) if self.shared else 0)


def one_head(head: str, decode: Callable[[int, C, list[Floats]], T]) -> Decode[C, T]:
    """Return a plan's `decode` for a single head, whose function gets that head's output for each window."""

    def decode_one(index: int, item: C, outputs: list[Outputs]) -> T:
        return decode(index, item, [own[head] for own in outputs])

    return decode_one


def together(plans: Mapping[K, TaskPlan[C, Any]]) -> TaskPlan[C, dict[K, Any]]:
    """Return a plan that gives the results of several plans of the same inputs, by key. The first plan encodes."""
    first = next(iter(plans.values()))

    def decode(index: int, item: C, outputs: list[Outputs]) -> dict[K, Any]:
        return {key: plan.decode(index, item, outputs) for key, plan in plans.items()}

    def result_bytes(found: dict[K, Any]) -> int:
        return sum(p.result_bytes(found[key]) for key, p in plans.items() if p.result_bytes)

    return replace(
        first,
        heads=tuple(dict.fromkeys(head for plan in plans.values() for head in plan.heads)),
        decode=decode,
        decode_rows=None,
        answer_bytes=sum_of_answers(plans.values()),
        result_bytes=result_bytes if any(plan.result_bytes for plan in plans.values()) else None,
        decodes_inline=all(plan.decodes_inline for plan in plans.values()),
    )


def characters(*texts: Sequence[str]) -> list[int]:
    """Return the characters of each input, which has one text in each of the sequences."""
    return [sum(map(len, together)) for together in zip(*texts, strict=True)]


def labels_bytes(labels: Sequence[str]) -> int:
    """Return the largest size of a result that has each of the labels once."""
    return CHARACTER_BYTES * sum(map(len, labels)) + SCORED_BYTES * len(labels)


def sum_of_answers(plans: Iterable[TaskPlan[C, Any]]) -> Callable[[int, C], int]:
    """Return the `answer_bytes` of a plan whose result has those of other plans."""
    return lambda index, item: sum(plan.answer_bytes(index, item) for plan in plans)

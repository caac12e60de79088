"""The seam between the engine and the tasks: a task makes a plan, and the engine computes its results."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from service.core.decode import Floats
from service.core.encode import Cut
from service.engines.result_collector import Decode
from service.scheduling.entries import Heads, Outputs

C = TypeVar("C", bound=Cut)
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TaskPlan(Generic[C, T]):
    """How the heads of a model answer the inputs of one request."""

    heads: Heads  # the names of the heads that compute
    sizes: Sequence[int]  # the characters of each input
    encode: Callable[[slice], Sequence[C]]  # encodes a slice of the inputs; may raise TextError
    # Makes the result of one input from its index, its windows and each window's outputs by head.
    decode: Decode[C, T]
    # Whether the event loop's thread decodes small inputs; otherwise a helper thread decodes all.
    decodes_inline: bool = True


def one_head(head: str, decode: Callable[[int, C, list[Floats]], T]) -> Decode[C, T]:
    """Return a plan's `decode` for a single head, whose function gets that head's output for each window."""

    def decode_one(index: int, item: C, outputs: list[Outputs]) -> T:
        return decode(index, item, [own[head] for own in outputs])

    return decode_one


def characters(*texts: Sequence[str]) -> list[int]:
    """Return the characters of each input, which has one text in each of the sequences."""
    return [sum(map(len, together)) for together in zip(*texts, strict=True)]

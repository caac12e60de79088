"""A value over the steps of a run, in a bounded number of points."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Self

MOST_POINTS = 1000


@dataclass
class Series:
    """Means of a value over equal numbers of recorded steps; exact for up to MOST_POINTS of them."""

    # The last step of each mean, and the mean.
    points: list[tuple[int, float]] = field(default_factory=list)
    width: int = 1  # the recorded values in each mean
    pending: list[float] = field(default_factory=list)  # the values after the last mean

    def add(self, step: int, value: float) -> None:
        """Record the value of a step."""
        self.pending.append(value)
        if len(self.pending) < self.width:
            return
        self.points.append((step, sum(self.pending) / self.width))
        self.pending = []
        if len(self.points) == MOST_POINTS:
            pairs = zip(self.points[::2], self.points[1::2], strict=True)
            self.points = [(later, (a + b) / 2) for (_, a), (later, b) in pairs]
            self.width *= 2

    def state(self) -> dict[str, Any]:
        """Return the content as plain lists and numbers."""
        return {"points": self.points, "width": self.width, "pending": self.pending}

    @classmethod
    def restore(cls, state: dict[str, Any]) -> Self:
        """Return the series of a state."""
        points: Sequence[Sequence[Any]] = state["points"]
        return cls([(step, value) for step, value in points], state["width"], state["pending"])

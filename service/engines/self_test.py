"""A small known input of each bundle, computed again and again.

So what a session can do no longer is known before somebody asks for it. A bundle whose own batches have just ended well
needs no canary, so load never makes a service unready.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import numpy as np
import structlog

from service import health
from service.core.bundle import Golden, Tolerance, disagreement
from service.core.encode import Window
from service.scheduling.entries import Outputs

log = structlog.get_logger()

ComputeProbe = Callable[[str, Window], Awaitable[Outputs]]


def smallest(golden: Golden) -> Window:
    """The shortest of a bundle's goldens."""
    index = int(golden.lengths.argmin())
    end = int(golden.lengths[: index + 1].sum())
    own = slice(end - int(golden.lengths[index]), end)
    return Window(golden.input_ids[own], golden.token_type_ids[own])


@dataclass(slots=True)
class SelfTest:
    """One bundle's input, what it gave at the start, how much of that may change, and what is wrong now."""

    window: Window
    expected: Outputs
    tolerance: Tolerance
    problem: str = ""
    failures: int = 0  # in a row
    well: float = 0.0  # when the bundle's own batches last ended well, by `time.monotonic`
    tried: float = 0.0

    def due(self, now: float) -> bool:
        """Whether it is to be tried; what failed is tried whatever its batches say."""
        known = self.tried if self.problem else max(self.tried, self.well)
        return now - known >= health.SELF_TEST_S

    def compare(self, outputs: Outputs) -> str:
        """How the outputs of today differ from those of the start, if they do."""
        for head, expected in self.expected.items():
            if not np.isfinite(outputs[head]).all():
                return f"{head} is not finite"
            if problem := disagreement(head, expected, outputs[head], self.tolerance):
                return problem
        return ""


class SelfTests:
    """The canaries of a device, which `probe` computes; `observe` is told of each try, and whether it went well."""

    def __init__(self, probe: ComputeProbe, observe: Callable[[str, bool], None]) -> None:
        self._probe = probe
        self._observe = observe
        self._of: dict[str, SelfTest] = {}

    def add(self, bundle: str, self_test: SelfTest) -> None:
        self._of[bundle] = self_test

    def remove(self, bundle: str) -> None:
        del self._of[bundle]

    def ended_well(self, bundle: str) -> None:
        """Know of a batch that has just been computed."""
        if bundle in self._of:
            self._of[bundle].well = time.monotonic()

    @property
    def problem(self) -> str:
        """What is wrong with a bundle, if anything is."""
        return next((self_test.problem for self_test in self._of.values() if self_test.problem), "")

    @property
    def lost(self) -> bool:
        """Whether a bundle has failed so often that nothing more is to be expected."""
        return any(
            self_test.failures >= health.SELF_TEST_FAILURES for self_test in self._of.values()
        )

    async def run(self) -> None:
        """Try those that have not shown to be well for a while, one after the other, again and again."""
        while True:
            for bundle, self_test in [*self._of.items()]:
                if self_test.due(time.monotonic()):
                    self_test.tried = time.monotonic()
                    await self._try(bundle, self_test)
            await asyncio.sleep(health.SELF_TEST_POLL_S)

    async def _try(self, bundle: str, self_test: SelfTest) -> None:
        try:
            problem = self_test.compare(await self._probe(bundle, self_test.window))
        except Exception as error:
            problem = " ".join(str(error).split()) or repr(error)
        if self._of.get(bundle) is not self_test:
            return  # it was removed meanwhile
        self_test.failures = self_test.failures + 1 if problem else 0
        self_test.problem = problem and f"the canary of {bundle} failed: {problem}"
        self._observe(bundle, not problem)
        if problem:
            log.error(
                "the canary failed", model=bundle, problem=problem, in_a_row=self_test.failures
            )

"""Self-tests: a small known input of each bundle, which the device computes periodically.

A self-test detects a session that no longer works before a client's request fails. A bundle whose own batches have just
succeeded needs no self-test, so high load never makes a service unready.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import numpy as np
import structlog

from service import liveness
from service.core.encode import Window
from service.core.goldens import Golden, disagreement
from service.core.manifest import Tolerance
from service.core.packing import golden_windows
from service.scheduling.entries import Outputs

log = structlog.get_logger()

ComputeProbe = Callable[[str, Window], Awaitable[Outputs]]


def smallest(golden: Golden, mask_token_id: int | None = None) -> Window:
    """Return the shortest golden for which every head, also that of the mask token, has an output."""
    windows = golden_windows(golden)
    complete = [own for own in windows if mask_token_id in (None, *own.input_ids.tolist())]
    return min(complete or windows, key=len)


@dataclass(slots=True)
class SelfTest:
    """One bundle's input, its expected outputs with their tolerance, and the state of the test."""

    window: Window
    expected: Outputs
    tolerance: Tolerance
    problem: str = ""  # why the last test failed; empty if it succeeded
    failures: int = 0  # in a row
    well: float = 0.0  # when one of the bundle's own batches last succeeded, by `time.monotonic`
    tried: float = 0.0  # when the last test started, by `time.monotonic`

    def due(self, now: float) -> bool:
        """Return whether the test should run; successful batches do not postpone it after a failure."""
        known = self.tried if self.problem else max(self.tried, self.well)
        return now - known >= liveness.SELF_TEST_S

    def compare(self, outputs: Outputs) -> str:
        """Return how the outputs differ from the expected ones; an empty string if they are within the tolerance."""
        for head, expected in self.expected.items():
            if not np.isfinite(outputs[head]).all():
                return f"{head} is not finite"
            if problem := disagreement(head, expected, outputs[head], self.tolerance):
                return problem
        return ""


class SelfTests:
    """The self-tests of a device's bundles.

    probe: computes the outputs of a bundle's window
    observe: called after each test with the bundle and whether it succeeded
    """

    def __init__(self, probe: ComputeProbe, observe: Callable[[str, bool], None]) -> None:
        self._probe = probe
        self._observe = observe
        self._of: dict[str, SelfTest] = {}

    def add(self, bundle: str, self_test: SelfTest) -> None:
        self._of[bundle] = self_test

    def remove(self, bundle: str) -> None:
        del self._of[bundle]

    def ended_well(self, bundle: str) -> None:
        """Record that a batch of a bundle has just succeeded."""
        if bundle in self._of:
            self._of[bundle].well = time.monotonic()

    def has_answered(self, bundle: str) -> bool:
        """Return whether a batch of a bundle has succeeded."""
        return bundle in self._of and self._of[bundle].well > 0

    @property
    def problem(self) -> str:
        """The problem of the first bundle whose last test failed; empty if all succeeded."""
        return next((self_test.problem for self_test in self._of.values() if self_test.problem), "")

    @property
    def lost(self) -> bool:
        """Whether a bundle has failed `SELF_TEST_FAILURES` tests in a row."""
        return any(
            self_test.failures >= liveness.SELF_TEST_FAILURES for self_test in self._of.values()
        )

    async def run(self) -> None:
        """Run each self-test that is due, one after the other, without end."""
        while True:
            for bundle, self_test in [*self._of.items()]:
                if self_test.due(time.monotonic()):
                    self_test.tried = time.monotonic()
                    await self._try(bundle, self_test)
            await asyncio.sleep(liveness.SELF_TEST_POLL_S)

    async def _try(self, bundle: str, self_test: SelfTest) -> None:
        try:
            problem = self_test.compare(await self._probe(bundle, self_test.window))
        except Exception as error:  # whatever fails is the result of the test
            problem = " ".join(str(error).split()) or repr(error)
        if self._of.get(bundle) is not self_test:
            return  # the bundle was removed in the meantime
        self_test.failures = self_test.failures + 1 if problem else 0
        self_test.problem = problem and f"the canary of {bundle} failed: {problem}"
        self._observe(bundle, not problem)
        if problem:
            log.error(
                "the canary failed", model=bundle, problem=problem, in_a_row=self_test.failures
            )

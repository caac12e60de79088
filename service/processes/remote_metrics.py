"""The metrics of an HTTP process, which the inference process counts and renders."""

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from service.observability import logs
from service.observability.shared_call import SharedCall
from service.processes import messages
from service.processes.remote_device import RemoteDevice

PUSH_S = 0.25  # longest delay in seconds before observations are sent
KEPT = 40_000  # observations kept while the inference process is away


class RemoteMetrics:
    """Sends the observations of an HTTP process to the inference process, which renders the metrics page."""

    def __init__(self, device: RemoteDevice) -> None:
        self._device = device
        self._calls: deque[tuple[str, tuple[Any, ...]]] = deque(maxlen=KEPT)
        self._pushing = False
        self._lost_lines = 0  # number of lost log lines already sent
        self._page = SharedCall(self._fetch)
        self.watch_live = device.watch_live

    def observe_request(
        self, route: str, model: str, status: int, seconds: float, priority: int = 0
    ) -> None:
        self._forward("observe_request", route, model, status, seconds, priority)

    def observe_error(self, code: str, client_deadline: bool = False) -> None:
        self._forward("observe_error", code, client_deadline)

    def observe_answer(self, model: str, tenant: str, tokens: int, stages: Sequence[float]) -> None:
        self._forward("observe_answer", model, tenant, tokens, stages)

    def observe_comparison(self, model: str, head: str, outcome: str, number: int) -> None:
        self._forward("observe_comparison", model, head, outcome, number)

    def observe_found(self, found: Mapping[str, int]) -> None:
        self._forward("observe_found", found)

    def _forward(self, method: str, *arguments: Any) -> None:
        """Call a method of the inference process's metrics with the next push."""
        self._calls.append((method, arguments))
        if not self._pushing:
            self._pushing = True
            asyncio.get_running_loop().call_later(PUSH_S, self._push)

    async def page(self) -> bytes:
        """Return the metrics page of all processes. Raises ReplicaLost if no inference process is available."""
        return await self._page()

    async def _fetch(self) -> bytes:
        self._push()
        return await self._device.page()

    def _push(self) -> None:
        self._pushing = False
        lost = logs.lost_lines()
        if not self._calls and lost == self._lost_lines:
            return
        if self._device.push(messages.Observed([*self._calls], lost - self._lost_lines)):
            self._lost_lines = lost
            self._calls.clear()

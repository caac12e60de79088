"""An index of all routes by the first segment of their path."""

from collections.abc import Iterable

from starlette.routing import BaseRoute, Match, Route
from starlette.types import Receive, Scope, Send


class RouteIndex(BaseRoute):
    """A route in place of all others, which compares a request only with the routes of its path's first segment.

    It comes first in the router. A request that matches none of them is left to the routes after it, for its error.
    """

    def __init__(self, routes: Iterable[BaseRoute]) -> None:
        self._by_segment: dict[str, list[Route]] = {}
        for route in routes:
            if isinstance(route, Route):
                self._by_segment.setdefault(first_segment(route.path), []).append(route)

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        if scope["type"] == "http":
            for route in self._by_segment.get(first_segment(scope["path"]), ()):
                match, found = route.matches(scope)
                if match is Match.FULL:
                    return match, {**found, "route": route}
        return Match.NONE, {}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        await scope["route"].handle(scope, receive, send)


def first_segment(path: str) -> str:
    return path[1:].partition("/")[0]

"""An index of all routes by their path, or by its first segment where the path has parameters."""

from collections.abc import Iterable

from starlette.routing import BaseRoute, Match, Route
from starlette.types import Receive, Scope, Send


class RouteIndex(BaseRoute):
    """A route in place of all others. It finds a path without parameters in a table.

    It comes first in the router. A request that matches none of them is left to the routes after it, for its error.
    """

    def __init__(self, routes: Iterable[BaseRoute]) -> None:
        self._by_path: dict[tuple[str, str], Route] = {}
        self._by_segment: dict[str, list[Route]] = {}
        for route in routes:
            if isinstance(route, Route) and route.param_convertors:
                self._by_segment.setdefault(first_segment(route.path), []).append(route)
            elif isinstance(route, Route):
                for method in route.methods or ():
                    self._by_path.setdefault((method, route.path), route)

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        if scope["type"] != "http":
            return Match.NONE, {}
        if found := self._by_path.get((scope["method"], scope["path"])):
            return Match.FULL, {"endpoint": found.endpoint, "path_params": {}, "route": found}
        for route in self._by_segment.get(first_segment(scope["path"]), ()):
            match, found_scope = route.matches(scope)
            if match is Match.FULL:
                return match, {**found_scope, "route": route}
        return Match.NONE, {}

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        await scope["route"].app(scope, receive, send)  # its method matches


def first_segment(path: str) -> str:
    return path[1:].partition("/")[0]

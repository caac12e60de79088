"""The table of routes, by their path or by its first segment."""

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Match, Route, Router

from service.api.route_table import RouteTable


async def endpoint(request: Request) -> Response:
    return Response()


ROUTES = [
    Route("/embed", endpoint, methods=["POST"]),
    Route("/tei/embed", endpoint, methods=["POST"]),
    Route("/tei", endpoint, methods=["POST"]),
    Route("/v2/models/{model}", endpoint, methods=["GET"]),
    Route("/v2/models/{model}/infer", endpoint, methods=["POST"]),
    Route("/", endpoint, methods=["GET"]),
]


def test_each_request_has_the_route_of_a_linear_search():
    """The table finds the first route that matches fully, with its parameters, and none otherwise."""
    router = Router(ROUTES)
    table = RouteTable(router, router)
    for path in (
        "/",
        "/embed",
        "/tei",
        "/tei/embed",
        "/v2/models/a/infer",
        "/v2/models/a",
        "/v3",
        "*",
    ):
        for method in ("GET", "POST"):
            scope = {"type": "http", "method": method, "path": path, "root_path": ""}
            expected = next((r for r in ROUTES if r.matches(scope)[0] is Match.FULL), None)
            found = table.find(scope)
            assert expected is (found and found.route), (method, path)
            if found:
                assert found.route.matches(scope)[1]["path_params"] == found.parameters

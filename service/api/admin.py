"""The administration routes, which list and change the served models.

Each requires a key with the `admin` permission.
"""

from typing import TypeVar

from starlette.requests import Request
from starlette.responses import Response

from service.api import openapi
from service.api.engine_call import json_response, receive_json, service_of
from service.api.native_routes import make_router
from service.api.responses import AdminModelsResponse, IntroducedResponse, UnloadedResponse
from service.api.schemas import AdminRequest, LoadRequest, PromoteRequest, validate
from service.engines.commands import (
    Command,
    ListModels,
    LoadModel,
    PromoteModel,
    RollBackModel,
    UnloadModel,
)
from service.middleware.request_context import context_of

T = TypeVar("T", bound=AdminRequest)

router = make_router()


@router.get("/admin/models", **openapi.admin(AdminModelsResponse))
async def list_models(request: Request) -> Response:
    """Every bundle that is served, comes or goes."""
    return await answer(request, ListModels())


@router.post("/admin/models", **openapi.admin(IntroducedResponse, LoadRequest))
async def load_model(request: Request) -> Response:
    """Let a bundle answer for its name: it is read, checked and tried, while all goes on as before."""
    body = await read_order(request, LoadRequest)
    return await answer(request, LoadModel(**body.model_dump(), by=tenant_of(request)))


@router.post(
    "/admin/models/{model:path}/promote",
    **openapi.admin(IntroducedResponse, PromoteRequest, of="model"),
)
async def promote_model(request: Request) -> Response:
    """Let a bundle that is loaded answer for its name."""
    body = await read_order(request, PromoteRequest)
    model = request.path_params["model"]
    return await answer(
        request, PromoteModel(**body.model_dump(), model=model, by=tenant_of(request))
    )


@router.post("/admin/models/{name:path}/rollback", **openapi.admin(IntroducedResponse, of="name"))
async def roll_back_model(request: Request) -> Response:
    """Let the bundle answer for a name that did before."""
    return await answer(
        request, RollBackModel(model=request.path_params["name"], by=tenant_of(request))
    )


@router.delete("/admin/models/{model:path}", **openapi.admin(UnloadedResponse, of="model"))
async def unload_model(request: Request) -> Response:
    """Serve a bundle no longer; the answer comes when its memory is free."""
    return await answer(
        request, UnloadModel(model=request.path_params["model"], by=tenant_of(request))
    )


async def read_order(request: Request, schema: type[T]) -> T:
    """Read the optional body and validate it. Raises the errors of `receive_json` and `validate`."""
    headers = request.headers
    has_body = "transfer-encoding" in headers or headers.get("content-length", "0") != "0"
    if not has_body and "content-type" not in headers:
        return validate(schema, {})
    return validate(schema, await receive_json(request))


async def answer(request: Request, command: Command) -> Response:
    """Execute a command to its end, even if the client leaves, and return the result."""
    engines = service_of(request).open_engines()
    return json_response(await engines.execute(command))


def tenant_of(request: Request) -> str:
    """Return the name of the client's key, for the log."""
    return context_of(request.scope).tenant

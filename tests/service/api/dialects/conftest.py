"""Requests to the application with a model that has heads for every task, checked against the OpenAPI document."""

from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest_asyncio
from jsonschema import Draft202012Validator

from tests.served import app_of, living

MOST_INPUTS = 8


class Requests:
    """Sends requests, and checks that each answer has the documented schema."""

    def __init__(self, client: httpx.AsyncClient, document: Mapping[str, Any]) -> None:
        self._client = client
        self._document = document

    async def post(self, path: str, body: object) -> Any:
        """Return the answer to a request that is accepted."""
        response = await self._client.post(path, json=body)
        assert 200 == response.status_code, response.text
        return self._checked(path, "post", response.json())

    async def get(self, path: str) -> Any:
        response = await self._client.get(path)
        assert 200 == response.status_code, response.text
        return self._checked(path, "get", response.json())

    async def refuse(self, path: str, body: object) -> tuple[int, Any]:
        """Return the status and the body of the answer to a request that is refused."""
        response = await self._client.post(path, json=body)
        assert response.status_code >= 400, response.text
        return response.status_code, response.json()

    def _checked(self, path: str, method: str, answer: Any) -> Any:
        documented = self._document["paths"].get(path)
        if documented is not None:
            content = documented[method]["responses"]["200"]["content"]["application/json"]
            schema = {**self._document, **content["schema"]}
            Draft202012Validator(schema).validate(answer)
        return answer


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def requests(tasks_bundle: Path) -> AsyncIterator[Requests]:
    app = app_of(tasks_bundle, max_inputs_per_request=MOST_INPUTS)
    async with living(app) as client:
        yield Requests(client, app.openapi())

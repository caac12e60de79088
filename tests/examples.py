"""The responses of the default bundle, which the OpenAPI document shows as examples.

`python -m tests.examples` writes them again.
"""

import asyncio
import json
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from service.api.app import create_app
from service.api.openapi import EXAMPLES, REQUESTS
from service.observability.metrics import Metrics
from service.processes.single_process import open_local_engines
from service.settings import Settings

ROOT = Path(__file__).parent.parent
BUNDLE = ROOT / "bundles" / "quartet-mini"
FILE = ROOT / "service" / "api" / "example_answers.json"
UNANSWERED = (
    "/zero-shot",
    "/embed-tokens",
    "/embed-sparse",
    "/fill-mask",
    "/attention",
)  # the default bundle cannot answer them
PAGES = ("/models", "/health/live", "/health/ready")


async def collect() -> dict[str, dict[str, Any]]:
    """Return the response of the service to each example request, by route and name."""
    metrics = Metrics()
    settings = Settings(bundles=[BUNDLE], provider="cpu")
    app = create_app(settings, partial(open_local_engines, metrics), metrics)
    transport = httpx.ASGITransport(app=app)
    found: dict[str, dict[str, Any]] = {}
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://quartet") as client,
    ):
        for path, request in REQUESTS.items():
            bodies = {} if path in UNANSWERED else EXAMPLES[request]
            replies = {name: await client.post(path, json=body) for name, body in bodies.items()}
            found[path] = {name: reply.raise_for_status().json() for name, reply in replies.items()}
        for path in PAGES:
            found[path] = {"response": (await client.get(path)).raise_for_status().json()}
    return found


if __name__ == "__main__":
    FILE.write_text(json.dumps(asyncio.run(collect()), indent=1, ensure_ascii=False) + "\n")

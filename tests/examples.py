"""The responses of the default bundle, which the OpenAPI document shows as examples.

`python -m tests.examples` writes them again.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

from service.api.openapi import EXAMPLES, REQUESTS
from tests.served import app_of, living

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
    found: dict[str, dict[str, Any]] = {}
    async with living(app_of(BUNDLE, threads=None)) as client:
        for path, request in REQUESTS.items():
            bodies = {} if path in UNANSWERED else EXAMPLES[request]
            replies = {name: await client.post(path, json=body) for name, body in bodies.items()}
            found[path] = {name: reply.raise_for_status().json() for name, reply in replies.items()}
        for path in PAGES:
            found[path] = {"response": (await client.get(path)).raise_for_status().json()}
    return found


if __name__ == "__main__":
    FILE.write_text(json.dumps(asyncio.run(collect()), indent=1, ensure_ascii=False) + "\n")

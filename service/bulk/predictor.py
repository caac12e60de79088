"""The predictions of rows, by requests to the service in this process: results are the served ones."""

import asyncio
import json
from binascii import a2b_base64
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import orjson
from starlette.types import ASGIApp

from service.bulk.rows import ROUTES, Outcome, Row
from service.core.bundle import load as load_bundle
from service.core.bundle_cache import fetch_bundle
from service.core.data_files.columns import Needs
from service.core.data_files.text_files import DataError
from service.core.manifest import Head, Manifest
from service.core.session import usable_kinds
from service.embedded import EmbeddedService

BUSY = 429  # the status of a request that a full queue refuses
DAY_MS = 24 * 3600 * 1000
LARGEST = 2**31  # bytes of a request and of a response
BATCH_TOKENS = 512  # of a batch on the CPU; larger ones take more time per token


class Predictor:
    """One head of a bundle, which predicts rows while an `async with` block lasts.

    head: its name; None for the first
    options: further fields of each request
    The batches of a request depend on this request alone. So equal rows get equal bytes in every run.
    Raises BundleError, and DataError for an unknown head.
    """

    def __init__(
        self,
        bundle: Path,
        head: str | None = None,
        options: Mapping[str, Any] | None = None,
        precision: str = "auto",
    ) -> None:
        bundle = fetch_bundle(bundle)
        manifest = load_bundle(bundle).manifest
        name, chosen = choose_head(manifest, head)
        self.task = chosen.task
        self._options = {"head": name, "on_error": "null", **(options or {})}
        # Reading decimals would take more time than a small model.
        floats = self.task == "embedding" and all(
            self._options.get(option, "float") == "float"
            for option in ("encoding_format", "output_dtype")
        )
        self._encoding = {"encoding_format": "base64"} if floats else {}
        fields = tuple(ROUTES[self.task][1])
        self.needs = Needs(self.task, fields, (fields if self.task == "qa" else fields[:1],))
        limits = {"max_batch_tokens": BATCH_TOKENS} if usable_kinds("auto")[0].on_host else {}
        self._service = EmbeddedService(
            bundle,
            precision=precision,
            fixed_batches=True,
            deadline_ms=DAY_MS,
            max_body_bytes=LARGEST,
            max_response_bytes=LARGEST,
            **limits,
        )

    async def __aenter__(self) -> Self:
        await self._service.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._service.__aexit__(*error)

    @property
    def identity(self) -> dict[str, Any]:
        """What determines the results of equal rows: the bundle, the graph, the runtime and the options."""
        return {"model": self._service.fingerprint, **self._options}

    async def predict(self, rows: Sequence[Row]) -> list[Outcome]:
        """Return the outcome of each row. Rows with a text pair and rows without one are separate requests.

        Raises DataError where the options or the service are at fault.
        """
        outcomes = [Outcome(None, row.error) for row in rows]
        for fields in {tuple(row.texts) for row in rows if not row.error}:
            places = [
                n for n, row in enumerate(rows) if not row.error and tuple(row.texts) == fields
            ]
            found = await self._request([rows[place] for place in places])
            for place, outcome in zip(places, found, strict=True):
                outcomes[place] = outcome
        return outcomes

    async def _request(self, rows: Sequence[Row]) -> list[Outcome]:
        """Return the outcomes of rows with the same fields, by one request, or by one for each row where that fails."""
        route, fields = ROUTES[self.task]
        texts: dict[str, Any] = {
            fields[field]: [row.texts[field] for row in rows] for field in rows[0].texts
        }
        if self.task == "qa":
            texts = {"inputs": [row.texts for row in rows]}
        # Half of a surrogate pair, which orjson refuses, must reach the service, which names the row.
        body = json.dumps({**texts, **self._options, **self._encoding}).encode()
        while (reply := await post(self._service.app, route, body))[0] == BUSY:
            await asyncio.sleep(1)
        status, content, _ = reply
        if status == 200:
            errors = {each["index"]: each["message"] for each in content.get("errors") or ()}
            results = content.get("results", content.get("embeddings"))
            if self._encoding:
                results = [np.frombuffer(a2b_base64(vector or ""), "<f4") for vector in results]
            return [
                Outcome(None, f"{row.where}: {errors[place]}")
                if place in errors
                else Outcome(found, "")
                for place, (row, found) in enumerate(zip(rows, results, strict=True))
            ]
        if len(rows) > 1:
            return [outcome for row in rows for outcome in await self._request([row])]
        message, param = content["error"]["message"], content["error"]["param"] or ""
        if status not in (400, 413) and not param.startswith(tuple(texts)):
            raise DataError(message)
        shown = message.replace("inputs[0].", "").replace("[0]", "")
        return [Outcome(None, f"{rows[0].where}: {shown}")]


def choose_head(manifest: Manifest, name: str | None) -> tuple[str, Head]:
    """Return a head and its name, by default the first. Raises DataError for an unknown one."""
    chosen = next(iter(manifest.heads)) if name is None else name
    if chosen not in manifest.heads:
        raise DataError(f"--head: {chosen} is none of {', '.join(manifest.heads)}")
    return chosen, manifest.heads[chosen]


async def post(
    app: ASGIApp, path: str, content: bytes, more: Mapping[bytes, bytes] | None = None
) -> tuple[int, Any, dict[bytes, bytes]]:
    """Return the status, content and headers of the application's response. more: headers of the request"""
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(content)).encode()),
            *(more or {}).items(),
        ],
        "client": ("local", 0),
        "server": ("local", 0),
    }
    sent = [{"type": "http.request", "body": content, "more_body": False}]
    parts: list[bytes] = []
    status = 0
    headers: dict[bytes, bytes] = {}

    async def receive() -> dict[str, Any]:
        if sent:
            return sent.pop()
        await asyncio.Event().wait()  # a client that stays connected
        raise AssertionError

    async def send(message: Any) -> None:
        nonlocal status
        status = message.get("status", status)
        headers.update(message.get("headers", ()))
        parts.append(message.get("body", b""))

    await app(scope, receive, send)
    return status, orjson.loads(b"".join(parts)), headers

"""Receipts: how an answer was made, so that `quartet replay` can make it again.

The response to a request with the header `X-Quartet-Receipt` has one in the header of this name: JSON in
base64url, a dot, and its HMAC-SHA256 if the service has a `receipt_key`. It has no text of the request.
"""

import base64
import hashlib
import hmac
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import orjson

from service.core.agreement import decisions, sketch
from service.core.cpu import vector_features
from service.engines.engine import Engine, Reply

HEADER = "X-Quartet-Receipt"
MOST_BYTES = 4096  # of a header; proxies refuse larger ones
TEXTS = "$texts"  # key of an object in the place of a text (0), or of a list of that many texts
EXCEEDED = "too-large"  # in the place of a receipt


class Asked(NamedTuple):
    """A request for a receipt. path, body: as the route has them; texts: locations of texts; key: "" for none"""

    path: str
    body: object
    texts: frozenset[str]
    key: str


def fields_of(texts: Iterator[tuple[str, str]]) -> frozenset[str]:
    """Return the fields of a body that have the texts of a request."""
    return frozenset(place.partition(".")[0].partition("[")[0] for place, _ in texts)


def make_receipt(asked: Asked, engine: Engine, reply: Reply[Any]) -> str:
    """Return the receipt of a reply, or "too-large"."""
    taken: list[str] = []
    body = asked.body if isinstance(asked.body, dict) else {}
    on = engine.runs_on
    record = {
        "path": asked.path,
        "body": {k: take(v, taken) if k in asked.texts else v for k, v in body.items()},
        "texts": hash_of(taken),
        "model": engine.id,
        "bundle": engine.sha256,
        "precision": on.precision,
        "provider": on.provider,
        "runtime": on.runtime,
        "processor": " ".join(vector_features()),
        "heads": reply.heads,
        "decisions": hash_of([decisions(one) for one in reply.results]),
        "numbers": base64.b64encode(sketch(reply.results).astype("<f4").tobytes()).decode(),
    }
    made = seal(record, asked.key)
    return made if len(made) <= MOST_BYTES else EXCEEDED


def take(value: object, taken: list[str]) -> object:
    """Return a value with a mark in the place of each text, which is added to `taken`."""
    if isinstance(value, str):
        taken.append(value)
        return {TEXTS: 0}
    if isinstance(value, list):
        if value and all(isinstance(one, str) for one in value):
            taken += value
            return {TEXTS: len(value)}
        return [take(one, taken) for one in value]
    if isinstance(value, dict):
        return {key: take(one, taken) for key, one in value.items()}
    return value


def put(value: object, texts: Iterator[str]) -> object:
    """Return a value with texts in the place of its marks. Raises StopIteration for too few texts."""
    if isinstance(value, list):
        return [put(one, texts) for one in value]
    if isinstance(value, dict):
        if value.keys() == {TEXTS}:
            count = value[TEXTS]
            return [next(texts) for _ in range(count)] if count else next(texts)
        return {key: put(one, texts) for key, one in value.items()}
    return value


def hash_of(value: object) -> str:
    return hashlib.sha256(orjson.dumps(value)).hexdigest()


def seal(record: object, key: str) -> str:
    """Return a record as a receipt."""
    content = base64.urlsafe_b64encode(orjson.dumps(record)).decode()
    return f"{content}.{_sign(content, key)}"


def unseal(receipt: str, key: str) -> tuple[dict[str, Any], bool | None]:
    """Return a receipt's record, and whether its signature is that of the key; None without a key.

    Raises ValueError.
    """
    content, _, signature = receipt.strip().partition(".")
    try:
        record = orjson.loads(base64.urlsafe_b64decode(content))
        np.frombuffer(base64.b64decode(record["numbers"]), "<f4")
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"no receipt: {error}") from None
    return record, hmac.compare_digest(_sign(content, key), signature) if key else None


def _sign(content: str, key: str) -> str:
    return hmac.new(key.encode(), content.encode(), "sha256").hexdigest() if key else ""

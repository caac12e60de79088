"""Receipts: how an answer was made, so that `quartet replay` can make it again.

The response to a request with the header `X-Quartet-Receipt` has one in the header of this name: JSON in
base64url, a dot, and its HMAC-SHA256 if the service has a `receipt_key`. It has no text of the request.
"""

import base64
import hashlib
import hmac
from binascii import b2a_base64
from collections.abc import Container, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import orjson

from service.core.agreement import outline
from service.core.cpu import vector_features
from service.engines.device import RunsOn
from service.engines.engine import Engine, Reply

HEADER = "X-Quartet-Receipt"
MOST_BYTES = 4096  # of a header; proxies refuse larger ones
TEXTS = "$texts"  # key of an object in the place of a text (0), or of a list of that many texts
MOST_REMEMBERED = 64  # bytes of decisions
URL_SAFE = bytes.maketrans(b"+/", b"-_")
EXCEEDED = "too-large"  # in the place of a receipt


@dataclass(slots=True)
class Draft:
    """The receipt of a request that has no answer yet.

    path, body: as the route has them; text_names: of the body's fields with texts; key: "" for none
    """

    path: str
    body: object
    text_names: Container[str]
    key: str
    engine: Engine
    beginning: str = ""

    def begin(self) -> None:
        """Make the part that needs no answer, while the model runs, so that no request waits for it."""
        if self.beginning:
            return
        taken: list[str] = []
        body = self.body if isinstance(self.body, dict) else {}
        record = {
            "path": self.path,
            "body": {k: take(v, taken) if k in self.text_names else v for k, v in body.items()},
            "texts": hash_of(orjson.dumps(taken)),
        }
        engine = self.engine
        facts = facts_of(engine.id, engine.sha256, engine.runs_on)
        # Of binary tensors, the record has the hash.
        content = orjson.dumps(record, default=hash_of)[:-1] + facts
        # Base64 of whole groups of three bytes continues without padding.
        self.beginning = encode(content.ljust(len(content) + -len(content) % 3))

    def finish(self, reply: Reply[Any]) -> str:
        """Return the receipt of a reply, or "too-large"."""
        self.begin()
        decisions, sums = outline(reply.results)
        decided = orjson.dumps(decisions)
        is_short = len(decided) <= MOST_REMEMBERED
        rest = {
            "heads": reply.heads,
            "decisions": known_hash(decided) if is_short else hash_of(decided),
            "numbers": b2a_base64(sums.data, newline=False).decode(),
        }
        made = seal(self.beginning + encode(orjson.dumps(rest)[1:]), self.key)
        return made if len(made) <= MOST_BYTES else EXCEEDED


@lru_cache
def facts_of(model: str, sha256: str, runs_on: RunsOn) -> bytes:
    """Return the part of a record that is the same for all requests, between two commas."""
    processor = " ".join(vector_features())
    record = {"model": model, "bundle": sha256, **runs_on.facts, "processor": processor}
    return b"," + orjson.dumps(record)[1:-1] + b","


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
        # Of a tensor, only its data are texts.
        names: Container[str] = ("data",) if "datatype" in value else value
        return {key: take(one, taken) if key in names else one for key, one in value.items()}
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


def hash_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


known_hash = lru_cache(1024)(hash_of)  # many vectors have one shape, many texts one label


def encode(content: bytes) -> str:
    return b2a_base64(content, newline=False).translate(URL_SAFE).decode()


def seal(content: str, key: str) -> str:
    """Return the encoded JSON of a record as a receipt."""
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

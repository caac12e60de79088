"""Clients that ask for everything, sometimes leave too soon, and compare every answer with the lone one."""

import json
import math
import random
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeVar

from tests.e2e.calls import Call, calls, same_answer, without_varying
from tests.e2e.conftest import Server


class LoneAnswers(NamedTuple):
    """A model's answers to some calls. fingerprint: the model's, which is in a header of each answer"""

    fingerprint: str
    answers: Sequence[Any]


Expected = Mapping[str, LoneAnswers]  # by the model

ASKED = calls()
LEAVES = 0.1  # of all requests are given up
PAUSE_S = 0.05  # after a refusal
LAG_S = 1.0  # a client that is later than this drops its remaining requests


def lone_answers(
    server: Server, model: str, headers: dict[str, str] | None = None, calls: Sequence[Call] = ASKED
) -> LoneAnswers:
    """Return the answers of a model to calls, which are sent one after the other."""
    replies = [server.post(path, {**body, "model": model}, headers) for path, body in calls]
    assert {200} == {reply.status for reply in replies}
    (fingerprint,) = {reply.headers["x-quartet-model"] for reply in replies}
    return LoneAnswers(fingerprint, [without_varying(reply.json()) for reply in replies])


def error_code(error: Any, status: int) -> str:
    """Return the code in the body of an error, its type in TEI's form, or its status where the body has neither."""
    own = error.get("error")
    return str(own["code"] if isinstance(own, dict) else error.get("error_type", status))


class Client(threading.Thread):
    """Sends one request after the other until `stop` is called.

    rate: requests per second, at random times; as many as can be when it is infinite
    """

    def __init__(
        self, server: Server, expected: Expected, seed: int, headers: dict[str, str], rate: float
    ) -> None:
        super().__init__(daemon=True)
        self.server, self.expected, self.headers, self.rate = server, expected, headers, rate
        self.models = {one.fingerprint: model for model, one in expected.items()}
        self.chance = random.Random(seed)
        self.seen: Counter[str] = Counter()  # answers by model, errors by code, and disconnects
        self.wrong: list[object] = []
        self.enough = threading.Event()

    def run(self) -> None:
        due = time.monotonic()
        while not self.enough.wait(max(0.0, due - time.monotonic())):
            number = self.chance.randrange(len(ASKED))
            if self.chance.random() < LEAVES:
                self.leave(number)
            else:
                self.ask(number)
            pause_s = self.chance.expovariate(self.rate) if self.rate < math.inf else 0.0
            due = max(due + pause_s, time.monotonic() - LAG_S)

    def ask(self, number: int) -> None:
        reply = self.server.post(*ASKED[number], self.headers)
        said = reply.json()
        if reply.status != 200:
            self.seen[error_code(said, reply.status)] += 1
            time.sleep(PAUSE_S)
            return
        model = said["model"] if "model" in said else self.models[reply.headers["x-quartet-model"]]
        self.seen[model] += 1
        if not same_answer(self.expected[model].answers[number], said):
            self.wrong.append((ASKED[number], said))

    def leave(self, number: int) -> None:
        """Send a request, or a part of it, and go."""
        path, asked = ASKED[number]
        body = json.dumps(asked).encode()
        head = {"Host": "x", "Content-Type": "application/json", "Content-Length": str(len(body))}
        lines = "".join(f"{name}: {value}\r\n" for name, value in (head | self.headers).items())
        request = f"POST {path} HTTP/1.1\r\n{lines}\r\n".encode() + body
        with socket.create_connection(("127.0.0.1", self.server.port)) as wire:
            wire.sendall(request[: self.chance.randrange(1, len(request) + 1)])
            time.sleep(self.chance.random() * 0.02)
        self.seen["left"] += 1


Kind = TypeVar("Kind", bound=Client)


@contextmanager
def asking(
    server: Server,
    expected: Expected,
    count: int,
    *,
    headers: dict[str, str] | None = None,
    rate: float = math.inf,
    kind: type[Kind] = Client,
) -> Iterator[list[Kind]]:
    """This number of clients, at this rate in sum, for as long as the block runs."""
    each = rate / count
    clients = [kind(server, expected, seed, headers or {}, each) for seed in range(count)]
    for client in clients:
        client.start()
    try:
        yield clients
    finally:
        for client in clients:
            client.enough.set()
        for client in clients:
            client.join(60)


def seen_by(clients: Sequence[Client]) -> Counter[str]:
    return sum((client.seen for client in clients), Counter[str]())


def wrong_of(clients: Sequence[Client]) -> list[object]:
    return [one for client in clients for one in client.wrong]

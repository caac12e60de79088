"""Everything at once: all tasks and lengths, clients that leave, processes that die. Nothing is lost or wrong."""

import json
import os
import random
import signal
import socket
import threading
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.e2e.calls import calls, close
from tests.e2e.conftest import Server, children, serving, until

pytestmark = pytest.mark.e2e

CLIENTS = 6
KILL_EVERY_S = 4.0


class Client(threading.Thread):
    """Asks one thing after the other, sometimes leaves too soon, and compares every answer with the lone one."""

    def __init__(self, server: Server, expected: list[object], end: float, seed: int) -> None:
        super().__init__(daemon=True)
        self.server, self.expected, self.end = server, expected, end
        self.chance = random.Random(seed)
        self.seen: Counter[object] = Counter()
        self.wrong: list[object] = []

    def run(self) -> None:
        asked = calls()
        while time.monotonic() < self.end:
            number = self.chance.randrange(len(asked))
            path, body = asked[number]
            if self.chance.random() < 0.1:
                self.leave(path, json.dumps(body).encode())
                continue
            reply = self.server.post(path, body)
            said = reply.json()
            if reply.status == 200:
                self.seen["answered"] += 1
                if not close(self.expected[number], said):
                    self.wrong.append((path, body, said))
            else:
                self.seen[said["error"]["code"]] += 1
                time.sleep(0.05)

    def leave(self, path: str, body: bytes) -> None:
        """Send a request, or a part of it, and go."""
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        request = f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
        with socket.create_connection(("127.0.0.1", self.server.port)) as wire:
            wire.sendall(request[: self.chance.randrange(1, len(request) + 1)])
            time.sleep(self.chance.random() * 0.02)
        self.seen["left"] += 1


@pytest.mark.promise("Nothing accepted is lost, and nothing is answered differently in company.")
def test_answers_are_right_while_processes_die(tiny_bundle: Path, seconds: float) -> None:
    """The inference process is killed again and again: what comes while there is none is refused, all else right."""
    with serving(tiny_bundle) as server:
        expected = [server.answer(*call) for call in calls()]
        end = time.monotonic() + max(seconds, 2 * KILL_EVERY_S)
        clients = [Client(server, expected, end, seed) for seed in range(CLIENTS)]
        for client in clients:
            client.start()
        kills = 0
        while time.monotonic() + KILL_EVERY_S / 2 < end:
            time.sleep(KILL_EVERY_S / 2)
            os.kill(children(server)["inference"][0], signal.SIGKILL)
            kills += 1
            until(lambda: server.get("/health/ready").status == 503)
            until(lambda: server.get("/health/ready").status == 200, 60)
            time.sleep(KILL_EVERY_S / 2)
        for client in clients:
            client.join(60)
        seen = sum((client.seen for client in clients), Counter[object]())
        assert not [one for client in clients for one in client.wrong]
        assert set(seen) <= {"answered", "left", "replica_lost", "not_ready"}
        assert seen["answered"] > 10 * kills
        assert kills
        assert expected[0] == server.answer(*calls()[0])

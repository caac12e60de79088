"""`quartet compare --watch` compares copies of live requests, with their own options, and exports figures."""

import http.client
import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.conftest import ROOT
from tests.e2e.conftest import until
from tests.quartet.test_compare import answering


def ask(port: int, method: str, path: str, body: str = "", **headers: str) -> tuple[int, str]:
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30)) as connection:
        connection.request(method, path, body, headers)
        reply = connection.getresponse()
        return reply.status, reply.read().decode()


def metrics(port: int) -> dict[str, float]:
    """The numbers of copies by outcome, and the figures by `=` and their name."""
    families = text_string_to_metric_families(ask(port, "GET", "/metrics")[1])
    samples = [sample for family in families for sample in family.samples]
    return {
        one.labels.get("outcome", f"={one.labels.get('figure', 'beyond')}"): one.value
        for one in samples
    }


@contextmanager
def watching(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """The command, and the port that takes copies."""
    command = [sys.executable, "-m", "quartet", "compare", *arguments]
    with subprocess.Popen(command, cwd=ROOT, text=True, stdout=-1, stderr=-1) as process:
        try:
            line = process.stderr.readline() if process.stderr else ""
            found = re.search(r"127\.0\.0\.1:(\d+)", line)
            assert found, line
            yield process, int(found[1])
        finally:
            process.kill()


@pytest.mark.slow
def test_copies_are_compared():
    """Of a path that both servers have; each gets the body as it is."""
    bodies: list[Any] = []

    def answer(body: Any, name: str) -> Any:
        bodies.append(body)
        text = body["inputs"][0]
        if text == "slow":
            time.sleep(1)
        if text in ("none", name):
            return {"error": "no"}
        return {"embeddings": [[1.0, 9.0 * (text == "far" and name == "b")]]}

    plain = ("--dialect-a", "plain", "--dialect-b", "plain", "--task", "embeddings")
    with (
        answering(lambda body: answer(body, "a")) as a,
        answering(lambda body: answer(body, "b")) as b,
        watching(a, b, "--watch", "0", *plain) as (process, port),
    ):

        def copy(text: str, outcome: str) -> None:
            before = metrics(port)[outcome]
            body = json.dumps({"inputs": [text, "more"], "normalize": False})
            assert (204, "") == ask(port, "POST", "/embed?one=1", body)
            until(lambda: metrics(port)[outcome] > before)

        assert "=texts" not in metrics(port), "there are no figures yet"
        copy("same", "same")
        assert {"inputs": ["same", "more"], "normalize": False} == bodies[0] == bodies[1]
        assert 0 == metrics(port)["=beyond"]
        ask(port, "POST", "/embed", json.dumps({"inputs": ["slow"]}))
        copy("more", "dropped")
        until(lambda: metrics(port)["same"] == 2)
        copy("far", "changed")
        copy("b", "failed")
        copy("none", "refused")
        ask(port, "POST", "/classify", "{}")
        known = metrics(port)
        assert (3, 2 / 3, 1) == (known["=texts"], known["=same"], known["=failed"])
        assert 2 == known["=beyond"]
        process.terminate()
        report, _ = process.communicate(timeout=60)
    assert 1 == process.returncode
    assert '"inputs": ["far", "more"]' in report
    assert "beyond its limit: failed is 1, at most 0" in report

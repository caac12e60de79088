"""The commands of a tutorial, run in order, print the outputs that the tutorial shows."""

import contextlib
import io
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import ROOT
from tests.e2e.page_examples import Example, examples, rounded, values
from tests.e2e.test_proxies import free_port, program

FIRST_MODEL = [*examples(ROOT / "docs" / "tutorials" / "first_model.md")]
SECTIONS = list(dict.fromkeys(example.section for example in FIRST_MODEL))
READY_S = 120
# The environment of the tests has Quartet's packages, but not Quartet itself.
QUARTET = 'quartet() { .venv/bin/python -m quartet "$@"; }\n'

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(1800)]


class Reader:
    """A reader with a clone of the repository, two terminals and a Python prompt.

    ports: the port that is used in place of each port on the page
    """

    def __init__(self, clone: Path):
        self.clone = clone
        self.ports = {"8000": str(free_port()), "8443": str(free_port())}
        self.names: dict[str, Any] = {"__name__": "__main__"}
        self.service: subprocess.Popen[bytes] | None = None
        proxy = clone / "deploy" / "proxies" / "nginx.conf"
        proxy.write_text(self.with_own_ports(proxy.read_text(encoding="utf-8")), encoding="utf-8")

    def with_own_ports(self, text: str) -> str:
        for shown, own in self.ports.items():
            text = text.replace(shown, own)
        return text

    def run(self, example: Example) -> str:
        """Run a command and return its output; a command that serves runs until the next one that serves."""
        command = self.with_own_ports(example.command)
        if example.language == "python":
            with contextlib.redirect_stdout(io.StringIO()) as output:
                exec(compile(command, "tutorial", "exec"), self.names)
            return output.getvalue()
        script = ["bash", "-euo", "pipefail", "-c", QUARTET + command]
        if "quartet serve" in command:
            self.stop()
            environment = {**os.environ, "QUARTET_PORT": self.ports["8000"]}
            self.service = subprocess.Popen(
                script, cwd=self.clone, env=environment, start_new_session=True
            )
            self.wait_until_ready()
            return ""
        return subprocess.check_output(script, cwd=self.clone, text=True)

    def wait_until_ready(self) -> None:
        assert self.service is not None
        end = time.monotonic() + READY_S
        url = self.with_own_ports("http://localhost:8000/health/ready")
        while time.monotonic() < end:
            assert self.service.poll() is None, "the service ended at its start"
            with contextlib.suppress(OSError), urllib.request.urlopen(url):
                return
            time.sleep(0.1)
        pytest.fail(f"the service was not ready within {READY_S} s")

    def stop(self) -> None:
        """Stop the service as Ctrl-C in its terminal does."""
        if self.service is not None:
            os.killpg(self.service.pid, signal.SIGINT)
            self.service.wait(60)
            self.service = None


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Reader]:
    clone = tmp_path_factory.mktemp("clone")
    listed = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in subprocess.check_output(listed, cwd=ROOT, text=True).split("\0"):
        if name and (ROOT / name).is_file():
            (clone / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, clone / name)
    (clone / ".venv").symlink_to(sys.prefix)
    reader = Reader(clone)
    yield reader
    reader.stop()
    process_id = clone / "runs" / "nginx" / "nginx.pid"
    if process_id.is_file():
        os.kill(int(process_id.read_text()), signal.SIGTERM)


@pytest.mark.parametrize("section", SECTIONS)
def test_commands_of_the_first_model_print_what_the_page_shows(reader, section):
    """Each section continues from the sections before it; scores may differ by 0.02."""
    for needed in ("curl", "nginx", "openssl"):
        if any(needed in example.command for example in FIRST_MODEL if example.section == section):
            program(needed)
    for example in FIRST_MODEL:
        if example.section == section:
            output = reader.run(example)
            if example.shown is not None:
                assert rounded(values(example.shown)) == values(output), example.command

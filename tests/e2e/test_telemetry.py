"""What our processes send and write on their own: nothing, by the system calls of whole runs."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.e2e.conftest import children, serving, until

pytestmark = pytest.mark.slow

# Each of these switches telemetry off in one of our libraries, and CI sets some of them.
SWITCHES = frozenset(
    [
        "APPVEYOR",
        "BITBUCKET_BUILD_NUMBER",
        "BUILDKITE",
        "CI",
        "CIRCLECI",
        "CODEBUILD_BUILD_ID",
        "DISABLE_TELEMETRY",
        "DO_NOT_TRACK",
        "GITHUB_ACTIONS",
        "GITLAB_CI",
        "HF_HUB_DISABLE_TELEMETRY",
        "HF_HUB_OFFLINE",
        "HF_UPDATE_DOWNLOAD_COUNTS",
        "JENKINS_URL",
        "ORT_DISABLE_TELEMETRY",
        "ORT_RUNNING_UNIT_TESTS",
        "TEAMCITY_VERSION",
        "TF_BUILD",
        "TRAVIS",
    ]
)
CALLS = "trace=network,open,openat"
NAMES = ("/etc/resolv.conf", "/etc/hosts")  # a look-up reads one of these
ADDRESSED = re.compile(r"sa_family=AF_INET6?\b")
LOOPBACK = re.compile(r'inet_addr\("127\.|inet_pton\(AF_INET6, "::1"')
OUTWARD = re.compile(r"\b(connect|sendto|sendmsg|sendmmsg)\(")


@pytest.fixture
def calls(tmp_path: Path) -> Path:
    """The file that the system calls are recorded in."""
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed")
    probe = subprocess.run([*recorder(tmp_path / "none"), "true"], capture_output=True, check=False)
    if probe.returncode:
        pytest.skip(f"strace cannot trace here: {probe.stderr.decode().strip()}")
    return tmp_path / "calls"


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """The environment of a user with an empty home directory and no switch set."""
    home = tmp_path / "home"
    home.mkdir()
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in SWITCHES and not name.startswith(("XDG_", "PYTEST_"))
    }
    return {**kept, "HOME": str(home)}


def recorder(calls: Path) -> Sequence[str]:
    """The command that records calls of the process which it becomes, and of all below that."""
    return ["strace", "-D", "-f", "-qq", "-s", "200", "-e", CALLS, "-o", str(calls)]


def sent(calls: Path) -> list[str]:
    """The calls that look up a name or address another machine."""
    return [
        line
        for line in calls.read_text(errors="replace").splitlines()
        if any(f'"{name}"' in line for name in NAMES)
        or (OUTWARD.search(line) and ADDRESSED.search(line) and not LOOPBACK.search(line))
    ]


def written(environment: dict[str, str]) -> list[Path]:
    return sorted(Path(environment["HOME"]).rglob("*"))


def run(script: str, calls: Path, environment: dict[str, str]) -> None:
    """Run a script of Python to its end, recorded."""
    command = [*recorder(calls), sys.executable, "-c", script]
    subprocess.run(command, cwd=ROOT, env=environment, check=True, capture_output=True)
    wait_for_end(calls)


def wait_for_end(calls: Path) -> None:
    """Wait until the recorder has written all: nothing has the file open then."""
    until(lambda: not holders(calls))


def holders(path: Path) -> list[Path]:
    found = []
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if os.readlink(link) == str(path):
                found.append(link)
        except OSError:
            continue
    return found


@pytest.mark.e2e
@pytest.mark.promise(
    "The service connects to no other machine on its own, and writes nothing to the home directory."
)
@pytest.mark.parametrize("workers", ["1", "0"])
def test_service(workers, mini_bundle, calls, environment):
    """From start to end, a service connects to nothing and leaves the home directory as it was."""
    arguments = (mini_bundle, "--http-workers", workers)
    with serving(*arguments, under=recorder(calls), env=environment) as server:
        server.answer("/classify", {"inputs": "A fine film."})
    wait_for_end(calls)

    assert [] == sent(calls)
    assert [] == written(environment)


@pytest.mark.e2e
def test_service_with_openvino(tiny_bundle, calls, environment):
    """The provider's package sends nothing, though its import alone reports itself."""
    if find_spec("openvino") is None:
        pytest.skip("the package openvino is not installed")
    with serving(tiny_bundle, "--provider", "openvino", under=recorder(calls), env=environment):
        pass
    wait_for_end(calls)

    assert [] == sent(calls)
    assert [] == written(environment)


def test_export(tiny_checkpoint, tmp_path, calls, environment):
    """An export of a local checkpoint connects to nothing and leaves the home directory as it was."""
    arguments = [str(tiny_checkpoint), str(tmp_path / "bundle"), "--precision", "fp32"]
    run(f"from export.__main__ import main; assert 0 == main({arguments})", calls, environment)

    assert [] == sent(calls)
    assert [] == written(environment)


@pytest.mark.parametrize(
    "module", ["export.passes.fold", "benchmarks.gpu", "model.finetune", "tests.export.helpers"]
)
def test_import(module, calls, environment):
    """A process that begins with any of our modules that compute connects to nothing."""
    run(f"import {module}", calls, environment)

    assert [] == sent(calls)
    assert [] == written(environment)


@pytest.mark.e2e
def test_telemetry_can_be_switched_on(mini_bundle, environment):
    """With `runtime_telemetry`, the processes that may load the library inherit that its telemetry is on."""
    # The library's own variable for its unit tests keeps it from sending any.
    within = {**environment, "ORT_RUNNING_UNIT_TESTS": "1"}
    with serving(mini_bundle, "--runtime-telemetry", "true", env=within) as server:
        (inference,) = children(server)["inference"]
        inherited = Path(f"/proc/{inference}/environ").read_bytes().split(b"\0")

    assert b"ORT_DISABLE_TELEMETRY=0" in inherited


@pytest.mark.parametrize(
    ("module", "variable", "off", "on"),
    [
        ("service.core.session", "ORT_DISABLE_TELEMETRY", "1", "0"),
        ("model", "HF_HUB_DISABLE_TELEMETRY", "1", "0"),
        ("model", "HF_UPDATE_DOWNLOAD_COUNTS", "0", "1"),
    ],
)
def test_switches(module, variable, off, on, environment):
    """A library's own switch is off, unless the user has given it a value; an empty one is none."""
    script = f"import os, {module}; print(os.environ[{variable!r}], end='')"

    def found(**given):
        command = [sys.executable, "-c", script]
        return subprocess.check_output(command, cwd=ROOT, env={**environment, **given}, text=True)

    assert (off, off, on) == (found(), found(**{variable: ""}), found(**{variable: on}))

"""Python environments of their own for packages that must not meet Quartet's: peers here, clients in the tests.

    python -m benchmarks.lib.environments [PEER ...]

builds the environments of peers under `build/peers` that are missing or out of date, from
`benchmarks/peers/PEER/requirements.txt`. Pip's own settings apply. Where the default index gives a torch with CUDA,
name the index of CPU builds in them: a peer is measured on the CPU, and CUDA takes gigabytes.
"""

import argparse
import hashlib
import shutil
import subprocess
import sys
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PEERS = ROOT / "benchmarks" / "peers"
BUILT = ROOT / "build" / "peers"
STAMP = "requirements.sha256"


class Unavailable(Exception):
    """A peer or a client that cannot run on this machine; the message is the reason for people."""


@dataclass(frozen=True)
class Environment:
    """A virtual environment.

    requirements: the file that it is built from
    folder: where it is; pip's output is next to it
    command: builds it; for messages
    """

    requirements: Path
    folder: Path
    command: str

    @property
    def name(self) -> str:
        return self.folder.name

    def python(self) -> Path:
        """Return the interpreter of an environment that is built and up to date. Raises Unavailable."""
        if not self.is_fresh():
            state = "is out of date" if self.folder.is_dir() else "has not been built"
            raise Unavailable(f"its environment {state}: run {self.command}")
        return self.folder / "bin" / "python"

    def build(self) -> Path:
        """Build the environment if it is not up to date, and return its interpreter. Raises Unavailable."""
        if self.is_fresh():
            print(f"{self.name}: {self.folder} is up to date", flush=True)
            return self.python()
        log = self.folder.with_name(f"{self.name}.log")
        print(f"{self.name}: building {self.folder}; the output of pip is in {log}", flush=True)
        shutil.rmtree(self.folder, ignore_errors=True)
        self.folder.parent.mkdir(parents=True, exist_ok=True)
        python, requirements = str(self.folder / "bin" / "python"), str(self.requirements)
        pip = [sys.executable, "-m", "pip", "--python", python]
        with log.open("w", encoding="utf-8") as output:
            for command in (
                [sys.executable, "-m", "venv", "--without-pip", str(self.folder)],
                [*pip, "install", "--no-input", "--no-compile", "--requirement", requirements],
            ):
                ended = subprocess.run(
                    command, stdout=output, stderr=subprocess.STDOUT, check=False
                )
                if ended.returncode:
                    shutil.rmtree(self.folder, ignore_errors=True)
                    raise Unavailable(f"its environment cannot be built: {reason(log)}")
        (self.folder / STAMP).write_text(self.fingerprint())
        return self.python()

    def is_fresh(self) -> bool:
        stamp = self.folder / STAMP
        return stamp.is_file() and stamp.read_text() == self.fingerprint()

    def fingerprint(self) -> str:
        """Return a digest of the requirements and the version of Python."""
        version = ".".join(map(str, sys.version_info[:3]))
        return hashlib.sha256(self.requirements.read_bytes() + version.encode()).hexdigest()


def reason(log: Path) -> str:
    """Return the errors in pip's output, or its last line."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    return " ".join(errors or lines[-1:]) or f"see {log}"


def build_all(environments: Iterable[Environment]) -> bool:
    """Build environments, two at once, and print why one cannot be built. Returns whether all are up to date."""

    def is_built(environment: Environment) -> bool:
        try:
            environment.build()
        except Unavailable as error:
            print(f"{environment.name}: skipped, {error}", flush=True)
            return False
        return True

    with ThreadPoolExecutor(2) as pool:
        return all([*pool.map(is_built, environments)])


# -- peers ----------------------------------------------------------------------------------------


def names() -> list[str]:
    return sorted(path.parent.name for path in PEERS.glob("*/requirements.txt"))


def of_peer(peer: str) -> Environment:
    command = f"python -m benchmarks.lib.environments {peer}"
    return Environment(PEERS / peer / "requirements.txt", BUILT / peer, command)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peers", nargs="*", metavar="PEER", help=f"all of {names()} by default")
    given = parser.parse_args()
    if unknown := set(given.peers) - set(names()):
        parser.error(f"no such peer: {', '.join(sorted(unknown))}; there are {', '.join(names())}")
    return int(not build_all(map(of_peer, given.peers or names())))


if __name__ == "__main__":
    sys.exit(main())

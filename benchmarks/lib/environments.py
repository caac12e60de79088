"""One environment per peer under `build/peers`, so that no peer's libraries meet Quartet's or another's.

    python -m benchmarks.lib.environments [PEER ...]

builds those that are missing or out of date, from `benchmarks/peers/PEER/requirements.txt`, and says what it does.
Pip's own settings apply. Where the default index gives a torch with CUDA, name the index of CPU builds in them:
a peer is measured on the CPU, and CUDA takes gigabytes.
"""

import argparse
import hashlib
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PEERS = ROOT / "benchmarks" / "peers"
BUILT = ROOT / "build" / "peers"
STAMP = "requirements.sha256"


class Unavailable(Exception):
    """A peer that cannot run on this machine; the message is the reason for people."""


def names() -> list[str]:
    return sorted(path.parent.name for path in PEERS.glob("*/requirements.txt"))


def python_of(peer: str) -> Path:
    """The interpreter of an environment that is built and up to date. Raises Unavailable."""
    folder = BUILT / peer
    if not is_fresh(peer):
        state = "is out of date" if folder.is_dir() else "has not been built"
        raise Unavailable(
            f"its environment {state}: run python -m benchmarks.lib.environments {peer}"
        )
    return folder / "bin" / "python"


def build(peer: str) -> Path:
    """Build the environment if need be, and return its interpreter. Raises Unavailable."""
    folder = BUILT / peer
    log = BUILT / f"{peer}.log"
    if is_fresh(peer):
        print(f"{peer}: {folder} is up to date", flush=True)
        return python_of(peer)
    print(f"{peer}: building {folder}, some minutes; pip's words go to {log}", flush=True)
    shutil.rmtree(folder, ignore_errors=True)
    BUILT.mkdir(parents=True, exist_ok=True)
    python = str(folder / "bin" / "python")
    requirements = str(PEERS / peer / "requirements.txt")
    with log.open("w", encoding="utf-8") as words:
        for command in (
            [sys.executable, "-m", "venv", str(folder)],
            [python, "-m", "pip", "install", "--no-input", "--requirement", requirements],
        ):
            ended = subprocess.run(command, stdout=words, stderr=subprocess.STDOUT, check=False)
            if ended.returncode:
                shutil.rmtree(folder, ignore_errors=True)
                raise Unavailable(f"its environment cannot be built: {reason(log)}")
    (folder / STAMP).write_text(fingerprint(peer))
    return python_of(peer)


def is_fresh(peer: str) -> bool:
    stamp = BUILT / peer / STAMP
    return stamp.is_file() and stamp.read_text() == fingerprint(peer)


def fingerprint(peer: str) -> str:
    """What an environment is made from: its requirements and the version of Python."""
    version = ".".join(map(str, sys.version_info[:3]))
    made_from = (PEERS / peer / "requirements.txt").read_bytes() + version.encode()
    return hashlib.sha256(made_from).hexdigest()


def reason(log: Path) -> str:
    """The errors that pip named, else the last thing that it said."""
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR:")]
    return " ".join(errors or lines[-1:]) or f"see {log}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peers", nargs="*", metavar="PEER", help=f"all of {names()} by default")
    given = parser.parse_args()
    if unknown := set(given.peers) - set(names()):
        parser.error(f"no such peer: {', '.join(sorted(unknown))}; there are {', '.join(names())}")
    failed = 0
    for peer in given.peers or names():
        try:
            build(peer)
        except Unavailable as error:
            print(f"{peer}: skipped, {error}", flush=True)
            failed += 1
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())

"""Proofs that a bundle computes its goldens on this machine, with the measured cost of its batches.

A proof holds for a bundle's hash, its unchanged files, the settings that select the graph, the runtime, the processor
and its vector features. A second opening with a proof takes a third of the time. The proofs are kept in a small file,
so that they survive the process; where it cannot be written, they last as long as the process.
"""

import json
import os
import platform
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import structlog

from service.core.cpu import vector_features
from service.core.session import RUNTIME
from service.engines.device import RunsOn
from service.scheduling.cost_model import Sample

log = structlog.get_logger()

FILE = ".quartet-proofs.json"  # in `models_dir`; a hidden file is no bundle


@dataclass(frozen=True, slots=True)
class Proof:
    """What an earlier opening of a bundle found: its graph, and measured batches by their number of slots."""

    runs_on: RunsOn
    samples: Mapping[int, Sequence[Sample]]
    gpu_rate: float  # tokens per second, see `OpenedBundle`

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> "Proof":
        samples = {
            int(width): [Sample(*one) for one in own] for width, own in record["samples"].items()
        }
        runs_on = RunsOn(**record["runs_on"])
        return cls(runs_on, samples, float(record["gpu_rate"]))


class Proofs:
    """The proofs of this machine, by the hash of a bundle's manifest.

    path: the file that keeps them; None for none
    records: as JSON, which the next process can take over
    conditions: what a proof depends on, apart from the bundle and the machine
    """

    def __init__(self, path: Path | None, *conditions: object) -> None:
        self._path = path
        self._conditions = [*map(str, conditions), RUNTIME, processor(), *vector_features()]
        self.records: dict[str, Any] = {}
        if path is not None:
            with suppress(OSError, ValueError):
                read = json.loads(path.read_bytes())
                self.records = read if isinstance(read, dict) else {}

    def get(self, folder: Path, sha256: str) -> Proof | None:
        """Return the proof of a bundle; None if there is none, or one of its conditions has changed."""
        with suppress(OSError, LookupError, TypeError, ValueError, AttributeError):
            record = self.records[sha256]
            if record["for"] == self._conditions and record["files"] == identify(folder):
                return Proof.read(record)
        return None

    def put(self, folder: Path, sha256: str, proof: Proof) -> None:
        """Keep the proof of a bundle in place of an earlier one."""
        with suppress(OSError):  # the bundle was removed
            files = identify(folder)
            self.records[sha256] = {"for": self._conditions, "files": files, **asdict(proof)}
        self._save()

    def _save(self) -> None:
        if self._path is None:
            return
        temporary = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        try:
            temporary.write_text(json.dumps(self.records))
            temporary.replace(self._path)
        except OSError as error:
            log.warning("proofs are kept in memory only", path=str(self._path), problem=str(error))
            self._path = None


def identify(folder: Path) -> list[list[Any]]:
    """Return the name, size, modification, status change and inode of each file, which change with its contents."""
    stats = [(path.name, path.stat()) for path in sorted(folder.iterdir())]
    return [[name, s.st_size, s.st_mtime_ns, s.st_ctime_ns, s.st_ino] for name, s in stats]


def processor() -> str:
    """Return the processor's model, or its architecture where the system does not name one."""
    with suppress(OSError):
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        if found := re.search(r"^model name\s*:\s*(.*)$", text, re.MULTILINE):
            return found.group(1)
    return platform.machine()

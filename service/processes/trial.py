"""Opens a bundle in a process of its own, before the process that serves does.

The runtime cannot end an operator that runs, and a graph may crash its process. This process can be killed, and costs
no request when it crashes.

    python -m service.processes.trial PARENT FOLDER SETTINGS
"""

import asyncio
import json
import os
import signal
import sys
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from service.core import bundle
from service.core.bundle import BundleError
from service.engines.local_device import open_device
from service.engines.proofs import Proof
from service.observability.metrics import Metrics
from service.processes.child_process import child_python
from service.processes.process_signals import die_with_parent
from service.rollout.model_manager import STOP_S
from service.settings import Settings
from service.variables import without_secrets

SECRETS = {
    "api_key",
    "api_keys",
    "keys",
    "receipt_key",
}  # settings that other users of the machine may not see


async def try_bundle(settings: Settings, folder: Path) -> Proof | None:
    """Open and test a bundle in a process of its own. Return the proof, or None if the bundle has a fault.

    Raises BundleError if that takes longer than `load_timeout_s`, or ends the process. The caller, which opens the
    bundle next, finds all other faults itself.
    """
    process = await asyncio.create_subprocess_exec(
        *(*child_python(), "-m", "service.processes.trial"),
        *(str(os.getpid()), str(folder), settings.model_dump_json(exclude=SECRETS)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
        env=without_secrets(os.environ),
        start_new_session=True,  # a signal from a terminal reaches only the main process
    )
    limit_s = settings.load_timeout_s
    try:
        async with asyncio.timeout(limit_s + STOP_S):
            printed, _ = await process.communicate()
    except TimeoutError:
        reason = f"opening and testing it takes more than load_timeout_s, {limit_s:g} s"
        raise BundleError(folder, reason) from None
    finally:
        with suppress(ProcessLookupError):
            process.kill()
    status = process.returncode
    if status is not None and status < 0:
        name = signal.Signals(-status).name
        raise BundleError(folder, f"opening and testing it ends a process with {name}")
    return Proof.read(json.loads(printed.splitlines()[-1])) if status == 0 else None


async def open_once(settings: Settings, folder: Path) -> Proof:
    async with open_device(settings, Metrics()) as device:
        return device.open(bundle.load(folder)).proof


def main() -> None:
    parent, folder, settings = sys.argv[1:]
    die_with_parent(True, int(parent))
    proof = asyncio.run(open_once(Settings.model_validate_json(settings), Path(folder)))
    print(json.dumps(asdict(proof)))


if __name__ == "__main__":
    main()

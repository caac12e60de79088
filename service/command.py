"""The command `quartet-serve`: `python -m service`, but modules in the working directory do not shadow it."""

import sys

from service.processes.child_process import start_early
from service.processes.process_signals import at_start


def main() -> None:
    """Serve as `service.__main__` does. Its imports start threads, so the signals are handled before."""
    at_start()
    start_early(sys.argv[1:])
    from service.__main__ import main as serve

    serve()

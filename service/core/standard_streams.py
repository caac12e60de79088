"""The standard descriptors 0, 1 and 2, which some daemons start their children without."""

import os
import sys


def open_standard_streams() -> None:
    """Open the null device on each standard descriptor that is closed.

    Otherwise the next file or socket would get its number. Then a child's input would replace a listener, and the
    output of native libraries would be written into a graph or a checkpoint.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)  # the lowest number that is free
            if opened != number:
                os.dup2(opened, number)
                os.close(opened)
            os.set_inheritable(number, True)
    # Python has no stream for a descriptor that was closed at its start.
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115

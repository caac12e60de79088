"""The progress of an export that a command waits for: a bar on a terminal, else the lines of the export."""

import os
import sys
import time

BAR = 20  # characters
# A part of an export's line, and the share of the time that has passed when the line appears, as measured for MiniLM.
STEPS = {
    "inputs of up to": 0.15,
    "tracing": 0.2,
    "calibrating": 0.4,
    "differs from": 0.7,
    "against fp32": 0.75,
    "a session takes": 0.85,
}


class Progress:
    """The progress of one export. A line that is no step, such as a warning, is always printed."""

    def __init__(self) -> None:
        self.is_bar = sys.stderr.isatty()
        self._began = time.monotonic()

    def show(self, line: str) -> None:
        """Print a line, or draw the bar at its step."""
        if not self.is_bar:
            print(f"  {line}", file=sys.stderr, flush=True)
        elif line.startswith("warning: "):
            print(f"\r\033[K  {line}", file=sys.stderr, flush=True)
        else:
            share = max((share for part, share in STEPS.items() if part in line), default=0.0)
            if share:
                self._draw(share, line)

    def end(self) -> None:
        """Remove the bar."""
        if self.is_bar:
            print("\r\033[K", end="", file=sys.stderr, flush=True)

    def _draw(self, share: float, line: str) -> None:
        bar = "█" * round(BAR * share)
        left = (time.monotonic() - self._began) * (1 - share) / share
        text = f"{bar:░<{BAR}}  {left:3.0f} s left  {line}"
        width = os.get_terminal_size(sys.stderr.fileno()).columns - 1
        print(f"\r\033[K{text[:width]}", end="", file=sys.stderr, flush=True)

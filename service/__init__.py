"""Quartet's server: bundles behind HTTP, with dynamic batching and without torch."""

from service.core.standard_streams import open_standard_streams

__version__ = "0.2.0"

# Called here, because every entry point of this repository imports this package before it opens a file.
open_standard_streams()

"""Quartet's serving room: bundles behind HTTP, with dynamic batching and without torch."""

__version__ = "0.1.0"

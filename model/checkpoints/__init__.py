"""Checkpoints in the hub's layout, both ways: which files and settings are read, and with which meaning.

Callers use `source.read_source`, `reader`, `writer` and `errors.CheckpointError`.
"""

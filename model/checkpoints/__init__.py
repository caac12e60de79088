"""Checkpoints in the hub's layout, both ways: which files and settings are read, and with which meaning.

Callers use `source.read_source`, `checkpoint` and `hub_names.CheckpointError`.
"""

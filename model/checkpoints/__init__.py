"""Checkpoint directories of other libraries: which files and settings are read, and with which meaning."""

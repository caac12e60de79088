"""Rollout: which versions are served, and how they are loaded, promoted, rolled back and unloaded.

Callers use `manager` and `directory_watcher`, with the commands of `engines.commands`.
"""

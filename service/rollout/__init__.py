"""Rollout: load, promote, roll back and unload versions of models.

Callers use `model_manager` and `directory_watcher`, with the commands of `engines.commands`.
"""

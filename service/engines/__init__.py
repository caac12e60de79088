"""Engines: each is one served model, from texts to results. They know no HTTP.

Callers use `registry.Engines`, `engine.Engine`, the `device.Device` that computes for them, and `commands`.
"""

"""Engines: each computes the results of one served model from texts, without HTTP.

Callers use `registry.Engines`, `engine.Engine`, the `device.Device` that computes their entries, and `commands`.
"""

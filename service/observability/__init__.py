"""Observability: metrics and the log.

Callers use `metrics.Metrics`, or its protocol `Recorder`, and the functions of `logs`.
"""

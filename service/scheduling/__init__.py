"""Scheduling: entries in, batches out. It knows neither HTTP nor ONNX Runtime.

Callers use `batcher.Batcher`, the types of `entries` and `load`, and measure costs with `cost_model`.
"""

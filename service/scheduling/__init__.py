"""Scheduling: entries in, batches out, independent of HTTP and of ONNX Runtime.

Callers use `batcher.Batcher`, the types of `entries` and `load`, and measure costs with `cost_model`.
"""

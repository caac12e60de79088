"""ONNX graphs that another tool exported: checked, and given a head.

Callers use `onnx_source.read_external`.
"""

"""Passes over an exported graph: each takes a graph and returns it faster, smaller or more precise.

Callers are `export.trace_graphs` and the pipeline.
"""

"""Shared parts of the training scripts: optimizers, resumable runs, distillation objectives, captures of an encoder.

Callers are the scripts in `model`.
"""

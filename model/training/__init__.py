"""What training scripts share: optimizers, resumable runs, distillation objectives, captures of an encoder.

Callers are the scripts in `model`.
"""

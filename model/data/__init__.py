"""Data: from files and data sets to the batches that a training step reads.

Callers use `corpus` and `pretraining_batches` for text, `labelled_rows` and `examples` for labelled rows.
"""

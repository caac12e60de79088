"""From a checkpoint to a verified bundle: the only package that sees both training and serving."""

import os

import service.core.standard_streams  # noqa: F401  opens them, before a library opens a file

# Before numpy and torch load: their threads would spin between the many small steps of rounding.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

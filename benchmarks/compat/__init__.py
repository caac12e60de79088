"""Compare Quartet's answers with those of transformers' pipelines: `python -m benchmarks.compat`."""

"""Compare the answers of Quartet and of transformers' pipelines: `python -m benchmarks.compat`."""

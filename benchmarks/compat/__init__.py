"""Are Quartet's answers those of transformers' pipelines? `python -m benchmarks.compat` asks both the same."""

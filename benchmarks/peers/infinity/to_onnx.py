"""Write a checkpoint's ONNX graph with optimum's exporter, and the graph that infinity optimizes from it.

    python to_onnx.py MODEL OUT MAX_TOKENS

Infinity optimizes a graph at its first start and caches the result. With current versions of optimum that step fails,
and infinity would serve the graph as exported. This script does the step with the same options, so that infinity finds
the cached result: attention and GELU fused.

Infinity's optimum engine truncates texts at the size of the position table in the configuration. The graph has its own
table, so the configuration can have MiniLM's maximum length instead.
"""

import json
import sys
from pathlib import Path

from optimum.exporters.onnx import main_export
from optimum.onnxruntime import ORTModelForFeatureExtraction, ORTOptimizer
from optimum.onnxruntime.configuration import OptimizationConfig

model, out, max_tokens = sys.argv[1:]
main_export(model, out, task="feature-extraction", library_name="transformers")
ORTOptimizer.from_pretrained(ORTModelForFeatureExtraction.from_pretrained(out)).optimize(
    OptimizationConfig(optimization_level=99, enable_transformers_specific_optimizations=True),
    save_dir=out,
)
config = Path(out) / "config.json"
said = json.loads(config.read_text())
config.write_text(json.dumps({**said, "max_position_embeddings": int(max_tokens)}))

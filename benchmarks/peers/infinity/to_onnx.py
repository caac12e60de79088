"""Write a checkpoint's ONNX graph by optimum's exporter, and beside it the one that infinity would optimise from it.

    python to_onnx.py MODEL OUT MAX_TOKENS

Infinity optimises a graph at its first start and keeps the result for later ones. With the optimum of today that
step fails, and it would serve the graph as exported. Here it is done with the same options, so that infinity finds
what it looks for: attention and GELU fused.

Infinity's optimum engine cuts texts where the position table ends. The graph has a table of its own, so the
configuration is free to say where MiniLM's texts really end.
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

"""Checkpoints in GLiClass's layout, of weights that a seed decides, and what `gliclass` computes with them.

`python -m tests.parity.gliclass_checkpoints FOLDER` writes the file RECORDED. It runs where `gliclass` is installed,
and imports nothing of Quartet.
"""

import json
import sys
from pathlib import Path
from typing import Any

from tests.parity.gliner_checkpoints import ENCODERS, SHAPE, TEXTS, make_tokenizer, write

RECORDED = Path(__file__).with_name("gliclass_recorded.json")
MARKERS = ("<<LABEL>>", "<<SEP>>", "<<EXAMPLE>>")
LABELS = (
    ["travel", "a late ferry", "x"],
    ["The river"],
    ["date of birth", "bakery, café", "on", "1998"],
)
CASES: dict[str, dict[str, Any]] = {
    "deberta-segments": {
        **{"encoder": "deberta-v2", "prompt_first": True, "class_token_pooling": "average"},
        "use_segment_embeddings": True,
    },
    "modernbert": {"encoder": "modernbert", "prompt_first": True, "hidden_size": 24},
    "bert-factors": {
        **{"encoder": "bert", "scorer_type": "weighted-dot", "pooling_strategy": "avg"},
        **{"embed_class_token": False, "class_token_pooling": "average"},
    },
    "bert-layers": {"encoder": "bert", "scorer_type": "mlp"},
    "bert-attention": {
        **{"encoder": "bert", "scorer_type": "cross-attn", "pooling_strategy": "pass"},
        **{"scorer_num_heads": 4, "scorer_mlp_hidden_size": 48},
    },
    "deberta-normalized": {
        **{"encoder": "deberta-v2", "normalize_features": True, "pooling_strategy": "max"},
        **{"embed_class_token": False, "prompt_first": True, "projector_hidden_act": "silu"},
    },
}


def save(folder: Path, case: str, shapes: dict[str, list[int]]) -> Path:
    """Write a checkpoint's directory, as `save_pretrained` does; returns it."""
    fields = {**CASES[case]}
    encoder = fields.pop("encoder")
    tokenizer = make_tokenizer(encoder, MARKERS)
    rows = tokenizer.get_vocab_size()
    label, separator, example = map(tokenizer.token_to_id, MARKERS)
    config = {
        "model_type": "GLiClass",
        "architectures": ["GLiClassModel"],
        "architecture_type": "uni-encoder",
        "encoder_model": "none",
        "class_token_index": label,
        "text_token_index": separator,
        "example_token_index": example,
        "vocab_size": rows,
        "hidden_size": SHAPE["hidden_size"],
        "encoder_config": {**ENCODERS[encoder], **SHAPE, "vocab_size": rows},
        **fields,
    }
    return write(folder, "config.json", config, tokenizer, shapes)


def record(folder: Path) -> None:
    """Write RECORDED: by case, the shapes of its tensors and the logits of TEXTS for each of LABELS."""
    import torch
    from gliclass import GLiClassModel, ZeroShotClassificationPipeline
    from gliclass.config import GLiClassModelConfig
    from transformers import AutoTokenizer

    recorded = {}
    for case in CASES:
        place = save(folder / case, case, {})
        config = GLiClassModelConfig(**json.loads((place / "config.json").read_text()))
        tensors = GLiClassModel(config).state_dict()
        shapes = {
            name: [*tensor.shape] for name, tensor in tensors.items() if "position_ids" not in name
        }
        save(place, case, shapes)
        model = GLiClassModel.from_pretrained(str(place), local_files_only=True).eval()
        tokenizer = AutoTokenizer.from_pretrained(str(place), local_files_only=True)
        pipeline = ZeroShotClassificationPipeline(
            model, tokenizer, device="cpu", progress_bar=False
        )
        with torch.no_grad():
            logits = [
                [
                    [round(float(x), 6) for x in one["logits"][: len(labels)]]
                    for text in TEXTS
                    for one in pipeline.pipe.get_embeddings([text], labels)
                ]
                for labels in LABELS
            ]
        recorded[case] = {"shapes": shapes, "logits": logits}
        print(case, logits[0])
    RECORDED.write_text(json.dumps(recorded) + "\n", encoding="utf-8")


if __name__ == "__main__":
    record(Path(sys.argv[1]))

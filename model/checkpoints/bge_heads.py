"""The heads of bge-m3 (Chen et al. 2024) in addition to its embedding: weights of tokens, and a vector for each token.

FlagEmbedding stores each as one linear layer in a file of its own, next to the files of sentence-transformers.
"""

from collections.abc import Mapping
from pathlib import Path

from tokenizers import Tokenizer
from torch import Tensor, nn

from model.checkpoints.errors import CheckpointError
from model.checkpoints.head_config import validate_head
from model.checkpoints.sentence_config import encoder_folder
from model.checkpoints.tokenizer_files import read_special_token, read_tokenizer
from model.checkpoints.weight_files import load_pickle
from model.heads import TokenEmbedding, TokenWeights
from service.core.manifest import Head, LateInteraction, Sparse

SPARSE, COLBERT = "sparse_linear.pt", "colbert_linear.pt"
UNWEIGHED = ("cls_token", "eos_token", "sep_token", "pad_token", "unk_token")

Layer = dict[str, Tensor]


def read_further_heads(
    folder: Path, width: int, vocabulary: int
) -> dict[str, tuple[Head, nn.Module]]:
    """Return the heads of the files SPARSE and COLBERT that a directory has, by name. Raises CheckpointError."""
    present = [name for name in (SPARSE, COLBERT) if (folder / name).is_file()]
    if not present:
        return {}
    tokenizer = read_tokenizer(encoder_folder(folder))
    found: dict[str, tuple[Head, nn.Module]] = {}
    if SPARSE in present:
        layer = _read_linear(folder / SPARSE, {"weight": (1, width), "bias": (1,)})
        skip = _special_ids(folder, tokenizer, UNWEIGHED)
        head = validate_head(
            folder / SPARSE,
            task="sparse-embedding",
            vocabulary_size=vocabulary,
            sparse=Sparse(source="tokens", skip_token_ids=skip),
        )
        weights = TokenWeights(width)
        weights.linear.load_state_dict(layer)
        found["sparse-embedding"] = (head, weights)
    if COLBERT in present:
        layer = _read_linear(folder / COLBERT, {"weight": (None, width), "bias": (None,)})
        skip = _special_ids(folder, tokenizer, ("cls_token",))
        late = LateInteraction(
            skip_token_ids=skip, query_skip_token_ids=skip, similarity="meanmaxsim"
        )
        head = validate_head(
            folder / COLBERT,
            task="late-interaction",
            dimensions=len(layer["weight"]),
            late_interaction=late,
        )
        dense = nn.Linear(width, len(layer["weight"]))
        dense.load_state_dict(layer)
        found["late-interaction"] = (head, TokenEmbedding(nn.Sequential(dense)))
    return found


def _special_ids(folder: Path, tokenizer: Tokenizer, names: tuple[str, ...]) -> tuple[int, ...]:
    tokens = (read_special_token(encoder_folder(folder), name) for name in names)
    ids = (tokenizer.token_to_id(token) for token in tokens if token is not None)
    return tuple(sorted({number for number in ids if number is not None}))


def _read_linear(path: Path, shapes: Mapping[str, tuple[int | None, ...]]) -> Layer:
    """Return the tensors of a linear layer in float32. shapes: of each tensor, None for any size"""
    layer = load_pickle(path)
    found = {name: tuple(tensor.shape) for name, tensor in layer.items()}
    if found.keys() != shapes.keys() or any(
        len(found[name]) != len(shape)
        or any(wanted not in (None, size) for wanted, size in zip(shape, found[name], strict=True))
        for name, shape in shapes.items()
    ):
        raise CheckpointError(
            f"{path}: has the tensors {found}, expected the shapes {dict(shapes)}"
        )
    return {name: tensor.float() for name, tensor in layer.items()}

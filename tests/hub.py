"""Checkpoints of every family, of random weights, as transformers and sentence-transformers write them."""

from pathlib import Path
from typing import Any

import torch
import transformers
from sentence_transformers import CrossEncoder, SentenceTransformer
from sentence_transformers.sentence_transformer.modules import Normalize, Pooling, Transformer
from tokenizers import Tokenizer

from model.families.registry import FAMILIES
from model.families.spec import Family
from model.tokenizer import train
from tests import samples
from tests.model.helpers import perturb

POSITIONS = 64
SHAPE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "embedding_size": 16,
}


def save(
    model_type: str, folder: Path, kind: Any, positions: int = POSITIONS, **fields: Any
) -> Path:
    """A model of one of transformers' Auto classes, with a tokenizer of its family's kind; returns the folder.

    positions: the tokens of its longest text
    """
    family = FAMILIES[model_type]
    tokenizer = train(samples.corpus(), vocab_size=500, family=family)
    pad = tokenizer.token_to_id(family.special_tokens["pad"])
    unused = 100 - family.config(max_position_embeddings=100, pad_token_id=pad).max_length
    shape = {
        **family.config.released,
        **SHAPE,
        "max_position_embeddings": positions + unused,
        **fields,
    }
    if hasattr(family.config, "num_key_value_heads"):
        shape |= {"num_key_value_heads": 2, "head_dim": 16}
    if hasattr(family.config, "use_bidirectional_attention"):
        shape = {"use_bidirectional_attention": True, **shape}
    words = {family.config.words.get(name, name): value for name, value in shape.items()}
    save_beside(tokenizer, family, positions, folder, kind, model_type, **words)
    return folder


def save_beside(
    tokenizer: Tokenizer,
    family: Family,
    positions: int,
    folder: Path,
    kind: Any,
    model_type: str,
    **fields: Any,
) -> Any:
    """Write any encoder of transformers and a family's tokenizer to one folder; returns the model."""
    config = transformers.AutoConfig.for_model(
        model_type,
        vocab_size=tokenizer.get_vocab_size(),
        **{
            "pad_token_id": tokenizer.token_to_id(family.special_tokens["pad"]),
            "tie_word_embeddings": True,
            **fields,
        },
    )
    torch.manual_seed(0)
    model = perturb(kind.from_config(config), scale=0.2)
    model.save_pretrained(folder)
    special = dict(family.special_tokens)
    if "mask" not in special:
        special["eos"] = special["sep"]
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=positions,
        **{f"{kind}_token": token for kind, token in special.items()},
        model_input_names=["input_ids", "attention_mask"]
        + ["token_type_ids"] * (family.config().type_vocab_size > 1),
    ).save_pretrained(folder)
    return model


def save_sentence_transformer(
    model_type: str,
    folder: Path,
    pooling: str = "mean",
    prompts: dict[str, str] | None = None,
    **fields: Any,
) -> SentenceTransformer:
    """A bi-encoder: its encoder, a pooling, and vectors of length 1."""
    plain = folder.with_name(f"{folder.name}-plain")
    save(model_type, plain, transformers.AutoModel, **fields)
    transformer = Transformer(str(plain))
    parts = [transformer, Pooling(transformer.get_embedding_dimension(), pooling), Normalize()]
    made = SentenceTransformer(modules=parts, device="cpu", prompts=prompts)
    made.save(str(folder))
    return made


def save_cross_encoder(
    model_type: str, folder: Path, activation: torch.nn.Module, **fields: Any
) -> CrossEncoder:
    """One score of a pair, through an activation."""
    kind = transformers.AutoModelForSequenceClassification
    plain = folder.with_name(f"{folder.name}-plain")
    save(model_type, plain, kind, num_labels=1, **fields)
    made = CrossEncoder(str(plain), activation_fn=activation, device="cpu")
    made.save(str(folder))
    return made

"""The configuration of a BERT encoder, with the field names of `config.json`, and named presets.

Other families derive their configuration from it, each in its own file, with other defaults and some other names.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar, Self, get_type_hints

# Without a limit, a wrong number takes all memory before its tensors are missing.
MOST_LAYERS = 1000
MOST = 10**9  # of all other integers

# The end of the hub's class names, by task.
SUFFIXES = {
    "classification": "ForSequenceClassification",
    "ner": "ForTokenClassification",
    "qa": "ForQuestionAnswering",
    "fill-mask": "ForMaskedLM",
    "embedding": "Model",
}
# Names of families in their original code, before transformers had them.
ORIGINAL_NAMES = {"new": "gte"}


@dataclass(frozen=True)
class BertConfig:
    """Fields have the names and defaults of the hub's `config.json` for `model_type: bert`.

    model_type: the family's name in `config.json`
    widening: intermediate_size / hidden_size of presets
    released: values of all released checkpoints that differ from the defaults; presets have them
    words: the family's names in `config.json` for our fields, None for a field that it does not have
    absent: transformers' values for fields missing in `config.json`, where they differ from the defaults here
    may_be_zero, may_be_negative: integers that need not be positive
    activations: supported values of hidden_act
    """

    model_type: ClassVar[str] = "bert"
    words: ClassVar[Mapping[str, str | None]] = {}
    absent: ClassVar[Mapping[str, Any]] = {}
    may_be_zero: ClassVar[frozenset[str]] = frozenset({"type_vocab_size", "conv_kernel_size"})
    may_be_negative: ClassVar[frozenset[str]] = frozenset(
        {"pad_token_id", "max_relative_positions", "position_buckets"}
    )
    activations: ClassVar[tuple[str, ...]] = ("gelu",)
    widening: ClassVar[float] = 4
    released: ClassVar[Mapping[str, Any]] = {}

    vocab_size: int = 30522
    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    hidden_dropout_prob: float = 0.1
    attention_probs_dropout_prob: float = 0.1
    max_position_embeddings: int = 512
    type_vocab_size: int = 2
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-12
    pad_token_id: int = 0

    def __post_init__(self) -> None:
        self._check_values()
        if self.num_hidden_layers > MOST_LAYERS:
            word = self.words.get("num_hidden_layers", "num_hidden_layers")
            raise ValueError(f"{word} = {self.num_hidden_layers} exceeds {MOST_LAYERS}")
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not a multiple of num_attention_heads {self.num_attention_heads}"
            )
        if self.hidden_act not in self.activations:
            known = " or ".join(map(repr, self.activations))
            word = self.words.get("hidden_act", "hidden_act")
            raise ValueError(f"{word} {self.hidden_act!r}: only {known} is {self.model_type}'s")
        if self.max_length < 1:
            raise ValueError(
                f"max_position_embeddings {self.max_position_embeddings} leaves no position for a token"
            )

    def _check_values(self) -> None:
        """Raise ValueError naming a field, as in `config.json`, whose value has a wrong type or range."""
        hints = get_type_hints(type(self))
        for field in fields(self):
            word = self.words.get(field.name, field.name) or field.name
            value, hint = getattr(self, field.name), hints[field.name]
            if expected := self._expected(field.name, value, hint):
                raise ValueError(f"{word} = {value!r} must be {expected}")

    def _expected(self, name: str, value: Any, hint: Any) -> str | None:
        """Return the requirement that a field's value does not meet, None if it is valid."""
        if hint is bool:
            return None if isinstance(value, bool) else "true or false"
        if hint is str:
            return None if isinstance(value, str) else "text"
        if hint is float:
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if name.endswith("_dropout_prob"):
                return None if is_number and 0 <= value <= 1 else "a number from 0 to 1"
            if name.endswith(("_eps", "_theta")):
                is_valid = is_number and math.isfinite(value) and value > 0
                return None if is_valid else "a positive number"
            return None if is_number and math.isfinite(value) and value >= 0 else "a number from 0"
        if hint is int or (hint == int | None and value is not None):
            least = 0 if name in self.may_be_zero else 1
            if not isinstance(value, int) or isinstance(value, bool):
                return "an integer"
            if name not in self.may_be_negative and value < least:
                return f"at least {least}"
            if value > MOST:
                return f"at most {MOST}"
        return None

    @property
    def max_length(self) -> int:
        """The longest sequence, in tokens, that has positions."""
        return self.max_position_embeddings

    @property
    def head_size(self) -> int:
        """D: the size of a head's query, key and value."""
        return self.hidden_size // self.num_attention_heads

    @property
    def num_key_heads(self) -> int:
        """K: the heads of keys and values."""
        return self.num_attention_heads

    @property
    def attention_widths(self) -> list[int]:
        """ND, KD, KD: the widths of queries, keys and values."""
        keys = self.num_key_heads * self.head_size
        return [self.num_attention_heads * self.head_size, keys, keys]

    def theta_of(self, layer: int) -> float | None:
        """Return the base of a layer's RoPE frequencies; None in families without rotary positions."""
        return None

    @property
    def embedding_width(self) -> int:
        """E: the width of the embedding tables."""
        return self.hidden_size

    def keeping(self, layers: Sequence[int]) -> Self:
        """Return the configuration with a subset of the layers. Raises ValueError where layers share weights."""
        return replace(self, num_hidden_layers=len(layers))

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> Self:
        """Read a hub `config.json`. Raises ValueError for settings that this encoder would compute differently."""
        if config.get("model_type", cls.model_type) != cls.model_type:
            raise ValueError(f"model_type {config['model_type']!r} is not {cls.model_type!r}")
        named = {
            field.name: config.get(cls.words.get(field.name, field.name)) for field in fields(cls)
        }
        present = {name: value for name, value in named.items() if value is not None}
        return cls(**{**cls.absent, **present})

    def to_dict(self) -> dict[str, Any]:
        """Return the content of a hub `config.json`."""
        named = {self.words.get(name, name): value for name, value in asdict(self).items()}
        return {
            "model_type": self.model_type,
            "position_embedding_type": "absolute",
            **{word: value for word, value in named.items() if word is not None},
        }


def _shape(layers: int, hidden: int) -> dict[str, int]:
    # The head size is 64, as in Google's releases, except in `small`, which has MiniLM's 12 heads of 32.
    heads = 12 if hidden == 384 else hidden // 64
    return {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads}


PRESETS = {
    "tiny": _shape(2, 128),
    "mini": _shape(4, 256),
    "small": _shape(6, 384),
    "base": _shape(12, 768),
    "large": _shape(24, 1024),
}


def preset(name: str, kind: type[BertConfig] = BertConfig, **overrides: Any) -> BertConfig:
    """Return a preset's configuration for a family, with other values for some fields. Raises ValueError."""
    if name not in PRESETS:
        raise ValueError(f"no preset {name!r}: one of {', '.join(PRESETS)}")
    known = [field.name for field in fields(kind)]
    if unknown := sorted(set(overrides) - set(known)):
        raise ValueError(f"{kind.model_type} has no {unknown[0]!r}: one of {', '.join(known)}")
    values = {**PRESETS[name], **kind.released, **overrides}
    return kind(**{"intermediate_size": round(kind.widening * values["hidden_size"]), **values})

"""The shape of a BERT encoder, in the words of its `config.json`, and the presets that have a name.

Other families' configurations derive from it, each in its own file: they differ in defaults and in some words.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar, Self, get_type_hints


@dataclass(frozen=True)
class BertConfig:
    """Field names and defaults are those of the hub's `config.json` for `model_type: bert`.

    model_type: the family, in the words of `config.json`
    widening: how many times as wide as its hidden states a preset's feed-forward is
    released: what all releases say, and so every preset, and what is not the default
    words: fields that it has another word for, or none
    absent: the values of fields that `config.json` leaves out, in transformers, where these are not the defaults here
    may_be_zero, may_be_negative: integers that need not be positive
    activations: what it may compute between the halves of its feed-forward
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
        """Raise ValueError naming a field, in the words of `config.json`, whose value has another type or range."""
        hints = get_type_hints(type(self))
        for field in fields(self):
            word = self.words.get(field.name, field.name) or field.name
            value, hint = getattr(self, field.name), hints[field.name]
            if expected := self._expected(field.name, value, hint):
                raise ValueError(f"{word} = {value!r} must be {expected}")

    def _expected(self, name: str, value: Any, hint: Any) -> str | None:
        """Return what a field's value must be where it is something else."""
        if hint is bool:
            return None if isinstance(value, bool) else "true or false"
        if hint is str:
            return None if isinstance(value, str) else "text"
        if hint is float:
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
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
        return None

    @property
    def max_length(self) -> int:
        """The longest sequence it has positions for, in tokens."""
        return self.max_position_embeddings

    @property
    def head_size(self) -> int:
        """Of a head's query, key and value."""
        return self.hidden_size // self.num_attention_heads

    def theta_of(self, layer: int) -> float | None:
        """How slowly a layer's slowest rotation goes; None in families that do not rotate by position."""
        return None

    @property
    def embedding_width(self) -> int:
        """Of the rows of the embedding tables."""
        return self.hidden_size

    def keeping(self, layers: Sequence[int]) -> Self:
        """Of an encoder that has only these of the layers. Raises ValueError where they cannot be told apart."""
        return replace(self, num_hidden_layers=len(layers))

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> Self:
        """Read a hub `config.json`. Raises ValueError for what this encoder would compute differently."""
        if config.get("model_type", cls.model_type) != cls.model_type:
            raise ValueError(f"model_type {config['model_type']!r} is not {cls.model_type!r}")
        said = {
            field.name: config.get(cls.words.get(field.name, field.name)) for field in fields(cls)
        }
        found = {name: value for name, value in said.items() if value is not None}
        return cls(**{**cls.absent, **found})

    def to_dict(self) -> dict[str, Any]:
        named = {self.words.get(name, name): value for name, value in asdict(self).items()}
        return {
            "model_type": self.model_type,
            "position_embedding_type": "absolute",
            **{word: value for word, value in named.items() if word is not None},
        }


def _shape(layers: int, hidden: int) -> dict[str, int]:
    # The head size is 64 for every preset, as in Google's releases, but for `small`, which has MiniLM's 12 heads of 32.
    heads = 12 if hidden == 384 else hidden // 64
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
    }


PRESETS = {
    "tiny": _shape(2, 128),
    "mini": _shape(4, 256),
    "small": _shape(6, 384),
    "base": _shape(12, 768),
    "large": _shape(24, 1024),
}


def preset(name: str, kind: type[BertConfig] = BertConfig, **overrides: Any) -> BertConfig:
    """The config of a preset (`tiny`, `mini`, `small`, `base` or `large`) in a family's kind of it.

    Raises ValueError for a preset, and for a field, that there is not.
    """
    if name not in PRESETS:
        raise ValueError(f"no preset {name!r}: one of {', '.join(PRESETS)}")
    known = [field.name for field in fields(kind)]
    if unknown := sorted(set(overrides) - set(known)):
        raise ValueError(f"{kind.model_type} has no {unknown[0]!r}: one of {', '.join(known)}")
    said = {**PRESETS[name], **kind.released, **overrides}
    return kind(**{"intermediate_size": round(kind.widening * said["hidden_size"]), **said})

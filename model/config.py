"""The shape of a BERT encoder, in the words of its `config.json`, and the presets that have a name.

Other families' configurations derive from it, each in its own file: they differ in defaults and in some words.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, ClassVar, Self


@dataclass(frozen=True)
class BertConfig:
    """Field names and defaults are those of the hub's `config.json` for `model_type: bert`.

    model_type: the family, in the words of `config.json`
    widening: how many times as wide as its hidden states a preset's feed-forward is
    released: what all releases say, and so every preset, and what is not the default
    words: fields that it has another word for, or none
    activations: what it may compute between the halves of its feed-forward
    """

    model_type: ClassVar[str] = "bert"
    words: ClassVar[Mapping[str, str | None]] = {}
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
        if self.hidden_size % self.num_attention_heads:
            raise ValueError(
                f"hidden_size {self.hidden_size} is not a multiple of num_attention_heads {self.num_attention_heads}"
            )
        if self.hidden_act not in self.activations:
            known = " or ".join(map(repr, self.activations))
            raise ValueError(f"hidden_act {self.hidden_act!r}: only {known} is {self.model_type}'s")

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
        if config.get("position_embedding_type", "absolute") != "absolute":
            raise ValueError(
                f"position_embedding_type {config['position_embedding_type']!r} is not 'absolute'"
            )
        if config.get("is_decoder") or config.get("add_cross_attention"):
            raise ValueError(
                "a decoder is not an encoder: is_decoder and add_cross_attention must be false"
            )
        said = {
            field.name: config.get(cls.words.get(field.name, field.name)) for field in fields(cls)
        }
        return cls(**{name: value for name, value in said.items() if value is not None})

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

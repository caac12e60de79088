"""The tensors of a checkpoint that a model does not use: known to be without effect, or refused by name."""

import re
from collections.abc import Collection, Iterable, Iterator

from model.checkpoints.errors import CheckpointError
from model.families.spec import Family

# Of all families: what a model computes itself.
BUFFERS = r"(.*\.)?(position_ids|token_type_ids|inv_freq|original_inv_freq)"
# Heads of pretraining that Quartet does not have: DeBERTa's of the third version.
OTHER_PRETRAINING = r"(lm_predictions|mask_predictions)\..*"
JOINT = r"heads\..*"  # of a joint checkpoint
PROJECTION = r"linear\.weight"  # of the first ColBERT code
TABLE = "position_embeddings"  # of distances alone, DeBERTa needs no table of positions


def check_unused(
    names: Iterable[str], used: Collection[str], family: Family, where: str, *, heads: bool
) -> None:
    """Raise CheckpointError naming a tensor (of `names`) that is neither used nor known to be without effect.

    heads: whether the heads of other tasks are left out knowingly, as in an encoder alone
    """
    used = {name.removeprefix(family.prefix) for name in used}
    known, others = [*_without_effect(family)], [*_of_heads(family)]
    unused = []
    for name in sorted(names):
        bare = name.removeprefix(family.prefix)
        if bare in used or _matches(bare, known):
            continue
        if not _matches(bare, others):
            unused.append(name)
        elif not heads:
            raise CheckpointError(
                f"{where}: {name} is of a head that config.json does not name in architectures: "
                "--task classification, ner or qa reads the head, --task embedding leaves it out"
            )
    if unused:
        more = f" and {len(unused) - 1} more" if len(unused) > 1 else ""
        raise CheckpointError(
            f"{where}: no part of a {family.model_type} model uses the tensor {unused[0]}{more}: "
            "remove tensors that have no effect"
        )


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(re.fullmatch(pattern, name) for pattern in patterns)


def _without_effect(family: Family) -> Iterator[str]:
    """Patterns of the tensors that transformers leaves out of a model for any task but pretraining."""
    yield BUFFERS
    yield OTHER_PRETRAINING
    for stem in (*family.objectives.values(), family.decoder):
        yield from _stem(family, stem)
    if family.encoder.has_pooler:  # of its own, which heads of tokens and spans do not read
        for stem in family.encoder_names[r"pooler\.dense"]:
            yield from _stem(family, stem)
    if family.model_type.startswith("deberta"):
        yield rf"embeddings\.{TABLE}\.weight"


def _of_heads(family: Family) -> Iterator[str]:
    yield JOINT
    yield PROJECTION
    for head in family.heads.values():
        for stem in head.values():
            yield from _stem(family, stem)


def _stem(family: Family, stem: str) -> Iterator[str]:
    """A pattern of the parameters of a part, and of a parameter of that name."""
    yield re.escape(stem.removeprefix(family.prefix)) + r"(\.(weight|bias))?"

"""The search for what makes a side's answers equal to a bundle's: one known cause after the other."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from export.external.onnx_source import POOLINGS
from quartet.comparison.bundle_side import BundleSide
from quartet.comparison.figures import EQUAL, rounding
from quartet.comparison.recipes import SERVED, Recipe
from quartet.comparison.sides import Item, SideError, Task
from service.core.agreement import distance
from service.core.cpu import CPU
from service.tasks.entity_recognition import Aggregation

Distances = NDArray[np.float64]

MOST_CAUSES = 3
PROBED = 3  # texts that tell whether a recipe helps at all
GAIN = 0.5  # the share of the distance that a cause leaves at most
LENGTHS = (32, 64, 128, 256, 384, 512)
PROMPTS = (
    *("", "query: ", "passage: ", "search_query: ", "search_document: "),
    "Represent this sentence for searching relevant passages: ",
)
# The tasks of a field of a recipe; all for the others.
TASKS: Mapping[str, Sequence[Task]] = {
    **dict.fromkeys(("dimensions", "normalize", "pooling", "prompt"), ("embeddings",)),
    "activation": ("labels", "reranking"),
    "labels": ("labels",),
    "offset_unit": ("entities", "answers"),
    "aggregation": ("entities",),
    "token_type": ("embeddings", "labels", "entities", "answers", "reranking"),
    "padding": ("embeddings", "labels", "sparse"),
}
# What to change, by the field of a recipe. {} is the value that the other side uses.
SETTINGS = {
    "pooling": "it pools by {}: quartet export --pooling, TEI's and infinity's --pooling, 1_Pooling/config.json",
    "normalize": "its vectors are scaled to length 1: {}: `normalize` of requests, or the module Normalize",
    "dimensions": "its vectors have {} dimensions: `dimensions` of requests, truncate_dim of sentence-transformers",
    "prompt": "it puts {!r} before each text: `prompt` or `prompt_name` of requests, TEI's --default-prompt",
    "truncation": "it cuts long texts on the {}: TEI's truncation_direction, truncation_side of tokenizer_config.json",
    "max_length": "it reads {} tokens: quartet export --max-length, max_seq_length, TEI's --max-input-length",
    "lower_case": "it lowers the case of texts: {}: do_lower_case of the tokenizer",
    "token_type": "all its tokens have the type {}: token_type_ids are missing in its inputs, or wrong",
    "padding": "it reads padding up to {} tokens as text: the attention mask, or the id of the padding token, is wrong",
    "activation": "it makes scores by {}: `function_to_apply` or `raw_scores` of requests, problem_type in config.json",
    "aggregation": "it joins tokens by {}: `aggregation_strategy` of requests",
    "offset_unit": "its offsets count in {}: `offset_unit` of requests, or convert them in the client",
    "labels": "its labels have another name or order, {}: id2label in config.json",
    "precision": "it computes in {}: the setting `precision`, TEI's --dtype",
}


@dataclass
class Explanation:
    """What a side does otherwise than a bundle.

    causes: by the field of a recipe, the sentence that says what to change
    equal: the precision at which the bundle's answers are the side's then; "" if a difference remains
    distance: the largest that remains; tried: the number of ways that were computed
    """

    causes: dict[str, str] = field(default_factory=dict)
    equal: str = ""
    distance: float = 0.0
    tried: int = 0


async def explain(
    lab: BundleSide, task: Task, items: Sequence[Item], theirs: Sequence[Any]
) -> Explanation:
    """Find the recipe by which a bundle gives a side's answers."""
    found = Explanation()
    recipe, ours = SERVED, [await lab.answer(task, item) for item in items]
    left = distances(theirs, ours)
    while left.max() > EQUAL and len(found.causes) < MOST_CAUSES:
        best: tuple[float, str, Recipe, list[Any]] | None = None
        for name, candidate in candidates(lab, task, items, recipe, ours, theirs):
            try:
                made = await answers(lab, task, items, candidate, theirs, left)
            except (SideError, IndexError):  # such as a text that is longer than the model reads
                continue
            found.tried += 1
            if made is None:
                continue
            apart = distances(theirs, made)
            if best is None or apart.mean() < best[0]:
                best = float(apart.mean()), name, candidate, made
            if apart.max() <= EQUAL:
                break
        if best is None or best[0] > GAIN * left.mean():
            break
        _, name, recipe, ours = best
        left = distances(theirs, ours)
        found.causes[name] = SETTINGS[name].format(getattr(recipe, name))
    found.equal = rounding([*zip(ours, theirs, strict=True)])
    found.distance = float(left.max())
    if found.equal not in ("", "fp32"):
        found.causes["precision"] = (
            f"the differences have the size of {found.equal}'s rounding: "
            + SETTINGS["precision"].format(found.equal)
        )
    return found


async def answers(
    lab: BundleSide,
    task: Task,
    items: Sequence[Item],
    recipe: Recipe,
    theirs: Sequence[Any],
    left: Distances,
) -> list[Any] | None:
    """Return the answers of a recipe; None if those that differ most, which are computed first, stay as far."""
    first = np.argsort(-left)[:PROBED]
    probed = {place: await lab.answer(task, items[place], recipe) for place in first}
    apart = [distance(theirs[place], own) for place, own in probed.items()]
    if np.mean(apart) > np.mean(left[first]):
        return None
    numbered = enumerate(items)
    return [
        probed[n] if n in probed else await lab.answer(task, item, recipe) for n, item in numbered
    ]


def distances(theirs: Sequence[Any], ours: Sequence[Any]) -> Distances:
    return np.array([min(distance(a, b), 10.0) for a, b in zip(theirs, ours, strict=True)])


def candidates(
    lab: BundleSide,
    task: Task,
    items: Sequence[Item],
    recipe: Recipe,
    ours: Sequence[Any],
    theirs: Sequence[Any],
) -> Iterator[tuple[str, Recipe]]:
    """Yield the recipes that differ from one in one field, with its name; quick and frequent causes come first."""
    manifest = lab.bundle.manifest
    longest = max(lab.encoder(SERVED).count_tokens(" ".join(item)) for item in items)
    lengths = [n for n in LENGTHS if n <= 2 * longest and n != manifest.max_length]
    is_short = task == "embeddings" and len(theirs[0]) < len(ours[0])
    values: dict[str, Iterable[Any]] = {
        "dimensions": [len(theirs[0])] if is_short else [],
        "normalize": (True, False),
        "pooling": POOLINGS,
        "prompt": dict.fromkeys([*lab.head(task).named_prompts.values(), *PROMPTS]),
        "activation": ("none", "sigmoid", *(["softmax"] if task == "labels" else [])),
        "labels": filter(None, [other_names(ours, theirs)] if task == "labels" else []),
        "offset_unit": ("utf16", "byte"),
        "aggregation": get_args(Aggregation),
        "token_type": (0, 1),
        "lower_case": (True, False),
        "truncation": ("left",),
        "max_length": lengths,
        "precision": sorted(
            {own.precision for own in manifest.graphs if own.provider in CPU.graphs}
        ),
        "padding": [*lengths, manifest.max_length],
    }
    for name, tried in values.items():
        for value in tried if task in TASKS.get(name, get_args(Task)) else ():
            changed = replace(recipe, **{name: value})
            if changed != recipe:
                yield name, changed


def other_names(ours: Sequence[Any], theirs: Sequence[Any]) -> tuple[tuple[str, str], ...]:
    """Return each label with the label of the other side that has its scores; empty where these are the same."""
    mine, other = (
        {label: [dict(one).get(label, 0.0) for one in side] for label in dict(side[0])}
        for side in (ours, theirs)
    )
    pairs = tuple(
        (name, min(other, key=lambda label: float(np.abs(np.subtract(other[label], column)).sum())))
        for name, column in mine.items()
    )
    is_order = len({label for _, label in pairs}) == len(pairs) == len(other)
    return pairs if is_order and any(one != label for one, label in pairs) else ()

"""Sequences of token ids in place of texts: the answers of heads that need no positions in a text."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from service.core.encode import Cut, TextError, Window
from service.core.manifest import PER_TOKEN
from service.core.packing import Ints
from service.engines.engine import Engine
from service.engines.task_plan import TaskPlan, together
from service.errors import InvalidInput
from service.scheduling.entries import Heads
from service.tasks.analysis import TASKS

# Tasks whose heads have one output for a sequence.
OF_IDS = frozenset(TASKS.keys() - PER_TOKEN)


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenSequences:
    """The results of several heads for each sequence, by head, as `Analysis` has them.

    Without named heads, all heads that have one output for a sequence answer.

    sequences: ids `[n]` int64 of the model's vocabulary, special tokens included
    """

    sequences: Sequence[Ints]

    def plan(self, engine: Engine, heads: Heads) -> TaskPlan[Cut, dict[str, Any]]:
        manifest = engine.manifest
        of_ids = [name for name, head in manifest.heads.items() if head.task in OF_IDS]
        for name in heads:
            if name not in of_ids:
                has = ", ".join(of_ids) or "none"
                reason = f"{name} is no head of {engine.id} that reads token ids; these do: {has}"
                raise InvalidInput(reason, param="outputs")
        names = tuple(dict.fromkeys(heads or of_ids))
        if not names:
            raise InvalidInput(f"{engine.id} has no head that reads token ids", param="outputs")
        empty = [""] * len(self.sequences)  # the tasks decode, but encode nothing
        plans = {
            name: TASKS[manifest.heads[name].task](inputs=empty).plan(engine, (name,))
            for name in names
        }
        size = engine.encoder.tokenizer.get_vocab_size()

        def encode(part: slice) -> list[Cut]:
            sequences, longest = self.sequences[part], engine.encoder.max_length
            if bad := [i for i, ids in enumerate(sequences) if not 1 <= len(ids) <= longest]:
                raise TextError(bad, f"must have 1 to {longest} tokens")
            if bad := [i for i, ids in enumerate(sequences) if ids.min() < 0 or ids.max() >= size]:
                raise TextError(bad, f"has an id outside of the vocabulary of {size}")
            return [Cut((Window(ids, ids * 0),), False) for ids in sequences]

        return replace(together(plans), sizes=[*map(len, self.sequences)], encode=encode)

"""Attention weights: how much each token of a text attends to each other token, in the heads of one layer."""

from collections.abc import Sequence
from typing import Self

from pydantic import Field, model_validator

from service.core.decode import AttentionMap, Floats
from service.core.encode import Encoded, TextError
from service.core.manifest import ATTENTION, MOST_ATTENDED
from service.engines.engine import Engine
from service.engines.task_plan import NUMBER_BYTES, SCORED_BYTES, TaskPlan, characters, one_head
from service.errors import InvalidInput, UnknownHead
from service.scheduling.entries import Heads
from service.tasks.fields import AtLeastOne, Inputs, Texts, check_aligned


class Attention(Inputs):
    """The attention weights of one layer for each text, or each pair of texts."""

    text_pair: Texts | None = Field(None, description="the second text of each input, aligned")
    layer: AtLeastOne | None = Field(
        None, description="the layer of the encoder, from 1; the last one when absent"
    )

    @model_validator(mode="after")
    def _aligned(self) -> Self:
        check_aligned(self.inputs, self.text_pair)
        return self

    def plan(self, engine: Engine, heads: Heads) -> TaskPlan[Encoded, AttentionMap]:
        graph, pairs = engine.manifest.attention, self.text_pair
        if graph is None:
            reason = "has no attention graph: export its checkpoint with --attention"
            raise UnknownHead(f"{engine.id} {reason}", param="model")
        layer = self.layer or graph.layers
        if layer > graph.layers:
            raise InvalidInput(f"{engine.id} has {graph.layers} layers", param="layer")
        most = min(MOST_ATTENDED, engine.encoder.max_length)

        def encode(part: slice) -> Sequence[Encoded]:
            found = engine.encoder.whole(self.inputs[part], None if pairs is None else pairs[part])
            if long := [index for index, item in enumerate(found) if item.tokens > most]:
                raise TextError(long, f"longer than {most} tokens, the limit of attention weights")
            return found

        def attend(_: int, item: Encoded, outputs: list[Floats]) -> AttentionMap:
            ids = item.windows[0].input_ids.tolist()
            tokens = [engine.encoder.tokenizer.id_to_token(number) or "" for number in ids]
            return AttentionMap(tokens, outputs[0][layer - 1])

        def answer_bytes(_: int, item: Encoded) -> int:
            return item.tokens * (SCORED_BYTES + NUMBER_BYTES * graph.heads * item.tokens)

        sizes = characters(self.inputs) if pairs is None else characters(self.inputs, pairs)
        return TaskPlan((ATTENTION,), sizes, encode, one_head(ATTENTION, attend), answer_bytes)

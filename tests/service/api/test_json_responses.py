"""A large answer is written in pieces, which together are the same JSON."""

from typing import Any

import numpy as np
import orjson
import pytest

from service.api.json_responses import ITEMS, dump, pieces

ROWS = np.arange(12_000, dtype=np.float32).reshape(-1, 4) / 7
ENTITIES = [{"label": "é\n", "score": one / 3} for one in range(300)]
CONTENTS: dict[str, Any] = {
    "vectors": {"embeddings": [*ROWS], "usage": {"tokens": 1}},
    "matrices": [{"index": 0, "data": ROWS}, {"index": 1, "data": ROWS[:0]}],
    "entities": {"results": [ENTITIES, None, [], ENTITIES[:1]]},
    "heads": [{"a": ENTITIES, "b": ROWS[0]}, {}],
    "weights": [{"indices": np.arange(99), "tokens": ["a"] * 99}],
    "nothing": [],
    "a text": "a",
}


@pytest.mark.parametrize("name", CONTENTS)
def test_pieces_are_the_same_json(name):
    """With small pieces, so that none holds the interpreter's lock for long."""
    found = [*pieces(CONTENTS[name])]
    assert dump(CONTENTS[name]) == b"".join(found)
    longest = max(len(dump(one)) for one in (*ROWS[-ITEMS:], *ENTITIES))
    assert max(map(len, found)) <= max(ITEMS * (longest + 1), 500)
    orjson.loads(b"".join(found))

"""What an embedding task makes of its options and a head: the head, the prompt, the dimensions and the type."""

from typing import Any

import numpy as np
import pytest

from service.core import decode
from service.errors import InvalidInput, UnknownHead
from service.tasks.embedding import Embedding, EmbeddingByType
from tests.service.tasks.helpers import WORDS, engine

PROMPTS = {"query": "query: ", "passage": "passage: "}


def words(made: Any, **options: Any) -> list[str]:
    """The words of the first window of a text, without special tokens."""
    plan = Embedding(inputs=["sea"], **options).plan(made, ())
    (item,) = plan.encode(slice(0, 1))
    return [WORDS[index] for index in item.windows[0].input_ids[1:-1]]


def vector(made: Any, output: Any, **options: Any) -> Any:
    """The result of a text whose head's output is known."""
    plan = Embedding(inputs=["sea"], **options).plan(made, ())
    (item,) = plan.encode(slice(0, 1))
    return plan.decode(0, item, [{plan.heads[0]: np.asarray(output, np.float32)}])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, "passage: sea"),
        ({"prompt_name": "query"}, "query: sea"),
        ({"prompt_name": "document"}, "sea"),
        ({"prompt": "ship "}, "ship sea"),
        ({"prompt": ""}, "sea"),
        ({"input_type": "query"}, "query: sea"),
        ({"input_type": "document"}, "sea"),
        ({"input_type": "document", "prompt_name": "passage"}, "passage: sea"),
        ({"input_type": "query", "prompt": "ship "}, "ship sea"),
    ],
)
def test_prompts(options, expected):
    """The request's prompt counts, else that of the input type, else the head's default."""
    made = engine(vectors={"prompts": PROMPTS, "default_prompt": "passage"})
    assert expected.split() == words(made, **options)


def test_prompts_of_a_head_without():
    """Input types and their prompts may be named for every head."""
    made = engine(vectors={})
    for options in ({}, {"input_type": "query"}, {"prompt_name": "document"}):
        assert ["sea"] == words(made, **options)
    assert ["ship", "sea"] == words(made, prompt="ship ")


def test_sizes_count_prompts():
    """The size of an input counts the characters of its prompt and its text."""
    made = engine(vectors={"prompts": PROMPTS, "default_prompt": "query"})
    assert [10, 8] == Embedding(inputs=["sea", "a"]).plan(made, ()).sizes


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "unknown prompt": (
        {"prompts": PROMPTS},
        {"prompt_name": "web"},
        "vectors has no prompt 'web', only query, document, passage",
        "prompt_name",
    ),
    "two prompts": ({}, {"prompt_name": "query", "prompt": ""}, "not both", "prompt"),
    "not pooled": (
        {"include_prompt": False},
        {"prompt": "ship "},
        "vectors excludes prompts from its pooling",
        "prompt",
    ),
    "long prompt": (
        {},
        {"prompt": "sea " * 8, "truncate": "window"},
        'the prompt has 8 tokens; with truncate "window" it may have 7',
        "prompt",
    ),
    "more dimensions": ({}, {"dimensions": 5}, "vectors has 4 dimensions, 5 were", "dimensions"),
    "untrained dimensions": (
        {"matryoshka_dimensions": [1, 2]},
        {"dimensions": 3},
        "vectors was not trained for 3 dimensions, only for 1, 2, 4",
        "dimensions",
    ),
    "no ranges": (
        {},
        {"output_dtype": "int8"},
        "vectors has no quantization ranges for int8: export with --calibrate",
        "output_dtype",
    ),
    "no ranges of these": (
        {"quantization_ranges": {4: [[0] * 4, [1] * 4]}},
        {"output_dtype": "uint8", "dimensions": 2},
        "vectors has quantization ranges for 4 dimensions, not for 2",
        "dimensions",
    ),
    "ranges of other vectors": (
        {"quantization_ranges": {4: [[0] * 4, [1] * 4]}},
        {"output_dtype": "int8", "normalize": False},
        "vectors has quantization ranges for normalize true only",
        "normalize",
    ),
    "another side": (
        {"input_type": "query"},
        {"input_type": "document"},
        "head vectors is for query, not for document",
        "input_type",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused(case):
    """The error has the option that the head does not support, and the field."""
    head, options, message, param = REFUSED[case]
    with pytest.raises(InvalidInput, match=message) as caught:
        Embedding(inputs=["sea"], **options).plan(engine(vectors=head), ())
    assert param == caught.value.param


@pytest.mark.parametrize("dimensions", [None, 1, 2, 4])
def test_trained_dimensions(dimensions):
    """The trained numbers of dimensions, and all of them, are cut and scaled."""
    made = engine(vectors={"matryoshka_dimensions": [1, 2]})
    found = vector(made, [3, 4, 0, 12], dimensions=dimensions)
    assert (dimensions or 4,) == found.shape
    np.testing.assert_allclose(1, np.linalg.norm(found), rtol=1e-6)


def test_heads_of_input_types():
    """An input type selects its head; without one the first head answers, and a named head is checked."""
    made = engine(document={"input_type": "document"}, query={"input_type": "query"})
    chosen = {
        side: Embedding(inputs=["sea"], input_type=side).plan(made, ()).heads
        for side in (None, "query", "document")
    }
    assert {None: ("document",), "query": ("query",), "document": ("document",)} == chosen
    assert ("query",) == Embedding(inputs=["sea"]).plan(made, ("query",)).heads
    with pytest.raises(UnknownHead):
        Embedding(inputs=["sea"], input_type="query").plan(made, ("other",))


def test_types():
    """A vector is cut and scaled before it is quantized, by the ranges of its number of dimensions."""
    ranges = {2: [[0.0, 0.0], [1.0, 1.0]], 4: [[0.0] * 4, [2.0] * 4]}
    made = engine(vectors={"quantization_ranges": ranges})
    output = [3, -4, 0, 12]
    assert [0b10010000] == vector(made, output, output_dtype="ubinary").tolist()
    assert [0b10000000 - 128] == vector(made, output, output_dtype="binary", dimensions=2).tolist()
    assert [153, 0] == vector(made, output, output_dtype="uint8", dimensions=2).tolist()
    unit = decode.embed([np.array(output, np.float32)], [1], normalize=True, dimensions=None)
    expected = np.clip(np.floor(unit / 2 * 255), 0, 255) - 128
    assert expected.tolist() == vector(made, output, output_dtype="int8").tolist()


def test_several_types():
    """A vector in several types equals the vector in each type alone; one type that is refused refuses all."""
    made = engine(vectors={"quantization_ranges": {4: [[0.0] * 4, [2.0] * 4]}})
    output = [3, -4, 0, 12]
    embedding, types = Embedding(inputs=["sea"]), ("float", "uint8", "binary")
    plan = EmbeddingByType(embedding=embedding, output_dtypes=types).plan(made, ())
    (item,) = plan.encode(slice(0, 1))
    found = plan.decode(0, item, [{"vectors": np.asarray(output, np.float32)}])
    assert [*types] == [*found]
    for dtype, one in found.items():
        assert vector(made, output, output_dtype=dtype).tolist() == one.tolist()
    without = engine(vectors={})
    with pytest.raises(InvalidInput, match="no quantization ranges for uint8"):
        EmbeddingByType(embedding=embedding, output_dtypes=types).plan(without, ())

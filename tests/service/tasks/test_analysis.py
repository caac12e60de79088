"""Heads that read other tokens than the rest are no part of an analysis."""

import pytest

from service.errors import InvalidInput
from service.tasks.analysis import Analysis
from tests.service.tasks.helpers import engine


def test_default_prompts():
    """A head with a default prompt is left out, and refused where it is named."""
    made = engine(plain={}, prompted={"prompts": {"query": "query: "}, "default_prompt": "query"})
    assert ("plain",) == Analysis(inputs=["sea"]).plan(made, ()).heads
    with pytest.raises(InvalidInput, match="prompted has a default prompt") as caught:
        Analysis(inputs=["sea"]).plan(made, ("plain", "prompted"))
    assert "heads" == caught.value.param

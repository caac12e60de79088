"""quartet-starter: the terms of its data, and its answers."""

import pytest

from service.core import bundle
from service.embedded import EmbeddedService
from tests.conftest import ROOT

STARTER = ROOT / "bundles" / "quartet-starter"

pytestmark = pytest.mark.skipif(
    not STARTER.is_dir(), reason="quartet-starter is not in this checkout"
)


def test_every_data_set_permits_commercial_use():
    manifest = bundle.load(STARTER).manifest
    assert {"yes"} == {data.commercial_use for data in manifest.provenance.datasets}
    assert dict.fromkeys(manifest.heads, "yes") == manifest.provenance.commercial_use_by_head(
        manifest.heads
    )
    assert manifest.weights_license.startswith("CC BY-SA 4.0")


async def test_it_answers():
    """A plain text of each head has the result that a reader expects."""
    async with EmbeddedService(STARTER) as service:
        (sentiment,) = await service.classify(["What a wonderful film!"])
        (entities,) = await service.ner(["Anna Bern works in Hamburg."])
        near, far = await service.similarity(
            "The port was closed by the storm.",
            ["Bad weather shut the harbour.", "She plays the cello every evening."],
        )
    assert "positive" == sentiment[0].label
    assert [("Anna Bern", "PER"), ("Hamburg", "LOC")] == [
        (each.word, each.entity) for each in entities
    ]
    assert near > far + 0.2

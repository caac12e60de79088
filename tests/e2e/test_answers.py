"""What a real server answers to many at once."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.e2e.calls import calls, same_answer
from tests.e2e.conftest import serving

pytestmark = pytest.mark.e2e


@pytest.mark.promise(
    "An answer does not depend on the batch composition (on a GPU at fp16: but for rounding)."
)
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_64_at_once_get_what_each_gets_alone(tiny_bundle, precision):
    """64 concurrent mixed requests are answered as the same requests one after the other."""
    with serving(tiny_bundle, "--precision", precision) as server:
        alone = [server.answer(*call) for call in calls()]
        with ThreadPoolExecutor(64) as clients:
            replies = list(clients.map(lambda call: server.post(*call), calls()))

    together = [reply.json() for reply in replies]
    sizes = [int(r.headers["x-quartet-batch"].split(";")[0].removeprefix("size=")) for r in replies]
    assert all(same_answer(a, b) for a, b in zip(alone, together, strict=True))
    assert max(sizes) > 1

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from service.batcher import BatchStats
from service.errors import Overloaded
from service.metrics import Metrics
from tests.service.fakes import FakeEngine

STATS = BatchStats(
    bundle="tiny@1", size=2, tokens=30, longest=20, queue_s=(0.5, 0.25), inference_s=0.125
)


def samples(text: str) -> dict[tuple[str, tuple[str, ...]], float]:
    """Each sample by its name and the values of its labels."""
    return {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_batch_is_observed() -> None:
    """One batch, and the wait of each that rode in it."""
    metrics = Metrics()
    metrics.observe_batch(STATS)
    found = samples(metrics.render().decode())
    expected = {
        "quartet_queue_wait_seconds_count": 2.0,
        "quartet_queue_wait_seconds_sum": 0.75,
        "quartet_inference_seconds_sum": 0.125,
        "quartet_batch_tokens_sum": 30.0,
        "quartet_batch_size_sum": 2.0,
        "quartet_padding_ratio_sum": 40 / 30,
    }
    assert {name: found[name, ("tiny@1",)] for name in expected} == expected


def test_the_queue_is_asked_when_read() -> None:
    """The gauge follows the queue without being told."""
    metrics, queue = Metrics(), [1, 2]
    metrics.watch_queue(lambda: len(queue))
    queue.append(3)
    assert samples(metrics.render().decode())["quartet_queue_tokens", ()] == 3.0


def test_each_process_has_its_own() -> None:
    """Two sets of metrics do not meet in a global registry."""
    first, second = Metrics(), Metrics()
    first.observe_rejection("overloaded")
    assert b'reason="overloaded"' not in second.render()


async def scrape(client: httpx.AsyncClient) -> dict[tuple[str, tuple[str, ...]], float]:
    return samples((await client.get("/metrics")).text)


async def test_requests_are_counted_by_template(client: httpx.AsyncClient) -> None:
    """Route, model and status label a request; what is no route is `other`."""
    await client.post("/classify", json={"inputs": "a"})
    await client.get("/one/of/many")
    await client.get("/another")
    name, found = "quartet_request_duration_seconds_count", await scrape(client)
    assert found[name, ("tiny@1", "/classify", "200")] == 1.0
    assert found[name, ("", "other", "404")] == 2.0


async def test_clients_invent_no_label(client: httpx.AsyncClient) -> None:
    """A model that is not served does not become a label."""
    await client.post("/classify", json={"inputs": "a", "model": "invented"})
    assert "invented" not in (await client.get("/metrics")).text


@pytest.mark.parametrize(
    ("error", "count"), [(Overloaded("full"), 1.0), (RuntimeError("bug"), None)]
)
async def test_refusals_are_counted_by_code(
    client: httpx.AsyncClient, engine: FakeEngine, error: Exception, count: float | None
) -> None:
    """A refusal is counted, a failure of ours is none."""
    engine.error = error
    await client.post("/classify", json={"inputs": "a"})
    refused = "quartet_requests_rejected_total"
    counts = {key: value for key, value in (await scrape(client)).items() if key[0] == refused}
    assert counts == ({(refused, ("overloaded",)): count} if count else {})

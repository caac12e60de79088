import asyncio
import threading
from dataclasses import replace

import httpx
import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from service import errors
from service.api.app import create_app
from service.errors import Overloaded
from service.keys import Key, digest
from service.observability.metrics import ORDERS, OUTCOMES, STAGES, Metrics
from service.scheduling.executor import BatchStats
from service.scheduling.load import Backlog, Flow, Load, RemainingWork
from service.settings import Settings
from tests.served import app_of, living

STATS = BatchStats(
    bundle="tiny@1", size=2, tokens=30, longest=20, queue_s=(0.5, 0.25), inference_s=0.125
)

FACTS = {
    "sha256": "00ff",
    "state": "current",
    "precision": "int8",
    "provider": "CPU",
    "runtime": "ort 1",
}
REFUSED = "quartet_requests_rejected_total"
FAILED = "quartet_internal_errors_total"
IN_LINES = {"Accept": "application/x-ndjson"}
TIMING = [0.001, 0.002, 0.003, 0.0005, 0.004]  # of the fake engine


def samples(text: str) -> dict[tuple[str, tuple[str, ...]], float]:
    """Each sample by its name and the values of its labels."""
    return {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_a_batch_is_observed():
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


def test_the_device_is_read_at_the_scrape():
    """The gauges follow the queue, readiness and what is served without being told."""
    metrics, loads, models = (
        Metrics(),
        [Load(problem="it hangs", max_queue_tokens=1000)],
        {"tiny@1": dict(FACTS)},
    )
    metrics.watch(lambda: {"cpu": loads[-1]}, lambda: models, 15.0)
    first = samples(metrics.render().decode())
    waiting = {Flow("tiny@1"): Backlog.of(RemainingWork(30, 2), RemainingWork(12, 1))}
    loads.append(Load({"tiny@1": 10.5}, waiting, max_queue_tokens=2000))
    models["tiny@2"] = models.pop("tiny@1") | {"precision": "fp32"}
    then = samples(metrics.render().decode())
    gauges = ["ready", "queue_tokens", "max_queue_tokens", "queue_seconds", "max_queue_seconds"]
    assert [first[f"quartet_{name}", ()] for name in gauges] == [0.0, 0.0, 1000.0, 0.0, 15.0]
    assert [then[f"quartet_{name}", ()] for name in gauges] == [1.0, 42.0, 2000.0, 4.0, 15.0]
    info = [labels for name, labels in then if name == "quartet_model_info"]
    assert info == [("tiny@2", "fp32", "CPU", "ort 1", "00ff", "current")]


def test_the_series_of_a_closed_model_end():
    """The series of its batches end after one more page; its requests stay counted while it is listed."""
    metrics, models = Metrics(), {"tiny@1": {**FACTS, "state": "cold"}}
    metrics.watch(dict, lambda: models)
    metrics.observe_batch(STATS)
    metrics.observe_request("/embed", "tiny@1", 200, 0.5)
    pages = [{name for name, _ in samples(metrics.render().decode())} for _ in range(2)]
    batches = {"quartet_batch_size_sum", "quartet_inference_seconds_sum"}
    assert [batches, set()] == [batches & page for page in pages]
    assert "quartet_request_duration_seconds_count" in pages[1]


def test_the_page_of_a_hundred_used_models_is_small():
    """At most 500 KiB, which Prometheus reads at each scrape."""
    metrics, names = Metrics(), [f"model-{number:03}@1" for number in range(100)]
    metrics.watch(lambda: {"cpu": Load()}, lambda: dict.fromkeys(names, FACTS))
    for name in names:
        metrics.observe_request("/classify", name, 200, 0.5)
        metrics.observe_answer(name, "", 9, [0.1] * len(STAGES))
        metrics.observe_batch(replace(STATS, bundle=name))
    assert len(metrics.render()) < 500 * 1024


def test_each_process_has_its_own():
    """Two sets of metrics do not meet in a global registry."""
    first, second = Metrics(), Metrics()
    first.observe_error("overloaded")
    assert samples(second.render().decode())[REFUSED, ("overloaded",)] == 0.0


async def scrape(client: httpx.AsyncClient) -> dict[tuple[str, tuple[str, ...]], float]:
    return samples((await client.get("/metrics")).text)


async def test_requests_are_counted_by_template(client):
    """Route, model and status label a request; what is no route is `other`."""
    await client.post("/classify", json={"inputs": "a"})
    await client.get("/one/of/many")
    await client.get("/another")
    name, found = "quartet_request_duration_seconds_count", await scrape(client)
    assert found[name, ("tiny@1", "/classify", "200")] == 1.0
    assert found[name, ("", "other", "404")] == 2.0


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (RuntimeError("bug"), "internal"),
        (errors.InferenceFailed("no number"), "inference_failed"),
        (Overloaded("full"), None),
    ],
)
async def test_internal_errors_are_counted_by_code(client, engine, error, code):
    """A fault of the service is counted under its code, also where no code was foreseen; a refusal is a refusal."""
    engine.error = error
    await client.post("/classify", json={"inputs": "a"})
    found = await scrape(client)
    counts = {key[1][0]: value for key, value in found.items() if key[0] == FAILED}
    assert counts == {name: float(name == code) for name in ("internal", "inference_failed")}
    refused = [key[1] for key, value in found.items() if key[0] == REFUSED and value]
    assert refused == ([] if code else [("overloaded",)])


@pytest.mark.parametrize(
    ("headers", "apart"),
    [({}, 0.0), ({"X-Request-Timeout-Ms": "30000"}, 0.0), ({"X-Request-Timeout-Ms": "20"}, 1.0)],
)
@pytest.mark.parametrize("kind", [errors.DeadlineExceeded, Overloaded])
async def test_short_deadlines_of_clients_are_counted_apart(client, engine, kind, headers, apart):
    """All are refusals; those whose client set less than the server's deadline are also in a counter of their own."""
    engine.error = kind("late")
    await client.post("/classify", json={"inputs": "a"}, headers=headers)
    found = await scrape(client)
    name = "quartet_client_deadline_rejections_total"
    assert (1.0, apart) == (found[REFUSED, (kind.code,)], found[name, (kind.code,)])


async def test_latency_is_by_priority_class(client, engine):
    """A bulk answer is observed as one, and an error as none."""
    await client.post("/classify", json={"inputs": "a"}, headers={"X-Priority": "bulk"})
    engine.error = Overloaded("full")
    await client.post("/classify", json={"inputs": "a"})
    found, name = await scrape(client), "quartet_answer_duration_seconds_count"
    counts = {key[1]: value for key, value in found.items() if key[0] == name}
    assert counts == {("tiny@1", "bulk", "/classify"): 1.0}


async def test_a_failure_of_ours_in_lines_is_no_refusal(client, engine):
    """The status of an answer in lines is said before it fails."""
    engine.error, engine.tell_first = errors.InferenceFailed("no number"), 0
    answer = await client.post("/classify", json={"inputs": ["a", "b"]}, headers=IN_LINES)
    assert (answer.status_code, "inference_failed" in answer.text) == (200, True)
    found = await scrape(client)
    assert 1.0 == found[FAILED, ("inference_failed",)]
    assert {0.0} == {value for key, value in found.items() if key[0] == REFUSED}


@pytest.mark.parametrize(("headers", "stages"), [({}, STAGES), (IN_LINES, STAGES[:-1])])
async def test_stages_are_timed(client, headers, stages):
    """Each stage that an answer went through, once; lines are written while others are computed."""
    await client.post("/classify", json={"inputs": "a"}, headers=headers)
    found, name = await scrape(client), "quartet_stage_seconds"
    counts = {stage: found[f"{name}_count", (stage,)] for stage in STAGES}
    assert counts == {stage: float(stage in stages) for stage in STAGES}
    assert [found[f"{name}_sum", (stage,)] for stage in STAGES[1:6]] == TIMING


async def test_stages_end_where_the_request_does(client, engine):
    """What is refused by the engine was read, and no more."""
    engine.error = Overloaded("full")
    await client.post("/classify", json={"inputs": "a"})
    found = await scrape(client)
    counts = [found["quartet_stage_seconds_count", (stage,)] for stage in STAGES]
    assert counts == [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]


async def test_tokens_are_counted_by_tenant(engines):
    """By the name of the key, and for everybody together where there is none."""
    keys = {name: Key(sha256=digest(f"the key of {name}").hex()) for name in ("ann", "bob")}
    keys["ann"] = keys["ann"].model_copy(update={"may": ("inference", "metrics")})
    app = create_app(Settings(keys=keys), engines.open, Metrics())
    async with living(app) as client:
        client.headers["Authorization"] = "Bearer the key of ann"
        await client.post("/embed", json={"inputs": "a"})
        await client.post("/classify", json={"inputs": "a"})
        found = await scrape(client)
    assert found["quartet_tokens_total", ("tiny@1", "ann")] == 14.0


async def test_series_begin_with_their_first_use(tiny_bundle):
    """The first scrape of a fresh server has what alerts need at zero, and nothing else of its models and routes."""
    async with living(app_of(tiny_bundle)) as client:
        found = await scrape(client)
    codes = {kind.code for kind in errors.kinds() if kind.status != 500}
    expected = {
        *((REFUSED, (code,)) for code in codes),
        *((FAILED, (code,)) for code in ("internal", "inference_failed")),
        *(
            ("quartet_client_deadline_rejections_total", (code,))
            for code in ("overloaded", "deadline_exceeded")
        ),
        *(("quartet_canary_runs_total", ("tiny@1", outcome)) for outcome in ("ok", "failed")),
        *(("quartet_model_orders_total", (order, o)) for order in ORDERS for o in OUTCOMES),
        ("quartet_poison_inputs_total", ("tiny@1",)),
    }
    assert {} == {key: found.get(key) for key in expected if found.get(key) != 0.0}
    of_model = {name for name, labels in found if "tiny@1" in labels}
    info, *counters = "model_info", "poison_inputs_total", "canary_runs_total"
    assert of_model == {f"quartet_{name}" for name in (info, *counters)}
    assert 1.0 == found["quartet_ready", ()]
    (info,) = (labels for name, labels in found if name == "quartet_model_info")
    assert info[0] == "tiny@1"


async def test_requests_add_no_series(client, engine):
    """A thousand unknown paths, methods, models, heads and ids are counted in existing series."""
    engine.error = errors.UnknownHead("no such head", param="head")

    async def ask(number):
        name = f"x{number}"
        requests = [
            ("GET", f"/{name}", None),
            ("GET", f"/static/{name}", None),
            (name.upper(), "/classify", None),
            ("POST", "/classify", {"inputs": "a", "model": name}),
            ("POST", "/ner", {"inputs": name, "head": name}),
        ]
        method, path, body = requests[number % len(requests)]
        headers = {"X-Request-Id": name, "Authorization": f"Bearer {name}"}
        answer = await client.request(method, path, json=body, headers=headers)
        assert answer.status_code in (404, 405)

    for number in range(5):
        await ask(number)
    await scrape(client)  # counts itself on the next
    before = set(await scrape(client))
    for number in range(5, 1000):
        await ask(number)
    assert before == set(await scrape(client))


async def test_a_page_is_shared_and_leaves_the_loop_free(monkeypatch):
    """Concurrent scrapes are one rendering, most of it in a thread."""
    threads = []
    render = generate_latest

    def spied(registry):
        threads.append(threading.get_ident())
        return render(registry)

    monkeypatch.setattr("service.observability.metrics.generate_latest", spied)
    metrics = Metrics()
    pages = await asyncio.gather(*[metrics.page() for _ in range(64)])
    assert 1 == len(threads) == len(set(pages))
    assert threading.get_ident() not in threads


async def test_a_scrape_has_all_that_was_before_it():
    """Also a scrape that comes while another page is rendered."""
    metrics = Metrics()

    async def count():
        metrics.observe_error("invalid")
        expected = metrics._rejected.labels("invalid")._value.get()
        found = samples((await metrics.page()).decode())[REFUSED, ("invalid",)]
        assert found >= expected
        return found

    counts = []
    for _ in range(4):
        counts.append(asyncio.create_task(count()))
        await asyncio.sleep(0.002)
    assert 4.0 == max(await asyncio.gather(*counts))

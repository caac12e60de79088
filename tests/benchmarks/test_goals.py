"""Each part of what is wanted is measured in real processes, and told with its limit."""

import json
import sys

import pytest

from benchmarks import bulk, bundles, dialects, goals, life, tasks
from benchmarks.lib import models, onnxruntime_baseline, rounds, servers
from model.checkpoints.source import read_source
from service.core import bundle

TEXTS = ["Ada drew a comet.", "Ada", "The river and the town of a north station."] * 4
SHORT = {"rounds_": 2, "seconds": 1.0}


@pytest.fixture(autouse=True)
def brief(monkeypatch):
    monkeypatch.setattr(onnxruntime_baseline, "TRIAL_S", 0.01)
    monkeypatch.setattr(rounds, "WARM_S", 0.05)


def limits(wanted):
    return {check.what: (len(check.found), check.limit) for check in wanted}


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.exclusive
def test_bulk(tiny_bundle, tmp_path):
    """All texts in one request are compared with the bare session, and singles' waits with a batch."""
    wanted, figures = bulk.measure(tiny_bundle, TEXTS * 20, tmp_path, **SHORT)

    assert {
        "one request of 240 texts: of the bare session": (2, 0.95),
        "single texts meanwhile: p99 of the wait, by a batch": (2, 1.0),
    } == limits(wanted)
    for one in figures["singles"]:
        assert one["count"] >= 1
        assert one["batch"] > 0
        assert 0 <= one["wait"] < one["latency"]


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.exclusive
def test_tasks(tiny_bundle, tmp_path):
    """Every task is compared with the bare session on its own encodings, and the mix with the slowest."""
    wanted, rates = tasks.measure(tiny_bundle, TEXTS, tmp_path, **SHORT)

    expected = {f"/{task}: of the bare session": (2, 0.85) for task in ("classify", "ner", "qa")}
    mix = {"all four at once: tokens/s, of the slowest alone": (2, 0.9)}
    assert expected | mix == limits(wanted)
    assert {*tasks.TASKS, "mix", tasks.TEXTS, tasks.PAIRS} == rates.keys()
    assert all(rate > 100 for found in rates.values() for rate in found)


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.exclusive
def test_bundles(tiny_bundle, tmp_path, monkeypatch):
    """Copies are bundles of other versions, asked in turn, whose threads are counted, and one is kept from another."""
    monkeypatch.setattr(bundles, "CROWD", 8)
    wanted, figures = bundles.measure(tiny_bundle, TEXTS, tmp_path, loaded=(1, 2), **SHORT)

    assert {
        "bundles, 1 of 2 asked: of one alone": (2, 0.9),
        "bundles, 2 of 2 asked: of one alone": (2, 0.9),
        "threads of 2 bundles, beyond those of one": (1, 0),
        "a bundle while another has a crowd: p99 of the wait, by a batch": (2, 1.0),
    } == limits(wanted)
    for one in figures["apart"]:
        assert one["count"] > 1
        assert 0 <= one["wait"]
        assert 0 < one["batch"]
    assert 1 < figures["threads"]["many"] <= figures["threads"]["one"]


def test_copies(tiny_bundle, tmp_path):
    """A copy differs in its version alone, and requests name each in turn."""
    copy = bundle.load(bundles.copy(tiny_bundle, tmp_path, "copy1")).manifest
    original = bundle.load(tiny_bundle).manifest
    assert "copy1" == copy.version
    assert original == copy.model_copy(update={"version": original.version})

    bodies = [json.loads(one.partition(b"\r\n\r\n")[2]) for one in bundles.encoded(TEXTS, "ab")]
    assert ["a", "b", "a"] == [body["model"] for body in bodies[:3]]
    assert TEXTS[:3] == [body["inputs"] for body in bodies[:3]]


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.exclusive
def test_life(tiny_bundle, tmp_path, monkeypatch):
    """Starts are timed one by one; memory is read after the given number of responses."""
    monkeypatch.setattr(life, "DEFAULT", tiny_bundle)
    monkeypatch.setattr(life, "BASE", tiny_bundle)
    monkeypatch.setattr(life, "START_S", {tiny_bundle.name: 2.0})
    monkeypatch.setattr(life, "growing", lambda *_, seconds: [100.0, 104.0])
    wanted, figures = life.measure(tiny_bundle, TEXTS, tmp_path, **SHORT)
    assert (1, 1.05) == limits(wanted)["memory after 10,000 requests, by that after 1,000"]
    assert wanted[-1].as_json()["met"]
    assert all(0.1 < start < 60 for start in figures["start_s"][tiny_bundle.name])


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.exclusive
def test_growing(tiny_bundle, tmp_path):
    """The memory of a server is read twice, and is that of a server."""
    early, late = life.growing(tiny_bundle, TEXTS, tmp_path, seconds=0.2, after=(5, 10))
    assert 20 < early < 2 * late < 4 * early


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.exclusive
def test_dialects(tiny_bundle, tmp_path):
    """Each route is compared with the native one, whose vectors it returns."""
    wanted, figures = dialects.measure(tiny_bundle, TEXTS, tmp_path, rounds_=1, seconds=0.5)

    routes = dialects.calls("tiny", "embeddings")
    assert {
        f"{route}: {what} of /embed": (1, limit)
        for route in routes
        if route != dialects.NATIVE
        for what, limit in (("tokens/s", 0.95), ("processor time", 1.05))
    } | {
        "all dialects: import": (1, 0.2),
        "all dialects: memory of a process": (1, 10.0),
    } == limits(wanted)
    assert routes.keys() == figures["rates"].keys()
    assert all(rate > 100 for found in figures["rates"].values() for rate in found)
    assert all(0 < seconds < 60 for seconds in figures["import_s"])


def test_models(tmp_path):
    """The joint checkpoint has a head of each task on MiniLM's trunk, and BERT-base its vocabulary."""
    joint = read_source(models.joint(tmp_path))
    assert ["classification", "ner", "qa", "embedding"] == [
        head.task for head in joint.model.described.values()
    ]
    assert (256, 384) == (joint.max_length, joint.model.config.hidden_size)
    assert models.joint(tmp_path) == joint.folder

    base = read_source(models.bert_base(tmp_path / "base", hidden_size=24, num_hidden_layers=1))
    assert (512, 30_522) == (base.max_length, base.model.config.vocab_size)


def test_stages():
    """The header's stages are read as the service writes them."""
    assert {"encode": 0.5, "queue": 12.0} == bulk.stages("encode;dur=0.500, queue;dur=12.000")


def test_command(tmp_path, monkeypatch, capsys):
    """What each part found is printed with its limits and kept as JSON; a part that fails does not stop the next."""

    def fails(*_, **__):
        raise servers.StartError("no such luck")

    def finds(*_, **__):
        return [goals.goal_checks.Check("speed", [1.0], 0.9)], {"rates": [1.23456]}

    monkeypatch.setattr(goals, "PARTS", {"bulk": fails, "bundles": finds})
    monkeypatch.setattr(servers, "to_bundle", lambda *_: tmp_path)
    monkeypatch.setattr(
        sys, "argv", ["goals", "--only", "bulk", "bundles", "--out", str(tmp_path / "out")]
    )
    goals.main()

    printed = capsys.readouterr().out
    told = json.loads((tmp_path / "out").read_text())
    assert told == json.loads(printed.splitlines()[-1])
    assert "no such luck" == told["parts"]["bulk"]["failed"]
    assert told["parts"]["bundles"]["checks"][0]["met"]
    assert "rates: [1.235]" in printed

"""Bundles are loaded and unloaded while others are served; a refused bundle changes nothing."""

import asyncio
import gc
import re
import shutil
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from service.api.responses import AdminModelsResponse
from service.core.bundle import BundleError, BundleTexts, describe_file
from service.core.bundle_cache import entries
from service.core.encode import Window
from service.engines.commands import ListModels, LoadModel, RollBackModel, UnloadModel
from service.engines.local_device import LocalDevice, open_device
from service.engines.model_state import Models
from service.errors import (
    BadBundle,
    ChangedAnswers,
    Conflict,
    Forbidden,
    InvalidInput,
    NewEmbeddingSpace,
    UnknownModel,
)
from service.observability.metrics import Counts, Metrics
from service.rollout import model_manager
from service.rollout.model_manager import ModelManager, check_answers, locate
from service.scheduling.entries import Entry
from service.settings import Settings
from tests.stores import serve_folder
from tests.versions import (
    GRAPH,
    answer_goldens,
    change_a_byte,
    read_manifest,
    restate,
    save_version,
)


class FakeFollower:
    """Sends requests to the configured version, unless it has a problem, and holds a bundle if configured."""

    def __init__(self) -> None:
        self.adopted: list[Models] = []
        self.problem: str | None = None
        self.texts: dict[str, BundleTexts] = {}
        self.hold = asyncio.Event()
        self.hold.set()

    async def adopt(self, models: Models, texts: Mapping[str, BundleTexts]) -> None:
        if self.problem is not None and not (self.adopted and models == self.adopted[-1]):
            raise ValueError(self.problem)
        self.adopted.append(models)
        self.texts = dict(texts)

    async def left(self, model_id: str) -> None:
        await self.hold.wait()


class Curated:
    """A curator of a directory of versions, the first of which is served."""

    def __init__(
        self,
        full: Path,
        models_dir: Path,
        device: LocalDevice,
        settings: Settings,
        metrics: Metrics,
    ):
        self.full = full
        self.models_dir = models_dir
        self.device = device
        self.settings = settings
        self.reports: list[Mapping[str, Any]] = []
        self.subscriber = FakeFollower()
        self.metrics = metrics
        self.manager = ModelManager(device, settings, metrics, self.report)

    async def report(self, report: Mapping[str, Any]) -> None:
        self.reports.append(report)

    def save(self, version: str, **manifest: Any) -> Path:
        return save_version(self.full, self.models_dir / version, version, **manifest)

    async def load(self, path: Path | str, **order: Any) -> Mapping[str, Any]:
        return await self.manager.execute(LoadModel(path=str(path), by="ops", **order))

    async def release(self, version: str) -> Mapping[str, Any]:
        """Save a version and load it."""
        self.save(version)
        return await self.load(version)

    async def unload(self, model: str) -> Mapping[str, Any]:
        return await self.manager.execute(UnloadModel(model=model, by="ops"))

    async def roll_back(self, name: str) -> Mapping[str, Any]:
        return await self.manager.execute(RollBackModel(model=name, by="ops"))

    async def shown(self) -> list[str]:
        models = (await self.manager.execute(ListModels()))["models"]
        return [f"{model['id']} {model['state']}" for model in models]

    async def gone(self, model: str) -> None:
        async with asyncio.timeout(30):
            while model in self.device.texts:
                await asyncio.sleep(0.001)


@pytest.fixture
async def curated(
    tiny_bundle: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Curated]:
    """tiny@1 is served."""
    monkeypatch.setattr("service.engines.local_device.WARM_UP_S", 0.001)
    first = save_version(tiny_bundle, tmp_path / "first", "1")
    models_dir = tmp_path / "models"
    models_dir.mkdir()
    settings = Settings(
        bundles=(first,),
        provider="cpu",
        threads=1,
        models_dir=models_dir,
        aliases={"BAAI/bge-m3": "tiny", "gpt": "huge"},
    )
    metrics = Metrics()
    async with open_device(settings, metrics) as device:
        made = Curated(tiny_bundle, models_dir, device, settings, metrics)
        made.manager.open()
        await made.manager.follow(made.subscriber)
        yield made


async def test_a_new_version_answers_and_the_old_one_is_kept(curated):
    """All subscribers get the new version at once, and the administrator gets the result."""
    answer = await curated.release("2")
    assert ["tiny@2 current", "tiny@1 previous"] == await curated.shown()
    assert curated.manager.models == curated.subscriber.adopted[-1]
    assert {"tiny@1", "tiny@2"} == {*curated.device.texts} == {*curated.subscriber.texts}
    assert ("tiny@2", "tiny@1", []) == (
        answer["model"]["id"],
        answer["previous"]["id"],
        answer["unloading"],
    )


async def test_aliases(curated, lines):
    """They come from the settings, stay with the name through new versions, and change by a command."""
    (warning,) = [line for line in lines if line["event"] == "alias of no served model"]
    assert ("gpt", "huge", ["tiny"]) == (warning["alias"], warning["model"], warning["served"])
    curated.save("2")
    assert ("BAAI/bge-m3",) == (await curated.load("2"))["model"]["aliases"]
    assert [("BAAI/bge-m3",)] * 2 == [model.aliases for model in curated.manager.models]
    await curated.load("2", aliases=["bge"])
    assert [("bge",)] * 2 == [model.aliases for model in curated.subscriber.adopted[-1]]
    kept = curated.reports[-1]["resume"]["models"]
    assert [("bge",)] * 2 == [model["aliases"] for model in kept]


async def test_only_one_old_version_is_kept(curated):
    """The one before it is let go of, memory and all."""
    for version in ("2", "3"):
        await curated.release(version)
    await curated.gone("tiny@1")
    assert ["tiny@3 current", "tiny@2 previous"] == await curated.shown()


async def test_none_is_kept_where_none_is_to_be(curated):
    """The old version is unloaded as soon as it has no requests."""
    curated.save("2")
    curated.subscriber.hold.clear()
    answer = await curated.load("2", keep_old=False)
    assert (None, ["tiny@1"]) == (answer["previous"], answer["unloading"])
    assert ["tiny@2 current", "tiny@1 draining"] == await curated.shown()
    assert "tiny@1" in curated.device.texts
    curated.subscriber.hold.set()
    await curated.gone("tiny@1")
    assert ["tiny@2 current"] == await curated.shown()


async def test_there_and_back(curated):
    """A step back needs nothing to be loaded; there is none behind the first."""
    with pytest.raises(Conflict, match="tiny has no previous version"):
        await curated.roll_back("tiny")
    with pytest.raises(UnknownModel):
        await curated.roll_back("huge")
    await curated.release("2")
    shutil.rmtree(curated.models_dir / "2")
    for expected in ("tiny@1", "tiny@2"):
        assert expected == (await curated.roll_back("tiny"))["model"]["id"]
        assert expected == curated.subscriber.adopted[-1][0].id


async def test_the_same_again_changes_nothing(curated):
    """Loading a version that already answers succeeds, since clients repeat requests; a kept version answers again."""
    await curated.release("2")
    told = len(curated.subscriber.adopted)
    assert "current" == (await curated.load("2"))["model"]["state"]
    assert told == len(curated.subscriber.adopted)
    await curated.roll_back("tiny")
    await curated.load("2")
    assert ["tiny@2 current", "tiny@1 previous"] == await curated.shown()


async def test_contents_have_a_version_of_their_own(curated):
    """What `name@version` answers does not change while it is served."""
    curated.save("1", weights_license="another")
    with pytest.raises(Conflict, match="tiny@1 is served with other contents"):
        await curated.load("1")
    assert ["tiny@1 current"] == await curated.shown()


async def test_an_unloading_bundle_is_not_loaded_again(curated):
    """Two bundles of one id could not be told apart."""
    curated.save("2")
    curated.subscriber.hold.clear()
    shutil.copytree(curated.settings.bundles[0], curated.models_dir / "1")
    await curated.load("2", keep_old=False)
    with pytest.raises(Conflict, match="tiny@1 is being unloaded"):
        await curated.load("1")
    curated.subscriber.hold.set()
    await curated.gone("tiny@1")
    await curated.load("1")
    assert ["tiny@1 current", "tiny@2 previous"] == await curated.shown()


def change_a_golden(folder: Path) -> None:
    goldens = read_manifest(folder)["goldens"]
    restate(folder, goldens={**goldens, "tolerance": {"fp32": {"max_difference": -1}}})


def break_the_graph(folder: Path) -> None:
    (folder / GRAPH).write_bytes(b"no graph")
    (graph,) = read_manifest(folder)["graphs"]
    restate(folder, graphs=[graph | describe_file(folder / GRAPH)])


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "bytes": (change_a_byte, "weights.bin has SHA-256"),
    "goldens": (change_a_golden, "goldens disagree at fp32"),
    "format": (lambda folder: restate(folder, format_version=99), "manifest.json is not valid"),
    "no graph": (break_the_graph, "fp32.onnx"),
    "no manifest": (lambda folder: (folder / "manifest.json").unlink(), "it has no manifest.json"),
    "nothing": (shutil.rmtree, "the bundle directory does not exist"),
}


@pytest.mark.parametrize("how", BROKEN)
async def test_what_must_not_be_served_changes_nothing(curated, how, lines):
    """It is refused with the reason, and only the log shows the attempt to others."""
    breaking, said = BROKEN[how]
    breaking(curated.save("2"))
    with pytest.raises(BadBundle, match=said):
        await curated.load("2")
    assert ["tiny@1 current"] == await curated.shown()
    assert ["tiny@1"] == [*curated.device.texts]
    assert 1 == len(curated.subscriber.adopted)
    assert 1 == len(curated.reports)
    (told,) = [line for line in lines if line["event"] == "refused"]
    assert ("load", "2", "ops") == (told["order"], told["path"], told["by"])


async def test_a_failed_activation_is_reverted(curated):
    """A bundle that one HTTP process cannot read is served by none."""
    curated.save("2")
    curated.subscriber.problem = "the tokenizer cannot be read"
    with pytest.raises(BadBundle, match="the tokenizer cannot be read"):
        await curated.load("2")
    await curated.gone("tiny@2")
    assert ["tiny@1 current"] == await curated.shown()
    assert ["tiny@1"] == [model.id for model in curated.subscriber.adopted[-1]]
    assert 1 == len(curated.reports)


async def test_loading_is_seen_and_serving_goes_on(curated, monkeypatch):
    """It happens in a thread, one bundle at a time."""
    opening, go_on = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    open_really = LocalDevice.open

    def open_slowly(device, bundle):
        loop.call_soon_threadsafe(opening.set)
        asyncio.run_coroutine_threadsafe(go_on.wait(), loop).result(30)
        return open_really(device, bundle)

    monkeypatch.setattr(LocalDevice, "open", open_slowly)
    curated.save("2")
    curated.save("3")
    loads = [asyncio.create_task(curated.load(version)) for version in ("2", "3")]
    await opening.wait()
    await asyncio.sleep(0.01)
    assert ["tiny@1 current", "None loading"] == await curated.shown()
    AdminModelsResponse.model_validate(await curated.manager.execute(ListModels()))
    go_on.set()
    await asyncio.gather(*loads)
    await curated.gone("tiny@1")
    assert ["tiny@3 current", "tiny@2 previous"] == await curated.shown()


async def test_a_slow_load_does_not_stop_others(curated, monkeypatch):
    """After a while the next load starts, and the slow one is completed later."""
    monkeypatch.setattr(model_manager, "LOAD_ALONE_S", 0.05)
    go_on = threading.Event()
    open_really = LocalDevice.open

    def open_slowly(device, bundle):
        assert bundle.manifest.version != "2" or go_on.wait(30)
        return open_really(device, bundle)

    monkeypatch.setattr(LocalDevice, "open", open_slowly)
    slow = [asyncio.create_task(curated.load(curated.save("2"))) for _ in range(2)]
    await curated.load(curated.save("3"))
    assert ["tiny@3 current", "tiny@1 previous", "None loading"] == await curated.shown()
    go_on.set()
    await asyncio.gather(*slow)
    assert "tiny@2 current" in await curated.shown()


async def test_a_load_that_cannot_be_stopped(curated, monkeypatch):
    """Its command fails at the time limit, though the runtime goes on."""
    monkeypatch.setattr(model_manager, "STOP_S", 0.1)
    curated.manager._settings = curated.settings.model_copy(update={"load_timeout_s": 0.1})
    go_on = threading.Event()
    monkeypatch.setattr(LocalDevice, "open", lambda *_: go_on.wait(30))
    with pytest.raises(BadBundle, match=r"loading it takes more than 0\.2 s"):
        await curated.load(curated.save("2"))
    go_on.set()
    assert ["tiny@1 current"] == await curated.shown()


async def test_a_disconnect_does_not_stop_a_command(curated):
    """The command of a client that disconnects is completed."""
    curated.save("2")
    order = asyncio.create_task(curated.load("2"))
    await asyncio.sleep(0)
    order.cancel()
    async with asyncio.timeout(30):
        while await curated.shown() != ["tiny@2 current", "tiny@1 previous"]:
            await asyncio.sleep(0.001)


# -- going --------------------------------------------------------------------------------------------


async def test_unloading(curated):
    """The one before answers again; the last one stays."""
    await curated.release("2")
    assert {"unloaded": "tiny@2", "current": "tiny@1"} == await curated.unload("tiny@2")
    assert ["tiny@1"] == [*curated.device.texts]
    assert ["tiny@1 current"] == await curated.shown()
    with pytest.raises(Conflict, match="tiny@1 is the last served model"):
        await curated.unload("tiny@1")
    with pytest.raises(UnknownModel, match="no model 'tiny@2'; loaded here: tiny@1"):
        await curated.unload("tiny@2")


async def test_what_was_accepted_is_answered_before_it_goes(curated, monkeypatch):
    """Nothing that waits fails because its bundle is unloaded."""
    await curated.release("2")
    ids = np.arange(5, 9)
    entry = Entry("tiny@1", Window(ids, 0 * ids), "r", time.monotonic(), time.monotonic() + 60)
    hold = asyncio.Event()
    loop = asyncio.get_running_loop()
    run = curated.device._runners["tiny@1"].run

    def run_slowly(*batch):
        asyncio.run_coroutine_threadsafe(hold.wait(), loop).result(30)
        return run(*batch)

    monkeypatch.setattr(curated.device._runners["tiny@1"], "run", run_slowly)
    asked = asyncio.ensure_future(curated.device.submit([entry]))
    await asyncio.sleep(0.01)
    going = asyncio.create_task(curated.unload("tiny@1"))
    await asyncio.sleep(0.05)
    models = (await curated.manager.execute(ListModels()))["models"]
    assert [("tiny@2", "current", 0), ("tiny@1", "draining", 1)] == [
        (model["id"], model["state"], model["requests"]) for model in models
    ]
    assert not going.done()
    hold.set()
    assert 1 == len(await asked)
    await going
    assert "tiny@1" not in curated.device.texts


async def test_a_bundle_leaves_nothing_behind(curated):
    """Neither a session nor a queue."""
    await curated.release("2")
    session = weakref.ref(curated.device._runners["tiny@2"]._sessions[1])
    await curated.unload("tiny@2")
    gc.collect()
    assert session() is None
    assert ["tiny@1"] == [*curated.device.load().rates]


async def test_the_metrics_tell_of_what_is_there(curated):
    """Each bundle has its state; an unloaded one has no series, although HTTP processes may still report it."""
    await curated.release("2")
    page = curated.metrics.render().decode()
    for labels in ('model="tiny@1"', 'model="tiny@2"'):
        assert f"quartet_poison_inputs_total{{{labels}}} 0.0" in page
    infos = [line for line in page.splitlines() if line.startswith("quartet_model_info{")]
    assert ["previous", "current"] == [re.findall('state="(.*?)"', info)[0] for info in infos]
    curated.metrics.observe_request("/embed", "tiny@1", 200, 0.5)
    await curated.unload("tiny@1")
    told = [sample for family in curated.metrics.registry.collect() for sample in family.samples]
    of_models = [sample for sample in told if sample.name != "quartet_model_info"]
    assert not any("tiny@1" in str(sample) for sample in of_models)
    curated.metrics.observe_request("/embed", "tiny@1", 200, 0.5)
    assert b"tiny@1" not in curated.metrics.render()


async def test_orders_are_counted(curated):
    """Those that were done and those that were refused; to be shown what is there changes nothing."""
    await curated.release("2")
    with pytest.raises(BadBundle):
        await curated.load("3")
    await curated.shown()
    page = curated.metrics.render().decode()
    counted = re.findall(r'quartet_model_orders_total{order="(\w+)",outcome="(\w+)"} (\S+)', page)
    assert [("load", "failed", "1.0"), ("load", "ok", "1.0")] == sorted(
        count for count in counted if count[2] != "0.0"
    )


async def test_one_may_stand_by_first(curated):
    """It answers by its full id, in any embedding space, until it is promoted."""
    curated.save("2", embedding_space="another")
    answer = await curated.load("2", promote=False)
    assert ("tiny@2", "pinned", None) == (
        answer["model"]["id"],
        answer["model"]["state"],
        answer["previous"],
    )
    assert ["tiny@1 current", "tiny@2 pinned"] == await curated.shown()
    await curated.load("2", promote=False)
    assert 2 == len(curated.subscriber.adopted)
    with pytest.raises(NewEmbeddingSpace):
        await curated.load("2")
    await curated.load("2", allow_new_embedding_space=True)
    assert ["tiny@2 current", "tiny@1 previous"] == await curated.shown()


def check(counts: Counts) -> None:
    check_answers("tiny@2", counts, max_changed=0.01, min_compared=100)


def test_so_many_answers_may_change():
    """The limit holds for each head; dropped copies do not count."""
    check({"a": {"same": 99, "changed": 1, "dropped": 50}, "b": {"same": 1}})


@pytest.mark.parametrize(
    ("counts", "param"),
    [
        ({"a": {"same": 98, "changed": 2}}, "max_changed"),
        ({"a": {"same": 98, "failed": 2}}, "max_changed"),
        ({"a": {"same": 500}, "b": {"failed": 1}}, "max_changed"),
        ({"a": {"same": 98, "changed": 1, "dropped": 50}}, "min_compared"),
    ],
)
def test_changed_answers_are_refused(counts, param):
    """So are those that failed, and too few."""
    with pytest.raises(ChangedAnswers) as refused:
        check(counts)
    assert param == refused.value.param


# -- embedding spaces ---------------------------------------------------------------------------------


@pytest.mark.parametrize("space", ["another", None])
async def test_another_embedding_space_must_be_wanted(curated, space):
    """Vectors of two spaces, or of one that is not known, cannot be compared."""
    curated.save("2", embedding_space=space)
    with pytest.raises(NewEmbeddingSpace, match=rf"tiny@2 has another embedding space \({space}\)"):
        await curated.load("2")
    assert ["tiny@1 current"] == await curated.shown()
    answer = await curated.load("2", allow_new_embedding_space=True)
    assert space == answer["model"]["embedding_space"] != answer["previous"]["embedding_space"]


async def test_a_step_back_is_always_allowed(curated):
    """The vectors that people have are rather of the old space."""
    curated.save("2", embedding_space="another")
    await curated.load("2", allow_new_embedding_space=True)
    assert "tiny@1" == (await curated.roll_back("tiny"))["model"]["id"]


async def test_bundles_without_vectors_have_no_space(curated):
    """Missing embedding spaces are not compared."""
    second = curated.save("2", embedding_space=None)
    heads = read_manifest(second)["heads"]
    restate(second, heads={name: heads[name] for name in heads if name != "embeddings"})
    answer_goldens(second)
    await curated.load("2")
    assert ["tiny@2 current", "tiny@1 previous"] == await curated.shown()


# -- where bundles come from --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path",
    [
        *("", ".", "..", "../first", "a/../../first", "/etc", ".hidden/a", "a" * 300, "a\0"),
        *("link", "link/inside"),  # whose target may change, or be outside of the directory
    ],
)
def test_paths_lead_nowhere_else(tmp_path, path):
    """Neither out of the directory, nor to what is not there yet or can be no file."""
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(InvalidInput, match="symbolic link" if "link" in path else None):
        locate(tmp_path, path)


def test_paths_by_name_or_whole(tmp_path, monkeypatch):
    """A name is one in the directory, from wherever the service was started."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "models").mkdir()
    for path in ("a", "./a", tmp_path / "models" / "a"):
        assert tmp_path / "models" / "a" == locate(Path("models"), str(path))


def test_without_a_directory_nothing_comes():
    """The operator decides from where bundles may be loaded."""
    with pytest.raises(Forbidden, match="models_dir is unset"):
        locate(None, "a")


# -- the next process ---------------------------------------------------------------------------------


@asynccontextmanager
async def again(curated: Curated) -> AsyncIterator[Curated]:
    """What a process that starts now makes of what this one reported."""
    metrics = Metrics()
    async with open_device(curated.settings, metrics) as device:
        made = Curated(curated.full, curated.models_dir, device, curated.settings, metrics)
        made.manager.open(curated.reports[-1]["resume"])
        await made.manager.reopen()
        yield made


async def test_the_next_process_serves_the_same(curated):
    """Versions, their states and since when, in their order."""
    await curated.release("2")
    await curated.roll_back("tiny")
    async with again(curated) as after:
        assert curated.manager.models == after.manager.models
        assert ["tiny@1 current", "tiny@2 previous"] == await after.shown()


async def test_what_cannot_be_opened_again_is_left_out(curated, lines):
    """A line is logged; the previous version answers again."""
    await curated.release("2")
    shutil.rmtree(curated.models_dir / "2")
    async with again(curated) as after:
        assert ["tiny@1 current"] == await after.shown()
    told = [(line["event"], line.get("model")) for line in lines if line["log_level"] == "error"]
    assert [("not served again", "tiny@2")] == told


async def test_a_changed_bundle_is_logged(curated, lines):
    """A directory with another bundle in it is served, but does not answer for the name of the one that was there."""
    await curated.release("2")
    save_version(curated.full, curated.models_dir / "2", "3")
    async with again(curated) as after:
        assert ["tiny@3 pinned", "tiny@1 current"] == await after.shown()
    told = [(line["event"], line.get("now")) for line in lines if line["log_level"] == "error"]
    assert [("changed since it was served", "tiny@3")] == told


async def test_nothing_left_is_an_error(curated):
    """A process that can serve nothing does not start."""
    curated.save("2")
    await curated.load("2", keep_old=False)
    shutil.rmtree(curated.models_dir / "2")
    with pytest.raises(BundleError, match="the bundle directory does not exist"):
        async with again(curated):
            pass


@pytest.mark.parametrize(
    "path",
    [
        "s3://models/team",  # without the slash, another bucket's name could begin with it
        "s3://models/teams/a",
        "s3://models/team/../other",
        "s3://models/team/%2e%2e/other",
        "s3://models/team/a/../../other",
        "s3://models/team/.hidden",
        "s3://models/team//a",
        "s3://models/team/a?endpoint_override=127.0.0.1",
        "s3://models/team/a#b",
        "s3://models/team/a b",
        "s3://models@team/a",
        "http://models/team/a",
        "https://169.254.169.254/latest",
    ],
)
def test_addresses_outside_the_sources_are_refused(tmp_path, path):
    with pytest.raises(InvalidInput, match="is not below s3://models/team/"):
        locate(tmp_path, path, ("s3://models/team/",))
    with pytest.raises(InvalidInput, match="model_sources is unset"):
        locate(tmp_path, path)


def test_addresses_of_the_sources():
    for path in ("s3://models/team/a", "s3:/models/team/a/", "s3://models/team/a.b/c_1@2+3"):
        assert Path(path) == locate(None, path, ("s3://models/team/",))
    assert Path("s3://models/team/a") == locate(Path("s3://models/team"), "a")
    with pytest.raises(InvalidInput, match="is not below"):
        locate(Path("s3://models/team"), "../a")


async def test_a_bundle_at_an_address(curated, tmp_path, monkeypatch):
    """It is served again without its server, and a wrong one leaves nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    curated.save("2")
    curated.save("3")
    with serve_folder(curated.models_dir) as web:
        url = f"{web.url}/2"
        own = curated.settings.model_copy(update={"model_sources": (f"{web.url}/",)})
        monkeypatch.setattr(curated.manager, "_settings", own)
        answer = await curated.load(url)
        assert ("tiny@2", url) == (answer["model"]["id"], answer["model"]["path"])
        (curated.models_dir / "3" / GRAPH).write_bytes(b"wrong")
        with pytest.raises(BadBundle, match=f"/3: {GRAPH} has SHA-256"):
            await curated.load(f"{web.url}/3")
    resume = curated.reports[-1]["resume"]
    async with open_device(curated.settings, Metrics()) as device:
        again = ModelManager(device, curated.settings, Metrics())
        again.open(resume)
    assert [("tiny@2", url), ("tiny@1", str(curated.settings.bundles[0]))] == [
        (model.id, model.path) for model in again.models
    ]
    await curated.unload("tiny@2")
    assert [] == entries()

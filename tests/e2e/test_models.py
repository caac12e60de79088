"""Models are loaded, replaced and unloaded under load: clients see only that other models answer."""

import itertools
import json
import os
import re
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from service.core import bundle
from service.keys import make_key, record
from tests.e2e.calls import calls, embed_calls, same_answer
from tests.e2e.clients import lone_answers
from tests.e2e.conftest import Reply, Server, children, readiness, serving, start, until
from tests.stores import lengthen, serve_folder
from tests.versions import (
    answer_goldens,
    change_a_byte,
    change_the_goldens,
    read_manifest,
    restate,
    save_version,
)

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

TEXT = "Ada drew a comet near the harbour."


@dataclass
class Desk:
    """A server, and what an administrator and a client say to it."""

    server: Server
    full: Path
    models_dir: Path
    client: dict[str, str]
    admin: dict[str, str]

    def save(self, version: str, **manifest: Any) -> str:
        """A new version among the operator's bundles; returns the name of its directory."""
        save_version(self.full, self.models_dir / version, version, **manifest)
        return version

    def order(self, method: str, path: str, body: object = None) -> Reply:
        data = None if body is None else json.dumps(body).encode()
        headers = self.admin if body is None else {**self.admin, "Content-Type": "application/json"}
        return self.server.send(method, path, data, headers)

    def load(self, version: str, **said: object) -> Any:
        reply = self.order("POST", "/admin/models", {"path": version, **said})
        assert 200 == reply.status, reply.body
        return reply.json()

    def models(self) -> dict[str, Any]:
        """What administrators read about each model, by its id."""
        reply = self.order("GET", "/admin/models")
        assert 200 == reply.status, reply.body
        models = reply.json()["models"]
        return {model["id"]: model for model in models}

    def states(self) -> list[str]:
        return [f"{model} {told['state']}" for model, told in self.models().items()]

    def ask(self, model: str | None) -> Reply:
        return self.server.post("/embed", {"inputs": TEXT, "model": model}, self.client)

    def vector(self, model: str | None) -> tuple[str, list[float]]:
        """The model that answers, and its vector."""
        reply = self.ask(model)
        assert 200 == reply.status, reply.body
        return reply.json()["model"], reply.json()["embeddings"][0]


@contextmanager
def desk(
    full: Path, folder: Path, *options: str | Path, workers: int = 1, others: Sequence[Path] = ()
) -> Iterator[Desk]:
    """A server of tiny@1 whose operator has a directory of further versions. others: bundles served next to it"""
    models_dir = folder / "models"
    models_dir.mkdir()
    first = save_version(full, folder / "first", "1")
    keys = {"client": make_key(), "admin": make_key()}
    told = "".join(record(name, key) for name, key in keys.items())
    (folder / "keys.toml").write_text(told + 'may = ["admin", "metrics"]\n')
    headers = {name: {"Authorization": f"Bearer {key}"} for name, key in keys.items()}
    settings = ["--api-keys", folder / "keys.toml", "--models-dir", models_dir]
    with serving(first, *others, *settings, "--http-workers", str(workers), *options) as server:
        until(lambda: sum('"serving"' in line for line in server.log) >= workers, 60)
        yield Desk(server, full, models_dir, **headers)


# Half of them in the dialects of other servers.
CALLS = [*embed_calls([TEXT] * 10), *calls()[:8]]


@dataclass
class Client:
    """Sends `CALLS` to `tiny` again and again, and remembers every answer with the index of its call."""

    at: Desk
    replies: list[tuple[int, Reply]] = field(default_factory=list)
    enough: threading.Event = field(default_factory=threading.Event)

    def run(self) -> None:
        for number in itertools.cycle(range(len(CALLS))):
            if self.enough.is_set():
                return
            path, body = CALLS[number]
            reply = self.at.server.post(path, {**body, "model": "tiny"}, self.at.client)
            self.replies.append((number, reply))


@contextmanager
def hammering(at: Desk, clients: int = 3) -> Iterator[list[Client]]:
    """Clients that send requests all the time."""
    made = [Client(at) for _ in range(clients)]
    threads = [threading.Thread(target=client.run) for client in made]
    for thread in threads:
        thread.start()
    try:
        yield made
    finally:
        for client, thread in zip(made, threads, strict=True):
            client.enough.set()
            thread.join(60)


@pytest.mark.promise(
    "No request fails because of a swap, and the response names the one version that computed the request."
)
@pytest.mark.parametrize(
    ("workers", "swaps"), [(1, 2), (0, 2), (2, 2), pytest.param(1, 20, marks=pytest.mark.nightly)]
)
def test_swaps_under_load(tiny_bundle, tmp_path, workers, swaps):
    """No request fails in any dialect; each is answered by one version, and as that version answers alone."""
    with desk(tiny_bundle, tmp_path, workers=workers) as at:

        def answers_of(model):
            return lone_answers(at.server, model, at.client, CALLS)

        alone = {"tiny@1": answers_of("tiny@1")}
        with hammering(at) as clients:
            for version in map(str, range(2, 2 + swaps)):
                at.load(at.save(version))
                assert f"tiny@{version}" == at.vector("tiny")[0] == at.vector(None)[0]
                alone[f"tiny@{version}"] = answers_of(f"tiny@{version}")
        replies = [reply for client in clients for reply in client.replies]
        assert {200: len(replies)} == Counter(reply.status for _, reply in replies)
        last = [f"tiny@{swaps + 1} current", f"tiny@{swaps} previous"]
        until(lambda: at.states() == last)
    vectors = [lone.answers[0]["embeddings"] for lone in alone.values()]
    assert not any(same_answer(one, other) for one, other in combinations(vectors, 2))
    models = {lone.fingerprint: model for model, lone in alone.items()}
    answered = Counter(models[reply.headers["x-quartet-model"]] for _, reply in replies)
    assert len(answered) > swaps / 2
    wrong = [
        CALLS[number]
        for number, reply in replies
        for lone in [alone[models[reply.headers["x-quartet-model"]]]]
        if not same_answer(lone.answers[number], reply.json())
    ]
    assert not wrong


# Threads or files more, by chance: swaps that leave one each would leave 15 or 50.
MARGIN = 10
# A thread that was not needed before has memory of its own; 50 versions that stayed would have 100 MB.
MARGIN_MB = 25


@dataclass(frozen=True)
class Held:
    """What a server's processes hold together."""

    memory_mb: float  # that none shares
    threads: int
    files: int

    @classmethod
    def by(cls, server: Server) -> "Held":
        pids = [server.process.pid, *(pid for found in children(server).values() for pid in found)]
        maps = [Path(f"/proc/{pid}/smaps_rollup").read_text() for pid in pids]
        private = [re.findall(r"Private_Dirty: +(\d+) kB", text)[0] for text in maps]
        threads, files = (
            sum(len(os.listdir(f"/proc/{pid}/{kind}")) for pid in pids) for kind in ("task", "fd")
        )
        return cls(sum(map(int, private)) / 1024, threads, files)


@pytest.mark.promise("Memory after fifty swaps equals memory before.")
@pytest.mark.parametrize(
    ("workers", "swaps"),
    [(1, 15), *(pytest.param(workers, 50, marks=pytest.mark.nightly) for workers in (1, 0))],
)
def test_swaps_take_no_memory(tiny_bundle, tmp_path, workers, swaps):
    """Nor threads, nor files: afterwards there are as many as when the first two versions were there."""
    with desk(tiny_bundle, tmp_path, workers=workers) as at:

        def swap(version):
            at.load(at.save(str(version)))
            assert f"tiny@{version}" == at.vector("tiny")[0]
            until(lambda: len(at.states()) == 2)
            shutil.rmtree(at.models_dir / str(version))

        for version in range(2, 5):
            swap(version)
        before = Held.by(at.server)
        for version in range(5, 5 + swaps):
            swap(version)
        after = Held.by(at.server)
    assert after.memory_mb < before.memory_mb + MARGIN_MB
    assert after.threads < before.threads + MARGIN
    assert after.files < before.files + MARGIN


@pytest.fixture(scope="module")
def at(tiny_bundle: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Desk]:
    """A desk that tests share, each with versions of its own."""
    with desk(tiny_bundle, tmp_path_factory.mktemp("desk"), workers=2) as made:
        yield made


@pytest.mark.promise("`name@version` selects exactly that version, or returns 404.")
def test_versions_can_be_pinned(at):
    """A request that names a version is answered by that version or gets 404."""
    at.load(at.save("pin-1"))
    at.load(at.save("pin-2"))
    for model in ("tiny@pin-1", "tiny@pin-2"):
        assert model == at.vector(model)[0]
    at.load(at.save("pin-3"))
    until(lambda: at.states() == ["tiny@pin-3 current", "tiny@pin-2 previous"])
    reply = at.ask("tiny@pin-1")
    assert (404, "unknown_model") == (reply.status, reply.json()["error"]["code"])
    assert "served here: tiny@pin-3, tiny@pin-2" in reply.json()["error"]["message"]


def break_the_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{}")
    vocabulary = read_manifest(folder)["vocabulary"]
    restate(folder, vocabulary=vocabulary | bundle.describe_file(folder / "tokenizer.json"))


@pytest.mark.promise("A bundle that must not be served replaces no other.")
@pytest.mark.parametrize(
    ("breaking", "said"),
    [
        (change_a_byte, "weights.bin has SHA-256"),
        (change_the_goldens, "goldens disagree at fp32: sentiment differs by "),
        (break_the_tokenizer, "the tokenizer cannot be read"),
    ],
)
def test_what_must_not_be_served_is_refused(at, breaking, said):
    """The response has the reason; the current version keeps serving."""
    before, states = at.vector("tiny"), at.states()
    breaking(at.models_dir / at.save("bad"))
    reply = at.order("POST", "/admin/models", {"path": "bad"})
    assert (422, "bad_bundle") == (reply.status, reply.json()["error"]["code"])
    assert said in reply.json()["error"]["message"]
    assert before == at.vector("tiny")
    until(lambda: states == at.states())


@pytest.mark.parametrize("workers", [1, 0])
def test_what_lies_in_a_directory_is_served(tiny_bundle, tmp_path, workers):
    """It comes, is replaced and goes without an order, and without a failed request."""
    with desk(tiny_bundle, tmp_path, "--watch-s", "0.05", workers=workers) as at:
        with hammering(at, clients=1) as (client,):
            at.save("2")
            until(lambda: at.states() == ["tiny@2 current", "tiny@1 previous"])
            (at.models_dir / at.save("3")).rename(tmp_path / "3")
            bundle.swap(tmp_path / "3", at.models_dir / "2")
            until(lambda: at.states() == ["tiny@3 current", "tiny@2 previous"])
            assert "tiny@3" == at.vector("tiny")[0]
            shutil.rmtree(at.models_dir / "2")
            until(lambda: len(at.states()) == 1)
        assert {200: len(client.replies)} == Counter(reply.status for _, reply in client.replies)


@pytest.mark.parametrize("workers", [1, 0])
def test_a_version_is_compared_before_it_is_promoted(tiny_bundle, tmp_path, workers):
    """The candidate gets mirrored requests and sends no response; the share of changed results decides."""
    with desk(tiny_bundle, tmp_path, workers=workers) as at:
        at.save("same")
        shutil.copy(tmp_path / "first" / "weights.bin", at.models_dir / "same")
        weights = {"weights": bundle.describe_file(at.models_dir / "same" / "weights.bin")}
        graphs = [graph | weights for graph in read_manifest(at.models_dir / "same")["graphs"]]
        restate(at.models_dir / "same", graphs=graphs)
        answer_goldens(at.models_dir / "same")
        at.save("other")

        def shadow(version):
            """What the figures are when it has got copies of some requests."""
            at.load(version, shadow=1.0)
            before = at.vector("tiny@1")
            until(lambda: before == at.vector("tiny") and compared(version) >= 5)
            return at.models()[f"tiny@{version}"]

        def compared(version):
            counts = at.models()[f"tiny@{version}"]["compared"].get("embeddings", {})
            return int(counts.get("same", 0) + counts.get("changed", 0))

        def promote(version, **said):
            return at.order("POST", f"/admin/models/tiny@{version}/promote", said)

        told = shadow("other")
        assert ("pinned", 1.0) == (told["state"], told["shadow"])
        assert "same" not in told["compared"]["embeddings"]
        few = promote("other", max_changed=1.0, min_compared=10_000)
        changed = promote("other", max_changed=0.5, min_compared=5)
        for reply, said in (few, "answers were compared"), (changed, "of embeddings"):
            assert (409, "changed_answers") == (reply.status, reply.json()["error"]["code"])
            assert said in reply.json()["error"]["message"]
        assert "tiny@1" == at.vector("tiny")[0]
        assert "changed" not in shadow("same")["compared"]["embeddings"]
        assert 0.0 == at.models()["tiny@other"]["shadow"]
        assert 200 == promote("same", max_changed=0.0, min_compared=5).status
        assert ("tiny@same", 0.0) == (at.vector("tiny")[0], at.models()["tiny@same"]["shadow"])
        page = at.server.send("GET", "/metrics", None, at.admin).body.decode()
        name = "quartet_shadow_answers_total"
        assert f'{name}{{head="embeddings",model="tiny@other",outcome="changed"}}' in page


@pytest.mark.promise("A new inference process serves the models that the lost one served.")
def test_a_lost_inference_process_serves_again_what_it_served(tiny_bundle, tmp_path):
    """The swapped set, not that of the command line; without what has become unreadable meanwhile."""
    with desk(tiny_bundle, tmp_path, workers=2) as at:
        at.load(at.save("2"))
        at.load(at.save("3"))
        swapped = at.vector("tiny")
        shutil.rmtree(at.models_dir / "2")
        (inference,) = children(at.server)["inference"]
        os.kill(inference, signal.SIGKILL)
        until(lambda: children(at.server)["inference"] not in ([], [inference]), 60)
        until(lambda: all(readiness(at.server) == 200 for _ in range(20)), 60)  # of both
        until(lambda: ["tiny@3 current"] == at.states(), 60)  # it is cold until it is open
        assert all(swapped == at.vector("tiny") for _ in range(8))
        until(lambda: any("not served again" in x and "tiny@2" in x for x in at.server.log))
        at.load(at.save("4"))
        assert "tiny@4" == at.vector(None)[0]


def test_an_http_process_that_starts_later_serves_the_same(tiny_bundle, tmp_path):
    """Even what is on no disk any more."""
    with desk(tiny_bundle, tmp_path) as at:
        at.load(at.save("2"))
        expected = [at.vector(model) for model in ("tiny", "tiny@1")]
        shutil.rmtree(at.models_dir / "2")
        (http,) = children(at.server)["http"]
        os.kill(http, signal.SIGKILL)
        until(lambda: sum('"serving"' in line for line in at.server.log) == 2, 60)
        assert expected == [at.vector(model) for model in ("tiny", "tiny@1")]


@pytest.mark.parametrize("workers", [0, 1])
def test_bundles_at_addresses(mini_bundle, tmp_path, workers):
    """A service that has lost its store starts with the last download, and a wrong bundle is refused with a reason."""
    env = {**os.environ, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    shutil.copytree(mini_bundle, tmp_path / "served" / "mini")
    flags = ["--http-workers", str(workers)]
    with serve_folder(tmp_path / "served") as web:
        url = f"{web.url}/mini"
        with serving(url, *flags, env=env) as server:
            assert server.answer("/embed", {"inputs": "a"})["embeddings"]
        next((tmp_path / "served" / "mini").glob("*.onnx")).write_bytes(b"wrong")
        lengthen(tmp_path / "served" / "mini" / "manifest.json")
        ended = start(url, *flags, env=env)
        _, log = ended.communicate(timeout=60)
        assert (3, 1) == (ended.returncode, len(log.splitlines()))
        assert log.startswith(f"quartet: {url}: ")
    with serving(url, *flags, env=env) as server:
        assert server.answer("/embed", {"inputs": "a"})["embeddings"]
        assert any("the last download is used" in line for line in server.log)

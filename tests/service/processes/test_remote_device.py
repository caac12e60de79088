"""A device in another process behaves like a local one: tested over a socket, both ends in one loop."""

import asyncio
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from service import errors
from service.core import bundle
from service.core.bundle import BundleTexts
from service.core.encode import Window
from service.engines.commands import Command, LoadModel, UnloadModel
from service.engines.device import RunsOn
from service.engines.model_state import Models, ServedModel, ServingState
from service.observability.metrics import Metrics
from service.processes import http_peers, messages
from service.processes.channel import Channel, frame
from service.processes.control_channel import ChildControl, ControlChannel, channel_to
from service.processes.http_peers import HttpPeers
from service.processes.inference_process import connect
from service.processes.remote_device import RemoteDevice
from service.processes.remote_metrics import RemoteMetrics
from service.scheduling.entries import Entry, EntryOutcome, OnOutcome, Outcome
from service.scheduling.load import Backlog, Flow, Load, RemainingWork
from tests.service.fakes import until

RUNS_ON = RunsOn("int8", "packed", "CPUExecutionProvider", None, "onnxruntime 1")
LOAD = Load(
    {"m@1": 1000.0, "tiny@1": 1000.0},
    {Flow("m@1", 1, "t"): Backlog.of(RemainingWork(42, 1))},
    max_queue_tokens=5000,
)


class FakeDevice:
    """Answers each entry with the sum and the number of its tokens, or as configured."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.hold: asyncio.Event | None = None
        self.seen: list[Entry] = []
        self.reached, self.cancelled = asyncio.Event(), asyncio.Event()
        self.living = True
        self.bad: dict[int, errors.QuartetError] = {}  # by the first token

    async def submit(
        self, entries: Sequence[Entry], on_outcome: OnOutcome | None = None
    ) -> list[EntryOutcome]:
        self.seen += entries
        self.reached.set()
        outcomes = [self.bad.get(int(e.window.input_ids[0])) or answer(e) for e in entries]
        for entry, outcome in zip(entries[:1], outcomes, strict=False):
            if on_outcome is not None:
                on_outcome(entry, outcome)
        try:
            if self.hold is not None:
                await self.hold.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        if self.error is not None:
            raise self.error
        for entry, outcome in zip(entries[1:], outcomes[1:], strict=True):
            if on_outcome is not None:
                on_outcome(entry, outcome)
        return outcomes

    def load(self) -> Load:
        return LOAD

    def alive(self) -> bool:
        return self.living


def answer(entry: Entry) -> Outcome:
    ids = entry.window.input_ids
    rows = np.stack([ids, 2 * ids], axis=1).astype(np.float32)
    failed = {1: errors.InferenceFailed("no number")} if entry.window.lengths else {}
    return Outcome({entry.heads[0]: rows}, 0.25, 0.5, 8, 312, 1.5, failed)


def text(*ids: int, hidden: int = 0, lengths: Sequence[int] = ()) -> Entry:
    tokens = np.array(ids, np.int64)
    window = Window(tokens, 0 * tokens, hidden=hidden, lengths=lengths)
    return Entry("tiny@1", window, "r", 1.5, 30.5, 2, "t", ("entities",))


class FakeManager:
    """Returns the command that it got, or fails as configured."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.hold: asyncio.Event | None = None

    async def execute(self, command: Command) -> Mapping[str, Any]:
        if self.hold is not None:
            await self.hold.wait()
        if self.error is not None:
            raise self.error
        return {"did": command.name, **asdict(command)}


class FakeSubscriber:
    """Records the bundles that it adopted, and holds them as configured."""

    def __init__(self) -> None:
        self.models: Models = ()
        self.texts: dict[str, BundleTexts] = {}
        self.error: Exception | None = None
        self.hold = asyncio.Event()
        self.hold.set()
        self.hold_models = asyncio.Event()
        self.hold_models.set()

    async def adopt(self, models: Models, texts: Mapping[str, BundleTexts]) -> None:
        await self.hold_models.wait()
        if self.error is not None:
            raise self.error
        self.models, self.texts = models, dict(texts)

    async def left(self, model_id: str) -> None:
        await self.hold.wait()


class Pair:
    """An inference process's part and an HTTP process's, connected."""

    def __init__(self) -> None:
        self.device = FakeDevice()
        self.manager = FakeManager()
        self.metrics = Metrics()
        self.broken = asyncio.Event()
        self.remote = RemoteDevice(self.broken.set)
        self.subscriber = FakeSubscriber()
        self.following = asyncio.create_task(self.remote.follow(self.subscriber))
        ours, end = socket.socketpair()
        self.control = ChildControl(ours, lambda report: None)
        self.peers = HttpPeers(self.device, self.manager.execute, self.metrics)
        self.serving = asyncio.create_task(connect(self.peers, ControlChannel(end)))
        self.reporting = asyncio.create_task(self.peers.report_load())

    async def link(self, remote: RemoteDevice | None = None) -> None:
        """Connect an HTTP process's part with a new socket."""
        ours, theirs = socket.socketpair()
        self.control.send(channel_to(0), theirs)
        theirs.close()
        await (remote or self.remote).connect(ours)

    async def connect(self) -> None:
        await self.link()
        await until(lambda: self.remote.load().ready)

    async def lose(self) -> None:
        """End the inference process, and wait until the HTTP process knows."""
        for peer in self.peers._peers:
            peer.close()
        await until(lambda: not self.remote.connected)

    async def answer_again(self) -> None:
        """Connect a device that holds no request any more."""
        self.device.hold = None
        await self.connect()


@asynccontextmanager
async def pair() -> AsyncIterator[Pair]:
    made = Pair()
    await made.connect()
    await made.following
    try:
        yield made
    finally:
        if made.remote._peer is not None:
            made.remote._peer.close()
        made.control.close()
        await asyncio.wait_for(made.serving, 30)
        made.reporting.cancel()
        with suppress(asyncio.CancelledError):
            await made.reporting


async def test_the_device_gets_the_submitted_entries():
    """Tokens, heads, and all fields that the queue uses are unchanged."""
    sent = text(1, 2, 3, hidden=1)
    async with pair() as both:
        await both.remote.submit([text(7), sent])
        first, seen = both.device.seen
    assert (0, 1) == (first.window.hidden, seen.window.hidden)
    np.testing.assert_array_equal(sent.window.input_ids, seen.window.input_ids)
    np.testing.assert_array_equal(sent.window.token_type_ids, seen.window.token_type_ids)
    fields = (
        "bundle",
        "request_id",
        "arrival",
        "deadline",
        "priority",
        "tenant",
        "heads",
        "tokens",
    )
    assert [getattr(sent, name) for name in fields] == [getattr(seen, name) for name in fields]


async def test_an_entry_of_several_texts_is_sent():
    """The lengths of its texts arrive, and the errors of single ones come back."""
    sent = text(1, 2, 3, lengths=[1, 2])
    async with pair() as both:
        alone, outcome = await both.remote.submit([text(7), sent])
        _, seen = both.device.seen
    assert [1, 2] == seen.window.lengths
    np.testing.assert_array_equal(answer(sent).outputs["entities"], outcome.outputs["entities"])
    assert {1: "no number"} == {row: error.message for row, error in outcome.failed.items()}
    assert {} == alone.failed


async def test_an_empty_request_costs_no_message():
    async with pair() as both:
        assert [] == await both.remote.submit([])
        assert [] == both.device.seen


async def test_outcomes_are_reported_one_by_one():
    """The first outcome is reported before the second exists."""
    entries, received = [text(1), text(2)], []
    async with pair() as both:
        both.device.hold = asyncio.Event()
        request = asyncio.create_task(
            both.remote.submit(entries, lambda entry, outcome: received.append(entry))
        )
        await until(lambda: bool(received))
        assert [entries[0]] == received
        assert not request.done()
        both.device.hold.set()
        assert 2 == len(await request)
    assert entries == received


@pytest.mark.parametrize(("most", "parts"), [(0, 3), (24, 1), (2**20, 0)])
async def test_large_outcomes_are_sent_in_parts(most, parts, monkeypatch):
    """Both processes copy a limited number of bytes before they serve other requests."""
    monkeypatch.setattr(http_peers, "PART_BYTES", most)
    entries, roles, send = [text(1, 2, 3), text(9), text(4, 5)], [], Channel.send
    async with pair() as both:
        monkeypatch.setattr(
            Channel, "send", lambda own, role, *rest: (roles.append(role), send(own, role, *rest))
        )
        got = await both.remote.submit(entries)
    for entry, outcome in zip(entries, got, strict=True):
        np.testing.assert_equal(asdict(answer(entry)), asdict(outcome))
    assert parts == roles.count("part")


@pytest.mark.parametrize("each", [False, True], ids=["together", "each"])
async def test_failed_entries_are_sent_with_the_others(each):
    """Each has its place, and its error is unchanged."""
    entries, received = [text(1, 2, 3), text(9), text(4, 5)], {}
    on_outcome = received.__setitem__ if each else None
    async with pair() as both:
        both.device.bad[9] = errors.InferenceFailed("no number")
        got = await both.remote.submit(entries, on_outcome)
    failed = got[1]
    assert isinstance(failed, errors.InferenceFailed)
    assert "no number" == failed.message
    for index in (0, 2):
        np.testing.assert_equal(asdict(answer(entries[index])), asdict(got[index]))
    if each:
        assert dict(zip(entries, got, strict=True)) == received


@pytest.mark.parametrize(
    "error",
    [
        errors.Overloaded("full", retry_after_s=7.5),
        errors.TooLarge("never"),
        errors.DeadlineExceeded("late"),
        errors.InferenceFailed("no number", param="inputs[3]"),
        errors.NotReady("not yet"),
        errors.Draining("going"),
        errors.UnknownModel("who?", param="model"),
    ],
    ids=lambda error: error.code,
)
async def test_errors_arrive_unchanged(error):
    """Class, message, field and headers are those that the device raised."""
    async with pair() as both:
        both.device.error = error
        with pytest.raises(type(error)) as caught:
            await both.remote.submit([text(1)])
    got = caught.value
    assert (error.code, error.body, error.headers) == (got.code, got.body, got.headers)


def test_every_error_can_be_sent():
    """Each code belongs to one class, so that no error arrives as another."""
    kinds = [*errors.kinds()]
    assert len(kinds) == len({kind.code for kind in kinds})
    of_http = {errors.MethodNotAllowed, errors.UnsupportedEncoding}  # which need a header's value
    crossing = [kind for kind in kinds if kind not in of_http]
    assert crossing == [type(errors.revive(kind.code, "m")) for kind in crossing]


async def test_an_unexpected_error_is_our_bug(lines):
    """An exception of an unknown class is logged in its process, and fails the request."""
    async with pair() as both:
        both.device.error = ZeroDivisionError()
        with pytest.raises(errors.InternalError, match="our bug"):
            await both.remote.submit([text(1)])
    assert ["unexpected error"] == [line["event"] for line in lines]


async def test_a_disconnect_cancels_the_work():
    """A request that is cancelled here is cancelled there."""
    async with pair() as both:
        both.device.hold = asyncio.Event()
        request = asyncio.create_task(both.remote.submit([text(1)]))
        await both.device.reached.wait()
        request.cancel()
        await asyncio.wait_for(both.device.cancelled.wait(), 30)


async def test_the_requests_of_a_lost_http_process_are_cancelled():
    """The inference process also forgets the HTTP process."""
    async with pair() as both, under_way(both, text(1)):
        assert both.remote._peer is not None
        both.remote._peer.close()
        await asyncio.wait_for(both.device.cancelled.wait(), 30)
        await until(lambda: not both.peers._peers)


# -- an inference process that is lost ---------------------------------------------------------------------------------


@asynccontextmanager
async def under_way(
    both: Pair, *entries: Entry, on_outcome: OnOutcome | None = None
) -> AsyncIterator[asyncio.Task[list[Outcome]]]:
    """A request that the device has, and holds; dropped in the end if it is still there."""
    both.device.hold = both.device.hold or asyncio.Event()
    seen = len(both.device.seen)
    request = asyncio.create_task(both.remote.submit(entries, on_outcome))
    await until(lambda: len(both.device.seen) > seen)
    yield request
    request.cancel()
    await asyncio.wait([request])


async def test_requests_without_a_device_fail_with_replica_lost():
    """Entries and pages are refused, readiness is false, and the next device answers."""
    async with pair() as both:
        await both.lose()
        assert both.remote.alive()
        assert not both.broken.is_set()  # the main process connects the next one
        with pytest.raises(errors.ReplicaLost, match="being started"):
            await both.remote.submit([text(1)])
        with pytest.raises(errors.ReplicaLost, match="being started"):
            await both.remote.page()
        await both.connect()
        assert 1 == len(await both.remote.submit([text(1)]))
        assert both.remote.load().ready


async def test_a_failed_receive_is_reported():
    """A process that lost the connection to a living device must end, or it would never be ready again."""
    entry = text(1)
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    async with pair() as both, under_way(both, entry):
        (peer,) = both.peers._peers
        computed = messages.Computed([0], [[[1, 2]]], [(0.0, 0.0, 1, 1, 1.0)], [])
        peer.send("reply", 1, computed, np.zeros(2, np.float16))
        await asyncio.wait_for(both.broken.wait(), 30)


async def test_requests_of_a_lost_device_go_to_the_next_one():
    """Clients only see a longer response time; in the second attempt, each entry has a batch of its own."""
    entries = [text(1), text(2, 3)]
    async with pair() as both, under_way(both, *entries) as request:
        await both.lose()
        assert not request.done()
        await both.answer_again()
        got = await asyncio.wait_for(request, 30)
        first, again = both.device.seen[:2], both.device.seen[2:]
    for entry, outcome in zip(entries, got, strict=True):
        np.testing.assert_equal(answer(entry).outputs, outcome.outputs)
    assert [False, False, True, True] == [entry.unbatched for entry in [*first, *again]]


async def test_a_reported_result_is_not_requested_again():
    """In a request with reported results, only the missing entries are sent again; each result is reported once."""
    entries, received = [text(1), text(2), text(3)], []

    def on_outcome(entry, outcome):
        np.testing.assert_equal(answer(entry).outputs, outcome.outputs)
        received.append(entry)

    async with pair() as both, under_way(both, *entries, on_outcome=on_outcome) as request:
        await until(lambda: bool(received))
        await both.lose()
        await both.answer_again()
        await asyncio.wait_for(request, 30)
        again = both.device.seen[3:]
    assert entries == received
    assert [2, 3] == [int(entry.window.input_ids[0]) for entry in again]


async def test_a_request_that_is_lost_twice_fails():
    """There is no third attempt."""
    async with pair() as both, under_way(both, text(1)) as request:
        await both.lose()
        await both.connect()
        await until(lambda: len(both.device.seen) == 2)
        await both.lose()
        with pytest.raises(errors.ReplicaLost, match="lost twice"):
            await request


async def test_requests_are_sent_again_one_at_a_time():
    """An entry that kills the device again fails alone: the other requests get their second attempt next."""
    large, small = [text(1), text(2)], text(3)
    async with pair() as both, under_way(both, *large) as first, under_way(both, small) as second:
        await both.lose()
        await both.connect()
        await until(lambda: len(both.device.seen) == 4)
        await asyncio.sleep(0.05)
        assert [3] == [int(entry.window.input_ids[0]) for entry in both.device.seen[3:]]
        await both.lose()
        with pytest.raises(errors.ReplicaLost, match="lost twice"):
            await second
        await both.answer_again()
        assert 2 == len(await asyncio.wait_for(first, 30))


async def test_an_entry_next_to_a_canceled_one_has_a_second_attempt():
    """A remaining entry may still be computed and kill the process; then its second attempt counts."""
    poison, large = text(1), [text(2), text(3)]
    async with pair() as both, under_way(both, poison) as gone, under_way(both, *large) as request:
        await both.lose()
        await both.connect()
        await until(lambda: len(both.device.seen) == 4)
        gone.cancel()
        await until(lambda: len(both.device.seen) == 6)
        await both.lose()
        await both.connect()
        await until(lambda: len(both.device.seen) == 8)
        assert not request.done()
        await both.lose()
        with pytest.raises(errors.ReplicaLost, match="lost twice"):
            await request


async def test_a_device_that_dies_while_it_opens_costs_no_attempt():
    """No request was sent to it."""
    async with pair() as both, under_way(both, text(1)) as request:
        await both.lose()
        for _ in range(3):
            ours, theirs = socket.socketpair()
            await both.remote.connect(ours)
            theirs.close()
            await until(lambda: not both.remote.connected)
        await both.answer_again()
        assert 1 == len(await asyncio.wait_for(request, 30))


async def test_a_cancelled_request_is_not_sent_again():
    """A request that was cancelled between two devices costs the second one nothing."""
    async with (
        pair() as both,
        under_way(both, text(1)) as gone,
        under_way(both, text(2)) as request,
    ):
        await both.lose()
        gone.cancel()
        await asyncio.wait([gone])
        await both.answer_again()
        assert 1 == len(await asyncio.wait_for(request, 30))
        assert [2] == [int(entry.window.input_ids[0]) for entry in both.device.seen[2:]]


async def test_a_device_that_dies_at_once_gets_no_request():
    """A socket whose other end is closed before its first use fails all requests by name; none waits."""
    remote = RemoteDevice()
    ours, theirs = socket.socketpair()
    theirs.close()
    await remote.connect(ours)
    await until(lambda: not remote.connected)
    with pytest.raises(errors.ReplicaLost):
        await remote.submit([text(1)])


async def test_the_load_is_reported_regularly():
    """The HTTP process knows the backlog, the rates and the limit without a request."""
    async with pair() as both:
        await until(lambda: both.remote.load() == LOAD)


async def test_requests_that_are_not_reported_yet_are_part_of_the_load():
    """A request that was sent counts until the device reports it, and then no more, however often it reports."""
    async with pair() as both:
        both.device.hold = asyncio.Event()
        request = asyncio.create_task(both.remote.submit([text(1, 2, 3)]))
        await asyncio.sleep(0)
        own = Flow("tiny@1", 2, "t")
        assert both.remote.load().waiting[own] == Backlog.of(RemainingWork(3, 1))
        both.remote._receive(messages.LoadReport.of(LOAD, -1), b"")
        assert both.remote.load().waiting[own] == Backlog.of(RemainingWork(3, 1))
        await until(lambda: both.remote.load() == LOAD)
        both.device.hold.set()
        await request


async def test_an_immediate_cancellation_adds_no_load(monkeypatch):
    """A request and its cancellation may arrive together."""
    sent = []
    async with pair() as both:
        assert both.remote._peer is not None
        (peer,) = both.peers._peers
        with monkeypatch.context() as patch:
            patch.setattr(both.remote._peer, "send", lambda *m: sent.append(frame(*m)))
            request = asyncio.create_task(both.remote.submit([text(1, 2, 3)]))
            await asyncio.sleep(0)
            request.cancel()
            await asyncio.wait([request])
        peer.data_received(b"".join(sent))
        assert both.remote.load() != LOAD
        await until(lambda: both.remote.load() == LOAD)
        assert [] == both.device.seen


async def test_a_device_that_falls_silent_is_not_ready():
    """The load contains the reason, and the device is ready again with the next report."""
    async with pair() as both:
        both.reporting.cancel()
        watching = asyncio.create_task(both.remote.watch())
        await until(lambda: not both.remote.load().ready)
        assert "has sent nothing for 0.8 s" in both.remote.load().problem
        assert LOAD.rates == both.remote.load().rates
        assert 5000 == both.remote.max_queue_tokens
        for peer in both.peers._peers:
            both.peers._send_load(peer)
        await until(lambda: both.remote.load().ready)
        watching.cancel()


async def test_metrics_are_kept_in_one_place():
    """Requests that any HTTP process answered are on the one page, with the batches."""
    async with pair() as both:
        seen = RemoteMetrics(both.remote)
        seen.observe_request("/embed", "tiny@1", 200, 0.5)
        seen.observe_error("overloaded")
        page = (await seen.page()).decode()
    labels = 'model="tiny@1",route="/embed",status="200"'
    assert f"quartet_request_duration_seconds_sum{{{labels}}} 0.5" in page
    assert 'quartet_requests_rejected_total{reason="overloaded"} 1.0' in page


async def test_metrics_of_several_processes_add_up():
    """The counts of two HTTP processes are added up, in both; so is their expected load."""
    async with pair() as both:
        other = RemoteDevice()
        following = asyncio.create_task(other.follow(FakeSubscriber()))
        await both.link(other)
        await until(lambda: other.load().ready)
        await following
        first, second = RemoteMetrics(both.remote), RemoteMetrics(other)
        for seen in (first, second):
            seen.observe_answer("tiny@1", "ann", 7, (0.25, 0.5))
            seen.observe_error("invalid")
        await first.page()
        page = (await second.page()).decode()
        assert other._peer is not None
        other._peer.close()
    assert 'quartet_tokens_total{model="tiny@1",tenant="ann"} 14.0' in page
    assert 'quartet_stage_seconds_sum{stage="parse"} 0.5' in page
    assert 'quartet_stage_seconds_count{stage="encode"} 2.0' in page
    assert 'quartet_stage_seconds_count{stage="queue"} 0.0' in page
    assert 'quartet_requests_rejected_total{reason="invalid"} 2.0' in page


async def test_concurrent_scrapes_are_one_request(monkeypatch):
    """An HTTP process requests one page of the inference process for all of them."""
    rendered = []
    render = Metrics._render_in_thread
    monkeypatch.setattr(
        Metrics, "_render_in_thread", lambda self: rendered.append(1) or render(self)
    )
    async with pair() as both:
        seen = RemoteMetrics(both.remote)
        pages = await asyncio.gather(*[seen.page() for _ in range(64)])
    assert (1, 1) == (len(rendered), len(set(pages)))


async def test_lost_log_lines_add_up(monkeypatch):
    """The lines that each process has lost, each counted once."""
    monkeypatch.setattr("service.observability.logs.lost_lines", lambda: 3)  # of both ends
    async with pair() as both:
        seen = RemoteMetrics(both.remote)
        for _ in range(2):
            assert "quartet_log_lines_lost_total 6.0" in (await seen.page()).decode()


async def test_metrics_wait_for_a_device():
    """Counts from a time without a device are sent to the next one."""
    async with pair() as both:
        await until(lambda: both.remote.load().ready)
        await both.lose()
        seen = RemoteMetrics(both.remote)
        seen.observe_error("replica_lost")
        with pytest.raises(errors.ReplicaLost):
            await seen.page()
        await both.connect()
        page = (await seen.page()).decode()
    assert 'quartet_requests_rejected_total{reason="replica_lost"} 1.0' in page


# -- what is served ----------------------------------------------------------------------------------------------------


def model(name: str, state: ServingState = "current") -> ServedModel:
    aliases = ("BAAI/bge-m3",)
    return ServedModel(name, f"/models/{name}", "0123", state, 12.5, RUNS_ON, aliases=aliases)


@pytest.fixture(scope="module")
def texts(tiny_bundle: Path) -> BundleTexts:
    return bundle.read_texts(bundle.load(tiny_bundle))


async def test_model_tables_arrive_unchanged(texts):
    """Models, manifest and tokenizer are sent to subscribers; a later subscriber gets the same."""
    models = (model("tiny@1"), model("tiny@0", "previous"))
    both_texts = {"tiny@1": texts, "tiny@0": texts}
    async with pair() as both:
        await both.peers.adopt(models, both_texts)
        assert models == both.subscriber.models
        assert {texts.manifest.id: texts} == both.subscriber.texts
        await both.lose()
        both.subscriber.models = ()
        await both.connect()
        assert models == both.subscriber.models


async def test_texts_are_sent_once(texts):
    """An HTTP process does not get the texts again that it has."""
    async with pair() as both:
        await both.peers.adopt((model("tiny@1"),), {"tiny@1": texts})
        await both.peers.adopt((model("tiny@1", "previous"),), {"tiny@1": texts})
        assert {} == both.subscriber.texts


async def test_a_failed_activation_is_reported(texts):
    """The model manager gets the error, and the HTTP process continues as before."""
    async with pair() as both:
        both.subscriber.error = ValueError("the tokenizer cannot be read")
        with pytest.raises(ValueError, match="the tokenizer cannot be read"):
            await both.peers.adopt((model("tiny@1"),), {"tiny@1": texts})
        assert 1 == len(await both.remote.submit([text(1)]))


async def test_the_first_model_table_must_be_adopted():
    """An HTTP process that cannot adopt it does not start."""
    both = Pair()
    both.subscriber.error = ValueError("the tokenizer cannot be read")
    await both.link()
    with pytest.raises(ValueError, match="the tokenizer cannot be read"):
        await both.following
    await both.lose()
    both.control.close()
    await asyncio.wait_for(both.serving, 30)
    both.reporting.cancel()


@pytest.mark.parametrize("dies", [False, True])
async def test_a_bundle_is_left_when_its_last_request_is_answered(texts, dies):
    """All HTTP processes are waited for, but no dead one; neither is it by the next activation."""
    async with pair() as both:
        both.subscriber.hold.clear()
        await both.peers.adopt((model("tiny@1"),), {"tiny@1": texts})
        await both.peers.adopt((), {})
        leaving = asyncio.create_task(both.peers.left("tiny@1"))
        await asyncio.sleep(0.05)
        assert not leaving.done()
        if dies:
            await both.lose()
        else:
            both.subscriber.hold.set()
        await asyncio.wait_for(leaving, 30)
        await asyncio.wait_for(both.peers.adopt((), {}), 30)


async def test_a_lost_subscriber_is_not_waited_for(texts):
    """An HTTP process that dies on the way does not keep the others from a new version."""
    async with pair() as both:
        both.subscriber.hold_models.clear()
        adopting = asyncio.create_task(both.peers.adopt((model("tiny@1"),), {"tiny@1": texts}))
        await asyncio.sleep(0.05)
        assert not adopting.done()
        await both.lose()
        await asyncio.wait_for(adopting, 30)


async def test_a_process_without_the_served_models_is_not_ready():
    """The inference process may be ready, but the HTTP process would find no engine."""
    async with pair() as both:
        await both.lose()
        both.subscriber.hold_models.clear()
        connecting = asyncio.create_task(both.connect())
        await asyncio.sleep(0.3)
        assert not both.remote.load().ready
        with pytest.raises(errors.ReplicaLost):
            await both.remote.submit([text(1)])
        both.subscriber.hold_models.set()
        await asyncio.wait_for(connecting, 30)


# -- errors in the messages between the processes ----------------------------------------------------------------------


async def test_an_error_in_receiving_a_message_costs_its_channel_only():
    """The HTTP process loses the channel, gets the next one, and sends its unanswered requests again."""
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)
    async with pair() as both, under_way(both, text(1)) as request:
        both.remote.push(messages.Observed([("no_such_method", ())]))
        await until(lambda: not both.remote.connected)
        await both.answer_again()
        assert 1 == len(await asyncio.wait_for(request, 30))
        assert not both.broken.is_set()


async def test_an_unexpected_error_in_an_adoption_closes_the_channel(lines):
    """An HTTP process without a model table would never be ready; without a channel, it gets another."""
    async with pair() as both:
        await both.lose()
        both.subscriber.error = RuntimeError("our bug")
        await both.link()
        await until(lambda: not both.remote.connected)
        assert "unexpected error" in [line["event"] for line in lines]
        both.subscriber.error = None
        await both.connect()
        assert 1 == len(await both.remote.submit([text(1)]))


async def test_a_process_that_cannot_adopt_after_a_reconnection_ends():
    """The table of a new inference process comes once, and without it an HTTP process is never ready."""
    async with pair() as both:
        await both.lose()
        both.subscriber.error = MemoryError("no memory")
        await both.link()
        await asyncio.wait_for(both.broken.wait(), 30)


async def test_a_process_that_dies_after_a_cancelled_command_is_forgotten():
    """Otherwise every later model table and every unloading would wait for it."""
    async with pair() as both:
        both.subscriber.hold_models.clear()
        adopting = asyncio.create_task(both.peers.adopt((), {}))
        await asyncio.sleep(0.05)
        adopting.cancel()
        await asyncio.wait([adopting])
        await both.lose()
        await until(lambda: not both.peers._peers)


async def test_commands_are_forwarded():
    """The inference process executes the commands that an HTTP process received."""
    async with pair() as both:
        command = LoadModel(path="a", by="ops", shadow=0.5)
        answer = await both.remote.execute(command)
        assert {"did": "load", **asdict(command)} == answer
        both.manager.error = errors.Conflict("not that one", param="model")
        with pytest.raises(errors.Conflict, match="not that one"):
            await both.remote.execute(UnloadModel(model="a@1", by="ops"))


async def test_a_lost_command_is_not_sent_again():
    """The outcome is unknown, so the administrator gets an error."""
    async with pair() as both:
        both.manager.hold = asyncio.Event()
        executing = asyncio.create_task(both.remote.execute(LoadModel(path="a", by="ops")))
        await asyncio.sleep(0.05)
        await both.lose()
        with pytest.raises(errors.ReplicaLost):
            await asyncio.wait_for(executing, 30)
        with pytest.raises(errors.ReplicaLost):
            await both.remote.execute(LoadModel(path="a", by="ops"))

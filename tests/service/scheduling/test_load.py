"""How long a request would wait is what the fluid of the fair queue says."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.scheduling.load import WEIGHTS, Backlog, Flow, Load, RemainingWork, weights

OURS, THEIRS = Flow("m@1", 0, "ours"), Flow("m@1", 0, "theirs")
BULK = Flow("m@1", 1, "theirs")


def singles(*tokens: int) -> Backlog:
    """Waiting single texts of this many tokens each."""
    return Backlog.of(*[RemainingWork(count, 1) for count in tokens])


def load(**waiting: Backlog) -> Load:
    """A device that computes 100 tokens a second of `m@1` and 50 of `slow@1`."""
    flows = {"ours": OURS, "theirs": THEIRS, "bulk": BULK, "slow": Flow("slow@1")}
    rates = {"m@1": 100.0, "slow@1": 50.0}
    return Load(rates, {flows[name]: backlog for name, backlog in waiting.items()})


def test_a_class_is_split_over_its_tenants_and_a_tenant_over_its_bundles():
    """More tenants of a class get no more together, nor does a tenant that asks several bundles."""
    flows = [Flow("a", 0, "x"), Flow("b", 0, "x"), Flow("a", 0, "y"), Flow("a", 1, "x")]
    shares = weights(flows)
    assert [shares[flow] / WEIGHTS[flow.priority] for flow in flows] == [1 / 4, 1 / 4, 1 / 2, 1]


@pytest.mark.parametrize(
    ("waiting", "flow", "tokens", "wait_s"),
    [
        ({}, OURS, 200, 2.0),  # an idle device takes what the work takes
        ({"ours": singles(500)}, Flow("other@1"), 10, 0.0),  # accepted without an estimate
        (
            {"ours": singles(*[10] * 10)},
            OURS,
            10,
            1.1,
        ),  # ten texts of the same flow are before ours
        # Of a thousand texts of a request as many tokens are before ours as it has itself.
        ({"ours": Backlog.of(RemainingWork(10_000, 100))}, OURS, 10, 0.2),
        ({"ours": Backlog.of(RemainingWork(10_000, 100))}, OURS, 10_000, 200.0),
        # A text waits for every text before it, also for those that are longer.
        ({"ours": Backlog.of(RemainingWork(500, 1), RemainingWork(200, 1))}, OURS, 10, 7.1),
        # For each token of ours, at most one token of each other tenant is computed first.
        ({"theirs": singles(10_000)}, OURS, 100, 2.0),
        ({"theirs": singles(30)}, OURS, 100, 1.3),
        # Classes wait by their weights.
        ({"bulk": singles(10_000)}, OURS, 80, 0.9),
        ({"ours": singles(10_000)}, BULK, 10, 0.9),
        ({"slow": singles(10_000)}, OURS, 100, 2.0),  # a second of the slow model for each of ours
    ],
)
def test_wait(waiting, flow, tokens, wait_s):
    """A request waits for what the fair queue computes before it."""
    assert load(**waiting).wait_s(flow, tokens) == pytest.approx(wait_s)


def test_what_was_sent_since_counts():
    """The load that was reported a moment ago does not contain the requests sent since."""
    told = load()
    told.add(OURS, RemainingWork(50, 1))
    told.add(OURS, RemainingWork(50, 1))
    assert told.queue_tokens == 100
    assert told.drain_s == pytest.approx(1.0)
    assert told.wait_s(OURS, 50) == pytest.approx(1.5)


def test_a_bundle_that_has_just_come_counts_from_the_next_time_on():
    """Its speed is not known yet, so the wait of the other requests is unknown."""
    told = load(ours=singles(100))
    told.add(Flow("new"), RemainingWork(5000, 1))
    assert told.wait_s(Flow("new"), 100) == 0.0
    assert told.drain_s == pytest.approx(1.0)
    assert told.wait_s(OURS, 100) == pytest.approx(2.0)


requests = st.lists(st.integers(1, 5000), max_size=20)


@given(requests, requests, requests, st.integers(1, 5000))
def test_a_wait_is_no_shorter_than_the_work_and_no_longer_than_all(ours, theirs, bulk, tokens):
    """Between an idle device, and one that serves everybody else first."""
    waiting = load(ours=singles(*ours), theirs=singles(*theirs), bulk=singles(*bulk))
    wait_s = waiting.wait_s(OURS, tokens)
    assert tokens / 100 <= wait_s * (1 + 1e-9)
    assert wait_s <= (waiting.drain_s + tokens / 100) * (1 + 1e-9)


lefts = st.builds(RemainingWork, st.integers(1, 5000), st.integers(1, 3)) | st.just(RemainingWork())


@given(st.lists(lefts, max_size=20), st.lists(st.tuples(st.integers(0, 19), lefts), max_size=20))
def test_a_backlog_is_what_is_left_of_each(sizes, changes):
    """However requests shrink, what is known is what a fresh count gives."""
    backlog = Backlog.of(*sizes)
    left = [*sizes]
    for at, after in changes:
        if at < len(left):
            backlog.change(left[at], after)
            left[at] = after
    fresh = Backlog.of(*left)
    assert backlog.tokens == fresh.tokens == sum(tokens for tokens, _ in left)
    for tokens in (1, 50, 5000):
        assert backlog.ahead(tokens) == fresh.ahead(tokens)

import pytest

from service.middleware.rate_limit import Bucket
from tests.service.fakes import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock(100.0)


def test_a_bucket_holds_a_minutes_worth(clock):
    """As much as a minute brings may be had at once, and then one at a time."""
    bucket = Bucket(6, clock)
    for _ in range(6):
        assert bucket.wait_s() == 0
        bucket.take(1)
    assert bucket.wait_s() == pytest.approx(10)
    clock.now += 4
    assert bucket.wait_s() == pytest.approx(6)
    clock.now += 6
    assert bucket.wait_s() == pytest.approx(0)


def test_a_full_bucket_overflows(clock):
    """After an idle hour, a client has one minute's worth of tokens."""
    bucket = Bucket(60, clock)
    clock.now += 3600
    assert bucket.wait_s() == 0
    bucket.take(60)
    assert bucket.wait_s() == pytest.approx(1)


def test_an_overdrawn_bucket_has_to_be_filled_first(clock):
    """What was taken too much is waited for."""
    bucket = Bucket(60, clock)
    bucket.take(180)
    assert bucket.wait_s() == pytest.approx(121)
    clock.now += 121
    assert bucket.wait_s() == pytest.approx(0)


def test_a_small_share_of_a_rate_still_lets_one_through(clock):
    """A quarter of one request a minute is one request in four minutes."""
    bucket = Bucket(0.25, clock)
    assert bucket.wait_s() == 0
    bucket.take(1)
    assert bucket.wait_s() == pytest.approx(240)

"""The first SIGINT or SIGTERM is recorded; the second one has its usual effect."""

import signal
from collections.abc import Iterator

import pytest

from model.training.stop_signals import StoppedRun, StopSignals


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_recorded(number, capfd):
    """It is announced, and afterwards both signals are handled as before."""
    before = [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)]
    with StopSignals() as signals:
        assert signals.received == 0
        signal.raise_signal(number)
        assert signals.received == number
        assert [signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)] == before
    assert "another signal stops at once" in capfd.readouterr().err


@pytest.fixture
def interrupting() -> Iterator[None]:
    """SIGINT interrupts, also where a shell started the tests in the background and made them ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interrupting")
def test_the_second_signal_interrupts():
    with StopSignals():
        signal.raise_signal(signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)


def test_a_signal_that_arrives_while_processes_agree_counts_the_next_time():
    def total(values):
        if not signals.received:
            signal.raise_signal(signal.SIGTERM)
        return values

    with StopSignals() as signals:
        assert signals.received_by_any(total) == 0
        assert signals.received_by_any(total) == signal.SIGTERM


def test_a_signal_to_another_process_counts():
    with StopSignals() as signals:
        assert signals.received_by_any(lambda values: {**values, "2": 1.0}) == signal.SIGINT
        assert signals.received == 0


def test_nothing_is_left_of_a_run_without_signals():
    before = signal.getsignal(signal.SIGTERM)
    with StopSignals():
        assert signal.getsignal(signal.SIGTERM) != before
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_exit_statuses(number, status):
    assert StoppedRun(number).code == status

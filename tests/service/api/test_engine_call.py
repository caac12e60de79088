import pytest

from service.api.engine_call import server_timing
from service.errors import Draining, InvalidInput, NotReady
from service.middleware.service_state import Service, timeout_s
from service.observability.metrics import Metrics
from service.settings import Settings
from service.shutdown import Stage


@pytest.fixture
def service() -> Service:
    return Service(Settings(deadline_ms=2000), Metrics())


def test_there_are_no_engines_before_they_are_open(service):
    """A request before the start gets 503 with `Retry-After`."""
    with pytest.raises(NotReady, match="still loading"):
        service.open_engines()


def test_there_are_no_engines_after_they_are_closed(service):
    """A request after the end gets 503 without a time to retry."""
    service.shutdown.advance(Stage.DRAINING)
    with pytest.raises(Draining):
        service.open_engines()


def test_requests_are_answered_while_draining(service, engines):
    """Readiness ends with the signal, answers only when the engines close."""
    service.engines = engines
    service.shutdown.advance(Stage.DRAINING)
    assert service.open_engines() is engines
    with pytest.raises(Draining):
        service.check_ready()


def test_a_batcher_that_stopped_is_not_ready(service, engines):
    """Open engines are not enough: they must also take work."""
    service.engines, engines.ready = engines, False
    with pytest.raises(NotReady, match="inference does not run"):
        service.check_ready()


@pytest.mark.parametrize(("header", "seconds"), [("1", 0.001), ("1500", 1.5), ("999999999", 2.0)])
def test_a_client_may_be_less_patient(service, header, seconds):
    """The header shortens the deadline, and never beyond the server's own."""
    assert timeout_s({"x-request-timeout-ms": header}, service.settings) == seconds
    assert timeout_s({}, service.settings) == 2.0


@pytest.mark.parametrize("header", ["", "0", "-1", "1.5", "soon", "1e3", "٣", "1" * 19])
def test_a_timeout_is_a_whole_number(service, header):
    """Anything else is refused by the header's name."""
    with pytest.raises(InvalidInput) as caught:
        timeout_s({"x-request-timeout-ms": header}, service.settings)
    assert caught.value.param == "X-Request-Timeout-Ms"


def test_stages_are_reported_in_milliseconds():
    """The header has the form of the Server Timing specification."""
    assert server_timing(encode=0.0012, total=1.5) == "encode;dur=1.200, total;dur=1500.000"

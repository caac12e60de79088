import pytest
from starlette.types import Scope

from service.middleware.client_address import HOPS, ClientAddresses

PROXY, OTHER_PROXY, CLIENT = "10.0.0.1", "10.0.0.2", "203.0.113.7"
FORGED = "198.51.100.66"


def request(peer: str | None, *headers: tuple[str, str]) -> Scope:
    """A request from a peer, None on a Unix socket, with these header lines."""
    lines = [(name.lower().encode(), value.encode("latin-1")) for name, value in headers]
    server = ("10.1.1.1", 8000) if peer else ("/run/quartet.sock", None)
    return {"client": (peer, 4711) if peer else None, "server": server, "headers": lines}


def forwarded_for(*lines: str) -> list[tuple[str, str]]:
    return [("X-Forwarded-For", line) for line in lines]


@pytest.mark.parametrize("peer", [CLIENT, "2001:db8::7", "testclient"])
def test_without_headers_it_is_the_peer(peer):
    """A client without a proxy is the peer itself."""
    assert peer == ClientAddresses("127.0.0.1")(request(peer))


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([CLIENT], CLIENT),
        ([f"{FORGED}, {CLIENT}"], CLIENT),
        ([f"{FORGED}, {CLIENT}, {OTHER_PROXY}"], CLIENT),
        ([FORGED, CLIENT], CLIENT),
        ([FORGED, f"{CLIENT}, {OTHER_PROXY}"], CLIENT),
        ([f"{CLIENT}:4711"], CLIENT),
        (["[2001:db8::7]:4711"], "2001:db8::7"),
        (["2001:DB8:0::7"], "2001:db8::7"),
        ([f"::ffff:{CLIENT}"], CLIENT),
        (["fe80::1%a\x1bb"], "fe80::1"),
        ([OTHER_PROXY], OTHER_PROXY),
        ([f"{OTHER_PROXY}, {PROXY}"], OTHER_PROXY),
        ([f"{FORGED}, unknown, {OTHER_PROXY}"], OTHER_PROXY),
        ([f"{FORGED}, "], PROXY),
        (["status=200 [forged]"], PROXY),
        ([""], PROXY),
    ],
)
def test_the_nearest_address_that_is_not_trusted(lines, expected):
    """Entries that the client wrote before a trusted proxy's entry are ignored, in one line or several."""
    scope = request(PROXY, *forwarded_for(*lines))
    assert expected == ClientAddresses("127.0.0.1, 10.0.0.0/8")(scope)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (f"for={CLIENT}", CLIENT),
        (f"for={FORGED}, For={CLIENT};proto=https;by={PROXY}", CLIENT),
        (f'proto=https; for="[2001:db8::7]:4711", for={OTHER_PROXY}', "2001:db8::7"),
        (f'for={FORGED};host=", for={CLIENT}', CLIENT),
        (f"for={FORGED}, for=unknown", PROXY),
        (f"for={FORGED}, for=_hidden", PROXY),
        (f"for={FORGED}, proto=https", PROXY),
        (f"xfor={FORGED}", PROXY),
    ],
)
def test_the_standard_header(line, expected):
    """`Forwarded` names the client where there is no `X-Forwarded-For`, which most proxies write."""
    addresses = ClientAddresses("10.0.0.0/8")
    assert expected == addresses(request(PROXY, ("Forwarded", line)))
    both = request(PROXY, ("Forwarded", f"for={FORGED}"), *forwarded_for(CLIENT))
    assert CLIENT == addresses(both)


@pytest.mark.parametrize("header", ["X-Forwarded-For", "Forwarded"])
@pytest.mark.parametrize(
    ("trusted", "peer"),
    [
        ("127.0.0.1", CLIENT),
        ("127.0.0.1", "127.0.0.2"),
        ("127.0.0.1", None),
        ("127.0.0.1,10.0.0.0/8", None),
        ("", "127.0.0.1"),
        ("unix:", "127.0.0.1"),
    ],
)
def test_a_peer_that_is_not_trusted_cannot_spoof(trusted, peer, header):
    """Without trust the headers name no client. A Unix socket is trusted only where that is configured."""
    value = f"for={FORGED}" if header == "Forwarded" else FORGED
    assert (peer or "unix:") == ClientAddresses(trusted)(request(peer, (header, value)))


@pytest.mark.parametrize(
    ("trusted", "peer", "expected"),
    [
        ("unix:", None, CLIENT),
        ("*", None, FORGED),
        ("*", CLIENT, FORGED),
        ("127.0.0.1", "::ffff:127.0.0.1", CLIENT),
    ],
)
def test_other_trusted_peers(trusted, peer, expected):
    """`unix:` trusts proxies on a Unix socket; `*` trusts every hop, down to what the client wrote."""
    scope = request(peer, *forwarded_for(f"{FORGED}, {CLIENT}"))
    assert expected == ClientAddresses(trusted)(scope)


@pytest.mark.parametrize(("hops", "expected"), [(HOPS - 1, CLIENT), (HOPS, PROXY)])
def test_a_long_chain_is_not_read_to_its_end(hops, expected):
    """Of a header that is as long as a header may be, the nearest entries are read."""
    chain = ",".join([CLIENT] + [PROXY] * hops)
    assert expected == ClientAddresses("10.0.0.0/8")(request(PROXY, *forwarded_for(chain)))


def test_a_peer_that_has_left_has_no_address():
    """A connection on a port whose client is gone is not taken for a Unix socket."""
    scope = {**request(CLIENT, *forwarded_for(FORGED)), "client": None}
    assert "" == ClientAddresses("unix:,10.0.0.0/8")(scope)

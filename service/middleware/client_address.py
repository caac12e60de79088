"""The address of a client, for the log. Headers count only if a trusted proxy wrote them."""

import re
from collections.abc import Iterator
from functools import lru_cache
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network

from starlette.types import Scope

ANY = "*"
UNIX = "unix:"  # notation of a peer on a Unix socket, in the list of trusted peers and in the log
HOPS = 32  # largest number of proxies in a row that are considered, counted from the service
KNOWN_PEERS = 4096  # number of peers in the cache of trust decisions
FOR = re.compile(r'(?:^|;)\s*for="?([^";]*)', re.IGNORECASE)  # in `Forwarded`; RFC 7239, 4
NODE = re.compile(r"\[([^\]]*)\](?::\w+)?|([^:]+):\d+|(.+)")  # an address with or without a port

Address = IPv4Address | IPv6Address


class ClientAddresses:
    """Determines the address of each request's client.

    trusted: addresses and networks of proxies, separated by commas. `*` trusts every peer, `unix:` every peer on a Unix
    socket. Raises ValueError for a part in any other format.
    """

    def __init__(self, trusted: str) -> None:
        names = {*filter(None, map(str.strip, trusted.split(",")))}
        self._all = ANY in names
        self._unix = self._all or UNIX in names
        self._networks = [ip_network(name) for name in names - {ANY, UNIX}]
        self._peer = lru_cache(KNOWN_PEERS)(self._judge)

    def __call__(self, scope: Scope) -> str:
        """Return the nearest untrusted address among the peer and its hops; with `*` the farthest, possibly forged."""
        client = scope.get("client")
        peer, trusted = self._peer(client[0]) if client else self._nameless(scope)
        if not trusted:
            return peer
        for text in hops(scope):
            address = parse(text)
            if address is None:
                break  # the address of the previous hop is the last known one
            peer = str(address)
            if not self._trusts(address):
                break
        return peer

    def _nameless(self, scope: Scope) -> tuple[str, bool]:
        """Return a peer on a Unix socket, or one that has left, and whether it is trusted."""
        _, port = scope.get("server") or ("", 0)
        return (UNIX, self._unix) if port is None else ("", self._all)

    def _judge(self, host: str) -> tuple[str, bool]:
        address = parse(host)
        if address is None:
            return host, self._all
        return str(address), self._trusts(address)

    def _trusts(self, address: Address) -> bool:
        return self._all or any(address in network for network in self._networks)


def hops(scope: Scope) -> Iterator[str]:
    """Yield the client address that each proxy reported in `X-Forwarded-For` or `Forwarded`, the nearest first."""
    by_name: dict[bytes, list[bytes]] = {b"x-forwarded-for": [], b"forwarded": []}
    for name, value in scope["headers"]:
        if name in by_name:
            by_name[name].append(value)
    lines = by_name[b"x-forwarded-for"]
    if lines:
        yield from nearest(lines)
        return
    for element in nearest(by_name[b"forwarded"]):
        found = FOR.search(element)
        yield found[1] if found else ""


def nearest(lines: list[bytes]) -> list[str]:
    """Return the last elements of a header, the last one first. A proxy may append a line, or an element to a line."""
    elements: list[str] = []
    for value in reversed(lines):
        elements += reversed(value.decode("latin-1").rsplit(",", HOPS))
        if len(elements) > HOPS:
            break
    return elements[:HOPS]


def parse(text: str) -> Address | None:
    """Return the address in a text without port and zone, as IPv4 where IPv6 maps it; None if there is none."""
    found = NODE.fullmatch(text.strip())
    if found is None:
        return None
    bracketed, with_port, bare = found.groups()
    try:
        address = ip_address(bracketed or with_port or bare or "")
    except ValueError:
        return None
    if isinstance(address, IPv4Address):
        return address
    return address.ipv4_mapped or IPv6Address(int(address))

"""Access checks: every request must pass them before the server reads its body or looks up its route.

A check is a plain callable. It takes a request's scope and request context, and raises a QuartetError to reject the
request. The checks run for every request, so they must be cheap.
"""

import re
from collections.abc import Collection, Mapping, Sequence, Set
from functools import lru_cache, partial
from hmac import compare_digest

from starlette.types import Scope

from service.errors import Forbidden, InvalidInput, NotFound, RateLimited, Unauthorized
from service.keys import PRIORITIES, Key, Keys, Permission, digest
from service.middleware.client_address import parse
from service.middleware.rate_limit import Bucket
from service.middleware.request_context import RequestContext
from service.middleware.request_lifecycle import Check
from service.settings import Settings

PRIORITY_HEADER = "X-Priority"
LIVE, LIVE_EVENTS = "/live", "/live/events"
OPEN = frozenset({"/", "/docs", "/openapi.json", LIVE})
HEALTH = "/health/"
OPEN_BELOW = (HEALTH, "/v2/health/", "/static/")
METRICS = "/metrics"
# Paths that need the permission "metrics", or have a port of their own.
MEASURES = frozenset({METRICS, LIVE_EVENTS})
KEY_HEADERS = ("api-key", "x-api-key")  # of clients of other servers
ADMIN = "/admin"
ADMIN_BELOW = (f"{ADMIN}/", "/v2/repository/models/")
ANY = "*"  # in `allowed_hosts`: every name
HOST_CHARACTERS = 253  # of a host in an error; no name has more
KNOWN_HOSTS = 1024  # number of hosts in the cache of decisions


def access_checks(settings: Settings) -> Sequence[Check]:
    """Return the checks in the order in which they run."""
    all_read = settings.api_key is None and settings.api_keys is None
    assert all_read, "our bug: there are keys that were not read"
    apart = settings.metrics_port
    is_open = OPEN if apart is None else OPEN | MEASURES
    checks: list[Check] = [] if apart is None else [PortCheck(apart)]
    if settings.allowed_hosts or is_local(settings):
        checks.insert(0, HostCheck(settings.allowed_hosts))
    if settings.keys:
        return [*checks, KeyCheck(settings.keys, is_open, settings.http_workers or 1)]
    return [*checks, partial(check_without_keys, is_open)]


def is_local(settings: Settings) -> bool:
    """Return whether a service without keys relies on its loopback address to be reached from this machine only."""
    address = parse(settings.host)
    loopback = settings.host == "localhost" or (address is not None and address.is_loopback)
    return loopback and settings.uds is None and not settings.keys


class HostCheck:
    """Check of the header `Host`, against pages whose own name is made to resolve to this machine (DNS rebinding).

    A browser treats such a page as one of the service. Always allowed are addresses, `localhost`, and names without a
    dot, which are no public names: no page of a stranger has one of them.

    allowed: further names; `*.example.org` stands for every name that ends in `.example.org`, and `*` for all
    """

    def __init__(self, allowed: Collection[str]) -> None:
        names = {name.lower() for name in allowed}
        self._all = ANY in names
        self._names = frozenset(names)
        self._endings = tuple(name[1:] for name in names if name.startswith("*."))
        self._is_allowed = lru_cache(KNOWN_HOSTS)(self._judge)

    def __call__(self, scope: Scope, context: RequestContext) -> None:
        host = context.headers.get("host", "")
        if not self._is_allowed(host):
            raise Forbidden(
                f"the host {host[:HOST_CHARACTERS]!r} is not one of allowed_hosts: add its name, or use an address"
                " of the service",
                param="Host",
            )

    def _judge(self, host: str) -> bool:
        name = re.sub(r":\d*$", "", host.lower()).removesuffix(".")
        return (
            self._all
            or "." not in name
            or parse(host) is not None
            or name in self._names
            or name.endswith((".localhost", *self._endings))
        )


class PortCheck:
    """Check that serves metrics and live view on their own port only, and there nothing else but health routes."""

    def __init__(self, metrics_port: int) -> None:
        self._metrics_port = metrics_port

    def __call__(self, scope: Scope, context: RequestContext) -> None:
        path: str = scope["path"]
        if scope["server"][1] == self._metrics_port:
            is_here = path in MEASURES or path == LIVE or path.startswith((HEALTH, "/static/"))
        else:
            is_here = path not in MEASURES and path != LIVE
        if not is_here:
            raise NotFound(f"there is nothing at {path} on this port")


def needs_no_key(path: str, is_open: Set[str]) -> bool:
    return path in is_open or path.startswith(OPEN_BELOW)


def check_without_keys(is_open: Set[str], scope: Scope, context: RequestContext) -> None:
    """Allow every request except administration, for a service without keys. Raises Forbidden for administration."""
    path: str = scope["path"]
    if needs_no_key(path, is_open):
        return
    if permission(path) == "admin":
        raise Forbidden("administration requires keys, and no key is configured")
    context.priority = requested_priority(0, context.headers)


class KeyCheck:
    """Check that admits a request if its key is known, has the required permission, and is within its rate limits.

    is_open: paths that need no key, in addition to the paths below OPEN_BELOW
    processes: number of HTTP processes, among which the rate limits are divided
    """

    def __init__(self, keys: Keys, is_open: Set[str], processes: int) -> None:
        self._open = is_open
        self._processes = processes
        self._holders: Sequence[KeyHolder] = ()
        self.replace(keys)

    @property
    def names(self) -> Sequence[str]:
        return [holder.name for holder in self._holders]

    def replace(self, keys: Keys) -> None:
        """Replace all keys. A key keeps the count of a rate limit if its name and that limit are unchanged."""
        before = {holder.name: holder for holder in self._holders}
        self._holders = [
            KeyHolder(name, key, self._processes, before.get(name)) for name, key in keys.items()
        ]

    def __call__(self, scope: Scope, context: RequestContext) -> None:
        path: str = scope["path"]
        if needs_no_key(path, self._open):
            return
        holder = self._find(shown_key(context.headers))
        context.tenant, context.models = holder.name, holder.models
        holder.check_permission(permission(path))
        context.priority = requested_priority(holder.priority, context.headers)
        holder.check_rates()
        context.on_finish.append(holder.charge)

    def _find(self, key: str) -> "KeyHolder":
        shown = digest(key)
        found = None
        # Compares all keys, so that the duration does not reveal which key matched.
        for holder in self._holders:
            if compare_digest(holder.digest, shown):
                found = holder
        if found is None:
            raise Unauthorized("the key is unknown")
        return found


def shown_key(headers: Mapping[str, str]) -> str:
    """Return the key in a request's headers. Raises Unauthorized if it has none, or different ones."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    keys = {headers[name].strip() for name in KEY_HEADERS if headers.get(name)}
    if scheme.lower() == "bearer":
        keys.add(key.strip())
    if not keys:
        raise Unauthorized("the request has no key: send the header Authorization: Bearer KEY")
    if len(keys) > 1:
        raise Unauthorized("the request has different keys in its headers: send one")
    return keys.pop()


class KeyHolder:
    """A configured key: its permissions, its priority, and the remainder of its rate limits."""

    def __init__(
        self, name: str, key: Key, processes: int, before: "KeyHolder | None" = None
    ) -> None:
        self.name = name
        self.digest = bytes.fromhex(key.sha256)
        self.priority = PRIORITIES[key.priority]
        self.models = key.models
        self._key = key
        self._may = key.may
        self._requests = bucket(key.requests_per_minute, processes)
        self._tokens = bucket(key.tokens_per_minute, processes)
        if before is not None and before._key.requests_per_minute == key.requests_per_minute:
            self._requests = before._requests
        if before is not None and before._key.tokens_per_minute == key.tokens_per_minute:
            self._tokens = before._tokens

    def check_permission(self, wanted: Permission) -> None:
        if wanted not in self._may:
            raise Forbidden(f"this key is for {' and '.join(self._may)}, not for {wanted}")

    def check_rates(self) -> None:
        """Count one more request. Raises RateLimited, and does not count the request, if a rate limit is exceeded."""
        for what, rate in (("requests", self._requests), ("tokens", self._tokens)):
            if rate is not None and (wait_s := rate.wait_s()):
                message = f"this key is above its {what} per minute"
                raise RateLimited(message, retry_after_s=wait_s)
        if self._requests is not None:
            self._requests.take(1)

    def charge(self, context: RequestContext) -> None:
        """Subtract a finished request's tokens; so the last admitted request may exceed the limit."""
        if self._tokens is not None:
            self._tokens.take(context.tokens)


def bucket(per_minute: int | None, processes: int) -> Bucket | None:
    return None if per_minute is None else Bucket(per_minute / processes)


def permission(path: str) -> Permission:
    """Return the permission that a path requires, for a path that needs a key."""
    if path in MEASURES:
        return "metrics"
    return "admin" if path == ADMIN or path.startswith(ADMIN_BELOW) else "inference"


def requested_priority(priority: int, headers: Mapping[str, str]) -> int:
    """Return the header's priority if it is lower than the key's. Raises InvalidInput for an unknown one."""
    asked = headers.get(PRIORITY_HEADER.lower())
    if asked is None:
        return priority
    if asked.lower() not in PRIORITIES:
        words = " or ".join(PRIORITIES)
        raise InvalidInput(f"{PRIORITY_HEADER}: must be {words}", param=PRIORITY_HEADER)
    return max(priority, PRIORITIES[asked.lower()])

"""Who may come in: what every request must pass before its body is read or its route looked for.

A check is a plain callable: it is given a request's scope and request context, and raises a QuartetError to turn it
away. The checks stand before every request, so they must be cheap.
"""

from collections.abc import Mapping, Sequence, Set
from functools import partial
from hmac import compare_digest

from starlette.types import Scope

from service.errors import Forbidden, InvalidInput, NotFound, RateLimited, Unauthorized
from service.keys import PRIORITIES, Key, Keys, Permission, digest
from service.middleware.rate_limit import Bucket
from service.middleware.request_context import RequestContext
from service.middleware.request_lifecycle import Check
from service.settings import Settings

PRIORITY_HEADER = "X-Priority"
OPEN = frozenset({"/", "/docs", "/openapi.json"})
HEALTH = "/health/"
OPEN_BELOW = (HEALTH, "/static/")
METRICS = "/metrics"
ADMIN = "/admin"


def access_checks(settings: Settings) -> Sequence[Check]:
    """The checks, in the order in which a request passes them."""
    all_read = settings.api_key is None and settings.api_keys is None
    assert all_read, "our bug: there are keys that were not read"
    apart = settings.metrics_port
    is_open = OPEN if apart is None else OPEN | {METRICS}
    checks: list[Check] = [] if apart is None else [PortCheck(apart)]
    if settings.keys:
        return [*checks, KeyCheck(settings.keys, is_open, settings.http_workers or 1)]
    return [*checks, partial(check_without_keys, is_open)]


class PortCheck:
    """Where the metrics have a port of their own, they are nowhere else, and nothing else but health is there."""

    def __init__(self, metrics_port: int) -> None:
        self._metrics_port = metrics_port

    def __call__(self, scope: Scope, context: RequestContext) -> None:
        path: str = scope["path"]
        if scope["server"][1] == self._metrics_port:
            is_here = path == METRICS or path.startswith(HEALTH)
        else:
            is_here = path != METRICS
        if not is_here:
            raise NotFound(f"there is nothing at {path} on this port")


def needs_no_key(path: str, is_open: Set[str]) -> bool:
    return path in is_open or path.startswith(OPEN_BELOW)


def check_without_keys(is_open: Set[str], scope: Scope, context: RequestContext) -> None:
    """Everybody may do everything, but for administration."""
    path: str = scope["path"]
    if needs_no_key(path, is_open):
        return
    if permission(path) == "admin":
        raise Forbidden("administration needs keys, and none is configured")
    context.priority = requested_priority(0, context.headers)


class KeyCheck:
    """Lets in whoever shows a key that is known, is for what is asked, and is within its rates.

    is_open: paths that need no key, beside those below OPEN_BELOW
    processes: processes like this one, among which the rates are divided
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
        """Replace all keys. The rate of a name keeps its count where the limit is the same as before."""
        before = {holder.name: holder for holder in self._holders}
        self._holders = [
            KeyHolder(name, key, self._processes, before.get(name)) for name, key in keys.items()
        ]

    def __call__(self, scope: Scope, context: RequestContext) -> None:
        path: str = scope["path"]
        if needs_no_key(path, self._open):
            return
        holder = self._find(context.headers.get("authorization", ""))
        context.tenant = holder.name
        holder.check_permission(permission(path))
        context.priority = requested_priority(holder.priority, context.headers)
        holder.check_rates()
        context.on_finish.append(holder.charge)

    def _find(self, authorization: str) -> "KeyHolder":
        scheme, _, key = authorization.partition(" ")
        if scheme.lower() != "bearer":
            raise Unauthorized("a key is needed: send the header Authorization: Bearer KEY")
        shown = digest(key.strip())
        found = None
        for holder in self._holders:  # to the end, so that the time tells nothing of who it was
            if compare_digest(holder.digest, shown):
                found = holder
        if found is None:
            raise Unauthorized("this key is not known")
        return found


class KeyHolder:
    """Who has a key: allowed what, how urgent, and with how much left of its rates."""

    def __init__(
        self, name: str, key: Key, processes: int, before: "KeyHolder | None" = None
    ) -> None:
        self.name = name
        self.digest = bytes.fromhex(key.sha256)
        self.priority = PRIORITIES[key.priority]
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
        """Count one more request. Raises RateLimited, and counts none, above one of the rates."""
        for what, rate in (("requests", self._requests), ("tokens", self._tokens)):
            if rate is not None and (wait_s := rate.wait_s()):
                message = f"this key is above its {what} per minute"
                raise RateLimited(message, retry_after_s=wait_s)
        if self._requests is not None:
            self._requests.take(1)

    def charge(self, context: RequestContext) -> None:
        """Count the tokens of a request that is over, so the last request that is let in may be any size."""
        if self._tokens is not None:
            self._tokens.take(context.tokens)


def bucket(per_minute: int | None, processes: int) -> Bucket | None:
    return None if per_minute is None else Bucket(per_minute / processes)


def permission(path: str) -> Permission:
    """What is needed to ask for a path that is not open."""
    if path == METRICS:
        return "metrics"
    return "admin" if path == ADMIN or path.startswith(f"{ADMIN}/") else "inference"


def requested_priority(priority: int, headers: Mapping[str, str]) -> int:
    """The priority that the header asks for, if it is lower. Raises InvalidInput for an unknown word."""
    asked = headers.get(PRIORITY_HEADER.lower())
    if asked is None:
        return priority
    if asked.lower() not in PRIORITIES:
        words = " or ".join(PRIORITIES)
        raise InvalidInput(f"{PRIORITY_HEADER}: must be {words}", param=PRIORITY_HEADER)
    return max(priority, PRIORITIES[asked.lower()])

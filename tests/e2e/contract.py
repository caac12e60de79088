"""What schemathesis does before it sends a request."""

from typing import Any

import schemathesis

PATIENCE_MS = 60_000


@schemathesis.hook
def before_call(
    context: schemathesis.HookContext, case: schemathesis.Case, kwargs: dict[str, Any]
) -> None:
    """Allow a long time: a request with a timeout of one millisecond rightly gets 504."""
    for name, value in (case.headers or {}).items():
        if name.lower() == "x-request-timeout-ms" and str(value).isascii() and 0 < number(value):
            case.headers[name] = str(max(number(value), PATIENCE_MS))


def number(value: object) -> int:
    return int(str(value)) if str(value).isdecimal() else 0

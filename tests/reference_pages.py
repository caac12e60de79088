"""The tables of docs/reference that follow from the code: errors and metrics.

`python -m tests.reference_pages` renews them.
"""

import re
from collections.abc import Iterator
from pathlib import Path

from prometheus_client import CollectorRegistry

from service.errors import QuartetError, kinds
from service.observability.metrics import Metrics

REFERENCE = Path(__file__).parent.parent / "docs" / "reference"
# For each code: when the service sends it, and what the client does.
ADVICE = {
    "bad_request": (
        "the request is not HTTP/1.1, or its body is not JSON in UTF-8 (`NaN` is not JSON)",
        "fix the client",
    ),
    "unauthorized": ("no API key, or an unknown one", "send a [key](api.md#keys)"),
    "forbidden": (
        "the key lacks the permission, no key is configured for this route, or `allowed_hosts` lacks the host",
        "use a key with the permission, or add the [host](settings.md#notes)",
    ),
    "not_found": ("no such route", "check the path"),
    "unknown_model": ("no such model is served", "use a name from the message, or set `aliases` or `unknown_model`"),
    "unknown_head": ("the model has no such head for this task", "use a head from the message"),
    "method_not_allowed": ("the route does not support this method", "use a method from `Allow`"),
    "slow_headers": ("the headers did not arrive within `header_timeout_s`", "retry"),
    "slow_body": ("the body did not arrive within `body_timeout_s`", "retry"),
    "conflict": ("the served models do not allow the administrator's command", "read the message"),
    "new_embedding_space": (
        "the vectors of the new version cannot be compared with the current version's",
        "build a new index, then send `allow_new_embedding_space` "
        "([Administration](api.md#administration))",
    ),
    "changed_answers": (
        "too few answers of the candidate version were compared, or too many differ",
        "see [Administration](api.md#administration)",
    ),
    "too_large": (
        "the body, the number of inputs, the characters of one input, or the tokens of all "
        "inputs exceed a limit, even if the queue is empty",
        "split the request",
    ),
    "unsupported_media_type": ("the content type is not `application/json` in UTF-8", "set `Content-Type`"),
    "unsupported_encoding": (
        "the body is compressed in an unsupported way",
        "use an encoding from `Accept-Encoding` of the response",
    ),
    "invalid": ("a field has an impossible value; the message lists every bad field and index", "fix the request"),
    "bad_bundle": (
        "the bundle failed its checks; the message names the file, hash or head that disagrees",
        "export the bundle again",
    ),
    "overloaded": (
        "the queue is full, the answer would miss the deadline, or request bodies take too much memory",
        "retry after `Retry-After` seconds",
    ),
    "rate_limited": ("the key exceeded its requests or tokens per minute", "retry after `Retry-After` seconds"),
    "headers_too_large": (
        "more than 100 headers, more than 64 KiB of them, a path longer than 2 KiB, or a longer URL than 8 KiB",
        "send fewer headers",
    ),
    "internal": ("a fault in the service", "report it with `X-Request-Id`"),
    "inference_failed": (
        "the model failed on this input, or its output was not finite",
        "report it with `X-Request-Id`; the log contains a hash of the tokens",
    ),
    "too_many_connections": ("`max_connections` are open", "reuse connections; retry after `Retry-After` seconds"),
    "not_ready": ("the service is not ready", "retry after `Retry-After` seconds"),
    "draining": ("the service shuts down", "retry; another instance answers"),
    "replica_lost": (
        "the inference process is starting, or two of them were lost while they had this request",
        "retry after `Retry-After` seconds",
    ),
    "deadline_exceeded": (
        "no answer within the deadline; the service dropped the work",
        "retry later, or allow more time",
    ),
}  # fmt: skip


def block(name: str) -> re.Pattern[str]:
    """Return the pattern of a generated part of a page: what lies between its two comments."""
    return re.compile(rf"(<!-- {name}: begin -->\n).*?(<!-- {name}: end -->)", re.DOTALL)


def error_table() -> str:
    """Return the table of every error code, by status."""
    lines = ["| status | code | when | what to do |", "|---|---|---|---|"]
    found = {(kind.status, kind.code) for kind in (QuartetError, *kinds())}
    order = list(ADVICE)
    for status, code in sorted(found, key=lambda pair: (pair[0], order.index(pair[1]))):
        lines.append(f"| {status} | `{code}` | {' | '.join(ADVICE[code])} |")
    return "\n".join([*lines, ""])


def metric_rows(registry: CollectorRegistry) -> Iterator[tuple[str, str, str, str]]:
    """Yield name, type, labels and help of each of the service's metrics.

    The registry lists a series only when it has a value, so labels are read from the metric objects.
    """
    labels = {
        collector._name: collector._labelnames
        for collector in registry._collector_to_names
        if hasattr(collector, "_labelnames")
    }
    for family in registry.collect():
        if not family.name.startswith("quartet_"):
            continue
        name = f"{family.name}_total" if family.type == "counter" else family.name
        names = labels.get(family.name) or getattr(family, "_labelnames", ())
        yield name, family.type, ", ".join(f"`{label}`" for label in names), family.documentation


def metric_table() -> str:
    """Return the table of every metric, in the order of the scrape."""
    lines = ["| metric | type | labels | |", "|---|---|---|---|"]
    for name, kind, labels, text in metric_rows(Metrics().registry):
        lines.append(f"| `{name}` | {kind} | {labels} | {text} |")
    return "\n".join([*lines, ""])


TABLES = {"errors": error_table, "metrics": metric_table}


def main() -> None:
    for name, table in TABLES.items():
        page = REFERENCE / f"{name}.md"
        text = page.read_text(encoding="utf-8")
        text = block(name).sub(lambda match, table=table: match[1] + table() + match[2], text)
        page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

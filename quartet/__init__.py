"""The command `quartet`: from a model's name or a file of labeled texts to an endpoint.

No package imports this one. `quartet.command` has the table of commands. `quartet.EmbeddedService` is the service for
another program; it is imported at its first use, because the command must start fast.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from service.embedded import EmbeddedService

__all__ = ["EmbeddedService"]


def __getattr__(name: str) -> Any:
    if name != "EmbeddedService":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from service.embedded import EmbeddedService

    return EmbeddedService

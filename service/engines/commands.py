"""The commands that change which models are served, one type each.

An administrator's request and the directory watcher make them; the model manager executes them, in this process or in
the inference process.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, get_args


@dataclass(frozen=True, slots=True)
class ListModels:
    """List every model that is served, loading or draining."""

    name: ClassVar[str] = "list"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadModel:
    """Load the bundle in a directory."""

    name: ClassVar[str] = "load"

    path: str  # the bundle's directory in `models_dir`, by its name or its path, or its address
    by: str  # the API key's name, for the log
    # Make it the current version of its name; otherwise only `name@version` selects it.
    promote: bool = True
    keep_old: bool = True  # keep the version that it replaces as `previous`
    # Promote it even if its vectors cannot be compared with the current version's.
    allow_new_embedding_space: bool = False
    # Share of the current version's requests that it gets copies of, from 0 to 1; above 0 it is not promoted.
    shadow: float = 0.0
    # Further names of requests for its name, in place of those that it has; None keeps them.
    aliases: Sequence[str] | None = None
    on_demand: bool = False  # list it; its first request opens it, within `memory_budget`


@dataclass(frozen=True, slots=True, kw_only=True)
class PromoteModel:
    """Make a loaded version the current one of its name."""

    name: ClassVar[str] = "promote"

    model: str  # `name@version`
    by: str
    keep_old: bool = True
    allow_new_embedding_space: bool = False
    # The share of compared answers, from 0 to 1, that may have changed or failed; None compares nothing.
    max_changed: float | None = None
    min_compared: int = 100  # answers that must have been compared where `max_changed` is set
    aliases: Sequence[str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RollBackModel:
    """Make the previous version of a model the current one."""

    name: ClassVar[str] = "roll_back"

    model: str
    by: str


@dataclass(frozen=True, slots=True, kw_only=True)
class UnloadModel:
    """Unload a version, `name@version`."""

    name: ClassVar[str] = "unload"

    model: str
    by: str


Command = ListModels | LoadModel | PromoteModel | RollBackModel | UnloadModel
COMMANDS: dict[str, type[Command]] = {command.name: command for command in get_args(Command)}

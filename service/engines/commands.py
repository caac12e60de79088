"""The commands that change which models are served, one type each.

An administrator's request and the directory watcher make them; the model manager executes them, in this process or in
the inference process.
"""

from dataclasses import dataclass
from typing import ClassVar, get_args


@dataclass(frozen=True, slots=True)
class ListModels:
    """List every model that is served, loading or draining."""

    name: ClassVar[str] = "list"


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadModel:
    """Load the bundle in a directory.

    path: the bundle's directory in `models_dir`, by its name or its path
    promote: make it the current version of its name; otherwise only `name@version` selects it
    keep_old: keep the version that it replaces as `previous`
    allow_new_embedding_space: promote it even if its vectors cannot be compared with the current version's
    shadow: share of the current version's requests that it gets copies of, from 0 to 1; above 0 it is not promoted
    by: the API key's name, for the log
    """

    name: ClassVar[str] = "load"

    path: str
    by: str
    promote: bool = True
    keep_old: bool = True
    allow_new_embedding_space: bool = False
    shadow: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PromoteModel:
    """Make a loaded version the current one of its name.

    model: `name@version`
    max_changed: the share of compared answers, from 0 to 1, that may have changed or failed; None compares nothing
    min_compared: answers that must have been compared where `max_changed` is set
    """

    name: ClassVar[str] = "promote"

    model: str
    by: str
    keep_old: bool = True
    allow_new_embedding_space: bool = False
    max_changed: float | None = None
    min_compared: int = 100


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

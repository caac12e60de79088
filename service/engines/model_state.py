"""The served bundles with the requests that each of them gets, as an immutable value, and functions that change it."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from service.core.bundle import BundleTexts
from service.engines.device import RunsOn

ServingState = Literal["current", "previous", "pinned"]
ModelState = Literal[ServingState, "cold", "set_aside", "loading", "draining"]


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """The record of a served bundle, from which another process can serve it again in the same state."""

    id: str  # `name@version`
    path: str
    sha256: str  # of its manifest
    # *current* gets the requests for its name; *previous* is the version that was current before it; requests for
    # `name@version` reach these two and any *pinned* version.
    state: ServingState
    since: float  # when it got its state, in seconds of `time.time`
    # The share of the current version's requests of which it gets copies.
    shadow: float = field(default=0.0, kw_only=True)
    # Further names of requests for `name`, which all versions of a name share.
    aliases: tuple[str, ...] = field(default=(), kw_only=True)
    encoder: str = field(default="", kw_only=True)  # the id of a head bundle's encoder
    # Bytes of `memory_budget` that it takes while it is open; 0 for a model that is always open.
    reserved: int = field(default=0, kw_only=True)

    @property
    def name(self) -> str:
        return self.id.partition("@")[0]


@dataclass(frozen=True, slots=True)
class ServedModel(ModelRecord):
    """A bundle that is served.

    cold: whether its sessions are not open, so that its first request opens it
    problem: why it is set aside; empty if it is not
    """

    runs_on: RunsOn
    cold: bool = field(default=False, kw_only=True)
    problem: str = field(default="", kw_only=True)

    @property
    def shown_state(self) -> ModelState:
        """The state in listings, in which a model that is not open has no version's state."""
        return "set_aside" if self.problem else "cold" if self.cold else self.state


Models = tuple[ServedModel, ...]  # the first current one is the default


class Subscriber(Protocol):
    """A sender of requests that follows changes of the served models, in this process or in another."""

    async def adopt(self, models: Models, texts: Mapping[str, BundleTexts]) -> None:
        """Send new requests to these models. Raises ValueError, and then continues with the previous models.

        texts: the texts of each bundle by id, at least of bundles that were not in the previous call
        """

    async def left(self, model_id: str) -> None:
        """Wait until no request uses a bundle that the last `adopt` has removed."""


def current(models: Models, name: str) -> ServedModel | None:
    """Return the current version of a name; None if there is none."""
    return next((m for m in models if m.name == name and m.state == "current"), None)


def previous(models: Models, name: str) -> ServedModel | None:
    """Return the version that a rollback of a name would make current; None if there is none."""
    return next((m for m in models if m.name == name and m.state == "previous"), None)


def settled(models: Sequence[ServedModel], now: float) -> Models:
    """Return the models with a current version for every name; the previous version, or else the first, fills a gap."""
    found = tuple(models)
    for name in dict.fromkeys(model.name for model in models):
        if current(found, name) is None:
            heir = previous(found, name) or next(m for m in found if m.name == name)
            found = tuple(_turned(m, "current", now) if m is heir else m for m in found)
    return found


def introduce_model(
    models: Models,
    new: ServedModel,
    now: float,
    *,
    keep_old: bool = True,
    resident: Collection[str] = (),
) -> Models:
    """Return the models with a new current version of its name; with `keep_old` the replaced one is `previous`.

    The former `previous` one is removed, or stays `pinned` if its hash is in `resident`.
    """
    old, former = current(models, new.name), previous(models, new.name)
    new = _turned(new, "current", now)
    if old is None:
        return (*models, new)
    rest = [m for m in models if m.id != new.id and (m is not former or m.sha256 in resident)]
    rest = [_turned(m, "pinned", now) if m is former else m for m in rest]
    place = rest.index(old)
    rest[place : place + 1] = [new, _turned(old, "previous", now)] if keep_old else [new]
    return tuple(rest)


def add_model(models: Models, new: ServedModel, now: float) -> Models:
    """Return the models with a pinned version, the only one of its name with `shadow` if that is above 0."""
    alone = new.shadow > 0
    rest = [replace(m, shadow=0.0) if alone and m.name == new.name else m for m in models]
    if any(model.id == new.id for model in rest):
        return tuple(new if model.id == new.id else model for model in rest)
    return settled((*rest, new), now)


def remove_model(models: Models, model_id: str, now: float) -> Models:
    """Return the models without a bundle; if it was current, another version of its name takes its place."""
    gone = next(model for model in models if model.id == model_id)
    rest = settled([model for model in models if model is not gone], now)
    heir = current(rest, gone.name)
    if gone.state != "current" or heir is None:
        return rest
    others = [model for model in models if model.id != heir.id]
    return tuple(heir if model is gone else model for model in others)


def assign_aliases(models: Models, name: str, aliases: Sequence[str]) -> Models:
    """Return the models with these aliases of a name, which every other name loses."""
    given = tuple(aliases)
    return tuple(
        replace(
            m, aliases=given if m.name == name else tuple(a for a in m.aliases if a not in given)
        )
        for m in models
    )


def _turned(model: ServedModel, state: ServingState, now: float) -> ServedModel:
    return model if model.state == state else replace(model, state=state, since=now, shadow=0.0)

"""Which bundles are served, and whose requests each of them gets: a value, and the ways in which it changes."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Protocol

from service.core.bundle import BundleTexts
from service.engines.device import RunsOn

ServingState = Literal["current", "previous", "pinned"]


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """What has to be known of a bundle to serve it again as it was.

    id: `name@version`; sha256: of its manifest; since: when it got its state, in seconds of `time.time`. State:
    *current* answers for its name, *previous* did so before it, and it and *pinned* ones answer who names them in full;
    shadow: the share of the current one's requests that it gets copies of
    """

    id: str
    path: str
    sha256: str
    state: ServingState
    since: float
    shadow: float = field(default=0.0, kw_only=True)

    @property
    def name(self) -> str:
        return self.id.partition("@")[0]


@dataclass(frozen=True, slots=True)
class ServedModel(ModelRecord):
    """A bundle that is served."""

    runs_on: RunsOn


Models = tuple[
    ServedModel, ...
]  # the first is the default, or would be if its name's current one were not there


class Subscriber(Protocol):
    """Whoever sends requests where the catalogue says, in this process or in others."""

    async def adopt(self, models: Models, texts: Mapping[str, BundleTexts]) -> None:
        """Send new requests there from now on. Raises ValueError, and sends them where they went before.

        texts: by id, at least of bundles that were not in the last one
        """

    async def left(self, model_id: str) -> None:
        """Wait until no request is with a bundle any more that was in the last one and is in this one no longer."""


def current(models: Models, name: str) -> ServedModel | None:
    """Who answers for a name."""
    return next((m for m in models if m.name == name and m.state == "current"), None)


def previous(models: Models, name: str) -> ServedModel | None:
    """Who would answer for it after a step back."""
    return next((m for m in models if m.name == name and m.state == "previous"), None)


def settled(models: Sequence[ServedModel], now: float) -> Models:
    """Let somebody answer for every name: where nobody does the previous one, else the first."""
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
    """Let a bundle answer for its name from now on; who did stays as the previous one, if it is to be kept.

    Whoever was the previous one goes, unless it is the new one itself, or one of the resident, by their hashes: these
    stay, pinned.
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
    """Let a bundle answer who names it in full, and for its name if nobody does; one of a name gets copies."""
    alone = new.shadow > 0
    rest = [replace(m, shadow=0.0) if alone and m.name == new.name else m for m in models]
    if any(model.id == new.id for model in rest):
        return tuple(new if model.id == new.id else model for model in rest)
    return settled((*rest, new), now)


def remove_model(models: Models, model_id: str, now: float) -> Models:
    """Serve a bundle no longer; if it answered for its name, another does now, in its place."""
    gone = next(model for model in models if model.id == model_id)
    rest = settled([model for model in models if model is not gone], now)
    heir = current(rest, gone.name)
    if gone.state != "current" or heir is None:
        return rest
    others = [model for model in models if model.id != heir.id]
    return tuple(heir if model is gone else model for model in others)


def _turned(model: ServedModel, state: ServingState, now: float) -> ServedModel:
    return model if model.state == state else replace(model, state=state, since=now, shadow=0.0)

"""The messages between HTTP processes and the inference process, one class for each kind.

Both ends run the same version on the same machine, so no message has a version number.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, get_args

from service.core.bundle import BundleTexts, Manifest
from service.engines.commands import COMMANDS, Command
from service.engines.device import RunsOn
from service.engines.model_state import Models, ServedModel
from service.scheduling.load import Backlog, Flow, Load

# -- from an HTTP process to the inference process --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Submit:
    """Compute the entries of one request; arrays: all `input_ids`, then all `token_type_ids`, int64.

    hidden: the last tokens of each entry that no token attends to; empty for none
    each: send each entry's outcome as soon as it is computed, instead of all together

    `Entry` defines the other fields.
    """

    id: int
    bundle: str
    heads: list[str]
    lengths: list[int]
    hidden: list[int]
    request_id: str
    arrival: float
    deadline: float
    priority: int
    tenant: str
    each: bool
    unbatched: bool


@dataclass(frozen=True, slots=True)
class Cancel:
    """Cancel a request, since its client has left or its deadline has passed."""

    id: int


@dataclass(frozen=True, slots=True)
class Observed:
    """Metric calls in an HTTP process, in their order: each call's method name and arguments.

    lost_lines: log lines that the process has lost since its previous message
    """

    calls: list[tuple[str, Sequence[Any]]]
    lost_lines: int = 0


@dataclass(frozen=True, slots=True)
class Render:
    """Send the metrics page; routes: for each route, whether its requests use a model."""

    id: int
    routes: Mapping[str, bool]


@dataclass(frozen=True, slots=True)
class Execute:
    """Execute a command of `service.engines.commands`: its name and its fields."""

    id: int
    name: str
    fields: dict[str, Any]

    @classmethod
    def of(cls, number: int, command: Command) -> "Execute":
        return cls(number, command.name, asdict(command))

    @property
    def command(self) -> Command:
        return COMMANDS[self.name](**self.fields)


@dataclass(frozen=True, slots=True)
class Adopted:
    """New requests follow this model table. If there is a problem, they still follow the previous one."""

    number: int
    problem: str | None


@dataclass(frozen=True, slots=True)
class Released:
    """No request uses a bundle any more that an earlier model table contained and the current one does not."""

    model: str


# -- from the inference process to an HTTP process --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Catalogue:
    """The model table: the served models from now on, and the texts of the new ones.

    models: in the format of `service.engines.model_state`
    texts: id, sha256, manifest and tokenizer size in bytes of each bundle
    arrays: the tokenizers, one after the other
    """

    number: int
    models: list[Any]
    texts: list[tuple[str, str, Any, int]]

    @classmethod
    def of(
        cls, number: int, models: Models, texts: Sequence[BundleTexts]
    ) -> tuple["Catalogue", bytes]:
        """Return the message and its arrays."""
        told = [
            (own.manifest.id, own.sha256, own.manifest.model_dump(mode="json"), len(own.tokenizer))
            for own in texts
        ]
        return cls(number, [*models], told), b"".join(own.tokenizer for own in texts)

    @property
    def served(self) -> Models:
        return tuple(
            ServedModel(**{**model, "runs_on": RunsOn(**model["runs_on"])}) for model in self.models
        )

    def read(self, arrays: bytes) -> dict[str, BundleTexts]:
        """Return the texts by bundle id."""
        found: dict[str, BundleTexts] = {}
        start = 0
        for name, sha256, manifest, size in self.texts:
            tokenizer = arrays[start : start + size]
            found[name] = BundleTexts(Manifest.model_validate(manifest), sha256, tokenizer)
            start += size
        return found


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The device's load, sent regularly. It includes the requests up to `seen`.

    waiting: each flow, with the bits, number and tokens of its requests
    """

    seen: int
    rates: dict[str, float]
    waiting: list[tuple[tuple[str, int, str], list[tuple[int, int, int]]]]
    problem: str
    max_queue_tokens: int

    @classmethod
    def of(cls, load: Load, seen: int) -> "LoadReport":
        waiting = [
            (
                (flow.bundle, flow.priority, flow.tenant),
                [(bits, n, backlog.sizes[bits]) for bits, n in backlog.requests.items() if n],
            )
            for flow, backlog in load.waiting.items()
        ]
        return cls(seen, dict(load.rates), waiting, load.problem, load.max_queue_tokens)

    @property
    def load(self) -> Load:
        waiting = {
            Flow(*flow): Backlog(
                Counter({bits: requests for bits, requests, _ in sizes}),
                Counter({bits: tokens for bits, _, tokens in sizes}),
            )
            for flow, sizes in self.waiting
        }
        return Load(self.rates, waiting, self.problem, self.max_queue_tokens)


@dataclass(frozen=True, slots=True)
class Computed:
    """Outcomes of a request's entries, by their places in it; arrays: their outputs, float32, one after the other.

    shapes: for each entry, the shapes of its heads' outputs, in the order of the request's heads
    facts: queue_s, inference_s, batch_size, batch_tokens, padding_ratio of each entry
    failed: place, code and message of each entry that failed
    """

    id: int
    places: list[int]
    shapes: list[list[list[int]]]
    facts: list[tuple[float, float, int, int, float]]
    failed: list[tuple[int, str, str]]


@dataclass(frozen=True, slots=True)
class Failed:
    """The whole request failed with an error of `service.errors`."""

    id: int
    code: str
    message: str
    param: str | None
    retry_after_s: float | None


@dataclass(frozen=True, slots=True)
class Page:
    """The metrics page; arrays: its bytes."""

    id: int


@dataclass(frozen=True, slots=True)
class Executed:
    """The result of a command."""

    id: int
    answer: dict[str, Any]


Message = (
    Submit
    | Cancel
    | Observed
    | Render
    | Execute
    | Adopted
    | Released
    | Catalogue
    | LoadReport
    | Computed
    | Failed
    | Page
    | Executed
)
KINDS: dict[str, type[Message]] = {kind.__name__: kind for kind in get_args(Message)}

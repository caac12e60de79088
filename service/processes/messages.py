"""The messages between HTTP processes and the inference process, one class for each kind.

Both ends run the same version on the same machine, so no message has a version number. `service.processes.peer` numbers
the requests, and sends a request's reply with the same number.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, get_args

from service import errors
from service.core.bundle import BundleTexts
from service.core.manifest import Manifest
from service.engines.commands import COMMANDS, Command
from service.engines.device import RunsOn
from service.engines.model_state import Models, ServedModel
from service.scheduling.load import Backlog, Flow, Load

# -- from an HTTP process to the inference process --------------------------------------------------------------------


@dataclass(slots=True)
class Submit:
    """Compute the entries of one request; arrays: all `input_ids`, then all `token_type_ids`, int64.

    lengths: the tokens of each entry, as a list for an entry of several sequences
    hidden: the last tokens of each entry that no token attends to; empty for none
    each: send each entry's outcome as a part of the reply as soon as it is computed; otherwise large outcomes only

    `Entry` defines the other fields. The reply is `Computed`.
    """

    bundle: str
    heads: list[str]
    lengths: list[int | Sequence[int]]
    hidden: list[int]
    request_id: str
    arrival: float
    deadline: float
    priority: int
    tenant: str
    each: bool
    unbatched: bool


@dataclass(frozen=True, slots=True)
class Observed:
    """Metric calls in an HTTP process, in their order: each call's method name and arguments."""

    calls: list[tuple[str, Sequence[Any]]]
    lost_lines: int = 0  # log lines that the process has lost since its previous message

    def repeat(self, metrics: object) -> None:
        """Make the calls here."""
        for method, arguments in self.calls:
            getattr(metrics, method)(*arguments)


@dataclass(frozen=True, slots=True)
class Lost:
    """The models whose requests were unanswered when the previous inference process was lost."""

    models: list[str]


@dataclass(frozen=True, slots=True)
class Render:
    """Send the metrics page."""


@dataclass(frozen=True, slots=True)
class Watch:
    """Send each frame of the live view as a part of the reply, until cancelled. The parts are `Page`."""


@dataclass(frozen=True, slots=True)
class Execute:
    """Execute a command of `service.engines.commands`: its name and its fields."""

    name: str
    fields: dict[str, Any]

    @classmethod
    def of(cls, command: Command) -> "Execute":
        return cls(command.name, asdict(command))

    @property
    def command(self) -> Command:
        return COMMANDS[self.name](**self.fields)


# -- from the inference process to an HTTP process --------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModelTable:
    """Send new requests to these models. The reply, `Done`, follows when they do, or `Failed` if they cannot.

    models: in the format of `service.engines.model_state`
    texts: id, sha256 and manifest of each bundle that the process does not have
    tokenizers: hash and size in bytes of each of their tokenizers, which several bundles may share
    arrays: the tokenizers, one after the other
    """

    models: list[Any]
    texts: list[tuple[str, str, Any]]
    tokenizers: list[tuple[str, int]]

    @classmethod
    def of(cls, models: Models, texts: Sequence[BundleTexts]) -> tuple["ModelTable", bytes]:
        """Return the message and its arrays."""
        fields = [
            (own.manifest.id, own.sha256, own.manifest.model_dump(mode="json")) for own in texts
        ]
        # The tokenizers of head bundles are empty.
        tokenizers = {
            own.manifest.vocabulary.sha256: own.tokenizer for own in texts if own.tokenizer
        }
        sizes = [(sha256, len(content)) for sha256, content in tokenizers.items()]
        return cls([*models], fields, sizes), b"".join(tokenizers.values())

    @property
    def served(self) -> Models:
        return tuple(
            ServedModel(
                **{
                    **model,
                    "runs_on": RunsOn(**model["runs_on"]),
                    "aliases": tuple(model["aliases"]),
                }
            )
            for model in self.models
        )

    def read(self, arrays: bytes) -> dict[str, BundleTexts]:
        """Return the texts by bundle id."""
        tokenizers, start = {}, 0
        for sha256, size in self.tokenizers:
            tokenizers[sha256] = arrays[start : start + size]
            start += size
        found: dict[str, BundleTexts] = {}
        for name, sha256, fields in self.texts:
            manifest = Manifest.model_validate(fields)
            tokenizer = b"" if manifest.encoder else tokenizers[manifest.vocabulary.sha256]
            found[name] = BundleTexts(manifest, sha256, tokenizer)
        return found


@dataclass(frozen=True, slots=True)
class Leave:
    """Reply with `Done` when no request uses a bundle any more that the last model table does not contain."""

    model: str


@dataclass(frozen=True, slots=True)
class LoadReport:
    """The device's load, sent regularly as a heartbeat. It includes the requests up to number `seen`."""

    seen: int
    rates: dict[str, float]
    # Each flow, with the bits, number and tokens of its requests.
    waiting: list[tuple[tuple[str, int, str], list[tuple[int, int, int]]]]
    problem: str
    limits: tuple[int, int, int, int]  # max_queue_tokens, slots, entry_size, batch_tokens

    @classmethod
    def of(cls, load: Load, seen: int) -> "LoadReport":
        waiting = [
            (
                (flow.bundle, flow.priority, flow.tenant),
                [(bits, n, backlog.sizes[bits]) for bits, n in backlog.requests.items() if n],
            )
            for flow, backlog in load.waiting.items()
        ]
        limits = load.max_queue_tokens, load.slots, load.entry_size, load.batch_tokens
        return cls(seen, dict(load.rates), waiting, load.problem, limits)

    @property
    def load(self) -> Load:
        waiting = {
            Flow(*flow): Backlog(
                Counter({bits: requests for bits, requests, _ in sizes}),
                Counter({bits: tokens for bits, _, tokens in sizes}),
            )
            for flow, sizes in self.waiting
        }
        return Load(self.rates, waiting, self.problem, *self.limits)


@dataclass(slots=True)
class Computed:
    """Outcomes of entries, by their places in `Submit`; arrays: their outputs, float32, one after the other."""

    places: list[int]
    # For each entry, the shapes of its heads' outputs, in the order of the request's heads.
    shapes: list[list[list[int]]]
    # queue_s, inference_s, batch_size, batch_tokens, padding_ratio of each entry.
    facts: list[tuple[float, float, int, int, float]]
    # Place, row, code and message of each entry that failed, or of a sequence of several; the row of an entry is -1.
    failed: list[tuple[int, int, str, str]]


@dataclass(frozen=True, slots=True)
class Page:
    """The metrics page, or a frame of the live view; arrays: its bytes."""


@dataclass(frozen=True, slots=True)
class Executed:
    """The result of a command."""

    answer: dict[str, Any]


# -- from the first inference process to the others -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hold:
    """Keep exactly these bundles open: the id, path and SHA-256 of each. The reply is `Done` or `Failed`."""

    bundles: list[tuple[str, str, str]]


@dataclass(frozen=True, slots=True)
class Follow:
    """Send metrics as parts of the reply, until cancelled. The parts are `Observed`."""


# -- in both directions -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Cancel:
    """Cancel a request, since its client has left or its deadline has passed."""

    number: int


@dataclass(frozen=True, slots=True)
class Done:
    """The request is completed."""


@dataclass(frozen=True, slots=True)
class Failed:
    """The request failed with an error of `service.errors`."""

    code: str
    message: str
    param: str | None
    retry_after_s: float | None

    @classmethod
    def of(cls, error: errors.QuartetError) -> "Failed":
        retry_after_s = error.retry_after_s if isinstance(error, errors.RetryableError) else None
        return cls(error.code, error.message, error.param, retry_after_s)

    @property
    def error(self) -> errors.QuartetError:
        return errors.revive(
            self.code, self.message, param=self.param, retry_after_s=self.retry_after_s
        )


Message = (
    Submit
    | Observed
    | Lost
    | Render
    | Watch
    | Execute
    | ModelTable
    | Leave
    | LoadReport
    | Computed
    | Page
    | Executed
    | Hold
    | Follow
    | Cancel
    | Done
    | Failed
)
KINDS: dict[str, type[Message]] = {kind.__name__: kind for kind in get_args(Message)}

"""Every setting, once: its environment variable, its flag, its default and when to change it.

A field `max_wait_ms` is read from `--max-wait-ms`, from `QUARTET_MAX_WAIT_MS` and, by `service.settings_sources`, from
a file; the first that is there wins. Settings are a frozen value, read at the edge and handed on as plain arguments;
the leaf modules never see it.
"""

import difflib
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from ipaddress import ip_network
from pathlib import Path
from typing import Annotated, Literal

import orjson
from pydantic import ByteSize, Field, SecretStr, ValidationInfo, field_validator
from pydantic_settings import (
    BaseSettings,
    EnvSettingsSource,
    NoDecode,
    PydanticBaseSettingsSource,
    SettingsConfigDict,
)

from service.core.addresses import address
from service.core.device_kind import DeviceKind, Slots
from service.core.device_places import check_devices
from service.core.device_table import KINDS, check_name, expected_kind
from service.keys import PLAIN, Keys
from service.variables import PREFIX, is_ours, variable

# As browsers write it; programs made of pages have schemes of their own, such as app: and chrome-extension:.
ORIGIN = r"[a-z][a-z0-9+.-]*://([a-z0-9.-]+|\[[0-9a-f:.]+\])(:\d+)?"
# The names that Kubernetes makes of a Service's, and Docker of a link's: https://kubernetes.io/docs/concepts/services-networking/service/#environment-variables
LINK = re.compile(
    r"_SERVICE_(HOST|PORT(_[A-Z0-9_]+)?)$|_PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?$"
)
HOST_NAME = r"\*|(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*"  # in lower case; the port does not matter
LINK_ADDRESS = re.compile(r"(tcp|udp|sctp)://")
# Bytes of memory below which HTTP and inference share one process.
LEAST_FOR_PROCESSES = 448 * 2**20
MOST_UDS_BYTES = 107  # which the kernel keeps with a terminator in 108

RootDialect = Literal["native", "hf", "infinity", "openai", "tei"]
UnknownModelRule = Literal["refuse", "default"]


class Variables(EnvSettingsSource):
    """The environment variables that are settings: not empty, and not set by Kubernetes for a Service."""

    def _load_env_vars(self) -> Mapping[str, str | None]:
        variables = super()._load_env_vars().items()
        given = {name: value for name, value in variables if value and not is_link(name, value)}
        return {name: without_marks(value) for name, value in given.items()}


class Settings(BaseSettings):
    """How this process serves; descriptions are the help text of the command line."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="forbid")

    config: Path | None = Field(
        None, description="file of settings with these names; unset, quartet.toml if it exists"
    )
    bundles: Annotated[tuple[Path, ...], NoDecode] = Field(
        (),
        description="bundle directories or addresses; the first is the default model"
        f" (the variable separates them with {os.pathsep!r})",
    )
    models_dir: Path | None = Field(
        None,
        description="directory or address of bundles that can be loaded while the service runs; unset, none can",
    )
    model_sources: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        description="addresses such as s3://bucket/models/ below which administrators may load bundles; unset, only"
        " models_dir (the variable separates them with ',')",
    )
    memory_budget: ByteSize | None = Field(
        None,
        description="memory for the sessions of models_dir's bundles, such as 2GiB: all are listed, a model is opened"
        " at its first request, and the least recently used is closed; unset, loaded models stay open",
    )
    watch_s: float | None = Field(
        None,
        gt=0,
        description="seconds between scans of models_dir, to serve all its"
        " bundles; unset, only administrators load them",
    )
    aliases: Annotated[Mapping[str, str], NoDecode] = Field(
        {},
        description="further names of models in requests: alias=name, separated by commas; a file has a table",
    )
    unknown_model: UnknownModelRule | None = Field(
        None,
        description="what happens to requests for a model that is not served: refuse, or default for the first model;"
        " unset, default for the API of TEI, refuse for others",
    )
    host: str = Field(
        "127.0.0.1", description="address to listen on; 0.0.0.0 for clients on other machines"
    )
    port: int = Field(8000, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    uds: Path | None = Field(
        None,
        description="path of a Unix socket to listen on instead of host and port, for a proxy on the same machine",
    )
    uds_mode: str = Field(
        "660",
        pattern=r"^0?[0-7]{3}$",
        description="permissions of the Unix socket's file, in octal digits; a proxy must be able to write to it",
    )
    root_dialect: RootDialect = Field(
        "native",
        description="API whose paths have no prefix; the native API is always below /native, too",
    )
    tiktoken_file: Path | None = Field(
        None,
        description="OpenAI's token file, cl100k_base.tiktoken, to decode token"
        " ids in requests of /v1/embeddings; unset, they are the"
        " model's token ids",
    )
    metrics_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="separate port for metrics and health checks, without keys; unset, they use the main port",
    )
    grpc_port: int | None = Field(
        None,
        ge=0,
        le=65535,
        description="port of the Open Inference Protocol over gRPC; unset, not served; it needs the extra grpc",
    )
    http_workers: int | None = Field(
        None,
        ge=0,
        description="HTTP processes, in addition to the inference process; unset, 1, or on a GPU half of the cores up"
        " to 4, or 0 below a memory limit of 448 MiB; 0 runs HTTP and inference in one process",
    )
    precision: Literal["auto", "fp32", "bf16", "int8", "fp16"] = Field(
        "auto",
        description="graph to run; auto takes the bundle's default, fp32 is slowest and most exact; bf16 needs provider"
        " openvino and a processor with bf16",
    )
    provider: str = Field(
        "auto",
        description=f"device; {' or '.join(sorted(kind.name for kind in KINDS))} ends the start if the device is not"
        " usable",
    )
    devices: str = Field(
        "auto",
        description="devices, each with an inference process of its own: cpu*2 for two groups of cores, cuda:0,cuda:1"
        " for two GPUs; auto takes all visible GPUs, or the CPU as one device",
    )
    replicas: int | None = Field(
        None,
        ge=1,
        description="batches that run at once and share the threads; unset, one"
        " per thread, or one on all threads if few texts wait; on a"
        " GPU, 2",
    )
    threads: int | None = Field(
        None,
        ge=1,
        description="threads for all batches; unset, one per usable core; unused on a GPU",
    )
    spin: bool = Field(
        False,
        description="let session threads spin between batches; slightly faster if no other process needs the cores",
    )
    arena: bool = Field(
        False,
        description="let ONNX Runtime, not the C library, keep memory between"
        " batches; faster on some machines",
    )
    max_batch_tokens: int | None = Field(
        None,
        ge=1,
        description="tokens in one batch; unset, 768 or fewer by the memory limit, or on a GPU 16384; lower it for"
        " latency, raise it for a large GPU",
    )
    max_batch_size: int | None = Field(
        None, ge=1, description="sequences in one batch; unset, 64, or on a GPU 256"
    )
    max_batch_attention: int | None = Field(
        None,
        ge=1,
        description="sequences times the squared length of the longest, in one batch on a GPU, for graphs whose"
        " attention may store that many scores; unset, from the GPU's memory; lower it if memory runs out",
    )
    cache_mb: int = Field(
        0,
        ge=0,
        description="MiB in each HTTP process for results that are returned again for equal texts; 0 remembers none",
    )
    cache_shared: bool = Field(
        False,
        description="let tenants share remembered results; a fast response then tells that another one sent the text",
    )
    max_batch_ms: float = Field(
        100.0,
        gt=0,
        description="expected time of a batch of several texts; lower it if short texts wait for long ones, raise it"
        " for throughput on a slow machine",
    )
    fixed_batches: bool = Field(
        False,
        description="compute the texts of a request in batches that depend on this request alone, so that equal"
        " requests get equal bytes; slower for small requests",
    )
    max_wait_ms: float = Field(
        0.0,
        ge=0,
        description="time that a request waits for others while the device is idle; raise it for many small requests",
    )
    max_queue_tokens: int | None = Field(
        None,
        ge=1,
        description="limit of waiting tokens, above which requests get 429; unset, 262144, or on a GPU the tokens of"
        " 3 s if these are more; lower it to refuse earlier",
    )
    max_inputs_per_request: int = Field(
        1024, ge=1, description="texts in one request; raise for bulk clients"
    )
    max_characters_per_input: int = Field(
        250_000,
        ge=1,
        description="characters of one text; raise it for longer texts, which take up to 600 bytes of memory a"
        " character",
    )
    max_body_bytes: int = Field(
        10 * 1024 * 1024, ge=1, description="size of a request body; raise for long texts in bulk"
    )
    max_response_bytes: int = Field(
        64 * 1024 * 1024,
        ge=1,
        description="size that the results of a request may have in JSON; raise it for bulk clients of large results",
    )
    gzip_min_bytes: int = Field(
        16_384,
        ge=0,
        description="bytes of a response from which it is compressed for clients that accept gzip; 0 compresses none;"
        " lower it for slow networks",
    )
    max_connections: int = Field(
        1000, ge=1, description="open connections of all HTTP processes; raise it for many clients"
    )
    keep_alive_s: float = Field(
        75.0,
        gt=0,
        description="seconds after which idle connections are closed; set it longer than a proxy keeps its idle"
        " connections to the service",
    )
    header_timeout_s: float = Field(
        20.0,
        gt=0,
        description="seconds within which headers must arrive; raise it for slow networks",
    )
    body_timeout_s: float = Field(
        30.0,
        gt=0,
        description="seconds within which a body must arrive; raise it for slow networks",
    )
    deadline_ms: int = Field(
        30_000,
        ge=1,
        description="milliseconds after which a request gets 504; X-Request-Timeout-Ms may shorten it",
    )
    hang_s: float = Field(
        5.0,
        ge=1,
        description="seconds after which a process without a heartbeat, or a running batch, counts as hanging;"
        " raise it if processes wait seconds for a core",
    )
    load_timeout_s: float = Field(
        120.0,
        gt=0,
        le=86_400,
        description="seconds within which a bundle must be open and tested; raise it for slow disks",
    )
    drain_delay_s: float = Field(
        0.0,
        ge=0,
        description="seconds after SIGTERM in which the service is not ready but still serves; for load balancers"
        " that need time to select other servers",
    )
    drain_s: float = Field(
        30.0,
        ge=0,
        description="seconds for requests to finish after SIGTERM and drain_delay_s; keep it below the platform's"
        " limit",
    )
    api_keys: Path | None = Field(
        None,
        description="file of API keys; with any key, all routes need one, except"
        " health checks and pages",
    )
    api_key: SecretStr | None = Field(
        None, description="one key in plain text, for inference, without rate limits"
    )
    receipt_key: SecretStr | None = Field(
        None,
        description="key that signs receipts of answers (the request header X-Quartet-Receipt)",
    )
    keys: Annotated[Keys, NoDecode] = Field(
        {}, description="keys by name, as in a file of keys (the variable contains JSON)"
    )
    forwarded_allow_ips: str = Field(
        "127.0.0.1",
        description="addresses and networks of proxies, separated by commas, whose X-Forwarded-For or"
        " Forwarded determines the client in the log; unix: for peers on uds, * for all peers",
    )
    cors_origins: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        description="origins whose pages may call the service from a browser; unset, only the service's own"
        " (the variable separates them with ',')",
    )
    allowed_hosts: Annotated[tuple[str, ...], NoDecode] = Field(
        (),
        description="names by which clients may reach the service, in addition to addresses and names without a dot;"
        " *.example.org for all below; unset, any name, but none on a loopback address without keys"
        " (the variable separates them with ',')",
    )
    runtime_telemetry: bool = Field(
        False,
        description="let ONNX Runtime send telemetry to Microsoft; set it only to help its developers",
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="least severe line to print; debug adds health checks and tracebacks"
    )
    log_format: Literal["auto", "console", "json"] = Field(
        "auto", description="auto: console on a terminal, JSON elsewhere"
    )

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,
        dotenv_settings: PydanticBaseSettingsSource,
        file_secret_settings: PydanticBaseSettingsSource,
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        return init_settings, Variables(settings_cls)

    @field_validator("bundles", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        if isinstance(value, str):
            return [*filter(None, re.split(f"{os.pathsep}(?!//)", value))]
        return [value] if isinstance(value, Path) else value

    @field_validator("aliases", mode="before")
    @classmethod
    def _pairs(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        aliases = {}
        for pair in value.split(","):
            alias, _, name = map(str.strip, pair.partition("="))
            if not alias or not name:
                raise ValueError(f"{pair!r} is not an alias and a model's name: write alias=name")
            aliases[alias] = name
        return aliases

    @field_validator("memory_budget", "watch_s")
    @classmethod
    def _somewhere(cls, value: object, info: ValidationInfo) -> object:
        if value is None:
            return None
        if (root := info.data.get("models_dir")) is None:
            raise ValueError("needs models_dir, which is unset")
        if (url := address(root)) and url.startswith("http"):
            raise ValueError(f"{url} has no list of its files: watch hf://, s3:// or gs://")
        return value

    @field_validator("uds")
    @classmethod
    def _short_enough(cls, value: Path | None) -> Path | None:
        if value is not None and len(os.fsencode(value.absolute())) > MOST_UDS_BYTES:
            raise ValueError(f"the path of a Unix socket has at most {MOST_UDS_BYTES} bytes")
        return value

    @field_validator("metrics_port")
    @classmethod
    def _apart(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value and value == info.data.get("port"):
            raise ValueError("must differ from port")
        return value

    @field_validator("grpc_port")
    @classmethod
    def _alone(cls, value: int | None, info: ValidationInfo) -> int | None:
        if value and value in (info.data.get("port"), info.data.get("metrics_port")):
            raise ValueError("must differ from port and metrics_port")
        return value

    @field_validator("api_key", "receipt_key")
    @classmethod
    def _hard_to_guess(cls, value: SecretStr | None) -> SecretStr | None:
        if value is not None and not re.fullmatch(PLAIN, value.get_secret_value()):
            raise ValueError("must be at least 16 visible ASCII characters")
        return value

    @field_validator("keys", mode="before")
    @classmethod
    def _parse(cls, value: object) -> object:
        return orjson.loads(value) if isinstance(value, str) else value

    @field_validator("forwarded_allow_ips")
    @classmethod
    def _are_networks(cls, value: str) -> str:
        for name in filter(None, map(str.strip, value.split(","))):
            if name not in ("*", "unix:"):
                ip_network(name)  # its ValueError names the fault
        return value

    @field_validator("model_sources")
    @classmethod
    def _are_addresses(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for source in value:
            if address(source) is None:
                raise ValueError(f"{source!r} is not an address such as s3://bucket/models/")
        return tuple(f"{source.rstrip('/')}/" for source in value)  # not also a longer name

    @field_validator("model_sources", "cors_origins", "allowed_hosts", mode="before")
    @classmethod
    def _split_names(cls, value: object) -> object:
        return [*map(str.strip, value.split(","))] if isinstance(value, str) else value

    @field_validator("cors_origins")
    @classmethod
    def _are_origins(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for origin in value:
            if not re.fullmatch(ORIGIN, origin):
                raise ValueError(f"{origin!r} is not an origin such as https://example.org")
        return value

    @field_validator("allowed_hosts")
    @classmethod
    def _are_hosts(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            if not re.fullmatch(HOST_NAME, name.lower()):
                raise ValueError(
                    f"{name!r} is not a name such as example.org: leave out scheme and port"
                )
        return value

    @field_validator("provider")
    @classmethod
    def _known(cls, value: str) -> str:
        return check_name(value, "auto")

    @field_validator("devices")
    @classmethod
    def _are_devices(cls, value: str) -> str:
        return check_devices(value)

    @field_validator(
        "precision", "provider", "unknown_model", "log_level", "log_format", mode="before"
    )
    @classmethod
    def _lower(cls, value: object) -> object:
        return value.lower() if isinstance(value, str) else value

    def rule_of_unknown_models(self, of_dialect: UnknownModelRule) -> UnknownModelRule:
        """Return what happens to requests for a model that is not served. of_dialect: what their API has by default"""
        return self.unknown_model or ("default" if self.root_dialect == "tei" else of_dialect)

    def workers(self, cores: int, memory_limit: int | None = None) -> int:
        """Return the number of HTTP processes, by the memory limit and the rule of the device where it is unset."""
        if self.http_workers is not None:
            return self.http_workers
        if memory_limit is not None and memory_limit < LEAST_FOR_PROCESSES:
            return 0
        return expected_kind(self.provider).http_workers(cores)

    def batch_tokens(self, kind: DeviceKind) -> int:
        """Return the most tokens of a batch of several sequences."""
        return self.max_batch_tokens or kind.batch_tokens

    def batch_size(self, kind: DeviceKind) -> int:
        """Return the most sequences of a batch."""
        return self.max_batch_size or kind.batch_size

    def slots(self, kind: DeviceKind, cores: int, bundles: int = 1) -> Slots:
        """Return how batches share the device, by a rule that always gives the same on the same machine."""
        return kind.slots(self.replicas, self.threads or cores, bundles)


def is_link(variable: str, value: str) -> bool:
    """Whether Kubernetes sets this variable for a Service named `quartet` or `quartet-...`, as it does in each pod.

    `QUARTET_PORT` and `QUARTET_METRICS_PORT` are settings unless their value is an address.
    """
    name = variable.upper()
    if not is_ours(name):
        return False
    return bool(LINK.search(name) or (name.endswith("_PORT") and LINK_ADDRESS.match(value)))


def without_marks(value: str) -> str:
    """Return a value without quotation marks around it, which `--env-file` of containers does not remove."""
    is_quoted = len(value) > 1 and value[0] == value[-1] and value[0] in "\"'"
    return value[1:-1] if is_quoted else value


def ignored_variables(environ: Mapping[str, str], closed: bool) -> list[str]:
    """One line for each kind of `QUARTET_` variable whose value is not used as it stands.

    closed: whether the service has API keys
    """
    lines = [
        f"{name}: the quotation marks around its value are left out"
        for name, value in sorted(environ.items())
        if is_ours(name) and value != without_marks(value)
    ]
    if links := sorted(name for name, value in environ.items() if is_link(name, value)):
        lines.append(
            f"ignored, because Kubernetes sets them for a Service named quartet...: {', '.join(links)};"
            " set enableServiceLinks: false in the pod's specification, and settings by flags or a file"
        )
    for name in map(variable, ("api_key", "api_keys", "keys")):
        if environ.get(name) == "":
            open_to = "" if closed else "; no key is set, so every client that connects is served"
            lines.append(f"{name} is empty, which counts as unset{open_to}")
    return lines


def unknown_variables(environ: Mapping[str, str]) -> list[str]:
    """One line for each `QUARTET_` variable that is no setting, with the closest name that is."""
    known = [name.upper() for name in Settings.model_fields]
    names = (
        name.upper().removeprefix(PREFIX)
        for name, value in environ.items()
        if is_ours(name) and not is_link(name, value)
    )
    unknown = sorted(name for name in names if name not in known)
    return [
        f"{PREFIX}{name} is not a setting{did_you_mean(name, known, PREFIX)}" for name in unknown
    ]


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def did_you_mean(name: str, known: Iterable[str], prefix: str = "") -> str:
    """A hint naming the closest known name, or nothing."""
    closest = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {prefix}{closest[0]}?)" if closest else ""


def usable_cores() -> int:
    """Whole cores that this process may keep busy: its affinity or its smaller cgroup quota."""
    quota = cgroup_cores()
    affinity = affinity_cores()
    return affinity if quota is None else max(1, min(affinity, int(quota)))


def affinity_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def cgroup_cores(root: Path = Path("/")) -> float | None:
    """The tightest CPU quota of this process's cgroup and its ancestors, in cores."""
    quotas = [
        quota for directory in cgroup_directories(root, "cpu") for quota in read_quotas(directory)
    ]
    return min(quotas, default=None)


def cgroup_directories(root: Path, controller: str) -> Iterator[Path]:
    """The directories of the process's own cgroup and its ancestors; a container may see only the root."""
    for line in read_text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        base = root / "sys/fs/cgroup" / controllers
        inner = Path(path.lstrip("/"))
        yield from (base / part for part in (inner, *inner.parents))


def read_quotas(directory: Path) -> Iterator[float]:
    """The quota that one directory sets, in cores: `cpu.max` (v2) or `cpu.cfs_quota_us` (v1)."""
    v2 = read_text(directory / "cpu.max").split()
    v1 = [
        *read_text(directory / "cpu.cfs_quota_us").split(),
        *read_text(directory / "cpu.cfs_period_us").split(),
    ]
    for limit in (v2, v1):
        match limit:
            case [quota, period] if quota.isdigit() and period.isdigit() and int(period) > 0:
                yield int(quota) / int(period)


def read_text(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""

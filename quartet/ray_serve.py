"""Quartet on Ray Serve: replicas that have all models, scaled by their expected wait.

RAY_SERVE_ENABLE_HA_PROXY=1 serve run quartet.ray_serve:build bundles=bundles/reviews max_replicas=4
"""

import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, field_validator
from ray import serve
from ray.serve.config import AutoscalingContext
from ray.util.metrics import Gauge

from service.embedded import EmbeddedService

WAIT = "expected_wait_s"
QUIET_S = 20.0  # without a need for the present replicas, before one is taken away
DRAIN_S = 25.0  # for the accepted requests of a replica that stops
METRICS_S = 5.0  # between two exports of the metrics, which Ray collects every 10 s by default


class Options(BaseModel):
    """The arguments of the application."""

    model_config = ConfigDict(extra="forbid")

    bundles: tuple[str, ...] = Field(
        (), description="directories, on every node; the default model without any"
    )
    models_dir: str | None = Field(None, description="directory of the models of `user_config`")
    settings: dict[str, Any] = Field({}, description="further settings of the service")
    cpus: int = Field(1, ge=1, description="cores of a replica, and threads of its batches")
    gpus: float = Field(0, ge=0, description="GPUs of a replica")
    min_replicas: int = Field(1, ge=1)
    max_replicas: int = Field(1, ge=1)
    wait_s: float = Field(
        0.2, gt=0, description="expected wait of a request at which replicas suffice"
    )

    @field_validator("bundles", mode="before")
    @classmethod
    def _split(cls, value: Any) -> Any:
        return value.split(",") if isinstance(value, str) else value


def build(options: Options) -> serve.Application:
    """Return the application, for `serve run` and for the `import_path` of a configuration."""
    scaling = {
        "min_replicas": options.min_replicas,
        "max_replicas": options.max_replicas,
        "look_back_period_s": 11,  # Ray wants more than its interval of 10 s
        "upscale_delay_s": 0,
        "downscale_delay_s": QUIET_S,
        "policy": {"policy_function": ScaleByWait, "policy_kwargs": {"wait_s": options.wait_s}},
    }
    deployment = Quartet.options(  # type: ignore[attr-defined]
        autoscaling_config=scaling,
        ray_actor_options={"num_cpus": options.cpus, "num_gpus": options.gpus},
    )
    return deployment.bind(options.model_dump())


# A replica decides itself what it accepts, by the expected wait, so Ray must not queue before it.
@serve.deployment(
    max_ongoing_requests=10_000, graceful_shutdown_timeout_s=DRAIN_S, health_check_period_s=5
)
@serve.ingress()
class Quartet:
    """A replica: the service with its HTTP application."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        own = Options.model_validate(options)
        settings = {"models_dir": own.models_dir, "drain_s": DRAIN_S, "threads": own.cpus}
        self._service = EmbeddedService(*own.bundles, **{**settings, **own.settings})
        # These stay, although `user_config` does not name them.
        self._kept = {Path(bundle).name for bundle in own.bundles}
        self._gauges: dict[str, Gauge] = {}
        self._exported = -math.inf

    def __serve_build_asgi_app__(self) -> Any:
        return self._service.app

    def check_health(self) -> None:
        """Let Ray replace a replica whose device cannot compute any more."""
        if not self._service.alive:
            raise RuntimeError(self._service.load.problem)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """Return the seconds until the backlog is computed, and pass the metrics on to Ray's exporter."""
        if time.monotonic() >= self._exported + METRICS_S:
            self._exported = time.monotonic()
            self._export_metrics()
        return {WAIT: self._service.load.drain_s}

    def _export_metrics(self) -> None:
        for name, help_text, labels, value in self._service.samples():
            if name not in self._gauges:
                self._gauges[name] = Gauge(name, help_text, tuple(labels))
            self._gauges[name].set(value, labels)

    async def reconfigure(self, user_config: Mapping[str, Any]) -> None:
        """Serve the `models` of `models_dir` by name, promoted in this order, and unload what is not named."""
        wanted = list(user_config.get("models", ()))
        for name in wanted:
            await self._service.load_model(name)
        for model in (await self._service.models())["models"]:
            if Path(model["path"]).name not in self._kept.union(wanted):
                await self._service.unload_model(model["id"])


class ScaleByWait:
    """A policy of Ray Serve: as many replicas as make the mean expected wait `wait_s`, and at most one less at once."""

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s

    def __call__(self, context: AutoscalingContext) -> tuple[int, dict[str, Any]]:
        """Return the number of replicas, which Ray applies after its delays."""
        waits = ((context.aggregated_metrics or {}).get(WAIT) or {}).values()
        present = context.target_num_replicas
        mean = sum(waits) / len(waits) if waits else 0.0
        wanted = max(math.ceil(present * mean / self._wait_s), present - 1)
        least, most = context.capacity_adjusted_min_replicas, context.capacity_adjusted_max_replicas
        return min(max(wanted, least), most), {}

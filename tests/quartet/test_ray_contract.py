"""The deployment of Ray Serve without Ray: a double of what the module takes from it, and the service itself.

`make cluster` tests the same module with Ray.
"""

import importlib
import re
import shlex
import shutil
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import ClassVar

import httpx
import pytest

from tests.versions import restate

ROOT = Path(__file__).parents[2]


class Gauge:
    """The last value of each gauge, by name and labels."""

    values: ClassVar = {}

    def __init__(self, name, description, tag_keys):
        self._name, self._keys = name, tag_keys

    def set(self, value, tags):
        assert {*tags} == {*self._keys}
        self.values[self._name, *sorted(tags.items())] = value


def deployment(**options):
    def decorate(own):
        own.options = lambda **more: SimpleNamespace(
            bind=lambda *arguments: ({**options, **more}, arguments)
        )
        return own

    return decorate


@pytest.fixture
def module(monkeypatch):
    """`quartet.ray_serve`, imported with the double."""
    serve = ModuleType("ray.serve")
    serve.deployment, serve.ingress, serve.Application = deployment, lambda: lambda own: own, object
    doubles = {
        "ray": {"serve": serve},
        "ray.serve": {},
        "ray.serve.config": {"AutoscalingContext": object},
        "ray.util": {},
        "ray.util.metrics": {"Gauge": Gauge},
    }
    for name, members in doubles.items():
        double = serve if name == "ray.serve" else ModuleType(name)
        vars(double).update(members)
        monkeypatch.setitem(sys.modules, name, double)
    monkeypatch.delitem(sys.modules, "quartet.ray_serve", raising=False)
    yield importlib.import_module("quartet.ray_serve")
    del sys.modules["quartet.ray_serve"]


def test_variables():
    """`make cluster` counts lost requests with the variables that the guide sets."""
    guide, makefile = ((ROOT / name).read_text() for name in ("docs/how-to/ray.md", "Makefile"))
    exported = " ".join(re.findall(r"^    export (.+)", guide, re.MULTILINE))
    [own] = re.findall(r"^RAY := ((?:.*\\\n)*.*)", makefile, re.MULTILINE)
    assert shlex.split(exported) == shlex.split(own.replace("\\\n", ""))


def test_arguments(module):
    """The application has the cores and the range of its arguments; an unknown argument is refused."""
    options, (own,) = module.build(module.Options(bundles="a,b", cpus=2, max_replicas=4))
    assert ("a", "b") == own["bundles"]
    assert {"num_cpus": 2, "num_gpus": 0} == options["ray_actor_options"]
    assert (1, 4) == tuple(
        options["autoscaling_config"][f"{end}_replicas"] for end in ("min", "max")
    )
    with pytest.raises(ValueError, match="bundle"):
        module.Options(bundle="a")


def test_scaling(module):
    """The wait decides how many replicas start, at most one stops at once, and Ray's delays are those of the docs."""
    options, _ = module.build(module.Options())
    scaling = options["autoscaling_config"]
    assert (0, 20) == (scaling["upscale_delay_s"], scaling["downscale_delay_s"])
    policy = module.ScaleByWait(wait_s=0.2)

    def wanted(present, *waits):
        context = SimpleNamespace(
            aggregated_metrics={module.WAIT: dict(enumerate(waits))} if waits else None,
            target_num_replicas=present,
            capacity_adjusted_min_replicas=1,
            capacity_adjusted_max_replicas=4,
        )
        return policy(context)[0]

    assert 3 == wanted(1, 0.5)
    assert 4 == wanted(3, 9.0, 9.0, 9.0)
    assert 3 == wanted(3, 0.2, 0.0, 0.3)
    assert 2 == wanted(3, 0.0, 0.0, 0.0)
    assert 1 == wanted(1)


async def test_replica(module, monkeypatch, tmp_path):
    """A replica answers, follows the user config, and reports health, wait and, less often, metrics."""
    for version in ("6", "7"):
        copy = shutil.copytree(ROOT / "bundles" / "quartet-mini", tmp_path / f"mini-{version}")
        restate(copy, version=version)
    options = module.Options(bundles=str(tmp_path / "mini-6"), models_dir=str(tmp_path))
    replica = module.Quartet(options.model_dump())
    app = replica.__serve_build_asgi_app__()
    transport = httpx.ASGITransport(app)
    async with (
        replica._service,
        httpx.AsyncClient(transport=transport, base_url="http://q") as client,
    ):

        async def model():
            answer = await client.post("/classify", json={"inputs": "a text"})
            return answer.json()["model"]

        assert "quartet-mini@6" == await model()
        await replica.reconfigure({"models": ["mini-7"]})
        assert "quartet-mini@7" == await model()
        await replica.reconfigure({})
        assert ["quartet-mini@6"] == [m["id"] for m in (await replica._service.models())["models"]]
        assert "quartet-mini@6" == await model()

        replica.check_health()
        assert {module.WAIT: 0.0} == replica.record_autoscaling_stats()
        assert any(name == "quartet_queue_seconds" for name, *_ in Gauge.values)
        Gauge.values.clear()
        replica.record_autoscaling_stats()
        assert not Gauge.values
        monkeypatch.setattr(module, "METRICS_S", 0.0)
        replica.record_autoscaling_stats()
        assert Gauge.values
        replica._service._state.engines.alive = lambda: False
        with pytest.raises(RuntimeError):
            replica.check_health()

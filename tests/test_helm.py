"""The chart: its schema, its renderings, and the plain manifest, which is one of them."""

import json
import re
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from benchmarks.lib.environments import Unavailable
from service import __version__
from service.settings import Settings
from service.settings_sources import PATHS
from service.variables import variable
from tests import charts
from tests.charts import CHART, HELM, PLAIN, ROOT, VALUES
from tests.e2e.client_calls.environments import environment

SCHEMA = json.loads((CHART / "values.schema.json").read_text())
DEFAULTS = yaml.safe_load((CHART / "values.yaml").read_text())
CUSTOM = {"ClusterServingRuntime": "kserve"}  # the environment that knows a kind, if another one


def rendered(name: str) -> list[Any]:
    path = (
        ROOT / "deploy/kubernetes.yaml" if name == PLAIN else ROOT / f"tests/rendered/{name}.yaml"
    )
    return [*yaml.safe_load_all(path.read_text(encoding="utf-8"))]


def pod_of(name: str) -> Mapping[str, Any]:
    """The specification of the pods of a rendering."""
    kinds = ("Deployment", "ClusterServingRuntime")
    (spec,) = (one["spec"] for one in rendered(name) if one["kind"] in kinds)
    return spec.get("template", {"spec": spec})["spec"]


@pytest.fixture
def helm() -> None:
    if not HELM.exists():
        pytest.skip("helm is absent: python -m tests.charts --fetch")
    try:
        charts.run_helm("version")
    except OSError as error:
        pytest.skip(f"helm does not run here: {error.strerror}")


def problems(*documents: Any) -> str:
    """The output of the strict validation of manifests. Skips where an environment is absent."""
    found = []
    for name in ("kubernetes", "kserve"):
        own = [one for one in documents if CUSTOM.get(one["kind"], "kubernetes") == name]
        try:
            python = environment(name).python() if own else None
        except Unavailable as error:
            pytest.skip(f"{name}: {error}")
        if python is not None:
            command = [python, ROOT / "tests/strict_manifests.py"]
            text = yaml.safe_dump_all(own)
            run = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
            found.append(run.stdout.strip())
    return "\n".join(filter(None, found))


# -- without helm -------------------------------------------------------------------------------------


def test_the_schema_describes_the_values():
    """Every value has a default, which is valid; the values of each file are valid."""
    assert DEFAULTS.keys() == SCHEMA["properties"].keys() - {"global"}
    for name in ("autoscaling", "resources", "service", "serviceMonitor", "networkPolicy"):
        assert DEFAULTS[name].keys() == SCHEMA["properties"][name]["properties"].keys()
    for values in ({}, *(yaml.safe_load(path.read_text()) for path in VALUES.values())):
        jsonschema.validate({**DEFAULTS, **values}, SCHEMA)


@pytest.mark.parametrize(
    "values",
    [
        {"replica": 3},
        {"replicas": 0},
        {"settings": {"max_batch_token": 3}},
        {"settings": {"port": 80}},  # which the Service would not find
        {"settings": {"aliases": {"a": "b"}}},
        {"autoscaling": {"by": "both"}},
        {"autoscaling": {"by": "hpa", "maximum": 3}},
        {"autoscaling": {"by": "keda", "prometheus": ""}},
        {"resources": {"limit": {"cpu": 1}}},
        {"maxUnavailable": "0%"},
        {"kind": "StatefulSet"},
    ],
)
def test_the_schema_refuses_typos(values):
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**DEFAULTS, **values}, SCHEMA)


def test_the_chart_has_the_version_of_the_service():
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert (__version__, __version__) == (chart["version"], chart["appVersion"])


@pytest.mark.parametrize("name", VALUES)
def test_pods_fit_the_service(name):
    """Variables are settings, ports are theirs, directories exist, and a drain ends before Kubernetes ends it."""
    pod = pod_of(name)
    (container,) = pod["containers"]
    variables = {one["name"]: one["value"] for one in container["env"]}
    names = {variable(setting): setting for setting in Settings.model_fields}
    cache = variables.pop("XDG_CACHE_HOME", None)
    files = {
        name: variables.pop(name) for name in [*variables] if names[name] in PATHS - {"models_dir"}
    }
    settings = Settings(
        bundles=(), **{names[variable]: value for variable, value in variables.items()}
    )
    mounts = {one["mountPath"] for one in container["volumeMounts"]}
    needed = {*map(str, map(Path, files.values())), *container.get("args", ())}
    local = {path for path in needed if "://" not in path and path != "/mnt/models"}
    assert all(any(path.startswith(f"{mount}/") for mount in mounts) for path in local)
    assert cache is None or cache in mounts
    assert {one["name"] for one in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
    ports = {one["name"]: one["containerPort"] for one in container["ports"]}
    assert {8000, settings.metrics_port} >= {*ports.values()} >= {8000}
    grace = pod.get("terminationGracePeriodSeconds", 30)  # Kubernetes' own
    assert grace > settings.drain_delay_s + settings.drain_s > settings.drain_delay_s > 0
    paths = {f"{kind}Probe": "/health/ready" for kind in ("startup", "readiness")}
    for probe, path in {**paths, "livenessProbe": "/health/live"}.items():
        assert {"path": path, "port": 8000} == container[probe]["httpGet"]
    assert container["securityContext"]["readOnlyRootFilesystem"]


def test_an_autoscaler_alone_determines_the_instances():
    scalers = {"hpa": "HorizontalPodAutoscaler", "keda": "ScaledObject"}
    for name in VALUES:
        documents = {one["kind"]: one for one in rendered(name)}
        found = {*scalers.values()} & documents.keys()
        assert ({scalers[name]} if name in scalers else set()) == found
        if "Deployment" in documents:
            assert bool(found) != ("replicas" in documents["Deployment"]["spec"])


def test_scaling_reads_a_metric_that_is_monitored():
    """The query of KEDA selects the labels that the ServiceMonitor's Service gives."""
    documents = {(one["kind"], one["metadata"]["name"]): one for one in rendered("keda")}
    (trigger,) = documents["ScaledObject", "quartet"]["spec"]["triggers"]
    service = documents["Service", "quartet-metrics"]
    wanted = documents["ServiceMonitor", "quartet"]["spec"]["selector"]["matchLabels"]
    assert wanted.items() <= service["metadata"]["labels"].items()
    assert not wanted.items() <= documents["Service", "quartet"]["metadata"]["labels"].items()
    metric = re.match(r"sum\((\w+)\{", trigger["metadata"]["query"])[1]
    assert f"| `{metric}` | gauge |" in (ROOT / "docs/reference/metrics.md").read_text()
    assert f'service="{service["metadata"]["name"]}"' in trigger["metadata"]["query"]


# -- with helm, and with the schemas of Kubernetes and of custom resources ----------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("helm")
def test_the_renderings_are_current():
    """`python -m tests.charts` renews them."""
    for path, text in charts.renderings().items():
        assert text == path.read_text(encoding="utf-8"), path.name


@pytest.mark.slow
@pytest.mark.usefixtures("helm")
@pytest.mark.parametrize("name", VALUES)
def test_helm_lints_the_chart(name):
    run = charts.run_helm("lint", "--strict", CHART, "--values", VALUES[name])
    assert 0 == run.returncode, run.stdout
    assert "WARNING" not in run.stdout + run.stderr


@pytest.mark.slow
@pytest.mark.usefixtures("helm")
@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("replica=3", "additional properties 'replica' not allowed"),
        ("settings.max_batch_token=3", "max_batch_token"),
        ("bundles[0]=reviews", "reviews is a path below volume, which is not set"),
        ("autoscaling.by=keda", "prometheus"),
    ],
)
def test_helm_refuses(flag, message):
    with pytest.raises(RuntimeError, match=re.escape(message)):
        charts.render("--set", flag)


@pytest.mark.slow
@pytest.mark.usefixtures("helm")
def test_values_become_settings():
    """Large numbers are no floats with an exponent, and truth values are words."""
    flags = ["settings.max_body_bytes=104857600", "settings.spin=true", "settings.max_wait_ms=0.5"]
    text = charts.render(*(part for flag in flags for part in ("--set", flag)))
    for value in ('"104857600"', '"true"', '"0.5"'):
        assert f"value: {value}}}" in text
    assert "name: search-quartet" in charts.run_helm("template", "search", CHART).stdout


@pytest.mark.slow
def test_the_renderings_are_valid():
    """By the schemas of Kubernetes, KEDA, the operator of Prometheus and KServe, without unknown fields."""
    documents = [one for name in VALUES for one in rendered(name)]
    containers = {key: pod_of("kserve")[key] for key in ("containers", "volumes")}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, "spec": containers}
    assert "" == problems(*documents, pod)


@pytest.mark.slow
def test_the_validation_finds_unknown_fields():
    wrong = {
        (PLAIN, "Deployment"): ("matchLabelKeys", "matchLabelsKeys"),
        ("keda", "ScaledObject"): ("maxReplicaCount", "maxReplicas"),
        ("keda", "ServiceMonitor"): ("interval", "intervall"),
        ("kserve", "ClusterServingRuntime"): ("autoSelect", "autoselect"),
    }
    documents = []
    for (name, kind), (old, new) in wrong.items():
        (document,) = (one for one in rendered(name) if one["kind"] == kind)
        text = yaml.safe_dump(document)
        assert old in text
        documents.append(yaml.safe_load(text.replace(old, new)))
    found = problems(*documents)
    assert len(wrong) == len(found.splitlines())
    assert all(new in found for _, new in wrong.values())


@pytest.mark.slow
def test_the_gateways_fit_the_chart():
    """The examples route to the Service; that of Ingress is valid (no package has the schema of HTTPRoute)."""
    (service,) = (one for one in rendered(PLAIN) if one["kind"] == "Service")
    port = service["spec"]["ports"][0]["port"]
    route, ingress = (
        yaml.safe_load((charts.CHARTS / "gateways" / f"{name}.yaml").read_text())
        for name in ("httproute", "ingress")
    )
    (rule,) = route["spec"]["rules"]
    assert [{"name": "quartet", "port": port}] == rule["backendRefs"]
    assert int(rule["timeouts"]["request"].removesuffix("s")) * 1000 > Settings().deadline_ms
    assert "" == problems(ingress)
    backend = ingress["spec"]["rules"][0]["http"]["paths"][0]["backend"]["service"]
    assert {"name": "quartet", "port": {"number": port}} == backend

"""What is there to watch the service with: it names only metrics and headings that there are."""

import asyncio
import json
import re
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from tests.served import app_of, living
from tests.test_docs import slugs

ROOT = Path(__file__).parent.parent
DEPLOY = ROOT / "deploy"
ALERTS = [
    rule
    for group in yaml.safe_load((DEPLOY / "alerts.yml").read_text(encoding="utf-8"))["groups"]
    for rule in group["rules"]
]
DASHBOARD = json.loads((DEPLOY / "grafana/dashboards/quartet.json").read_text(encoding="utf-8"))
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
OBSERVERS = ["prometheus", "grafana"]
PROMETHEUS = {"job", "instance", "le"}  # labels that it adds, or that every histogram has


def expressions():
    """Every PromQL expression, with where it is from."""
    for rule in ALERTS:
        yield pytest.param(rule["expr"], id=rule["alert"])
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            yield pytest.param(target["expr"], id=f"{panel['title']} {target['refId']}")


def names(expression):
    """The metrics that PromQL names."""
    bare = re.sub(r'"[^"]*"', "", expression)
    bare = re.sub(r"\{[^}]*\}|\[[^\]]*\]|\bby \([^)]*\)", " ", bare)
    found = re.findall(r"\b[a-zA-Z_:][\w:]*\b(?!\s*\()", bare)
    return {name for name in found if name not in ("by", "or", "and", "unless", "offset")}


def labels(expression):
    """The labels that PromQL names."""
    bare = re.sub(r'"[^"]*"', '""', expression)
    matched = re.findall(r'(\w+)\s*(?:=~|!~|!=|=)\s*""', bare)
    grouped = re.findall(r"\bby \(([^)]*)\)", bare)
    return {*matched, *(name.strip() for group in grouped for name in group.split(","))}


@pytest.fixture(scope="module")
def samples(tiny_bundle):
    """The metrics of a service that has answered a request."""

    async def scrape():
        async with living(app_of(tiny_bundle)) as client:
            await client.post("/embed", json={"inputs": "Ada"})
            return (await client.get("/metrics")).text

    page = asyncio.run(scrape())
    return [s for family in text_string_to_metric_families(page) for s in family.samples]


@pytest.mark.parametrize(
    ("expression", "found"),
    [
        ('up{job="a"} == 0 or b_c == 0', {"up", "b_c"}),
        ("sum by (x, le) (rate(a_b[5m])) / c > 0.1", {"a_b", "c"}),
        ('q(0.99, sum(rate(a{m!="n"}[$__rate_interval])))', {"a"}),
        ('a{b="c"} offset 5m >= 4', {"a"}),
    ],
)
def test_names_are_found(expression, found):
    """Neither functions, nor labels, nor words of the language are metrics."""
    assert found == names(expression)


@pytest.mark.parametrize("expression", [*expressions()])
def test_what_is_watched_is_there(expression, samples):
    """Every metric and label of the dashboard and the alerts is in a scrape of a server that has answered."""
    known = {sample.name for sample in samples} | {"up"}
    told = {label for sample in samples for label in sample.labels} | PROMETHEUS

    assert names(expression)
    assert set() == names(expression) - known
    assert set() == labels(expression) - told


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_alerts_say_what_to_do(rule):
    """An alert has a summary, an action, and a section of the documentation that names it."""
    told = rule["annotations"]
    page, _, section = told["runbook"].partition("#")

    assert told["summary"]
    assert told["action"]
    assert section in slugs(ROOT / page)
    assert f"`{rule['alert']}`" in (ROOT / page).read_text(encoding="utf-8")


def test_alerts_are_read():
    """Prometheus reads the rules where the container has them, and scrapes the job that they name."""
    config = yaml.safe_load((DEPLOY / "prometheus.yml").read_text(encoding="utf-8"))
    mounted = [volume.split(":") for volume in COMPOSE["services"]["prometheus"]["volumes"]]
    (job,) = config["scrape_configs"]
    (target,) = job["static_configs"][0]["targets"]

    assert set(config["rule_files"]) <= {there for _, there, *_ in mounted}
    assert "quartet" == job["job_name"]
    assert target.partition(":")[0] in COMPOSE["services"]


def test_panels_ask_the_data_source_that_is_provisioned():
    """By its uid, each panel of its own place and id."""
    file = DEPLOY / "grafana/provisioning/datasources/prometheus.yml"
    (source,) = yaml.safe_load(file.read_text(encoding="utf-8"))["datasources"]
    panels = DASHBOARD["panels"]
    asked = [target["datasource"]["uid"] for panel in panels for target in panel["targets"]]

    assert {source["uid"]} == {*asked, *(panel["datasource"]["uid"] for panel in panels)}
    assert "http://prometheus:9090" == source["url"]
    for key in (lambda panel: panel["id"], lambda panel: str(panel["gridPos"])):
        assert len(panels) == len({key(panel) for panel in panels})


def test_the_dashboard_is_found():
    """Grafana looks for dashboards where the container has them."""
    file = DEPLOY / "grafana/provisioning/dashboards/quartet.yml"
    (provider,) = yaml.safe_load(file.read_text(encoding="utf-8"))["providers"]
    mounted = [volume.split(":") for volume in COMPOSE["services"]["grafana"]["volumes"]]

    assert provider["options"]["path"] in [there for _, there, *_ in mounted]


@pytest.mark.parametrize("name", OBSERVERS)
def test_observers_are_wanted_pinned_and_locked_down(name):
    """They start by their profile alone, at a version, for this machine alone, and change no file of ours."""
    service = COMPOSE["services"][name]
    ours = [v for v in service["volumes"] if v.startswith(".")]

    assert ["observe"] == service["profiles"]
    assert re.fullmatch(r"[\w/]+:v?\d+\.\d+\.\d+", service["image"])
    assert all(port.startswith("127.0.0.1:") for port in service["ports"])
    assert service["read_only"] is True
    assert ["ALL"] == service["cap_drop"]
    assert all(volume.endswith(":ro") for volume in ours)
    assert all((ROOT / volume.split(":")[0]).exists() for volume in ours)

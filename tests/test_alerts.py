"""The alert rules fire when they should and only then, as Prometheus evaluates them, and can fire at all."""

import shutil
import subprocess

import pytest
import yaml

from service.errors import Overloaded
from service.scheduling.load import EARLY_SHARE, Backlog, Flow, Load, RemainingWork
from tests.test_observe import ALERTS, DEPLOY

CASES = DEPLOY / "alerts_test.yml"


def outcomes(alert: str) -> set[bool]:
    """Whether the cases of an alert expect it to fire: True, False or both."""
    tests = yaml.safe_load(CASES.read_text(encoding="utf-8"))["tests"]
    checks = [check for test in tests for check in test["alert_rule_test"]]
    return {bool(check["exp_alerts"]) for check in checks if check["alertname"] == alert}


@pytest.mark.parametrize("rule", ALERTS, ids=lambda rule: rule["alert"])
def test_each_alert_has_both_cases(rule):
    """Every alert has a case in which it fires and one in which it does not."""
    assert {True, False} == outcomes(rule["alert"])


@pytest.mark.slow
def test_alerts_fire_when_they_should():
    """promtool finds every case as expected."""
    if shutil.which("promtool") is None:
        pytest.skip("promtool is not installed (Debian package prometheus)")
    command = ["promtool", "test", "rules", CASES.name]
    ended = subprocess.run(command, cwd=DEPLOY, capture_output=True, text=True, check=False)
    assert 0 == ended.returncode, ended.stdout + ended.stderr


@pytest.mark.parametrize("deadline_s", [1.0, 30.0, 300.0])
def test_the_queue_alert_comes_before_refusals(deadline_s):
    """A queue at the alert's threshold still admits requests, and one above its limit does not."""
    (rule,) = [rule for rule in ALERTS if rule["alert"] == "QuartetQueueNearItsLimit"]
    threshold = float(rule["expr"].partition("> ")[2].split()[0])
    limit_s = EARLY_SHARE * deadline_s

    def load(share):
        waiting = {Flow("m@1"): Backlog.of(RemainingWork(round(1000 * share * limit_s), 1))}
        return Load({"m@1": 1000.0}, waiting)

    assert threshold * limit_s < load(threshold + 0.05).drain_s < limit_s
    load(threshold + 0.05).check_in_time(Flow("m@1"), 1, deadline_s, EARLY_SHARE)
    with pytest.raises(Overloaded):
        load(1.0).check_in_time(Flow("m@1"), round(1000 * limit_s), deadline_s, EARLY_SHARE)

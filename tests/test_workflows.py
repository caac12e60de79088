"""The GitHub workflows: valid by their schema, and building every image with SBOM and provenance."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.test_containers import DEFAULTS, STAGES, TARGETS

ROOT = Path(__file__).parent.parent
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def check(path: Path) -> subprocess.CompletedProcess[str]:
    """Check a workflow against the schema that the package check-jsonschema contains."""
    schema = ["--builtin-schema", "vendor.github-workflows"]
    command = [sys.executable, "-m", "check_jsonschema", *schema, str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_workflow_follows_the_schema(path):
    """GitHub accepts the keys and values of each workflow."""
    checked = check(path)

    assert (0, "ok -- validation done\n") == (checked.returncode, checked.stdout), checked


def test_a_wrong_key_is_found(tmp_path):
    """A workflow with a misspelled key fails the check."""
    text = (ROOT / ".github/workflows/images.yml").read_text(encoding="utf-8")
    (tmp_path / "images.yml").write_text(text.replace("    steps:", "    stepz:"))

    assert 0 != check(tmp_path / "images.yml").returncode


def test_images_are_built_for_every_target_and_processor():
    """CPU images are for amd64 and arm64, GPU images for amd64; all have an SBOM and provenance."""
    workflow = yaml.safe_load((ROOT / ".github/workflows/images.yml").read_text(encoding="utf-8"))
    job = workflow["jobs"]["image"]
    runners = workflow["jobs"]["goldens"]["strategy"]["matrix"]["runner"]
    images = {entry["target"]: entry["platforms"] for entry in job["strategy"]["matrix"]["include"]}
    build = job["steps"][-1]["with"]

    assert {"cpu": "linux/amd64,linux/arm64", "gpu": "linux/amd64"} == images
    assert ["ubuntu-24.04", "ubuntu-24.04-arm"] == runners  # on which the goldens pass first
    assert "goldens" == job["needs"]
    assert set(TARGETS) == {*images} <= {*STAGES}
    assert (True, "mode=max") == (build["sbom"], build["provenance"])
    assert build["build-args"].partition("=")[0] == "DEVICE"
    assert "DEVICE" not in DEFAULTS  # the Dockerfile has no default for it

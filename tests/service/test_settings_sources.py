import hashlib
import re
from pathlib import Path
from typing import Any

import pytest

from service.settings import Settings, ignored_variables, unknown_variables
from service.settings_sources import ConfigError, Configuration, configure, report

EXAMPLE = Path(__file__).parents[2] / "deploy/quartet.toml"
PLAIN = "0123456789abcdef"


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The working directory: empty, but for what a test writes."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(name: str, text: str) -> str:
    path = Path(name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return name


def with_bundle(**flags: Any) -> Configuration:
    return configure({"bundles": ["x"], **flags})


def told(configuration: Configuration) -> dict[str, list[str]]:
    """The report by setting: value and origin."""
    lines = [re.split("  +", line) for line in report(configuration).splitlines()]
    return {name: rest for name, *rest in lines}


def test_a_flag_goes_before_a_variable_before_the_file(monkeypatch):
    """Each setting comes from the nearest of the places where it is given, and the report says from which."""
    write("quartet.toml", "port = 1\nthreads = 1\nreplicas = 1\n")
    monkeypatch.setenv("QUARTET_PORT", "2")
    monkeypatch.setenv("QUARTET_THREADS", "2")
    configuration = with_bundle(port="3", spin="true")
    settings = configuration.settings
    assert (settings.port, settings.threads, settings.replicas) == (3, 2, 1)
    assert settings.deadline_ms == Settings().deadline_ms
    found = told(configuration)
    assert found["port"] == ["3", "--port"]
    assert found["threads"] == ["2", "QUARTET_THREADS"]
    assert found["replicas"] == ["1", "quartet.toml"]
    assert found["spin"] == ["true", "--spin"]
    assert found["bundles"] == ["x", "arguments"]
    assert found["deadline_ms"] == ["30000", "default"]
    assert found["config"] == ["quartet.toml", "default"]
    assert list(found) == list(Settings.model_fields)


def test_quotation_marks_around_variables(monkeypatch):
    """Files of variables for containers keep them; they are left out, with a warning that names the variable."""
    given = {"QUARTET_API_KEY": f'"{PLAIN}"', "QUARTET_PORT": "'9000'", "QUARTET_HOST": "::1"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    settings = with_bundle().settings
    assert (9000, "::1") == (settings.port, settings.host)
    (key,) = settings.keys.values()
    assert hashlib.sha256(PLAIN.encode()).hexdigest() == key.sha256
    lines = ignored_variables(given, closed=True)
    assert ["QUARTET_API_KEY", "QUARTET_PORT"] == [line.partition(":")[0] for line in lines]


@pytest.mark.parametrize("name", ["quartet.toml", "keys.toml"])
def test_a_byte_order_mark(name):
    """Editors of Windows write one at the start of a file."""
    Path("quartet.toml").write_text("port = 9000\napi_keys = 'keys.toml'\n", encoding="utf-8")
    Path("keys.toml").write_text(f"[keys.ops]\nsha256 = '{'a' * 64}'\n", encoding="utf-8")
    path = Path(name)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())
    settings = with_bundle().settings
    assert (9000, ["ops"]) == (settings.port, [*settings.keys])


def test_a_file_can_be_named(monkeypatch):
    """A flag or a variable names it, and no other file is read."""
    write("quartet.toml", "port = 1\nthreads = 1")
    write("one.toml", "port = 2")
    write("other.toml", "port = 3")
    monkeypatch.setenv("QUARTET_CONFIG", "one.toml")
    assert with_bundle().settings.port == 2
    assert with_bundle(config="other.toml").settings.port == 3
    assert with_bundle(config="other.toml").settings.threads is None


def test_no_file_is_needed():
    """Without one, nothing is from it."""
    assert with_bundle().settings == Settings(bundles=(Path("x"),))


def test_paths_in_a_file_are_relative_to_it():
    """A file means the same wherever the service is started."""
    write("etc/keys.toml", f'[keys.a]\nsha256 = "{"a" * 64}"')
    write("etc/quartet.toml", 'bundles = ["b", "/c"]\napi_keys = "keys.toml"\nuds = "s"')
    settings = configure({"config": "etc/quartet.toml"}).settings
    assert settings.uds == Path("etc/s")
    assert settings.bundles == (Path("etc/b"), Path("/c"))
    assert list(settings.keys) == ["a"]
    write("etc/quartet.toml", 'bundles = "b:c"')
    assert configure({"config": "etc/quartet.toml"}).settings.bundles == (Path("etc/b:c"),)
    write("etc/quartet.toml", 'bundles = ["s3://a/b"]\nmodels_dir = "s3://a"')
    configuration = configure({"config": "etc/quartet.toml"})
    assert "s3://a/b" in report(configuration)
    assert configuration.settings.models_dir == Path("s3://a")


def test_bundles_that_come_later_come_from_a_directory():
    """A directory that exists, relative to the file with the setting."""
    write("etc/quartet.toml", 'models_dir = "models"')
    with pytest.raises(ConfigError, match=r"^etc/quartet.toml: etc/models is no directory$"):
        with_bundle(config="etc/quartet.toml")
    Path("etc/models").mkdir()
    assert with_bundle(config="etc/quartet.toml").settings.models_dir == Path("etc/models")


def test_bundles_are_found_when_none_is_named():
    """What lies in `bundles/` is served by default, in the order of names, without the second bundle of a checkout."""
    for name in ("b", "a", ".a.partial", "quartet-starter"):
        write(f"bundles/{name}/manifest.json", "")
    Path("bundles/notes").mkdir()
    configuration = configure({})
    assert configuration.settings.bundles == (Path("bundles/a"), Path("bundles/b"))
    assert told(configuration)["bundles"] == ["bundles/a, bundles/b", "default"]


def test_keys_of_all_places_are_found(monkeypatch):
    """Those in the file, in its file of keys and in a variable; nothing but hashes is handed on."""
    write("keys.toml", f'[keys.filed]\nsha256 = "{"a" * 64}"')
    write("quartet.toml", f'api_keys = "keys.toml"\n[keys.told]\nsha256 = "{"b" * 64}"')
    monkeypatch.setenv("QUARTET_API_KEY", PLAIN)
    configuration = with_bundle()
    settings = configuration.settings
    assert {name: key.sha256 for name, key in settings.keys.items()} == {
        "told": "b" * 64,
        "filed": "a" * 64,
        "default": hashlib.sha256(PLAIN.encode()).hexdigest(),
    }
    assert Settings.model_validate_json(settings.model_dump_json()) == settings
    assert PLAIN not in settings.model_dump_json()


def test_keys_in_a_variable_go_before_those_in_the_file(monkeypatch):
    """As with every setting: they are not mixed with them."""
    write("quartet.toml", f'[keys.a]\nsha256 = "{"a" * 64}"\nmay = ["admin"]')
    monkeypatch.setenv("QUARTET_KEYS", f'{{"a": {{"sha256": "{"b" * 64}"}}}}')
    (key,) = with_bundle().settings.keys.values()
    assert (key.sha256, key.may) == ("b" * 64, ("inference",))


def test_a_report_tells_no_secret(monkeypatch):
    """The report has the names of keys only."""
    write("keys.toml", f'[keys.filed]\nsha256 = "{"a" * 64}"')
    monkeypatch.setenv("QUARTET_API_KEY", PLAIN)
    configuration = with_bundle(api_keys="keys.toml")
    found = told(configuration)
    assert found["api_key"] == ["(not shown)", "QUARTET_API_KEY"]
    assert found["api_keys"] == ["keys.toml", "--api-keys"]
    assert found["keys"] == ["filed, default", "--api-keys, QUARTET_API_KEY"]
    assert PLAIN not in report(configuration)
    assert "aaaa" not in report(configuration)


RECORD = f'[keys.a]\nsha256 = "{"a" * 64}"\n'


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("port = no", "quartet.toml: Invalid value (at line 1, column 8)"),
        (
            "max_batch_token = 1",
            "max_batch_token: is not a setting (did you mean max_batch_tokens?)",
        ),
        ("[limits]\nport = 1", "quartet.toml: limits: is not a setting"),
        (f'api_key = "{PLAIN}"', "quartet.toml: api_key: is not for files"),
        ('config = "x.toml"', "quartet.toml: config: is not for files"),
        ("port = 99999", "quartet.toml: port: Input should be less than or equal to 65535"),
        ('port = "x"\nthreads = 0', "port: Input should be a valid integer, unable"),
        ('port = "x"\nthreads = 0', "threads: Input should be greater than or equal to 1"),
        ("[keys]", "quartet.toml: there is no key in keys"),
        (RECORD + "mai = 1", "quartet.toml: keys.a.mai: is not known (did you mean may?)"),
        (RECORD.replace("a" * 64, PLAIN), "quartet.toml: keys.a.sha256: String should match"),
        (RECORD + RECORD.replace(".a]", ".b]"), "keys: a and b are the same key"),
        ('api_keys = "none.toml"', "none.toml: No such file or directory"),
        ('api_keys = "quartet.toml"', "quartet.toml: keys: Field required"),
    ],
)
def test_faults_of_a_file_are_reported(text, reason):
    """Every name and every value, and where it stands."""
    write("quartet.toml", text)
    with pytest.raises(ConfigError, match=re.escape(reason)):
        with_bundle()


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("PORT", "http", "QUARTET_PORT: Input should be a valid integer"),
        ("PORT", "9000 # for tests", ", not '9000 # for tests'"),
        ("API_KEY", "0123456789 abcdef", "must be at least 16 visible ASCII characters"),
        ("KEYS", "{", "QUARTET_KEYS: unexpected end of data"),
        ("KEYS", "{}", "QUARTET_KEYS: there is no key in keys"),
        ("KEYS", '{"a": {"sha256": "0"}}', "QUARTET_KEYS: a.sha256: String should match pattern"),
        ("API_KEYS", "none.toml", "none.toml: No such file or directory"),
        ("CONFIG", "none.toml", "none.toml: No such file or directory"),
    ],
)
def test_faults_of_a_variable_are_reported(monkeypatch, name, value, reason):
    """A service whose keys cannot be read is not left open."""
    monkeypatch.setenv(f"QUARTET_{name}", value)
    with pytest.raises(ConfigError, match=re.escape(reason)):
        with_bundle()


@pytest.mark.parametrize("name", Settings.model_fields)
def test_an_empty_variable_is_an_unset_one(monkeypatch, name):
    """As Compose and many scripts set variables that have no value."""
    unset = configure({"bundles": ["x"]} if name != "bundles" else {"config": str(EXAMPLE)})
    monkeypatch.setenv(f"QUARTET_{name.upper()}", "")
    empty = configure({"bundles": ["x"]} if name != "bundles" else {"config": str(EXAMPLE)})
    assert unset == empty


def test_an_empty_variable_leaves_what_a_file_says(monkeypatch):
    """A setting in the file holds, and keys in it keep the service closed."""
    write("quartet.toml", "port = 1\n" + RECORD)
    for name in ("PORT", "API_KEY", "API_KEYS", "KEYS"):
        monkeypatch.setenv(f"QUARTET_{name}", "")
    settings = with_bundle().settings
    assert (1, ["a"]) == (settings.port, [*settings.keys])


@pytest.mark.parametrize(
    ("flags", "text", "reason"),
    [
        ({"models_dir": ""}, "", "--models-dir: models_dir: is empty; leave it out for"),
        ({"host": ""}, "", "--host: host: is empty"),
        ({"config": ""}, "", "--config: config: is empty"),
        ({"bundles": [""]}, "", "arguments: bundles: is empty"),
        ({}, 'models_dir = ""', "quartet.toml: models_dir: is empty"),
        ({}, 'host = ""', "quartet.toml: host: is empty"),
        ({}, 'bundles = ["x", ""]', "quartet.toml: bundles: is empty"),
    ],
)
def test_an_empty_flag_or_line_is_a_mistake(flags, text, reason):
    """It would select the working directory, or every address; the error has its origin."""
    write("quartet.toml", text)
    with pytest.raises(ConfigError, match=re.escape(reason)):
        configure({"bundles": ["x"], **flags} if "bundles" not in text else flags)


def links(service: str, address: str = "tcp://10.96.14.2:8000") -> dict[str, str]:
    """What Kubernetes sets in each pod for a Service, and Docker for a link."""
    return {
        f"{service}_SERVICE_HOST": "10.96.14.2",
        f"{service}_SERVICE_PORT": "8000",
        f"{service}_SERVICE_PORT_HTTP": "8000",
        f"{service}_PORT": address,
        f"{service}_PORT_8000_TCP": address,
        f"{service}_PORT_8000_TCP_PROTO": "tcp",
        f"{service}_PORT_8000_TCP_PORT": "8000",
        f"{service}_PORT_8000_TCP_ADDR": "10.96.14.2",
        f"{service}_PORT_53_UDP": "udp://10.96.14.2:53",
    }


@pytest.mark.parametrize("service", ["QUARTET", "QUARTET_METRICS", "QUARTET_GPU_2"])
@pytest.mark.parametrize("address", ["tcp://10.96.14.2:8000", "tcp://[fd00::2]:8000"])
def test_a_kubernetes_service_sets_nothing(monkeypatch, service, address):
    """A Service whose name begins with quartet leaves every setting as it is."""
    plain = with_bundle()
    given = links(service, address)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert plain == with_bundle()
    (line,) = ignored_variables(given, closed=False)
    assert all(name in line for name in given)
    assert "enableServiceLinks: false" in line
    assert [] == unknown_variables(given)


def test_settings_apply_next_to_a_kubernetes_service(monkeypatch):
    """A variable that is a setting by its value holds, and a wrong one is refused as ever."""
    for name, value in links("QUARTET").items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("QUARTET_PORT", "9000")
    assert 9000 == with_bundle().settings.port
    monkeypatch.setenv("QUARTET_PORT", "http://x:1")
    with pytest.raises(ConfigError, match="QUARTET_PORT: Input should be a valid integer"):
        with_bundle()
    unknown = {"QUARTET_SERVICE": "1", "QUARTET_PROT": "tcp://x:1", "QUARTET_PORT_HTTP": "1"}
    assert 3 == len(unknown_variables(unknown))
    assert [] == ignored_variables(unknown, closed=False)


def test_an_empty_key_is_warned_of():
    """The warning says whether the service is open without the key."""
    assert ["QUARTET_API_KEY is empty, which counts as unset"] == ignored_variables(
        {"QUARTET_API_KEY": "", "QUARTET_PORT": ""}, closed=True
    )
    (line,) = ignored_variables({"QUARTET_KEYS": ""}, closed=False)
    assert line.endswith("no key is set, so every client that connects is served")


def test_what_is_wrong_never_tells_a_key(monkeypatch):
    """An error may end up in a log."""
    monkeypatch.setenv("QUARTET_API_KEY", "too-short")
    with pytest.raises(ConfigError) as caught:
        with_bundle()
    assert "too-short" not in str(caught.value)


def test_the_example_is_as_it_says():
    """The file that is shipped is read as it stands, and what is commented out in it has its default."""
    text = EXAMPLE.read_text(encoding="utf-8")
    shipped = configure({"config": str(EXAMPLE)}).settings
    assert [path.resolve().name for path in shipped.bundles] == ["quartet-mini"]
    write(
        "quartet.toml", re.sub(r"^# (?=\w+ = |\[)", "", text, flags=re.M).replace("...", "a" * 64)
    )
    uncommented = configure({}).settings
    (key,) = uncommented.keys.values()
    unlike = {
        name
        for name, field in Settings.model_fields.items()
        if getattr(uncommented, name) != field.default
    }
    assert unlike == {"config", "bundles", "keys"}
    assert (key.may, key.priority) == (("inference",), "interactive")

import os
from pathlib import Path

import pytest
from pydantic import ValidationError

from service import settings
from service.core.addresses import address
from service.core.cpu import CPU
from service.core.cuda import CUDA
from service.settings import Settings, cgroup_cores, unknown_variables, usable_cores


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_variables_are_read(monkeypatch):
    """`QUARTET_` and a field's name in capitals set the field."""
    monkeypatch.setenv("QUARTET_MAX_BATCH_TOKENS", "512")
    monkeypatch.setenv("QUARTET_PROVIDER", "CUDA")
    assert (Settings().max_batch_tokens, Settings().provider) == (512, "cuda")


def test_bundles_are_separated_like_a_path(monkeypatch):
    """`QUARTET_BUNDLES` is read as `PATH` is."""
    monkeypatch.setenv("QUARTET_BUNDLES", os.pathsep.join(["bundles/a", "", "bundles/b"]))
    assert Settings().bundles == (Path("bundles/a"), Path("bundles/b"))
    monkeypatch.setenv("QUARTET_BUNDLES", "s3://b/one:bundles/a:https://example.org/two")
    assert ["s3://b/one", None, "https://example.org/two"] == [
        address(path) for path in Settings().bundles
    ]


def test_model_sources_are_addresses_with_a_slash_at_the_end(monkeypatch):
    """A source without it would contain all longer names."""
    monkeypatch.setenv("QUARTET_MODEL_SOURCES", "s3://models/team, https://example.org/m/")
    assert Settings().model_sources == ("s3://models/team/", "https://example.org/m/")
    with pytest.raises(ValidationError, match="is not an address such as"):
        Settings(model_sources=["/models"])


def test_a_web_server_is_not_watched():
    """It has no list of its files."""
    assert Settings(models_dir="s3://models/team", watch_s=30).watch_s == 30
    with pytest.raises(ValidationError, match=r"https://example\.org/m has no list of its files"):
        Settings(models_dir="https://example.org/m", watch_s=30)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"port": 65536}, "port"),
        ({"max_batch_tokens": 0}, "max_batch_tokens"),
        ({"precision": "int4"}, "precision"),
        ({"drain_s": -1}, "drain_s"),
        ({"port": 9000, "grpc_port": 9000}, "must differ from port"),
        ({"metrics_port": 9000, "grpc_port": 9000}, "must differ from port"),
        ({"port": 9000, "metrics_port": 9000}, "must differ from port"),
        *(
            ({"forwarded_allow_ips": trusted}, "forwarded_allow_ips")
            for trusted in ("proxy", "10.0.0.300", "10.0.0.1/8", "127.0.0.1 10.0.0.1")
        ),
        *(
            ({"cors_origins": [origin]}, "is not an origin")
            for origin in (
                "",
                "*",
                "null",
                "a.org",
                "https://a.org/",
                "https://*.a.org",
                "https://A.org",
            )
        ),
        *(
            ({"allowed_hosts": [name]}, "is not a name such as")
            for name in ("", "https://a.org", "a.org:80", "a.*", "*.", "*a.org")
        ),
    ],
)
def test_bad_values_are_refused(fields, message):
    """A slip of the pen does not become a default, leave a proxy or a page out, or let all in."""
    with pytest.raises(ValidationError, match=message):
        Settings(**fields)


def test_ports_may_all_be_free_ones():
    """Port 0 is a free one for each listener."""
    assert 0 == Settings(port=0, metrics_port=0, grpc_port=0).metrics_port


def test_a_unix_socket_has_a_path_that_the_kernel_can_keep():
    """A path that is too long is refused by the name of its setting; a mode has three octal digits."""
    longest = "/" + "s" * 106
    assert Path(longest) == Settings(uds=longest).uds
    with pytest.raises(ValidationError, match="at most 107 bytes"):
        Settings(uds=longest + "s")
    for mode in ("8", "0o660", "1777", "668"):
        with pytest.raises(ValidationError, match="uds_mode"):
            Settings(uds_mode=mode)


@pytest.mark.parametrize("trusted", ["", "*", "127.0.0.1", "::1, 10.0.0.0/8,unix:"])
def test_trusted_proxies_are_addresses_and_networks(trusted):
    """Proxies are listed as uvicorn lists them."""
    assert trusted == Settings(forwarded_allow_ips=trusted).forwarded_allow_ips


def test_origins_are_separated_by_commas(monkeypatch):
    """`QUARTET_CORS_ORIGINS` may name several."""
    origins = (
        *("https://a.org", "http://localhost:3000", "http://[::1]:80", "app://obsidian.md"),
        *("chrome-extension://abcdefgh", "capacitor://localhost", "tauri://localhost"),
    )
    monkeypatch.setenv("QUARTET_CORS_ORIGINS", ", ".join(origins))
    assert Settings().cors_origins == origins


def test_aliases_are_pairs(monkeypatch):
    """A flag and a variable have them as text, a file as a table."""
    monkeypatch.setenv("QUARTET_ALIASES", "BAAI/bge-m3=tiny, text-embedding-3-small = tiny")
    expected = {"BAAI/bge-m3": "tiny", "text-embedding-3-small": "tiny"}
    assert expected == Settings().aliases == Settings(aliases=expected).aliases
    for bad in ("tiny", "a=", "=tiny", "a=tiny,"):
        with pytest.raises(ValidationError, match="write alias=name"):
            Settings(aliases=bad)


@pytest.mark.parametrize("name", Settings.model_fields)
def test_every_setting_is_described(name):
    """The help text comes from the field, so each field has one."""
    assert Settings.model_fields[name].description


def test_unknown_variables_are_named_with_the_closest_known():
    """A misspelt variable is pointed out, a stranger's is not."""
    assert unknown_variables({"QUARTET_MAX_BATCH_TOKEN": "1", "PATH": "", "QUARTET_PORT": "1"}) == [
        "QUARTET_MAX_BATCH_TOKEN is not a setting (did you mean QUARTET_MAX_BATCH_TOKENS?)"
    ]


@pytest.mark.parametrize(
    ("given", "number", "threads"),
    [
        ({}, 8, {1: 1, 8: 8}),
        ({"threads": 3}, 3, {1: 1, 3: 3}),
        ({"threads": 16}, 16, {1: 1, 16: 16}),
        ({"replicas": 1}, 1, {1: 8}),
        ({"replicas": 3}, 3, {1: 8}),
        ({"replicas": 8}, 8, {1: 1}),
        ({"replicas": 16}, 16, {1: 1}),
        ({"replicas": 4, "threads": 5}, 4, {1: 5}),
    ],
)
def test_slots_on_a_cpu(given, number, threads):
    """A thread each, and all for one; replicas share the threads, or have one each if there are no more."""
    assert Settings(**given).slots(CPU, cores=8) == (number, threads)


@pytest.mark.parametrize(
    ("bundles", "threads"), [(2, {1: 1, 4: 4}), (3, {1: 1, 2: 2}), (8, {1: 1}), (99, {1: 1})]
)
def test_threads_do_not_grow_with_bundles(bundles, threads):
    """The threads for single texts are divided among the bundles."""
    assert Settings().slots(CPU, cores=8, bundles=bundles) == (8, threads)


def test_slots_on_one_core_and_on_a_gpu():
    """One core has one slot. A GPU has two, so that one batch is prepared while the other one runs."""
    assert Settings().slots(CPU, cores=1) == (1, {1: 1})
    assert Settings().slots(CUDA, cores=8) == (2, {1: 8})
    assert Settings(replicas=1).slots(CUDA, cores=8) == (1, {1: 8})


@pytest.mark.parametrize(("cores", "workers"), [(64, 4), (6, 3), (1, 1)])
def test_http_workers(cores, workers):
    """One on a CPU; on a GPU half of the cores, up to four."""
    assert (1, workers) == (CPU.http_workers(cores), CUDA.http_workers(cores))


@pytest.mark.parametrize(
    ("given", "kind", "size"), [(None, CPU, 64), (None, CUDA, 256), (9, CUDA, 9)]
)
def test_sequences_of_a_batch(given, kind, size):
    """64 on a CPU and 256 on a GPU, or as set."""
    assert size == Settings(max_batch_size=given).batch_size(kind)


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "max 100000\n"}, None),
        ({"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "250000 100000\n"}, 2.5),
        (
            {
                "proc/self/cgroup": "0::/a/b\n",
                "sys/fs/cgroup/a/cpu.max": "150000 100000\n",
                "sys/fs/cgroup/a/b/cpu.max": "400000 100000\n",
            },
            1.5,
        ),
        ({"proc/self/cgroup": "0::/host/only\n", "sys/fs/cgroup/cpu.max": "100000 100000"}, 1.0),
        (
            {
                "proc/self/cgroup": "4:memory:/m\n2:cpu,cpuacct:/docker/x\n",
                "sys/fs/cgroup/cpu,cpuacct/docker/x/cpu.cfs_quota_us": "300000\n",
                "sys/fs/cgroup/cpu,cpuacct/docker/x/cpu.cfs_period_us": "100000\n",
            },
            3.0,
        ),
        (
            {
                "proc/self/cgroup": "2:cpu:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            None,
        ),
    ],
    ids=["none", "v2-max", "v2", "v2-parent-is-tighter", "v2-hidden", "v1", "v1-unlimited"],
)
def test_the_cgroup_quota_is_read(tmp_path, files, cores):
    """The tightest quota on the way up counts; no quota is no limit."""
    assert cgroup_cores(write(tmp_path, files)) == cores


@pytest.mark.parametrize(
    ("affinity", "quota", "cores"), [(4, None, 4), (4, 2.9, 2), (2, 8.0, 2), (4, 0.5, 1)]
)
def test_usable_cores_are_the_smaller_of_affinity_and_quota(monkeypatch, affinity, quota, cores):
    """A fraction of a core is not counted on, but one core always is."""
    monkeypatch.setattr(settings, "affinity_cores", lambda: affinity)
    monkeypatch.setattr(settings, "cgroup_cores", lambda: quota)
    assert usable_cores() == cores

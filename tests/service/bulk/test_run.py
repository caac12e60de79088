"""Runs over many files: shards, formats, and the runs that follow a killed one."""

import asyncio
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

from service import predict
from service.bulk.input_files import find_files
from service.bulk.output_files import output_at
from service.bulk.predictor import Predictor
from service.bulk.ray_predictor import RayPredictor
from service.bulk.run import Progress, run
from service.core.data_files.text_files import DataError
from service.core.remote_files import files_at
from tests import samples
from tests.stores import BUCKET, serve_folder, serve_s3, upload

TEXTS = [samples.text(1 + number * 7 % 40, seed=number) for number in range(60)]


class Killed(BaseException):
    """The end of a run without warning."""


@pytest.fixture
def files(tmp_path):
    """Two files of forty and twenty texts."""
    folder = tmp_path / "in"
    folder.mkdir()
    for name, texts in (("a.jsonl", TEXTS[:40]), ("b.jsonl", TEXTS[40:])):
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (folder / name).write_text(lines, encoding="utf-8")
    return [str(folder / "a.jsonl"), str(folder / "b.jsonl")]


def start(bundle, files, output, suffix=".jsonl", head="embeddings", lasts=10**9, **options):
    """Run in shards of 16 rows until `lasts` requests are computed. Returns the number of computed rows."""
    computed = []

    async def main():
        predictor = Predictor(bundle, head, options)
        compute = predictor.predict

        async def counted(rows):
            if len(computed) >= lasts:
                raise Killed
            computed.append(len(rows))
            return await compute(rows)

        predictor.predict = counted
        async with predictor:
            await run(predictor, files, output_at(output, suffix, False), shard_rows=16)

    with suppress(Killed):
        asyncio.run(main())
    return sum(computed)


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("single", [True, False])
def test_a_run_after_a_killed_one_computes_the_rest(tiny_bundle, files, tmp_path, suffix, single):
    """It computes only the missing shards; its output has each row once, and the bytes of a run that was not killed."""
    whole, killed = (tmp_path / f"{name}{suffix if single else ''}" for name in ("whole", "killed"))
    assert 60 == start(tiny_bundle, files, whole, suffix)

    assert 32 == start(tiny_bundle, files, killed, suffix, lasts=2)
    assert single != killed.exists()
    assert 28 == start(tiny_bundle, files, killed, suffix)

    if single:
        assert whole.read_bytes() == killed.read_bytes()
        assert {"in", whole.name, killed.name} == {path.name for path in tmp_path.iterdir()}
    else:
        assert 0 == start(tiny_bundle, files, killed, suffix)
        names = [f"part-{part}{suffix}" for part in ("00000-00000", "00000-00001", "00000-00002")]
        names += [f"part-00001-0000{part}{suffix}" for part in range(2)]
        assert ["_run.jsonl", *names] == sorted(path.name for path in killed.iterdir())
        assert all((whole / name).read_bytes() == (killed / name).read_bytes() for name in names)


def test_a_run_keeps_to_its_directory(tiny_bundle, files, tmp_path):
    """Other options, other inputs, other files and another process are refused by name, and lose nothing."""
    output = tmp_path / "out"
    start(tiny_bundle, files, output)
    before = {path.name: path.read_bytes() for path in output.iterdir()}

    with pytest.raises(DataError, match="has a run with dimensions None, not 8: remove it"):
        start(tiny_bundle, files, output, dimensions=8)
    with pytest.raises(DataError, match="has a run with inputs"):
        start(tiny_bundle, files[:1], output)
    with pytest.raises(DataError, match="has files, but not of a run"):
        start(tiny_bundle, files, tmp_path / "in")
    with (output / "_run.jsonl").open() as record:
        fcntl.flock(record, fcntl.LOCK_EX)
        with pytest.raises(DataError, match="another process writes it"):
            start(tiny_bundle, files, output)
    assert before == {path.name: path.read_bytes() for path in output.iterdir()}


def test_a_record_that_was_cut_off(tiny_bundle, files, tmp_path):
    """A shard whose line is incomplete is computed again."""
    output = tmp_path / "out"
    start(tiny_bundle, files, output)
    record = output / "_run.jsonl"
    complete = record.read_bytes()
    record.write_bytes(complete[:-9])

    assert 4 == start(tiny_bundle, files, output)
    assert complete == record.read_bytes()


def test_arrow_files(tiny_bundle, tmp_path):
    """Parquet and Arrow files are read, and written with their own types and typed results."""
    table = pa.table({"id": pa.array([7, 8, 9], pa.int16()), "text": ["sea", "", "sky"]})
    pq.write_table(table, tmp_path / "a.parquet")
    feather.write_feather(table, tmp_path / "b.arrow")

    arguments = [str(tiny_bundle), str(tmp_path / "*.*"), str(tmp_path / "out.parquet")]
    assert 1 == predict.main([*arguments, "--head", "embeddings"])

    found = pq.read_table(tmp_path / "out.parquet")
    assert [7, 8, 9, 7, 8, 9] == found["id"].to_pylist()
    assert pa.list_(pa.float32()) == found.schema.field("result").type
    assert [True, False, True] * 2 == found["result"].is_valid().to_pylist()
    assert f"{tmp_path}/b.arrow: row 2: no text" == found["error"][4].as_py()


def test_an_actor_of_ray_data(tiny_bundle):
    """A table keeps its columns, and gets those of results, in every call."""
    table = pa.table({"id": pa.array([7, 8, 9], pa.int16()), "text": ["sea", "", "sky"]})
    actor = RayPredictor(str(tiny_bundle), "embeddings", {"dimensions": 4})

    first, second = actor(table), actor(table)
    actor.close()

    assert first == second
    assert table == first.select(["id", "text"])
    assert [4, None, 4] == [each and len(each) for each in first["result"].to_pylist()]
    assert [None, "the data set: row 2: no text", None] == first["error"].to_pylist()


def test_files_of_a_directory(tmp_path):
    """A directory has the files below it, a pattern those that fit, in order and without hidden ones."""
    for name in ("b.csv", "a.csv", "sub/c.csv", ".hidden", "_run.jsonl"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("text\na\n")

    everything = [f"{tmp_path}/{name}?text=a" for name in ("a.csv", "b.csv", "sub/c.csv")]
    assert everything == find_files(f"{tmp_path}?text=a")
    assert everything[:2] == find_files(f"{tmp_path}/*.csv?text=a")
    with pytest.raises(DataError, match=r"no\.csv: no such file"):
        find_files(f"{tmp_path}/no.csv?text=a")
    with pytest.raises(DataError, match="no files"):
        find_files(f"{tmp_path}/*.tsv")


@pytest.mark.slow
def test_a_killed_process(tiny_bundle, tmp_path):
    """SIGKILL at any moment loses no row and doubles none."""
    source = tmp_path / "in.jsonl"
    rows = [{"id": number, "text": TEXTS[number % 60]} for number in range(20_000)]
    source.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    output = tmp_path / "out"
    command = [sys.executable, "-m", "service.predict", tiny_bundle, source, output]
    status = None
    for kills in range(8):
        process = subprocess.Popen([*map(str, command), "--format", "jsonl"])
        deadline = time.monotonic() + (10 if kills < 2 else 300)
        shards = len([*output.glob("part-*")])
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
            if kills < 2 and len([*output.glob("part-*")]) > shards:
                break
        if process.poll() is None:
            os.kill(process.pid, signal.SIGKILL)
        if (status := process.wait()) == 0:
            break

    parts = sorted(output.glob("part-*"))
    found = [json.loads(line) for part in parts for line in part.read_text("utf-8").splitlines()]
    assert 0 == status
    assert [row["id"] for row in rows] == [row["id"] for row in found]
    assert all(row["result"] for row in found)


def test_a_file_of_a_web_server(tiny_bundle, tmp_path, monkeypatch, capsys):
    """Errors name the address, and not the copy."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "new.csv").write_text('id,Review\n1,sea\n2,""\n')
    with serve_folder(tmp_path) as web:
        url, out = f"{web.url}/new.csv", tmp_path / "out.jsonl"
        bundle = f"{web.url}/{tiny_bundle.name}"
        shutil.copytree(tiny_bundle, tmp_path / tiny_bundle.name)
        more = ["--head", "embeddings", "--columns", '{"text": "Review"}']
        assert 1 == predict.main([bundle, url, str(out), *more])
        assert [None, f"{url}:3: no Review"] == [
            json.loads(line).get("error") for line in out.read_text().splitlines()
        ]
        for source in (f"{web.url}/absent.csv", f"{web.url}/*.csv"):
            assert 2 == predict.main([bundle, source, str(out)])
            assert f"{source}: no " in capsys.readouterr().err
        assert 2 == predict.main([bundle, url, f"{web.url}/out.jsonl"])
        assert "cannot be written" in capsys.readouterr().err


@pytest.mark.slow
def test_a_run_in_an_object_store(tiny_bundle, files, tmp_path, monkeypatch):
    """Another machine continues it, and its files have the bytes of a local run."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "one"))
    whole = tmp_path / "whole"
    start(tiny_bundle, files, whole)
    start(tiny_bundle, files, tmp_path / "whole.jsonl")
    with serve_s3():
        upload(tmp_path / "in", f"{BUCKET}/in")
        found = find_files(f"{BUCKET}/in/*.jsonl")
        assert (
            [f"{BUCKET}/in/a.jsonl", f"{BUCKET}/in/b.jsonl"] == found == find_files(f"{BUCKET}/in")
        )
        assert [] != find_files(f"{BUCKET}/**/a.jsonl")
        with pytest.raises(DataError, match="no files"):
            find_files(f"{BUCKET}/*.jsonl")
        assert 32 == start(tiny_bundle, found, f"{BUCKET}/out", lasts=2)
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "two"))
        assert 28 == start(tiny_bundle, found, f"{BUCKET}/out")
        assert 60 == start(tiny_bundle, found, f"{BUCKET}/out.jsonl")
        with pytest.raises(DataError, match="has files, but not of a run"):
            start(tiny_bundle, found, f"{BUCKET}/in")
        store = files_at(f"{BUCKET}/out")
        assert {path.name for path in whole.iterdir()} == {*store.list()}
        for path in whole.glob("part-*"):
            with store.open(path.name) as file:
                assert path.read_bytes() == file.read()
        with files_at(BUCKET).open("out.jsonl") as file:
            assert (tmp_path / "whole.jsonl").read_bytes() == file.read()
    assert [] == [path for path in (tmp_path / "two").rglob("*") if path.is_file()]


def test_progress_has_the_rate_and_the_time_left(monkeypatch, capsys):
    moments = iter((0.0, 10.0, 20.0))
    clock = SimpleNamespace(monotonic=lambda: next(moments))
    monkeypatch.setattr("service.bulk.run.time", clock)
    progress = Progress(4000)
    progress.add(250)
    progress.add(3250)
    lines = [
        "250 of 4,000 rows, 25 rows/s, 2 min left",
        "3,500 of 4,000 rows, 175 rows/s, 3 s left",
    ]
    assert lines == capsys.readouterr().err.splitlines()

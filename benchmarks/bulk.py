"""Measure bulk work: processor time per row of `quartet predict`, Ray Data and sentence-transformers, on the same rows.

.venv/bin/python -m benchmarks.bulk BUNDLE --precision int8 --ray .venv-ray/bin/python

Each contender runs in processes of its own with few rows and with many, and the difference counts: a start is not bulk
work. They run one after the other, because waiting threads of torch take processor time.
"""

import argparse
import gzip
import itertools
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.lib import processes
from benchmarks.lib.environments import ROOT
from benchmarks.lib.models import MAX_TOKENS, minilm
from benchmarks.lib.traffic import NEWS
from service.settings import usable_cores

FEW = 512  # rows of the run that is subtracted
READY = "computed"


def main() -> None:
    """Measure, and print a line for each contender; with --contender, be one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--precision", default="int8")
    parser.add_argument("--rows", type=int, default=20_000)
    parser.add_argument("--peer-rows", type=int, default=2000, help="of sentence-transformers")
    parser.add_argument("--ray", metavar="PYTHON", help="an interpreter with Ray")
    parser.add_argument("--data", type=Path, default=NEWS.with_name("train.jsonl.gz"))
    parser.add_argument("--contender", choices=CONTENDERS, help=argparse.SUPPRESS)
    parser.add_argument("--output", type=Path, help=argparse.SUPPRESS)
    own = parser.parse_args()
    if own.contender:
        CONTENDERS[own.contender](own)
        print(READY, flush=True)
        sys.stdin.read()  # until the processor time was read
        return
    runs = {"predict": (sys.executable, own.rows)}
    if own.ray:
        runs["ray"] = own.ray, own.rows
    if own.peer_rows:
        runs["sentence-transformers"] = sys.executable, own.peer_rows
    with tempfile.TemporaryDirectory() as scratch:
        costs = {name: measure(own, Path(scratch), name, *run) for name, run in runs.items()}
    for name, (per_row, start_s) in costs.items():
        ratios = "".join(
            f"{per_row / other:>8.2f} of {peer}"
            for peer, (other, _) in costs.items()
            if peer != name
        )
        print(f"{name:<22}{per_row:>7.2f} ms a row, {start_s:>5.1f} s to start {ratios}")


def measure(
    own: argparse.Namespace, scratch: Path, name: str, python: str, rows: int
) -> tuple[float, float]:
    """Return a contender's processor milliseconds per row, and the processor seconds of its start."""
    spent = []
    for count in (FEW, FEW + rows):
        folder = scratch / f"{name}-{count}"
        folder.mkdir()
        texts = read_texts(own.data, count)
        (folder / "rows.jsonl").write_text(
            "".join(json.dumps({"text": text}) + "\n" for text in texts)
        )
        command = [python, "-m", "benchmarks.bulk", str(own.bundle.resolve()), "--contender", name]
        options = ["--precision", own.precision, "--output", str(folder)]
        with subprocess.Popen(
            [*command, *options], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as process:
            assert process.stdout is not None
            if READY not in map(str.strip, process.stdout):
                raise SystemExit(f"{name} failed")
            spent.append(processes.cpu_s(process.pid))
            process.communicate("")
    few, many = spent
    per_row = (many - few) / rows
    return 1000 * per_row, few - FEW * per_row


def read_texts(data: Path, count: int) -> list[str]:
    """Return this many texts, again from the first where the file has fewer."""
    with gzip.open(data, "rt", encoding="utf-8") as lines:
        texts = [json.loads(line)["text"] for line in lines]
    return list(itertools.islice(itertools.cycle(texts), count))


def run_predict(own: argparse.Namespace) -> None:
    from service.predict import main

    arguments = [str(own.bundle), str(own.output / "rows.jsonl"), str(own.output / "vectors")]
    assert main([*arguments, "--precision", own.precision]) == 0


def run_ray(own: argparse.Namespace) -> None:
    """Run the example of docs/how-to/bulk.md with one actor on all cores."""
    import ray

    from service.bulk.ray_predictor import RayPredictor

    cores = usable_cores()
    environment = {"env_vars": {"PYTHONPATH": str(ROOT)}}
    # Reading and writing have a core of their own, as far as Ray counts.
    ray.init(
        address="local",
        num_cpus=cores + 1,
        runtime_env=environment,
        include_dashboard=False,  # a cluster has one, however many jobs it runs
        log_to_driver=False,
    )
    rows = ray.data.read_json(str(own.output / "rows.jsonl")).repartition(
        target_num_rows_per_block=2048
    )
    rows.map_batches(
        RayPredictor,
        fn_constructor_args=[str(own.bundle), None, None, own.precision],
        batch_format="pyarrow",
        batch_size=2048,
        compute=ray.data.ActorPoolStrategy(size=1),
        num_cpus=cores,
    ).write_parquet(str(own.output / "vectors"))


def run_sentence_transformers(own: argparse.Namespace) -> None:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(minilm()), device="cpu")
    model.max_seq_length = MAX_TOKENS
    with (own.output / "rows.jsonl").open() as lines:
        texts = [json.loads(line)["text"] for line in lines]
    model.encode(texts, batch_size=32)


CONTENDERS = {
    "predict": run_predict,
    "ray": run_ray,
    "sentence-transformers": run_sentence_transformers,
}

if __name__ == "__main__":
    main()

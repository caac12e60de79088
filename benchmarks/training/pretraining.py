"""Compare pretraining objectives: four families of one small size, with one budget of tokens.

    make bench-pretraining ARGS="[--only bert ...] [--seeds 1 2] [--tokens 2e6] [--picture PNG]"

BERT, RoBERTa and ELECTRA have the same layers and different objectives; ModernBERT has other layers, too. All read the
same corpus with one vocabulary, for the same steps at the same learning rate. The results are the loss at masked tokens
of unseen text, and the metrics after fine-tuning on two tasks, compared with the same encoder without pretraining.

All files are kept in --scratch, and the same command resumes there. Several commands may run in parallel on different
families; the last one, on all, prints the table and the JSON line and draws the picture.
"""

import argparse
import dataclasses
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import tokenizers
import torch
from matplotlib import pyplot
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from benchmarks.lib import run_record
from model import finetune, pretrain, tokenizer
from model.checkpoints import reader, writer
from model.data import corpus
from model.data.pretraining_batches import Sampler, Specials
from model.families.registry import FAMILIES
from model.families.spec import Family
from model.heads import make_pretraining

SHAPE = {
    "num_hidden_layers": 4,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "intermediate_size": 512,
}
# ModernBERT's feed-forward has three matrices where BERT's has two: as many parameters. ELECTRA also at its authors'
# rate.
VARIANTS: dict[str, dict[str, Any]] = {
    "bert": {},
    "roberta": {},
    "electra": {},
    "electra-5e-4": {"family": "electra", "lr": 5e-4},
    "modernbert": {"shape": {"intermediate_size": 344}},
}
LENGTH = 64
STEP = 1024  # tokens
TASKS = {"sst2": ("train_sentences", 2), "ag_news": ("train", 1)}  # what is trained on, and epochs
HELD = 1024  # texts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", type=Path, default=Path("../shared/data"))
    parser.add_argument("--scratch", type=Path, default=Path("runs/objectives"))
    parser.add_argument("--tokens", type=float, default=2e6)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--picture", type=Path)
    given = parser.parse_args()
    found = [
        measure(name, seed, int(given.tokens), given.data, given.scratch)
        for seed in given.seeds
        for name in given.only
    ]
    for line in table(found):
        print(line)
    run = run_record.describe_run()
    print(json.dumps({"run": run, "tokens": given.tokens, "found": found}))
    if given.picture:
        draw(found, given.picture)


def measure(name: str, seed: int, tokens: int, data: Path, scratch: Path) -> dict[str, Any]:
    """Pretrain a variant, and fine-tune what came out as well as what went in."""
    own = {"family": name, "lr": 1e-3, **VARIANTS[name]}
    family = FAMILIES[own["family"]]
    words = vocabulary(family, data, scratch)
    out = scratch / f"{name}-{tokens}-{seed}"
    settings = pretrain.PretrainSettings(
        output=str(out / "pretrain"),
        corpus=[str(data / "pretrain/wiki_en_00.txt.xz")],
        tokenizer=str(words),
        family=family.model_type,
        shape={**SHAPE, **own.get("shape", {})},
        max_position_embeddings=LENGTH + 2,
        steps=tokens // STEP,
        phases=[[1, LENGTH]],
        batch_tokens=STEP,
        lr=own["lr"],
        warmup=0.1,
        dropout=0.0,
        precision="fp32",  # the same on every machine
        seed=seed,
        eval_every=max(1, tokens // STEP // 20),
        cache=str(scratch / "cache"),
    )
    done = out / "pretrain" / "metrics.json"
    if not done.is_file():
        before = time.process_time()
        pretrain.pretrain(settings)
        (out / "cpu_seconds.json").write_text(json.dumps(time.process_time() - before))
    fresh = out / "fresh"
    if not fresh.is_dir():
        save_fresh(fresh, settings)
    trained = out / "pretrain" / "checkpoint"
    return {
        "variant": name,
        "seed": seed,
        "cpu_seconds": json.loads((out / "cpu_seconds.json").read_text()),
        "curve": list(curve(out / "pretrain" / "tensorboard")),
        "held_out": held_out(trained, family, words, data, scratch),
        **{
            f"{task}, {kind}": accuracy(task, folder, out / f"{task}-{kind}", seed, data)
            for task in TASKS
            for kind, folder in (("fresh", fresh), ("pretrained", trained))
        },
    }


def vocabulary(family: Family, data: Path, scratch: Path) -> Path:
    """One vocabulary of words' pieces for all, with the family's own special tokens around it."""
    specials = list(dict.fromkeys(family.special_tokens.values()))
    path = scratch / f"tokenizer-{len(specials)}-{family.special_tokens['cls'].strip('[<>]')}.json"
    if not path.is_file():
        text = corpus.documents([data / "pretrain/wiki_en_00.txt.xz"])
        paragraphs = (paragraph for document in text for paragraph in document)
        pieces = dataclasses.replace(family, tokenizer="wordpiece")
        learnt = tokenizer.train(paragraphs, 8192, family=pieces)
        path.parent.mkdir(parents=True, exist_ok=True)
        learnt.save(str(path))
    return path


def save_fresh(folder: Path, settings: pretrain.PretrainSettings) -> None:
    """The encoder as it was before the first step."""
    words = tokenizers.Tokenizer.from_file(settings.tokenizer)
    family, shape = pretrain.read_shape(settings, words)
    torch.manual_seed(settings.seed)
    model = make_pretraining(shape, family.pairs is not None)
    writer.save_pretraining(folder, model, Path(settings.tokenizer))


def held_out(folder: Path, family: Family, words: Path, data: Path, scratch: Path) -> float:
    """The loss at the same hidden tokens of the same unseen texts; ELECTRA's is its generator's."""
    done = folder / "held_out.json"
    if done.is_file():
        return json.loads(done.read_text())
    beside = folder / "generator"
    model = reader.load_pretraining(beside if beside.is_dir() else folder)
    text = corpus.load([data / "pretrain/wiki_en_07.txt.xz"], words, scratch / "cache")
    specials = Specials.of(tokenizers.Tokenizer.from_file(str(words)), family)
    sampler = Sampler(text, specials, pairs=None)
    drawn = {"seed": 1, "size": 32, "length": LENGTH, "rate": 0.15}
    held = [sampler.samples(step=step, **drawn) for step in range(HELD // 32)]
    model.next_sentence = None  # the texts are no pairs
    model.weights = {"mlm": 1.0}
    loss = pretrain.evaluate(model, held)["mlm"]
    done.write_text(json.dumps(loss))
    return loss


def accuracy(task: str, start: Path, out: Path, seed: int, data: Path) -> float:
    """Of one head on its test file, after the same fine-tuning for all."""
    done = out / "accuracy.json"
    if not done.is_file():
        folder = data / "classification" / task
        train, epochs = TASKS[task]
        head = {
            "task": "classification",
            "train": [str(folder / f"{train}.jsonl.gz")],
            "dev": str(folder / "test.jsonl.gz"),
            "batch_size": 32,
        }
        result = finetune.finetune(
            finetune.FinetuneSettings(
                output=str(out),
                heads={task: head},
                init_from=str(start),
                max_length=LENGTH,
                epochs=epochs,
                lr=5e-4,
                dropout=0.1,
                precision="fp32",
                seed=seed,
                eval_every=10**9,  # at the end: nothing is chosen by what it is judged on
                dev_limit=1,
            )
        )
        done.write_text(json.dumps(result["heads"][task]["accuracy"]))
    return json.loads(done.read_text())


def curve(folder: Path) -> Iterator[tuple[float, float]]:
    """Tokens read, and the loss at hidden tokens of fixed batches."""
    events = EventAccumulator(str(folder)).Reload()
    for event in events.Scalars("held/mlm"):
        yield (event.step + 1) * STEP, event.value


def table(found: list[dict[str, Any]]) -> Iterator[str]:
    """Means over the seeds, and each seed's."""
    columns = ["held_out", *(key for key in found[0] if ", " in key), "cpu_seconds"]
    yield f"| variant | {' | '.join(columns)} |"
    yield f"|---|{'---|' * len(columns)}"
    for name in dict.fromkeys(one["variant"] for one in found):
        rows = [one for one in found if one["variant"] == name]
        cells = [told([row[column] for row in rows], column) for column in columns]
        yield f"| {name} | {' | '.join(cells)} |"


def told(values: list[float], column: str) -> str:
    scale, digits = (100, 1) if ", " in column else (1, 0 if "seconds" in column else 3)
    each = ", ".join(f"{scale * value:.{digits}f}" for value in values)
    return f"{scale * statistics.mean(values):.{digits}f} ({each})"


def draw(found: list[dict[str, Any]], picture: Path) -> None:
    """The loss over tokens, and for each task bars per variant: pale without pretraining, a dot for each seed."""
    matplotlib.use("agg")
    figure, panels = pyplot.subplots(1, 1 + len(TASKS), figsize=(11, 3.8), layout="constrained")
    families = list(dict.fromkeys(one["variant"] for one in found))
    colours = dict(
        zip(families, pyplot.rcParams["axes.prop_cycle"].by_key()["color"], strict=False)
    )
    for one in found:
        tokens, losses = zip(*one["curve"], strict=True)
        label = one["variant"] if one["seed"] == found[0]["seed"] else None
        colour = colours[one["variant"]]
        panels[0].plot(np.asarray(tokens) / 1e6, losses, color=colour, label=label)
    panels[0].set(xlabel="million tokens", ylabel="loss at hidden tokens of fixed batches")
    panels[0].legend(fontsize=8)
    panels[0].grid(alpha=0.3)
    for panel, task in zip(panels[1:], TASKS, strict=True):
        lowest = 1.0
        for place, name in enumerate(families):
            for side, kind in ((-0.2, "fresh"), (0.2, "pretrained")):
                values = [one[f"{task}, {kind}"] for one in found if one["variant"] == name]
                alpha = 0.35 if kind == "fresh" else 1.0
                height = 100 * statistics.mean(values)
                panel.bar(place + side, height, 0.38, color=colours[name], alpha=alpha)
                dots = [place + side] * len(values)
                panel.plot(dots, [100 * value for value in values], "k.", markersize=4)
                lowest = min(lowest, *values)
        panel.set_xticks(range(len(families)), families, fontsize=8, rotation=20)
        panel.set(title=f"{task}: accuracy, %", ylim=(100 * lowest - 4, None))
        panel.grid(alpha=0.3, axis="y")
    figure.suptitle("Without pretraining (pale) and with it")
    figure.savefig(picture, dpi=90)
    pyplot.close(figure)


if __name__ == "__main__":
    main()

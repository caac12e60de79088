"""Average the weights of two checkpoints, and calibrate the mean: `python -m model.mean FIRST SECOND OUT --share 0.75`.

SECOND is FIRST after training, so their tensors have equal names and shapes. Such a mean keeps most of what training
added, and most of what it would have lost (Wortsman et al. 2022).
"""

import argparse
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from model import dev_report, evaluate
from model.checkpoints import writer
from model.checkpoints.source import Source, read_source
from model.data import head_rows
from model.heads import EncoderWithHeads
from service.core.encode import Encoder


def average(
    first: EncoderWithHeads, second: EncoderWithHeads, share: float, of_heads: Mapping[str, float]
) -> None:
    """Set each weight of `first` to its weighted mean with `second`, in which `second` has the weight `share`.

    of_heads: another share of some heads, by name
    Raises ValueError where only one of the models has a tensor.
    """
    here, there = first.state_dict(), second.state_dict()
    if odd := sorted(here.keys() ^ there.keys()):
        raise ValueError(f"{odd[0]}: only one of the checkpoints has this tensor")
    shares = {f"heads.{head}.": number for head, number in of_heads.items()}
    mean = {}
    for name, tensor in here.items():
        own = next((number for prefix, number in shares.items() if name.startswith(prefix)), share)
        mean[name] = torch.lerp(tensor, there[name], own)
    first.load_state_dict(mean)


def shift(model: EncoderWithHeads, target: str, amount: float) -> None:
    """Add a number to the bias of the label `HEAD.LABEL`. Raises ValueError for an unknown one."""
    name, _, label = target.partition(".")
    head = model.described.get(name)
    if head is None or label not in head.labels:
        raise ValueError(f"--shift {target}: no head of the checkpoint has this label")
    with torch.no_grad():
        model.heads[name].classifier.bias[head.labels.index(label)] += amount


def fit_temperature(source: Source, name: str, files: list[Path]) -> float:
    """Fit the calibration temperature of a classification head to rows. Raises ValueError for too few rows."""
    head = source.model.described[name]
    rows = [row for file in files for row in head_rows.read(file, head)]
    run = evaluate.torch_run(source.model, [name])
    encoder = Encoder(source.tokenizer, source.max_length)
    fitted = dev_report.fit(rows, evaluate.head_outputs(run, encoder, head, name, rows, 0), head)
    if fitted is None:
        raise ValueError(f"--calibrate {name}: no temperature fits {len(rows)} rows")
    print(
        f"{name}: temperature {fitted.temperature}, expected calibration error {fitted.error_before:.4f},"
        f" {fitted.error_after:.4f} with it"
    )
    return fitted.temperature


def pairs(options: Sequence[str]) -> list[tuple[str, str]]:
    """Split options of the form NAME=VALUE. Raises ValueError for another form."""
    split = [option.partition("=") for option in options]
    if odd := [option for option, (_, equals, _) in zip(options, split, strict=True) if not equals]:
        raise ValueError(f"{odd[0]}: not of the form NAME=VALUE")
    return [(name, value) for name, _, value in split]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m model.mean", description=__doc__)
    parser.add_argument("first", help="a joint checkpoint")
    parser.add_argument("second", help="the same after training")
    parser.add_argument("out", type=Path)
    parser.add_argument("--share", type=float, required=True, help="of the second, from 0 to 1")
    several: dict[str, Any] = {"nargs": "+", "default": []}
    parser.add_argument("--head-share", **several, metavar="HEAD=NUMBER", help="of this head")
    parser.add_argument("--shift", **several, metavar="HEAD.LABEL=NUMBER", help="added to a bias")
    parser.add_argument(
        "--null-threshold", **several, metavar="HEAD=NUMBER", help="of a qa head, see the manifest"
    )
    parser.add_argument("--calibrate", **several, metavar="HEAD=FILE", help="fits temperatures")
    given = parser.parse_args()
    try:
        source = read_source(given.first)
        model = source.model
        of_heads = {name: float(share) for name, share in pairs(given.head_share)}
        average(model, read_source(given.second).model, given.share, of_heads)
        for target, amount in pairs(given.shift):
            shift(model, target, float(amount))
        for name, value in pairs(given.null_threshold):
            update = {"null_threshold": float(value)}
            model.described[name] = model.described[name].model_copy(update=update)
        files: dict[str, list[Path]] = {}
        for name, file in pairs(given.calibrate):
            files.setdefault(name, []).append(Path(file))
        for name, each in files.items():
            update = {"calibration_temperature": fit_temperature(source, name, each)}
            model.described[name] = model.described[name].model_copy(update=update)
        with writer.replacing(given.out) as folder:
            writer.save_joint(folder, model, source.folder / "tokenizer.json")
    except (OSError, ValueError, KeyError) as error:
        raise SystemExit(f"{error}") from None


if __name__ == "__main__":
    main()

"""Train a head on a frozen encoder and write its bundle: `python -m export.head_bundle --init-from BUNDLE ...`.

The bundle has the head's weights, goldens, and a manifest that names the encoder's bundle by hash. It has no graph and
no tokenizer, so it is a few hundred kilobytes.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from export import model_card
from export.pipeline import EXPECTED_ERRORS, write_bundle
from export.verify import COSINE_MARGIN, FP16_COSINE, FP32_TOLERANCE, INT8_COSINE, ParityError
from model.finetune_settings import FinetuneSettings
from model.frozen import FrozenEncoder, TrainedHead, train
from model.run_settings import read_settings, setting
from service.core import bundle
from service.core.bundle_versions import next_version
from service.core.cpu import CPU
from service.core.goldens import Golden, cosine, save_golden
from service.core.manifest import SHARED_VERSION, Manifest
from service.core.session import RUNTIME
from service.core.state_heads import save_heads

GOLDEN, WEIGHTS = "golden.npz", "heads.npz"


class FrozenSettings(FinetuneSettings):
    """The settings of `python -m export.head_bundle`: the settings of fine-tuning, and the bundle to write."""

    out: str = setting(..., "directory of version 1 of the bundle", "bundles/questions")


def golden_outputs(encoder: FrozenEncoder, trained: TrainedHead) -> np.ndarray:
    """Return the head's outputs for the goldens of its encoder, each in a batch of its own."""
    join = np.concatenate if trained.described.per_token else np.stack
    return join([trained.head(states) for states in encoder.golden_states()])


def measure_tolerances(
    encoder: FrozenEncoder, trained: TrainedHead, expected: np.ndarray
) -> dict[str, dict[str, Any]]:
    """Return the tolerance of the goldens for each precision of the encoder. Raises ParityError for a low cosine."""
    manifest, name = encoder.bundle.manifest, trained.name
    tolerances: dict[str, dict[str, Any]] = {}
    for precision in manifest.precisions:
        if precision == manifest.default_precision == "fp32":
            tolerances[precision] = {"max_difference": 10 * FP32_TOLERANCE}
            continue
        least = FP16_COSINE - COSINE_MARGIN  # of a GPU, where it was not measured
        if manifest.graphs_for(CPU, precision):
            found = golden_outputs(FrozenEncoder(encoder.bundle, precision), trained)
            if not (least := cosine(expected, found)) >= INT8_COSINE:
                raise ParityError(
                    f"{name}: {precision} has cosine {least:.4f} with {manifest.default_precision}"
                    f" (at least {INT8_COSINE})"
                )
            least -= COSINE_MARGIN
        tolerances[precision] = {"min_cosine": {name: round(least, 3)}}
    return tolerances


def write(encoder: FrozenEncoder, trained: TrainedHead, out: Path, data: str) -> Manifest:
    """Write the next version of a head's bundle, and return its manifest. Raises ParityError."""
    base, name, golden = encoder.bundle.manifest, trained.name, encoder.bundle.golden
    version, folder = next_version(out)
    expected = golden_outputs(encoder, trained)
    with tempfile.TemporaryDirectory() as scratch:
        full = Path(scratch)
        save_heads(full / WEIGHTS, {name: trained.head})
        inputs = golden.input_ids, golden.token_type_ids, golden.lengths
        save_golden(full / GOLDEN, Golden(*inputs, {name: expected}))
        metrics = {metric: round(100 * value, 2) for metric, value in trained.metrics.items()}
        manifest = Manifest.model_validate(
            {
                "format_version": SHARED_VERSION,
                "name": out.name,
                "version": str(version),
                "heads": {name: trained.described},
                "default_precision": base.default_precision,
                "max_length": base.max_length,
                "vocabulary": base.vocabulary,
                "encoder": {
                    "id": base.id,
                    "sha256": encoder.bundle.sha256,
                    "weights": bundle.describe_file(full / WEIGHTS),
                    "layers": {name: trained.head.layers},
                },
                "goldens": {
                    **bundle.describe_file(full / GOLDEN),
                    "tolerance": measure_tolerances(encoder, trained, expected),
                },
                "metrics": {name: {base.default_precision: metrics}} if metrics else {},
                "provenance": {
                    **base.provenance.model_dump(),
                    "recipe": f"a head on the frozen states of {base.id}",
                    "runtime": RUNTIME,
                },
                "weights_license": base.weights_license,
            }
        )
        training = f"A head on the frozen states of `{base.id}`, trained on {trained.examples:,} examples of {data}."
        metadata = {
            "description": f"A head for the encoder `{base.id}`, which must be served with it.",
            "training": f"{training} Measured on {trained.origin}." if trained.origin else training,
        }
        card = model_card.render(manifest, metadata, {})
        with bundle.writing(folder) as partial:
            write_bundle(manifest, full, partial, card)
    return manifest


def main() -> int:
    """Train a head, write its bundle, and print what was measured. Returns the exit status."""
    s = read_settings(FrozenSettings, __doc__ or "")
    try:
        encoder = FrozenEncoder(bundle.load(s.init_from))
        trained = train(s, encoder, print)
        for metric, value in trained.metrics.items():
            print(f"{trained.name}: {metric} {100 * value:.2f} on {trained.origin}")
        manifest = write(encoder, trained, Path(s.out), Path(s.data).name)
        print(f"{manifest.id}: on {encoder.bundle.manifest.id}")
    except EXPECTED_ERRORS as error:
        print(f"quartet: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`quartet replay RECEIPT TEXT`: make an answer again from its receipt, and say what is equal and what differs."""

import argparse
import asyncio
import base64
import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from service.core import bundle_cache
from service.core.bundle_versions import MANIFEST
from service.variables import variable

# The largest distance of numbers that count as equal, as a share of their length, by precision.
TOLERANCE = {"fp32": 1e-4, "fp16": 5e-3, "int8": 0.05}
NAMES = ("bundle", "precision", "provider", "runtime", "processor", "heads")


class ReplayError(Exception):
    """An answer that cannot be made again; the message has the reason."""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = argparse.ArgumentParser(
        "quartet replay",
        description="Make an answer again from its receipt (the response header X-Quartet-Receipt), and compare both. "
        "The exit status is 0 if labels and spans are equal, and numbers within the tolerance of the precision: "
        f"{', '.join(f'{name} {most:g}' for name, most in TOLERANCE.items())} of their length. "
        f"With {variable('receipt_key')}, the signature is checked, too.",
    )
    parser.add_argument("receipt", metavar="RECEIPT", help="the value of the header, or @FILE")
    parser.add_argument(
        "texts", nargs="+", metavar="TEXT", help="the texts of the request in their order, or @FILE"
    )
    parser.add_argument(
        "--model",
        type=Path,
        metavar="BUNDLE",
        help="default: the one in bundles/ or in the cache with the hash of the receipt",
    )
    return parser


def main() -> int:
    """Make the answer again, and print the comparison. Returns the exit status."""
    arguments = parser().parse_args()
    # Here, so that `--help` does not wait for these imports.
    from service.api import receipts
    from service.core.bundle import BundleError
    from service.core.session import ProviderError

    try:
        receipt, *texts = (
            Path(one[1:]).read_text(encoding="utf-8") if one.startswith("@") else one
            for one in (arguments.receipt, *arguments.texts)
        )
        key = os.environ.get(variable("receipt_key"), "")
        old, is_signed = receipts.unseal(receipt, key)
        folder = arguments.model or find_bundle(old["bundle"])
        new = asyncio.run(answer_again(folder, old, texts, key))
    except (BundleError, ProviderError, ReplayError) as error:
        print(f"quartet: replay: {error}", file=sys.stderr)
        return 3
    except (OSError, ValueError, KeyError) as error:
        print(f"quartet: replay: {error}", file=sys.stderr)
        return 2
    lines, is_equal = compare(old, new)
    signature = {None: f"not checked: set {variable('receipt_key')}", True: "valid", False: "WRONG"}
    print("\n".join([f"signature: {signature[is_signed]}", *lines]))
    return 0 if is_equal and is_signed is not False else 1


def find_bundle(sha256: str, *others: Path) -> Path:
    """Return the bundle in bundles/, in the cache or of `others` whose manifest has a hash. Raises ReplayError."""
    cached = (entry.bundle for entry in bundle_cache.entries())
    known = [*Path("bundles").glob("*"), *cached, *others]
    for folder in sorted(folder for folder in known if (folder / MANIFEST).is_file()):
        if hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest() == sha256:
            return folder
    raise ReplayError(
        f"no bundle in bundles/ and in the cache has the hash {sha256[:12]}: name one by --model"
    )


async def answer_again(
    folder: Path, old: Mapping[str, Any], texts: Sequence[str], key: str
) -> dict[str, Any]:
    """Send the request of a receipt to a bundle, and return the record of the new receipt. Raises ReplayError."""
    from service.api import receipts
    from service.bulk.predictor import post
    from service.core.bundle import read_manifest
    from service.embedded import EmbeddedService

    left = iter(texts)
    try:
        body = receipts.put(old["body"], left)
    except (StopIteration, RuntimeError):
        raise ReplayError(f"the request had more than {len(texts)} texts") from None
    if more := len([*left]):
        raise ReplayError(f"the request had {len(texts) - more} texts, not {len(texts)}")
    if isinstance(body, dict):
        body.pop("model", None)
    bundles = [folder]
    if encoder := read_manifest(folder).encoder:  # of a head bundle
        bundles.append(find_bundle(encoder.sha256, *folder.resolve().parent.iterdir()))
    async with EmbeddedService(*bundles, precision=old["precision"]) as service:
        asked = {receipts.HEADER.lower().encode(): b"1"}
        content = json.dumps(body).encode()
        status, answer, headers = await post(service.app, old["path"], content, asked)
    if status != 200:
        raise ReplayError(f"{folder} answers {status}: {answer}")
    made = headers.get(receipts.HEADER.lower().encode(), b"").decode()
    return receipts.unseal(made, key)[0]


def compare(old: Mapping[str, Any], new: Mapping[str, Any]) -> tuple[list[str], bool]:
    """Return a line for each part of two receipts, and whether texts and answers are equal."""
    lines = [
        f"{name}: equal" if old[name] == new[name] else f"{name}: {old[name]}, now {new[name]}"
        for name in NAMES
    ]
    alike = {name: old[name] == new[name] for name in ("texts", "decisions")}
    lines += [f"{name}: {'equal' if same else 'DIFFERENT'}" for name, same in alike.items()]
    was, now = (
        np.frombuffer(base64.b64decode(one["numbers"]), "<f4").astype(np.float64)
        for one in (old, new)
    )
    apart = float(np.linalg.norm(was - now) / (np.linalg.norm(was) or 1.0))
    most = TOLERANCE[new["precision"]]
    is_near = apart <= most
    verdict = "within the tolerance" if is_near else "BEYOND the tolerance"
    lines.append(f"numbers: differ by {apart:.1e} of their length, {verdict}, {most:g}")
    return lines, all(alike.values()) and is_near

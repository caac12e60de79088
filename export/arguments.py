"""The command line of `python -m export`, apart from it because it imports nothing slow."""

import argparse
from pathlib import Path
from typing import get_args

from service.core.manifest import PoolingMode, Task
from service.core.program_name import program_name

DESCRIPTION = """\
Export a checkpoint to a verified bundle, which a service serves.

CHECKPOINT is a directory in the hub's layout, trained here or elsewhere, or a hub name. It may also be an ONNX graph
of any encoder: its file, or a directory or hub name that has a graph and no other weights. Without torch, the graph is
exported where there are both. Every graph is checked before OUT appears; when a check fails, the exit status is 1 and
nothing is left.
"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = argparse.ArgumentParser(program_name("export"), description=DESCRIPTION)
    parser.add_argument(
        "checkpoint", help="a local directory, or a hub name: NAME or NAME@REVISION"
    )
    parser.add_argument("--revision", help="a branch, tag or commit of a hub name")
    parser.add_argument(
        "--onnx",
        action="store_true",
        help="use the graph of a directory that has both a graph and other weights",
    )
    parser.add_argument("out", type=Path, help="the bundle's directory")
    parser.add_argument(
        "--precision",
        nargs="+",
        choices=["fp32", "int8", "fp16"],
        dest="precisions",
        help="graphs to write, the default first: fp32 and int8 for CPUs, fp16 for CUDA; default: fp32 int8",
    )
    parser.add_argument(
        "--default-precision",
        choices=["fp32", "int8"],
        help="what the service computes on a CPU unless its setting `precision` selects another; the first of "
        "--precision by default",
    )
    parser.add_argument("--name", help="the model's name in requests; OUT's name by default")
    parser.add_argument("--version", default="1", help="the bundle's version; default: 1")
    parser.add_argument(
        "--max-length", type=int, help="tokens; the checkpoint's own by default, up to 8,192"
    )
    parser.add_argument(
        "--eval",
        nargs="+",
        default=[],
        metavar="HEAD=FILE",
        help="measure heads on labeled files, and write the metrics into the bundle",
    )
    parser.add_argument(
        "--max-changed",
        type=float,
        default=0.05,
        help="the largest share of answers that int8 may change where --eval gives data; default: %(default)s",
    )
    parser.add_argument(
        "--provenance",
        type=Path,
        help="a TOML file of data sets and terms, for the manifest and the model card",
        metavar="FILE",
    )
    parser.add_argument(
        "--task",
        choices=[task for task in get_args(Task) if task != "hidden-states"],
        help="the head to read, where architectures in config.json does not name it; "
        "embedding reads the encoder alone of any checkpoint",
    )
    parser.add_argument(
        "--adapter",
        metavar="FOLDER",
        help="a folder of the checkpoint with a LoRA adapter of peft, which is merged into the weights",
    )
    parser.add_argument(
        "--pooling",
        choices=[*get_args(PoolingMode), "none"],
        help="how the vectors of tokens become one, where no file of the checkpoint declares it; none for an ONNX "
        "graph whose output is pooled",
    )
    parser.add_argument(
        "--output",
        nargs="+",
        default=[],
        metavar="NAME",
        help="the output of an ONNX graph, where it does not have the usual name; two for qa",
    )
    parser.add_argument(
        "--states",
        action="store_true",
        help="also give the last hidden states, which the heads of other bundles read (quartet train --frozen)",
    )
    parser.add_argument(
        "--attention",
        action="store_true",
        help="also write a graph of the attention weights, which the playground draws; it shares the fp32 weights",
    )
    parser.add_argument(
        "--no-memory",
        action="store_false",
        dest="memory",
        help="do not measure the memory of the graphs, so that equal checkpoints make equal bundles",
    )
    parser.add_argument(
        "--dimensions",
        nargs="+",
        type=int,
        default=[],
        metavar="D",
        help="numbers of dimensions for which Matryoshka training optimized vectors; the checkpoint's own by default",
    )
    parser.add_argument(
        "--calibrate",
        type=Path,
        metavar="FILE",
        help="a file with one text a line, which an int8 graph is calibrated with; also stores the ranges of their "
        "vectors, so that requests may have int8 vectors",
    )
    parser.add_argument(
        "--encoder",
        type=Path,
        metavar="DIR",
        help="also write the encoder to DIR in half precision, as a checkpoint that training can start from",
    )
    parser.add_argument("--replace", action="store_true", help="replace OUT if it is a bundle")
    parser.add_argument(
        "--next-version",
        action="store_true",
        help="where OUT exists, write OUT-v2 with version 2, then OUT-v3, and so on; OUT may be served meanwhile",
    )
    return parser

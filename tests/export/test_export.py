"""`python -m export`: what it writes, what it refuses, and that a refusal leaves nothing behind."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import numpy_helper
from safetensors.torch import load_file

from export import from_checkpoint, trace_graphs, verify
from export.__main__ import main, read_request
from export.comparison import compare_graphs
from export.drafts import choose_max_length
from export.goldens import run_torch
from export.passes import quantize
from export.passes.portable import make_portable
from export.provenance import read_metadata
from model.checkpoints.reader import load_encoder, load_model, read_teachers
from model.checkpoints.writer import save_joint
from model.heads import EncoderWithHeads
from service.core import bundle
from service.core.encode import Encoder
from service.core.manifest import Head
from service.core.session import RUNTIME, SessionOptions, open_session
from tests import samples
from tests.json_files import edit_json
from tests.tiny import HEADS

pytestmark = [pytest.mark.usefixtures("scratch"), pytest.mark.slow]

ROOT = Path(__file__).parents[2]
Spoil = Callable[[Path], None]

FULL = {
    "README.md",
    "fp32.onnx",
    "fp32.portable.onnx",
    "golden.npz",
    "int8.onnx",
    "manifest.json",
    "tokenizer.json",
    "weights.bin",
}

PROVENANCE = """
description = "A model that knows nothing."
training = "It was not."
limits = "All there are."
weights_license = "CC0-1.0"

[provenance]
recipe = "nothing.toml"
seed = 7

[[provenance.datasets]]
name = "made-up"
origin = "these tests"
terms = "none"
commercial_use = "yes"
used_for = "nothing"

[[provenance.datasets]]
key = "conll2003"
used_for = "nothing either"
"""


def export(checkpoint: Path, out: Path, *flags: str | Path) -> int:
    arguments = [str(checkpoint), str(out), "--no-memory", "--max-length", "64"]
    return main([*arguments, *map(str, flags)])


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


Refused = Callable[..., None]


@pytest.fixture
def assert_refused(out: Path, capsys: pytest.CaptureFixture[str]) -> Refused:
    """Export: status 1, one line with the reason, and no file next to OUT, in it, or among temporary files."""

    def check(said: str, checkpoint: Path, *flags: str | Path) -> None:
        status = export(checkpoint, out, *flags)
        errors = capsys.readouterr().err
        assert (1, 1) == (status, errors.count("\n"))
        assert errors.startswith("export: ")
        assert said in errors
        assert [] == [*out.parent.iterdir()]
        assert [] == [*(out.parent.parent / "scratch").iterdir()]

    return check


# -- what is written ------------------------------------------------------------------------------


class TestFullBundle:
    def test_files(self, tiny_bundle):
        """By default a bundle has all graphs, and no file that the manifest does not list."""
        manifest = bundle.load(tiny_bundle).manifest
        assert FULL == files(tiny_bundle)
        assert FULL - {"README.md", "manifest.json"} == set(manifest.files())

    def test_manifest(self, tiny_bundle):
        """The manifest names the model, its heads in their order, and each graph."""
        manifest = bundle.load(tiny_bundle).manifest
        assert ("tiny@1", 512, "fp32") == (
            manifest.id,
            manifest.max_length,
            manifest.default_precision,
        )
        assert [*HEADS.items()] == [*manifest.heads.items()]
        graphs = [(g.precision, g.layout, g.provider) for g in manifest.graphs]
        assert [
            ("fp32", "packed", "any"),
            ("fp32", "portable", "any"),
            ("int8", "packed", "cpu"),
        ] == graphs
        assert RUNTIME == manifest.provenance.runtime

    def test_fp32_graphs_share_their_weights(self, tiny_bundle):
        """Both fp32 graphs name the one weight file; the int8 graph has its own within."""
        weights = [g.weights and g.weights.file for g in bundle.load(tiny_bundle).manifest.graphs]
        assert ["weights.bin", "weights.bin", None] == weights
        largest = max(
            (tiny_bundle / f"{name}.onnx").stat().st_size for name in ("fp32", "fp32.portable")
        )
        assert largest < 0.1 * (tiny_bundle / "weights.bin").stat().st_size

    def test_goldens(self, tiny_bundle, tiny_checkpoint):
        """Goldens are PyTorch's outputs; fp32 must meet them closely, int8 by a cosine of each head."""
        opened = bundle.load(tiny_bundle)
        tolerance = opened.manifest.goldens.tolerance
        assert 1e-3 == tolerance["fp32"].max_difference
        assert set(HEADS) == set(tolerance["int8"].min_cosine)
        assert all(0.9 < least < 1 for least in tolerance["int8"].min_cosine.values())
        assert 512 == opened.golden.lengths.max()
        assert 2 == opened.golden.lengths.min()

    def test_tokenizer_does_not_cut(self, tiny_bundle):
        """The tokenizer has no truncation and no padding: cutting is the encoder's."""
        written = json.loads((tiny_bundle / "tokenizer.json").read_text(encoding="utf-8"))
        assert (None, None) == (written["truncation"], written["padding"])

    def test_card(self, tiny_bundle):
        """The card says what each head gives and how each graph agreed with PyTorch."""
        card = (tiny_bundle / "README.md").read_text(encoding="utf-8")
        assert card.startswith("# tiny 1\n")
        assert "| `sentiment` | classification | negative, neutral, positive |" in card
        assert "| `embeddings` | embedding | 64 numbers, mean pooling |" in card
        assert "| fp32 packed | differs from PyTorch by " in card
        assert "| int8 packed | against fp32 on the goldens: sentiment cosine " in card

    @pytest.mark.parametrize("precision", ["fp32", "int8"])
    def test_it_serves(self, precision, tiny_bundle):
        """Its goldens hold where it is opened."""
        opened = bundle.load(tiny_bundle)
        session = open_session(opened, precision=precision, options=SessionOptions(threads=1))
        assert (precision, "packed") == (session.graph.precision, session.graph.layout)


def test_slim(tiny_checkpoint, out):
    """Asked for int8 alone, a bundle holds no fp32 graph and no fp32 weights, and serves."""
    assert 0 == export(tiny_checkpoint, out, "--precision", "int8")
    assert FULL - {"fp32.onnx", "fp32.portable.onnx", "weights.bin"} == files(out)
    opened = bundle.load(out)
    assert (("int8",), "int8") == (opened.manifest.precisions, opened.manifest.default_precision)
    assert {"int8"} == set(opened.manifest.goldens.tolerance)
    assert "int8" == open_session(opened, options=SessionOptions(threads=1)).graph.precision


def test_exact_only(tiny_checkpoint, out):
    """Asked for fp32 alone, a bundle holds the two graphs that share weights."""
    assert 0 == export(tiny_checkpoint, out, "--precision", "fp32")
    assert FULL - {"int8.onnx"} == files(out)


def test_half(gpu_bundle):
    """Asked for fp16 too, a bundle holds CUDA's graph with weights of its own, and what the goldens allow it."""
    manifest = bundle.load(gpu_bundle).manifest
    assert FULL - {"int8.onnx"} | {"fp16.onnx", "fp16.weights.bin"} == files(gpu_bundle)
    assert ("fp32", ("fp32", "fp16")) == (manifest.default_precision, manifest.precisions)
    tolerance = manifest.goldens.tolerance["fp16"]
    assert dict.fromkeys(HEADS, verify.FP16_COSINE) == tolerance.min_cosine
    card = (gpu_bundle / "README.md").read_text(encoding="utf-8")
    assert "| fp16 packed | against fp32 on the goldens: sentiment cosine 0.9999" in card
    assert "GPU" in card


def test_half_is_never_the_default(tiny_checkpoint, out, tmp_path, decided):
    """Though fp16 be named first, a CPU's default is what it can run; that is what labelled data measures, too."""
    data = write_rows(tmp_path / "dev.jsonl", decided)
    assert 0 == export(tiny_checkpoint, out, "--precision", "fp16", "int8", "--eval", data)
    manifest = bundle.load(out).manifest
    assert ("int8", {"int8", "fp16"}) == (manifest.default_precision, {*manifest.precisions})
    assert {"fp32", "int8"} == set(manifest.metrics["sentiment"])


def test_first_precision_is_the_default(tiny_checkpoint, out):
    """The precision that is named first is what `auto` serves; name, version and length are as asked."""
    flags = ("--precision", "int8", "fp32", "--name", "BAAI/other", "--version", "2.1")
    assert 0 == export(tiny_checkpoint, out, *flags)
    manifest = bundle.load(out).manifest
    assert ("int8", "BAAI/other@2.1", 64) == (
        manifest.default_precision,
        manifest.id,
        manifest.max_length,
    )


def test_export_is_reproducible(tiny_checkpoint, out):
    """The same checkpoint makes the same bundle, byte for byte."""
    other = out.with_name("again")
    assert [0, 0] == [export(tiny_checkpoint, path, "--name", "tiny") for path in (out, other)]
    for name in FULL:
        assert (out / name).read_bytes() == (other / name).read_bytes(), name


def test_provenance(tiny_checkpoint, out, tmp_path):
    """The contents of the provenance file are in the manifest and on the card."""
    (tmp_path / "told.toml").write_text(PROVENANCE)
    assert 0 == export(tiny_checkpoint, out, "--provenance", tmp_path / "told.toml")
    manifest = bundle.load(out).manifest
    assert ("CC0-1.0", "nothing.toml", 7) == (
        manifest.weights_license,
        manifest.provenance.recipe,
        manifest.provenance.seed,
    )
    named = [(data.name, data.commercial_use) for data in manifest.provenance.datasets]
    assert [("made-up", "yes"), ("CoNLL-2003 English", "no")] == named
    card = (out / "README.md").read_text()
    for told in (
        "A model that knows nothing.",
        "## How it was trained\n\nIt was not.",
        "| made-up | nothing | these tests | none | yes |",
        "| CoNLL-2003 English | nothing either | https://www.clips.uantwerpen.be/conll2003/ner | research use | no |",
        "## Limits\n\nAll there are.",
        "Weights: CC0-1.0.",
        "Do the terms of the data allow commercial use? no: CoNLL-2003 English\n",
    ):
        assert told in card


def test_tables_of_the_card(tiny_checkpoint, out, tmp_path):
    """A bar in a cell ends no cell, and a card without data sets does not refer to them."""
    (tmp_path / "told.toml").write_text(PROVENANCE.replace("made-up", "made|up"))
    assert 0 == export(tiny_checkpoint, out, "--provenance", tmp_path / "told.toml")
    card = (out / "README.md").read_text()
    assert r"| made\|up | nothing |" in card
    assert "terms of their own, above" in card
    assert 0 == export(tiny_checkpoint, out, "--replace")
    assert "above" not in (out / "README.md").read_text()


def test_terms_of_each_head_are_on_the_card(tiny_checkpoint, out, tmp_path):
    """If the terms differ, a table has the terms of each head."""
    told = PROVENANCE.replace('used_for = "nothing either"', 'used_for = "entities"')
    assert told != PROVENANCE
    (tmp_path / "told.toml").write_text(told)
    assert 0 == export(tiny_checkpoint, out, "--provenance", tmp_path / "told.toml")
    card = (out / "README.md").read_text()
    assert "| `sentiment` | yes |\n" in card
    assert "| `entities` | no: CoNLL-2003 English |\n" in card


TAUGHT = '{"teachers": ["a large model", "another"]}'


def taught_copy(folder: Path, told: str, to: Path) -> Path:
    """A checkpoint that names its teachers."""
    shutil.copytree(folder, to)
    (to / "provenance.json").write_text(told)
    return to


@pytest.mark.parametrize("training", ["", 'training = "In a day."'])
def test_the_teachers_of_a_checkpoint(training, tiny_checkpoint, out, tmp_path):
    """The teachers that a checkpoint names are in the manifest and on the card, next to the given provenance."""
    student = taught_copy(tiny_checkpoint, TAUGHT, tmp_path / "student")
    (tmp_path / "told.toml").write_text(f"{training}\n[provenance]\nseed = 7\n")
    assert 0 == export(student, out, "--provenance", tmp_path / "told.toml")
    told = bundle.load(out).manifest.provenance
    assert (told.teachers, told.seed) == (("a large model", "another"), 7)
    said = "Distilled from `a large model` and `another`."
    expected = f"{said}\n\nIn a day." if training else said
    assert f"## How it was trained\n\n{expected}\n\n#" in (out / "README.md").read_text()


@pytest.mark.parametrize(
    ("front", "expected"),
    [
        ("---\nlanguage: en\nlicense: apache-2.0\n---\n", "apache-2.0"),
        ("---\r\nlicense:\r\n- mit\r\n---\r\n", "mit"),
        ("---\nlicense: other\nlicense_name: 'of-its-own'\n---\n", "of-its-own"),
        ("# Model\n\nlicense: mit\n", "no license is named"),
    ],
)
def test_the_license_of_a_checkpoint(front, expected, tiny_checkpoint, out, tmp_path):
    """The front matter of its card names it; `weights_license` replaces it."""
    folder = shutil.copytree(tiny_checkpoint, tmp_path / "licensed")
    (folder / "README.md").write_text(front, newline="")
    assert 0 == export(folder, out, "--precision", "fp32")
    assert f"## Terms\n\nWeights: {expected}.\n" in (out / "README.md").read_text()
    (tmp_path / "told.toml").write_text('weights_license = "CC0-1.0"')
    assert 0 == export(
        folder, out, "--precision", "fp32", "--replace", "--provenance", tmp_path / "told.toml"
    )
    assert "CC0-1.0" == bundle.load(out).manifest.weights_license


TRAINED = {
    "base": "a/base",
    "license": "mit",
    "heads": {
        "mood": {
            "examples": 1216,
            "files": ["a.csv"],
            "metrics": {"accuracy": 0.5},
            "measured_on": "24 of 1,240 rows of a.csv",
        }
    },
}


def test_the_card_of_a_trained_checkpoint(tiny_checkpoint, out, tmp_path, capsys):
    """It has the base model with its license, the rows, and the scores on those that were held out."""
    trained = taught_copy(tiny_checkpoint, json.dumps({"training": TRAINED}), tmp_path / "trained")
    assert 0 == export(trained, out, "--precision", "fp32")
    card = (out / "README.md").read_text()
    for text in (
        "Trained with Quartet from the base model `a/base` (license: mit).",
        "`mood`: 1,216 examples of a.csv. Before export: accuracy 0.5000, on 24 of 1,240 rows of a.csv.",
        "Weights: mit.",
    ):
        assert text in card
    (trained / "provenance.json").write_text(json.dumps({"training": {"base": "a"}}))
    assert 1 == export(trained, out, "--precision", "fp32", "--replace")
    assert "provenance.json: training: KeyError('license')" in capsys.readouterr().err


def test_the_encoder_is_a_checkpoint(tiny_checkpoint, out, tmp_path, capsys):
    """`--encoder` writes half-precision tensors that training can start from, with the names of the teachers."""
    student = taught_copy(tiny_checkpoint, TAUGHT, tmp_path / "student")
    folder = tmp_path / "encoder"
    assert export(student, out, "--precision", "fp32", "--encoder", folder) == 0

    dtypes = {tensor.dtype for tensor in load_file(folder / "model.safetensors").values()}
    assert dtypes == {torch.float16}
    written, expected = load_encoder(folder, pooler=False), load_model(student).encoder
    for name, tensor in expected.state_dict().items():
        torch.testing.assert_close(written.state_dict()[name], tensor, rtol=1e-3, atol=1e-5)
    assert read_teachers(folder) == ["a large model", "another"]
    assert (folder / "tokenizer.json").read_bytes() == (out / "tokenizer.json").read_bytes()

    capsys.readouterr()
    assert export(student, out.with_name("other"), "--encoder", folder) == 1
    assert f"{folder} exists; use --replace" in capsys.readouterr().err


def test_other_folders_are_not_replaced_by_an_encoder(tiny_checkpoint, out, tmp_path, capsys):
    """`--replace` replaces a checkpoint only."""
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "letter.txt").write_text("keep me")
    assert export(tiny_checkpoint, out, "--encoder", tmp_path / "notes", "--replace") == 1
    assert "is no checkpoint" in capsys.readouterr().err
    assert (tmp_path / "notes" / "letter.txt").read_text() == "keep me"


def test_a_checkpoint_without_teachers(tiny_bundle):
    """Without teachers, the manifest names none."""
    assert () == bundle.load(tiny_bundle).manifest.provenance.teachers
    assert "Distilled" not in (tiny_bundle / "README.md").read_text()


def test_teachers_have_names(tiny_checkpoint, tmp_path, assert_refused):
    """Anything else is refused before anything is traced."""
    student = taught_copy(tiny_checkpoint, '{"teachers": [7]}', tmp_path / "student")
    assert_refused("teachers: [7] is no list of names", student)


# -- replacing ------------------------------------------------------------------------------------


def test_existing_out_is_refused(tiny_checkpoint, out, capsys):
    """What lies at OUT already is not touched."""
    out.mkdir()
    (out / "precious").touch()
    assert 1 == export(tiny_checkpoint, out)
    assert f"export: {out} exists; use --replace" in capsys.readouterr().err
    assert {"precious"} == files(out)


def test_replace(tiny_checkpoint, out):
    """Told to, an export replaces the bundle at OUT, whole."""
    out.mkdir()
    (out / "manifest.json").touch()
    (out / "precious").touch()
    assert 0 == export(tiny_checkpoint, out, "--precision", "int8", "--replace")
    assert "precious" not in files(out)
    assert {"tiny"} == files(out.parent)


def test_what_is_no_bundle_is_not_replaced(tiny_checkpoint, out, capsys):
    """A directory of bundles, or a checkpoint, is refused before anything is traced, and keeps all."""
    (out / "bundle").mkdir(parents=True)
    (out / "bundle" / "manifest.json").touch()
    assert 1 == export(tiny_checkpoint, out, "--replace")
    said = capsys.readouterr()
    assert f"export: {out} is not replaced: it is not a bundle" in said.err
    assert "tracing" not in said.out
    assert ({"bundle"}, {"manifest.json"}) == (files(out), files(out / "bundle"))


def test_failed_replacement_keeps_the_old(tiny_checkpoint, out, monkeypatch):
    """An export that fails leaves the bundle that it was to replace."""
    out.mkdir()
    (out / "manifest.json").touch()
    break_graph(monkeypatch)
    assert 1 == export(tiny_checkpoint, out, "--replace")
    assert ({"manifest.json"}, {"tiny"}) == (files(out), files(out.parent))


def test_graphs_are_compared_at_the_end(tiny_bundle):
    """The table has each precision with its speed relative to fp32, and the options that select one."""
    table = compare_graphs(tiny_bundle, {"fp32 packed": "equal", "int8 packed": "near"})
    _, fp32, int8, choice = table.splitlines()
    assert ["fp32", "1.0", "MB", "equal"] == [*fp32.split()[:2], *fp32.split()[3:]]
    assert ("int8", "near") == (int8.split()[0], int8.split()[-1])
    assert 0 < float(int8.split()[1])
    assert "--precision fp32 or --precision int8" in choice


@pytest.mark.parametrize(("flags", "length"), [([], 8192), (["--max-length", "16384"], 16384)])
def test_long_texts_on_request_only(flags, length, tiny_checkpoint):
    """A model of 32,768 positions reads 8,192 tokens, unless the command states more."""
    request = read_request([str(tiny_checkpoint), "out", *flags])
    assert length == choose_max_length(request, 32768)


def test_the_default_precision_may_be_any_of_the_graphs(tiny_checkpoint):
    """It comes first; a precision without a graph is refused."""
    folder = str(tiny_checkpoint)  # a name of the hub would be looked up
    request = read_request([folder, "out", "--default-precision", "int8"])
    assert (("int8", "fp32"), "int8") == (request.precisions, request.default_precision)
    with pytest.raises(SystemExit):
        read_request([folder, "out", "--precision", "fp32", "--default-precision", "int8"])


@pytest.mark.parametrize(
    ("flags", "status", "said"),
    [
        (["--help"], 0, "--pooling"),
        (["CHECKPOINT", "out"], 1, "a checkpoint needs onnx, an ONNX graph does not: pip install"),
    ],
)
def test_without_the_packages_of_training(flags, status, said, tiny_checkpoint):
    """An installation that only serves has the help, and learns which extra is missing."""
    code = (
        "import sys; sys.modules.update(onnx=None, torch=None, transformers=None);"
        "from export.__main__ import main; sys.exit(main(sys.argv[1:]))"
    )
    flags = [flag.replace("CHECKPOINT", str(tiny_checkpoint)) for flag in flags]
    ended = subprocess.run(
        [sys.executable, "-c", code, *flags], capture_output=True, text=True, check=False
    )
    assert status == ended.returncode
    assert said in ended.stdout + ended.stderr
    assert "Traceback" not in ended.stderr


def test_numpy_has_no_threads_that_wait():
    """Threads that wait between the steps of rounding cost several times the processor time of the steps."""
    code = (
        "import export.__main__, os, numpy;"
        "x = numpy.ones((600, 600)); x @ x; print(len(os.listdir('/proc/self/task')))"
    )
    environment = {k: v for k, v in os.environ.items() if not k.endswith("_NUM_THREADS")}
    printed = subprocess.check_output([sys.executable, "-c", code], text=True, env=environment)
    assert 1 == int(printed)


# -- refusals -------------------------------------------------------------------------------------


def change(name: str, **fields: Any) -> Spoil:
    """Set fields of a JSON file."""

    def spoil(folder: Path) -> None:
        edit_json(folder / name, **fields)

    return spoil


def drop(*names: str) -> Spoil:
    return lambda folder: [(folder / name).unlink() for name in names] and None


def be(architecture: str) -> Spoil:
    def spoil(folder: Path) -> None:
        (folder / "heads.json").unlink()
        change("config.json", architectures=[architecture])(folder)

    return spoil


def add_masks(folder: Path) -> None:
    """Add a fill-mask head whose parameters are random."""
    model = load_model(folder)
    rows = model.config.vocab_size
    head = Head(task="fill-mask", mask_token_id=4, vocabulary_size=rows)
    made = EncoderWithHeads(model.config, model.described | {"masks": head})
    made.load_state_dict(model.state_dict(), strict=False)
    save_joint(folder, made, folder / "tokenizer.json")


REFUSED: dict[str, tuple[Spoil, list[str], str]] = {
    "architecture": (
        be("BertForMultipleChoice"),
        [],
        "architecture BertForMultipleChoice is none of BertForSequenceClassification, ",
    ),
    "no masked language model": (
        be("BertForMaskedLM"),
        [],
        "names a fill-mask head, and 5 of its tensors are missing: cls.predictions.bias, "
        "cls.predictions.transform.LayerNorm.bias, cls.predictions.transform.LayerNorm.weight ...: "
        "--task embedding reads the encoder alone",
    ),
    "no tokenizer": (drop("tokenizer.json"), [], "has neither tokenizer.json nor vocab.txt"),
    "a panic": (
        change(
            "tokenizer.json",
            pre_tokenizer={
                "type": "Split",
                "pattern": {"Regex": "(a+a+)+y"},
                "behavior": "Isolated",
                "invert": False,
            },
        ),
        [],
        "the tokenizer fails on a text: Onig: Regex search error",
    ),
    "no checkpoint": (shutil.rmtree, [], "is no local directory, and the hub does not provide it"),
    "another pooling": (
        lambda _: None,
        ["--pooling", "cls"],
        "--pooling: the files of the checkpoint declare mean: leave it out",
    ),
    "a graph's option": (lambda _: None, ["--output", "x"], "--output and --pooling none are for"),
    "name": (lambda _: None, ["--name", "a b"], "--name: 'a b' may have letters"),
    "version": (lambda _: None, ["--version", "1@2"], "--version: '1@2' may have letters"),
    "long": (lambda _: None, ["--max-length", "513"], "--max-length: from 8 to the checkpoint's own 512"),
    "short": (lambda _: None, ["--max-length", "7"], "--max-length: from 8"),
    "fp16 alone": (lambda _: None, ["--precision", "fp16"], "--precision: fp16 runs on a GPU only; add fp32 or int8"),
    "no provenance": (lambda _: None, ["--provenance", "nowhere.toml"], "nowhere.toml"),
    "unknown head": (
        lambda _: None,
        ["--eval", "sentimental=x.jsonl"],
        "--eval: the checkpoint has no head sentimental",
    ),
    "no metric": (
        add_masks,
        ["--eval", "masks=x.jsonl"],
        "--eval: masks is a fill-mask head, for which there is no metric",
    ),
    "no data": (lambda _: None, ["--eval", "sentiment=nowhere.jsonl"], "nowhere.jsonl"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refusals(case, tiny_checkpoint, tmp_path, monkeypatch, assert_refused):
    """A refused export ends with one line that has the option or file."""
    spoil, flags, said = REFUSED[case]
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    checkpoint = shutil.copytree(tiny_checkpoint, tmp_path / "checkpoint")
    spoil(checkpoint)
    assert_refused(said, checkpoint, *flags)


def test_a_file_is_no_checkpoint(tiny_checkpoint, assert_refused):
    """A weight file in place of its directory is refused without a look at the hub."""
    assert_refused("is a file: give the directory", tiny_checkpoint / "model.safetensors")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("limit = 'English'\n", "'limit' is none of description, training, limits"),
        ("[provenance]\nsede = 1\n", "sede: Extra inputs are not permitted"),
        ("[[provenance.datasets]]\nname = 'x'\n", "datasets.0.origin: Field required"),
        ("[[provenance.datasets]]\nkey = 'x'\n", "'x' is none of wikipedia, books, sst2"),
        (
            "[[provenance.datasets]]\nkey = 'sst2'\nterms = 'mine'\n",
            "sst2: model/datasets.toml says its terms",
        ),
        ("provenance = 1", "valid dictionary"),
        ("[provenance", "Expected ']'"),
    ],
)
def test_refused_provenance(text, said, tiny_checkpoint, tmp_path, assert_refused):
    """A provenance file that says what a manifest cannot hold is refused by its field."""
    (tmp_path / "told.toml").write_text(text)
    assert_refused(said, tiny_checkpoint, "--provenance", tmp_path / "told.toml")


def test_shipped_provenance_is_the_lock_s():
    """The shipped bundle has the data sets that its provenance file names, with the terms in the lock."""
    shipped = bundle.load(ROOT / "bundles" / "quartet-mini").manifest.provenance
    told = read_metadata(ROOT / "model" / "configs" / "everyday-provenance.toml")["provenance"]
    alike = {"name", "terms", "commercial_use", "used_for"}
    assert len(told["datasets"]) > 5
    assert [data.model_dump(include=alike) for data in shipped.datasets] == [
        {field: data[field] for field in data if field in alike} for data in told["datasets"]
    ]


def break_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the packed graph another model's: one norm is a tenth off."""
    whole = trace_graphs.trace_packed

    def broken(*arguments: Any) -> onnx.ModelProto:
        proto = whole(*arguments)
        scale_weights(proto, "layers.1.feed_forward_norm.weight", 1.1)
        return proto

    monkeypatch.setattr(trace_graphs, "trace_packed", broken)


def scale_weights(proto: onnx.ModelProto, name: str, factor: float | np.ndarray) -> None:
    (tensor,) = (t for t in proto.graph.initializer if t.name.endswith(name))
    value = (numpy_helper.to_array(tensor) * factor).astype(np.float32)
    tensor.CopyFrom(numpy_helper.from_array(value, tensor.name))


def test_parity_failure(tiny_checkpoint, monkeypatch, assert_refused):
    """A graph that does not answer as PyTorch does is never written."""
    break_graph(monkeypatch)
    assert_refused("fp32 packed: head sentiment differs from PyTorch by ", tiny_checkpoint)


def test_portable_parity_failure(tiny_checkpoint, monkeypatch, assert_refused):
    """Nor is a bundle whose portable graph alone is wrong."""

    def broken(packed):
        proto = make_portable(packed)
        scale_weights(proto, "layers.1.feed_forward_norm.weight", 1.1)
        return proto

    monkeypatch.setattr(from_checkpoint, "make_portable", broken)
    monkeypatch.setattr(trace_graphs, "save_sharing_weights", save_apart)
    assert_refused("fp32 portable: head sentiment differs from PyTorch by ", tiny_checkpoint)


def test_half_parity_failure(tiny_checkpoint, monkeypatch, assert_refused):
    """Nor is one whose graph for CUDA is another model's: here every position is the next one's."""
    proto = trace_graphs.export_cuda(load_model(tiny_checkpoint))
    (table,) = (t for t in proto.graph.initializer if t.name.endswith("position.weight"))
    rolled = np.roll(numpy_helper.to_array(table), 1, axis=0)
    table.CopyFrom(numpy_helper.from_array(rolled, table.name))
    monkeypatch.setattr(trace_graphs, "export_cuda", lambda _: proto)
    assert_refused(
        "fp16 packed: head sentiment has cosine", tiny_checkpoint, "--precision", "fp32", "fp16"
    )


def save_apart(graphs: dict[Path, onnx.ModelProto], weights: Path) -> None:
    """Each graph with weights of its own: sharing would refuse two that differ."""
    weights.touch()
    for path, proto in graphs.items():
        onnx.save(proto, path)


@pytest.mark.parametrize("precision", ["fp32 packed", "int8 packed"])
def test_batch_dependence_is_an_error(precision, tiny_checkpoint, monkeypatch, assert_refused):
    """A graph whose answers depend on the batch is never written."""
    whole = verify.check_batch_invariance

    def check(run, encodings, batched, what):
        if what == precision:
            batched[0] = {name: value + 1e-3 for name, value in batched[0].items()}
        return whole(run, encodings, batched, what)

    monkeypatch.setattr(verify, "check_batch_invariance", check)
    assert_refused(f"{precision}: answers differ by ", tiny_checkpoint)


# -- int8 on labelled data ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def decided(tiny_checkpoint: Path) -> dict[str, str]:
    """Texts of which fp32 is sure, with the label that it gives each."""
    model = load_model(tiny_checkpoint)
    texts = [samples.text(2 + index % 20, seed=index) for index in range(60)]
    encoder = Encoder.from_file(tiny_checkpoint / "tokenizer.json", 64)
    outputs = run_torch(model, [item.windows[0] for item in encoder.texts(texts)])
    logits = [output["sentiment"] for output in outputs]
    labels = HEADS["sentiment"].labels
    found = {
        text: labels[row.argmax()]
        for text, row in zip(texts, logits, strict=True)
        if np.ptp(np.sort(row)[-2:]) > 0.5
    }
    assert len(found) > 20
    return found


def write_rows(path: Path, rows: dict[str, str]) -> str:
    """A data file, as a value of --eval."""
    lines = [json.dumps({"text": text, "label": label}) for text, label in rows.items()]
    path.write_text("\n".join(lines))
    return f"sentiment={path}"


def break_int8(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make int8 say "positive" to everything."""
    whole = quantize.quantize

    def broken(proto: onnx.ModelProto, *inputs: Any) -> onnx.ModelProto:
        quantized = whole(proto, *inputs)
        (tensor,) = (
            t for t in quantized.graph.initializer if t.name.endswith("sentiment.classifier.bias")
        )
        bias = np.array([0, 0, 1e3], dtype=np.float32)
        tensor.CopyFrom(numpy_helper.from_array(bias, tensor.name))
        return quantized

    monkeypatch.setattr(quantize, "quantize", broken)


def test_metrics(tiny_checkpoint, out, tmp_path, decided):
    """The metrics of each precision are in the manifest and on the card."""
    data = write_rows(tmp_path / "dev.jsonl", decided)
    assert 0 == export(tiny_checkpoint, out, "--precision", "int8", "--eval", data)
    metrics = bundle.load(out).manifest.metrics
    assert {"sentiment"} == set(metrics)
    assert {"fp32", "int8"} == set(metrics["sentiment"])
    assert 100.0 == metrics["sentiment"]["fp32"]["accuracy"]
    assert 100.0 == metrics["sentiment"]["int8"]["accuracy"]
    assert "| `sentiment` | fp32 | accuracy 100.00, " in (out / "README.md").read_text()


def test_int8_that_is_wrong_is_refused(tiny_checkpoint, monkeypatch, assert_refused):
    """Without any rows, too: what it answers to the goldens is no rounding of what PyTorch does."""
    break_int8(monkeypatch)
    assert_refused("int8 packed: head sentiment has", tiny_checkpoint)


def test_int8_that_loses_is_refused(
    tiny_checkpoint, tmp_path, decided, monkeypatch, assert_refused
):
    """More than a point of the head's metric lost at int8 ends the export."""
    break_int8(monkeypatch)
    monkeypatch.setattr(verify, "INT8_COSINE", -1)
    data = write_rows(tmp_path / "dev.jsonl", decided)
    assert_refused("sentiment: int8 loses ", tiny_checkpoint, "--eval", data, "--max-changed", "1")


def test_int8_that_changes_answers_is_refused(
    tiny_checkpoint, tmp_path, decided, monkeypatch, assert_refused
):
    """So do too many changed answers, though the metric be the same."""
    break_int8(monkeypatch)
    monkeypatch.setattr(verify, "INT8_COSINE", -1)
    wrong = {t: "negative" if label == "neutral" else "neutral" for t, label in decided.items()}
    data = write_rows(tmp_path / "dev.jsonl", wrong)
    assert_refused("of answers, allowed 5.0% (--max-changed)", tiny_checkpoint, "--eval", data)

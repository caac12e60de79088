"""A bundle is whole or it is refused, with one line that says what disagrees."""

import hashlib
import io
import json
import os
import re
import shutil
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray

from service.core import bundle
from service.core.bundle import Bundle, BundleError
from service.core.goldens import Golden, cosine, deviation, disagreement, save_golden
from service.core.manifest import (
    FORMAT_VERSION,
    DataSet,
    Head,
    Manifest,
    Memory,
    Provenance,
    Tolerance,
)

SENTIMENT = {"task": "classification", "labels": ["bad", "good"]}
ENTITIES = {"task": "ner", "labels": ["O", "B-PER"]}
VECTORS = {"task": "embedding", "pooling": "mean", "dimensions": 4}
MASKS = {"task": "fill-mask", "mask_token_id": 4, "vocabulary_size": 100}

GOLDEN = Golden(
    input_ids=np.arange(5),
    token_type_ids=np.zeros(5, np.int64),
    lengths=np.array([3, 2]),
    outputs={
        "entities": np.ones((5, 2), np.float32),
        "sentiment": np.array([[1, 0], [0, 1]], np.float32),
        "vectors": np.eye(2, 4, dtype=np.float32),
    },
)
TOLERANCE = {
    "fp32": {"max_difference": 1e-4},
    "int8": {"min_cosine": {"vectors": 0.98, "sentiment": 0.9}},
}
GRAPHS = [
    ("packed.onnx", "fp32", "packed", "cpu", "weights.bin"),
    ("portable.onnx", "fp32", "portable", "any", "weights.bin"),
    ("int8.onnx", "int8", "packed", "cpu", None),
]


# Optional fields of an embedding head.
EMBEDDING: dict[str, dict[str, Any]] = {
    "prompts": {"prompts": {"query": "query: "}},
    "default_prompt": {"default_prompt": "document"},
    "include_prompt": {"include_prompt": False},
    "input_type": {"input_type": "query"},
    "matryoshka_dimensions": {"matryoshka_dimensions": [2, 4]},
    "quantization_ranges": {"quantization_ranges": {"2": [[-1.0, -0.5], [1.0, 0.25]]}},
    "pooling": {"pooling": ["mean", "max"]},
}


def write(folder: Path) -> dict[str, Any]:
    """Write a bundle's files but for the manifest, which is returned."""
    folder.mkdir(exist_ok=True)
    for name in ("tokenizer.json", "weights.bin"):
        (folder / name).write_text(f"what {name} holds")
    for name, *_ in GRAPHS:
        graph = onnx.ModelProto(producer_name=name)
        (folder / name).write_bytes(graph.SerializeToString())
    save_golden(folder / "golden.npz", GOLDEN)

    def described(name: str) -> dict[str, str]:
        return bundle.describe_file(folder / name)

    return {
        "format_version": FORMAT_VERSION,
        "name": "quartet-test",
        "version": "1.0",
        "heads": deepcopy({"entities": ENTITIES, "sentiment": SENTIMENT, "vectors": VECTORS}),
        "default_precision": "int8",
        "max_length": 128,
        "vocabulary": {**described("tokenizer.json"), "size": 100},
        "graphs": [
            {
                **described(file),
                "precision": precision,
                "layout": layout,
                "provider": provider,
                "opset": 20,
                "weights": described(weights) if weights else None,
            }
            for file, precision, layout, provider, weights in GRAPHS
        ],
        "goldens": {**described("golden.npz"), "tolerance": deepcopy(TOLERANCE)},
        "provenance": {"runtime": "onnxruntime 1.31"},
    }


def save(folder: Path, manifest: Any) -> Path:
    (folder / "manifest.json").write_text(json.dumps(manifest))
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A bundle on disk."""
    return save(tmp_path / "b", write(tmp_path / "b"))


def refusal(folder: Path) -> str:
    """The one line with which a bundle is refused, less its path."""
    with pytest.raises(BundleError) as refused:
        bundle.load(folder)
    error = refused.value
    assert error.path == folder
    assert str(error) == f"{folder}: {error.reason}"
    assert "\n" not in str(error)
    return error.reason


def _in_node(**value: Any) -> onnx.NodeProto:
    return onnx.NodeProto(attribute=[onnx.AttributeProto(name="a", **value)])


def _in_graph(**parts: Any) -> onnx.ModelProto:
    return onnx.ModelProto(graph=onnx.GraphProto(**parts))


# Where a model may have a tensor.
PLACES: dict[str, Callable[[onnx.TensorProto], onnx.ModelProto]] = {
    "initializer": lambda t: _in_graph(initializer=[t]),
    "sparse": lambda t: _in_graph(sparse_initializer=[onnx.SparseTensorProto(indices=t)]),
    "constant": lambda t: _in_graph(node=[_in_node(t=t)]),
    "constants": lambda t: _in_graph(node=[_in_node(tensors=[t])]),
    "subgraph": lambda t: _in_graph(node=[_in_node(g=onnx.GraphProto(initializer=[t]))]),
    "subgraphs": lambda t: _in_graph(node=[_in_node(graphs=[onnx.GraphProto(initializer=[t])])]),
    "function": lambda t: onnx.ModelProto(functions=[onnx.FunctionProto(node=[_in_node(t=t)])]),
    "training": lambda t: onnx.ModelProto(
        training_info=[onnx.TrainingInfoProto(algorithm=onnx.GraphProto(initializer=[t]))]
    ),
}


class TestLoad:
    def test_whole(self, folder):
        """A whole bundle is read: manifest, goldens, and the hash that pins all else."""
        loaded = bundle.load(str(folder))

        assert loaded.manifest == Manifest.model_validate(json.loads(loaded_text(folder)))
        assert loaded.sha256 == hashlib.sha256(loaded_text(folder)).hexdigest()
        assert loaded.file("golden.npz") == folder / "golden.npz"
        assert loaded.golden.outputs.keys() == GOLDEN.outputs.keys()
        for name, output in GOLDEN.outputs.items():
            np.testing.assert_array_equal(loaded.golden.outputs[name], output)
        for field in ("input_ids", "token_type_ids", "lengths"):
            np.testing.assert_array_equal(getattr(loaded.golden, field), getattr(GOLDEN, field))

    def test_manifest(self, folder):
        """The manifest has the bundle's id, its precisions and the files that it hashes."""
        manifest = bundle.load(folder).manifest

        assert manifest.id == "quartet-test@1.0"
        assert manifest.precisions == ("fp32", "int8")
        assert list(manifest.heads) == ["entities", "sentiment", "vectors"]
        assert [head.per_token for head in manifest.heads.values()] == [True, False, False]
        assert set(manifest.files()) == {path.name for path in folder.iterdir()} - {"manifest.json"}

    def test_no_bundle(self, tmp_path):
        """A path where nothing is, a file, and a directory without a manifest that is a file are no bundles."""
        (tmp_path / "file").touch()
        for path in (tmp_path / "none", tmp_path / "file"):
            assert refusal(path) == "the bundle directory does not exist"
        assert refusal(tmp_path) == "not a bundle: it has no manifest.json"
        (tmp_path / "config.json").touch()
        assert refusal(tmp_path).endswith(
            f"quartet serve {tmp_path} exports a checkpoint and serves it"
        )
        (tmp_path / "config.json").unlink()
        hub = refusal(Path("BAAI/bge-small-en-v1.5"))
        assert "; quartet serve BAAI/bge-small-en-v1.5 exports a model of the hub" in hub
        (tmp_path / "manifest.json").mkdir()
        assert refusal(tmp_path) == "manifest.json cannot be read: Is a directory"

    def test_fields_of_graphs(self, tmp_path):
        """A graph may state whether its attention has a bias, and its memory."""
        manifest = write(tmp_path)
        manifest["graphs"][0]["attention_bias"] = True
        manifest["graphs"][1]["attention_bias"] = False
        manifest["graphs"][2]["memory"] = {"opened": 5, "batches": {"128": 7, "1024": 9}}

        graphs = bundle.load(save(tmp_path, manifest)).manifest.graphs

        assert [True, False, None] == [graph.attention_bias for graph in graphs]
        assert [None, None, Memory(opened=5, batches={128: 7, 1024: 9})] == [
            g.memory for g in graphs
        ]
        assert graphs[2].memory.model_dump(mode="json") == manifest["graphs"][2]["memory"]

    @pytest.mark.parametrize("field", EMBEDDING)
    def test_fields_of_embedding_heads(self, tmp_path, field):
        """An embedding head may state its prompts and types."""
        manifest = write(tmp_path)
        manifest["heads"]["vectors"] |= EMBEDDING[field]

        head = bundle.load(save(tmp_path, manifest)).manifest.heads["vectors"]

        written = json.loads(head.model_dump_json(exclude_defaults=True))
        assert {**VECTORS, **EMBEDDING[field]} == written

    def test_prompts(self):
        """A head always has the prompts of sentence-transformers, without a text unless it states one."""
        head = Head.model_validate({**VECTORS, "prompts": {"passage": "p: ", "query": "q: "}})
        assert {"query": "q: ", "document": "", "passage": "p: "} == head.named_prompts
        assert "" == head.default_prompt_text
        assert "p: " == head.model_copy(update={"default_prompt": "passage"}).default_prompt_text

    def test_output_dtypes(self):
        """8-bit numbers need ranges."""
        plain = Head.model_validate(VECTORS)
        ranged = Head.model_validate({**VECTORS, **EMBEDDING["quantization_ranges"]})
        assert ["float", "binary", "ubinary"] == plain.output_dtypes
        assert ["float", "int8", "uint8", "binary", "ubinary"] == ranged.output_dtypes

    @pytest.mark.parametrize(
        ("batches", "tokens", "expected"),
        [
            ({1024: 100, 4096: 400, 16384: 1000}, 1024, 100),
            ({1024: 100, 4096: 400, 16384: 1000}, 2560, 250),
            ({1024: 100, 4096: 400, 16384: 1000}, 10240, 700),
            ({1024: 100, 4096: 400, 16384: 1000}, 28672, 1600),
            ({1024: 200, 4096: 500}, 512, 150),
            ({1024: 100, 4096: 4000}, 128, 0),
            ({4096: 400, 1024: 100}, 2048, 200),
            ({1024: 100, 4096: 100}, 9000, 100),
            ({512: 100}, 512, 100),
            ({512: 100}, 768, 150),
        ],
    )
    def test_memory_of_a_batch(self, batches, tokens, expected):
        """It is linear between the measured batches and beyond them, from the origin with one, and never negative."""
        assert expected == Memory(opened=0, batches=batches).of_batch(tokens)


def loaded_text(folder: Path) -> bytes:
    return (folder / "manifest.json").read_bytes()


def stated(**fields: Any) -> Callable[[Any], Any]:
    """State fields of the embedding head."""
    return lambda manifest: manifest["heads"]["vectors"].update(fields)


def state(manifest: Any, memory: Any) -> None:
    """State the memory of the first graph."""
    manifest["graphs"][0]["memory"] = memory


def add_masks(manifest: Any, name: str = "masks", **fields: Any) -> None:
    """Add a fill-mask head."""
    manifest["heads"][name] = {**MASKS, **fields}


BAD: list[tuple[str, Callable[[Any], Any], str]] = [
    ("earlier format", lambda m: m.update(format_version=4), "format_version 4 is neither 5 nor 6: export"),
    ("later format", lambda m: m.update(format_version=7, new=1), "format_version 7 is neither 5 nor 6: export"),
    ("no format", lambda m: m.pop("format_version"), "format_version: Field required"),
    ("temperature of vectors", stated(calibration_temperature=2.0), "calibration_temperature is for classification"),
    ("temperature of 0", lambda m: m["heads"]["sentiment"].update(calibration_temperature=0), "greater than 0"),
    ("unknown prompt", stated(default_prompt="q"), "default_prompt 'q' is none of prompts: query, document"),
    ("prompts of labels", lambda m: m["heads"]["sentiment"].update(prompts={"q": "q: "}), "for embedding heads only"),
    ("trained for more", stated(matryoshka_dimensions=[2, 5]), "matryoshka_dimensions: 5 exceeds dimensions 4"),
    ("prompts that are not pooled", stated(include_prompt=False, prompts={"q": "q: "}), "prompts: must have no text"),
    ("no modes", stated(pooling=[]), "needs its pooling"),
    ("unknown mode", stated(pooling=["mean", "median"]), "heads.vectors.pooling"),
    ("ranges of more", stated(quantization_ranges={5: [[0] * 5, [1] * 5]}), "quantization_ranges: 5 exceeds"),
    ("ranges of less", stated(quantization_ranges={4: [[0] * 4, [1] * 3]}), "quantization_ranges.4: must have 2 lists"),
    ("empty range", stated(quantization_ranges={1: [[1.0], [0.5]]}), "quantization_ranges.1: must be finite"),
    ("memory of no batch", lambda m: state(m, {"opened": 1, "batches": {}}), "0.memory.batches: "),
    ("memory of no tokens", lambda m: state(m, {"opened": 1, "batches": {0: 1}}), "memory.batches.0"),
    ("negative memory", lambda m: state(m, {"opened": -1, "batches": {1024: 2}}), "0.memory.opened: "),
    ("late interaction", lambda m: late(m, dimensions=None), "needs its dimensions and late_inter"),
    ("not late", lambda m: m["heads"]["vectors"].update(late_interaction={}), "not for a head of"),
    ("long query", lambda m: late(m, query_length=129), "query_length 129 exceeds max_length 128"),
    ("long expansion", lambda m: late(m, query_length=8, query_expansion=9, expansion_token_id=4),
     "query_expansion 9 exceeds query_length 8"),
    ("no expansion token", lambda m: late(m, query_expansion=9), "needs expansion_token_id"),
    ("no such token", lambda m: late(m, skip_token_ids=[100]), "is not below the size of the voca"),
    ("hidden on CUDA", lambda m: (late(m, query_expansion=9, expansion_token_id=4),
     m["graphs"][0].update(provider="cuda")), "packed.onnx for CUDA"),
    ("no name", lambda m: m.pop("name"), "name: Field required"),
    ("odd name", lambda m: m.update(name="a b"), "name: String should match pattern"),
    ("path as name", lambda m: m.update(name="../a"), "name: String should match pattern"),
    ("three words", lambda m: m.update(name="a/b/c"), "name: String should match pattern"),
    ("hidden word", lambda m: m.update(name="a/.b"), "name: String should match pattern"),
    ("slash in version", lambda m: m.update(version="a/b"), "version: String should match pattern"),
    ("odd version", lambda m: m.update(version="1@2"), "version: String should match pattern"),
    ("line break", lambda m: m.update(version="1\n"), "version: String should match pattern"),
    ("unknown field", lambda m: m.update(hedas={}), "hedas: Extra inputs are not permitted"),
    ("no heads", lambda m: m.update(heads={}), "heads: Dictionary should have at least 1 item"),
    ("no graphs", lambda m: m.update(graphs=[]), "needs either graphs or the encoder that its"),
    ("endless", lambda m: m.update(max_length=2**62), "max_length: Input should be less than or"),
    ("short", lambda m: m.update(max_length=7), "max_length: Input should be greater than or"),
    ("task", lambda m: m["heads"]["vectors"].update(task="rank"), "heads.vectors.task: Input"),
    ("no labels", lambda m: m["heads"]["sentiment"].pop("labels"), "heads.sentiment: Value error"),
    ("pooling", lambda m: m["heads"]["vectors"].pop("pooling"), "needs its pooling"),
    ("dimensions", lambda m: m["heads"]["vectors"].update(dimensions=0), "heads.vectors.dimensions"),
    ("file above", lambda m: m["graphs"][1].update(file="../x"), "graphs.1.file: String should"),
    ("file below", lambda m: m["graphs"][1].update(file="a/b"), "graphs.1.file: String should"),
    ("hidden file", lambda m: m["goldens"].update(file=".npz"), "goldens.file: String should"),
    ("long name", lambda m: m["goldens"].update(file="a" * 129), "goldens.file: String should"),
    ("weights", lambda m: m["graphs"][0]["weights"].update(file="/w"), "graphs.0.weights.file: "),
    ("hash", lambda m: m["vocabulary"].update(sha256="AB"), "vocabulary.sha256: String should"),
    ("no hash", lambda m: m["vocabulary"].pop("sha256"), "vocabulary.sha256: Field required"),
    ("layout", lambda m: m["graphs"][2].update(layout="flat"), "graphs.2.layout: Input should be"),
    ("precision", lambda m: m.update(default_precision="fp16"), "default_precision fp16 has no"),
    ("no mask token", lambda m: m["heads"].update(masks={"task": "fill-mask"}), "needs its mask_token_id"),
    ("other rows", lambda m: add_masks(m, vocabulary_size=99), "vocabulary_size is not that of the vocabulary, 100"),
    ("mask token", lambda m: add_masks(m, mask_token_id=100), "mask_token_id must be below vocabulary_size"),
    ("two mask tokens", lambda m: (add_masks(m), add_masks(m, "more", mask_token_id=5)), "differs from that"),
    ("tolerance", lambda m: m["goldens"]["tolerance"].pop("int8"), "golden tolerance for ['int8']"),
]  # fmt: skip


def late(manifest: Any, dimensions: int | None = 4, **settings: Any) -> None:
    head = {"task": "late-interaction", "dimensions": dimensions, "late_interaction": settings}
    manifest["heads"]["vectors"] = head


class TestBadManifests:
    @pytest.mark.parametrize(
        ("change", "message"), [pytest.param(*case, id=name) for name, *case in BAD]
    )
    def test_field(self, tmp_path, change, message):
        """A wrong field is named, in one line."""
        manifest = write(tmp_path)
        change(manifest)

        reason = refusal(save(tmp_path, manifest))

        assert reason.startswith("manifest.json is not valid: ")
        assert message in reason

    def test_every_field(self, tmp_path):
        """All wrong fields are named at once."""
        manifest = write(tmp_path)
        manifest.update(name="", max_length="long")

        reason = refusal(save(tmp_path, manifest))

        assert "; max_length: " in reason
        assert "name: " in reason

    @pytest.mark.parametrize("text", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'"\xff"'])
    def test_no_object(self, tmp_path, text):
        """A manifest that is no JSON object is refused as such."""
        (tmp_path / "manifest.json").write_bytes(text)

        assert refusal(tmp_path).startswith("manifest.json is not valid: manifest: ")


FILES = ["tokenizer.json", "golden.npz", "weights.bin", "packed.onnx", "int8.onnx"]


class TestFiles:
    @pytest.mark.parametrize("name", FILES)
    def test_tampering(self, folder, name):
        """A file with one bit changed is refused with both hashes."""
        path = folder / name
        before = bundle.hash_file(path)
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)

        after = bundle.hash_file(path)

        assert refusal(folder) == (
            f"{name} has SHA-256 {after[:12]}..., the manifest says {before[:12]}..."
        )

    @pytest.mark.parametrize("name", ["manifest.json", *FILES])
    def test_symlink(self, folder, tmp_path, name):
        """A link is refused even if what it leads to has the right hash, within the bundle or without."""
        for elsewhere in (tmp_path / "elsewhere.bin", folder / "elsewhere.bin"):
            (folder / name).rename(elsewhere)
            (folder / name).symlink_to(elsewhere)

            assert refusal(folder).startswith(name)
            assert refusal(folder).endswith("not a plain file")

            (folder / name).unlink()
            elsewhere.rename(folder / name)

        bundle.load(folder)

    @pytest.mark.parametrize("name", ["manifest.json", "weights.bin"])
    @pytest.mark.parametrize(
        "put", [lambda path: None, Path.mkdir, os.mkfifo], ids=["none", "directory", "pipe"]
    )
    def test_no_plain_file(self, folder, name, put):
        """A missing file, a directory or a named pipe is named, and does not hold up the load."""
        (folder / name).unlink()
        put(folder / name)

        assert name in refusal(folder)

    def test_empty_tolerance(self, folder):
        """A tolerance that compares nothing is refused."""
        manifest = json.loads(loaded_text(folder))
        manifest["goldens"]["tolerance"]["int8"] = {}

        assert "the golden tolerance for int8 is empty" == refusal(save(folder, manifest))

    @pytest.mark.parametrize("name", ["weights.bin", "other.bin"])
    @pytest.mark.parametrize("place", PLACES)
    @pytest.mark.parametrize("value_first", [True, False])
    def test_external_data(self, place, value_first, name, folder):
        """A graph that reads another file than its weights is refused wherever it names the file."""
        entry = onnx.StringStringEntryProto(key="location", value=name)
        tensor = onnx.TensorProto(name="w", data_location=1, external_data=[entry])
        text = PLACES[place](tensor).SerializeToString()
        key, value = b"\x0a\x08location", b"\x12" + bytes([len(name)]) + name.encode()
        if value_first:  # which every parser of the format accepts
            assert key + value in text
            text = text.replace(key + value, value + key)
        (folder / "packed.onnx").write_bytes(text)
        manifest = json.loads(loaded_text(folder))
        manifest["graphs"][0].update(bundle.describe_file(folder / "packed.onnx"))
        save(folder, manifest)
        if name == "weights.bin":
            bundle.load(folder)
        else:
            assert "packed.onnx reads 'other.bin', which is not its weights" in refusal(folder)

    def test_no_graph(self, folder):
        """A graph's file that protobuf cannot parse is named."""
        (folder / "packed.onnx").write_bytes(b"this is none")
        manifest = json.loads(loaded_text(folder))
        manifest["graphs"][0].update(bundle.describe_file(folder / "packed.onnx"))

        assert "packed.onnx cannot be read: not an ONNX model" in refusal(save(folder, manifest))

    def test_other_files(self, folder):
        """Files that the manifest does not name, such as a model card, are ignored."""
        (folder / "README.md").write_text("A card.")

        assert bundle.load(folder).manifest.name == "quartet-test"


def array_file() -> bytes:
    file = io.BytesIO()
    np.save(file, np.arange(3))
    return file.getvalue()


def restated(folder: Path) -> Path:
    """State the hash of changed goldens."""
    manifest = json.loads(loaded_text(folder))
    manifest["goldens"].update(bundle.describe_file(folder / "golden.npz"))
    return save(folder, manifest)


class TestGoldens:
    @pytest.mark.parametrize(
        "content",
        [b"", b"no archive", b"PK\x03\x04cut", b"\x93NUMPY\x01\x00", array_file()],
        ids=["empty", "text", "cut off", "array cut off", "single array"],
    )
    def test_unreadable(self, folder, content):
        """Goldens that are no archive of arrays are refused, although their hash is right."""
        (folder / "golden.npz").write_bytes(content)

        assert refusal(restated(folder)).startswith("golden.npz cannot be read: ")

    def test_inflated(self, folder, monkeypatch):
        """Goldens that would take much memory are refused before they are inflated."""
        monkeypatch.setattr(bundle, "MOST_GOLDEN_BYTES", 1_000_000)
        np.savez_compressed(folder / "golden.npz", input_ids=np.zeros(200_000, np.int64))

        assert "bytes, more than 1000000" in refusal(restated(folder))

    def test_pickles(self, folder):
        """Goldens are never unpickled."""
        np.savez(folder / "golden.npz", input_ids=np.array([object()]), allow_pickle=True)

        assert "allow_pickle=False" in refusal(restated(folder))

    def test_head_without_golden(self, tmp_path):
        """A head whose golden is missing is named."""
        manifest = write(tmp_path)
        manifest["heads"]["more"] = SENTIMENT

        assert "output.more" in refusal(save(tmp_path, manifest))

    def test_lengths(self, folder):
        """Lengths that do not add up to the tokens are refused."""
        short = Golden(GOLDEN.input_ids, GOLDEN.token_type_ids, np.array([3, 1]), GOLDEN.outputs)
        save_golden(folder / "golden.npz", short)

        assert refusal(restated(folder)) == "golden.npz: lengths and input_ids disagree"


Outputs = dict[str, NDArray[np.float32]]


class TestCheckGoldens:
    @pytest.fixture
    def loaded(self, folder: Path) -> Bundle:
        return bundle.load(folder)

    @pytest.fixture
    def outputs(self) -> Outputs:
        return {name: output.copy() for name, output in GOLDEN.outputs.items()}

    @staticmethod
    def reason(loaded: Bundle, precision: Any, outputs: Outputs, runtime: str) -> str:
        tolerance = loaded.manifest.goldens.tolerance[precision]
        with pytest.raises(BundleError) as refused:
            bundle.check_goldens(loaded, precision, tolerance, outputs, runtime)
        return refused.value.reason

    @pytest.mark.parametrize(
        ("precision", "name", "by"),
        [("fp32", "vectors", 9e-5), ("int8", "vectors", 9e-5), ("int8", "entities", 7)],
    )
    def test_agree(self, loaded, outputs, precision, name, by):
        """Outputs within the tolerance pass; a head that has no cosine at a precision is not compared there."""
        outputs[name] += by

        tolerance = loaded.manifest.goldens.tolerance[precision]
        bundle.check_goldens(loaded, precision, tolerance, outputs, "onnxruntime 1.31")

    @pytest.mark.parametrize(
        ("precision", "change", "runtime", "expected"),
        [
            (
                "fp32",
                lambda outputs: {"entities": outputs["entities"] + 0.5},
                "1.31",
                r"goldens disagree at fp32: entities differs by 5\.00e-01, allowed 1e-04",
            ),
            (
                "fp32",
                lambda outputs: {"entities": outputs["entities"] + 1},
                "2.0",
                r".* \(exported with onnxruntime 1\.31, running onnxruntime 2\.0\)",
            ),
            (
                "int8",
                lambda outputs: {"vectors": np.stack([np.ones(4), outputs["vectors"][1]])},
                "1.31",
                r"goldens disagree at int8: vectors has cosine 0\.6\d*, at least 0\.98",
            ),
            (
                "int8",
                lambda outputs: {"vectors": outputs["vectors"][:, :3]},
                "1.31",
                r".*vectors has shape \(2, 3\), expected \(2, 4\)",
            ),
        ],
        ids=["difference", "runtime", "cosine", "shape"],
    )
    def test_disagree(self, loaded, outputs, precision, change, runtime, expected):
        """The head is named with the difference and what is allowed, and another runtime than at the export."""
        changed = outputs | change(outputs)

        assert re.fullmatch(
            expected, self.reason(loaded, precision, changed, f"onnxruntime {runtime}")
        )

    def test_no_rows(self):
        """Outputs without rows agree, such as the outputs of a fill-mask head without a mask token."""
        none = np.zeros((0, 4), np.float32)

        assert 0 == deviation(none, none)
        assert 1 == cosine(none, none)

    def test_difference_of_large_numbers(self):
        """What may differ grows with the largest golden number: fp32 keeps seven digits of any."""
        expected = np.array([[5000.0, 0.0]], np.float32)
        allowed = Tolerance(max_difference=1e-4)

        near = disagreement("grade", expected, expected + np.float32(0.4), allowed)
        far = disagreement("grade", expected, expected + np.float32(5), allowed)

        assert (None, "grade differs by 1.00e-03, allowed 1e-04") == (near, far)

    @pytest.mark.parametrize("precision", ["fp32", "int8"])
    @pytest.mark.parametrize("value", [np.nan, np.inf])
    def test_not_finite(self, loaded, outputs, precision, value):
        """Outputs that are not finite never pass."""
        outputs["sentiment"][0, 0] = value

        with np.errstate(invalid="ignore"):
            assert "sentiment" in self.reason(loaded, precision, outputs, "onnxruntime 1.31")

    @pytest.mark.parametrize(
        ("a", "b", "expected"),
        [([1, 0], [2, 0], 1), ([1, 0], [0, 3], 0), ([0, 0], [0, 0], 1), ([0, 0], [1, 0], 0)],
    )
    def test_cosine_of(self, a, b, expected):
        """A cosine depends on directions only; a zero vector equals zero vectors only."""
        found = cosine(np.array(a, np.float32), np.array(b, np.float32))

        assert found == pytest.approx(expected)


def write_and_fail(path: Path, error: type[BaseException]) -> None:
    with bundle.writing(path, replace=path.exists()) as folder:
        (folder / "half.bin").write_text("half")
        raise error


class TestWriting:
    def test_success(self, tmp_path):
        """The written files have their final name and are readable for all; there are no other files."""
        with bundle.writing(tmp_path / "new" / "b") as folder:
            save(folder, write(folder))
            assert not (tmp_path / "new" / "b").exists()

        assert bundle.load(tmp_path / "new" / "b").manifest.id == "quartet-test@1.0"
        assert [path.name for path in (tmp_path / "new").iterdir()] == ["b"]
        assert (tmp_path / "new" / "b").stat().st_mode & 0o777 == 0o755

    @pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
    def test_failure(self, folder, error):
        """A failure in the middle leaves nothing, or what there was."""
        for path in (folder.parent / "new", folder):
            with pytest.raises(error):
                write_and_fail(path, error)

        assert bundle.load(folder).manifest.id == "quartet-test@1.0"
        assert [path.name for path in folder.parent.iterdir()] == ["b"]

    @pytest.mark.parametrize(
        ("place", "replace", "said"),
        [
            (".", False, "exists; choose another path"),
            ("..", True, "it is not a bundle, because it has no manifest"),
            ("golden.npz", True, "it is not a bundle, because it has no manifest"),
        ],
    )
    def test_existing(self, folder, place, replace, said):
        """What exists is not overwritten unasked; neither a directory of bundles nor a file loses anything."""
        with (
            pytest.raises(FileExistsError, match=said),
            bundle.writing(Path(os.path.normpath(folder / place)), replace=replace),
        ):
            raise AssertionError("nothing is written")

        assert bundle.load(folder).manifest.id == "quartet-test@1.0"
        assert [path.name for path in folder.parent.iterdir()] == ["b"]

    def test_replace(self, folder):
        """What is to be replaced is replaced whole."""
        with bundle.writing(folder, replace=True) as new:
            (new / "only.txt").write_text("new")

        assert [path.name for path in folder.iterdir()] == ["only.txt"]
        assert [path.name for path in folder.parent.iterdir()] == ["b"]

    def test_an_empty_directory_is_replaced(self, tmp_path):
        """There is nothing in it to lose."""
        (tmp_path / "b").mkdir()
        with bundle.writing(tmp_path / "b", replace=True) as new:
            (new / "only.txt").write_text("new")

        assert [path.name for path in (tmp_path / "b").iterdir()] == ["only.txt"]

    def test_replacement_that_cannot_take_the_place(self, folder, monkeypatch):
        """When the last step fails, what there was comes back."""
        rename = Path.rename

        def full_disk(path, target):
            if (path / "only.txt").exists():
                raise OSError("no space")
            return rename(path, target)

        monkeypatch.setattr(Path, "rename", full_disk)
        with pytest.raises(OSError, match="no space"):
            self.test_replace(folder)

        assert bundle.load(folder).manifest.id == "quartet-test@1.0"
        assert [path.name for path in folder.parent.iterdir()] == ["b"]

    def test_link(self, folder, tmp_path):
        """If the path is a link, its target is replaced."""
        (tmp_path / "current").symlink_to(folder)
        with bundle.writing(tmp_path / "current", replace=True) as new:
            (new / "only.txt").write_text("new")

        assert [path.name for path in folder.iterdir()] == ["only.txt"]
        assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "current"]

    def test_meanwhile(self, tmp_path):
        """What another wrote under the name meanwhile is not overwritten."""
        writing = bundle.writing(tmp_path / "b")
        writing.__enter__()
        save(tmp_path / "b", write(tmp_path / "b"))

        with pytest.raises(OSError, match="not empty"):
            writing.__exit__(None, None, None)

        assert bundle.load(tmp_path / "b").manifest.id == "quartet-test@1.0"
        assert [path.name for path in tmp_path.iterdir()] == ["b"]


class TestSwap:
    @pytest.mark.parametrize("replaced", [False, True])
    def test_after_one_that_was_cut_off(self, folder, replaced):
        """After an interrupted replacement, the next one succeeds, whether or not the new directory was in place."""
        old = shutil.copytree(folder, folder.with_name("b.new.old"))
        if not replaced:
            shutil.rmtree(folder)
        new = folder.with_name("b.new")
        new.mkdir()
        (new / "only.txt").write_text("new")
        bundle.swap(new, folder)

        assert [path.name for path in folder.iterdir()] == ["only.txt"]
        assert [path.name for path in old.parent.iterdir()] == ["b"]


class TestHead:
    def test_defaults(self):
        """A head has the defaults that the format promises."""
        head = Head.model_validate(VECTORS)

        assert head.normalize
        assert (head.null_threshold, head.max_answer_tokens, head.max_query_tokens) == (0, 30, 64)
        assert not head.demo

    def test_fill_mask(self):
        """A fill-mask head has a column for each token, and rows for mask tokens only."""
        head = Head.model_validate(MASKS)

        assert (100, False, True) == (head.width, head.per_token, head.per_mask)
        assert not Head.model_validate(VECTORS).per_mask


def test_texts_are_those_of_the_bundle(tiny_bundle, tmp_path):
    """Other readers of texts get the verified tokenizer, or none."""
    copy = shutil.copytree(tiny_bundle, tmp_path / "copy")
    loaded = bundle.load(copy)
    texts = bundle.read_texts(loaded)
    assert (loaded.manifest, loaded.sha256) == (texts.manifest, texts.sha256)
    assert (copy / "tokenizer.json").read_bytes() == texts.tokenizer
    (copy / "tokenizer.json").write_text("{}")
    with pytest.raises(BundleError, match=r"tokenizer\.json was changed while"):
        bundle.read_texts(loaded)
    (copy / "tokenizer.json").unlink()
    with pytest.raises(BundleError, match=r"tokenizer\.json cannot be read"):
        bundle.read_texts(loaded)


@pytest.mark.parametrize(
    ("answers", "told"),
    [
        (["yes", "yes"], "yes"),
        (["yes", "unclear", "no", "no"], "no: 2; 3"),
        (["unclear", "yes", "unclear"], "unclear: 0; 2"),
        ([], "unclear: no data set is named"),
    ],
)
def test_data_sets_allow_together_what_the_least_allows(answers, told):
    """And those are named that forbid it, or may."""
    sets = [
        DataSet(name=str(number), origin="here", terms="some", commercial_use=answer)
        for number, answer in enumerate(answers)
    ]
    assert told == Provenance(datasets=tuple(sets)).commercial_use


def test_each_head_has_the_terms_of_its_own_data():
    """A data set belongs to the heads that it was used for; one that names none was used for all."""
    sets = [
        DataSet(name=name, origin="here", terms="some", commercial_use=answer, used_for=used)
        for name, answer, used in (
            ("text", "yes", "pretraining"),
            ("films", "unclear", "sentiment, tokenizer"),
            ("news", "no", "topic and sentiments"),
        )
    ]
    provenance = Provenance(datasets=tuple(sets))
    assert provenance.commercial_use_by_head(["sentiment", "topic", "answers"]) == {
        "sentiment": "unclear: films",
        "topic": "no: news",
        "answers": "yes",
    }
    assert Provenance().commercial_use_by_head(["topic"]) == {
        "topic": "unclear: no data set is named"
    }

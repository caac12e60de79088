"""`python -m export` of ONNX graphs: they get their heads, and what cannot be served is refused by name."""

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from onnx.external_data_helper import set_external_data
from safetensors.torch import save_file

from export.__main__ import main
from model.tokenizer import train
from service.core import bundle, packing
from service.core.bundle import Bundle
from service.core.cpu import CPU
from service.core.encode import Encoder
from service.core.packing import Packed
from service.core.session import BatchOutputs, SessionOptions, open_session
from tests import samples
from tests.json_files import write_json

pytestmark = [pytest.mark.usefixtures("scratch"), pytest.mark.slow]

VOCAB, WIDTH = 500, 24
TOKENIZER = train(samples.corpus(), vocab_size=VOCAB)
TEXTS = [samples.text(words, seed=words) for words in (1, 9, 3, 20)]
RNG = np.random.default_rng(0)
TABLES = {  # a token's output, looked up
    "last_hidden_state": RNG.normal(size=(VOCAB, WIDTH)).astype(np.float32),
    "token_embeddings": RNG.normal(size=(VOCAB, WIDTH)).astype(np.float32),
    "logits": RNG.normal(size=(VOCAB, 3)).astype(np.float32),
    "start_logits": RNG.normal(size=VOCAB).astype(np.float32),
    "end_logits": RNG.normal(size=VOCAB).astype(np.float32),
}
ARCHITECTURES = {
    "classification": "LookupForSequenceClassification",
    "ner": "LookupForTokenClassification",
    "qa": "LookupForQuestionAnswering",
    "embedding": "LookupModel",
}
LABELS = {"0": "sea", "1": "sky", "2": "trade"}
AS_SAVED = {"tokenizer_class": "PreTrainedTokenizerFast"}
Spoil = Callable[[Path], object]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A directory of everything but a graph."""
    (tmp_path / "given").mkdir()
    TOKENIZER.save(str(tmp_path / "given" / "tokenizer.json"))
    write_json(tmp_path / "given" / "tokenizer_config.json", AS_SAVED)
    return tmp_path / "given"


# -- graphs that look tokens up -------------------------------------------------------------------


def values(names: list[str], kind: int = TensorProto.INT64) -> list[onnx.ValueInfoProto]:
    return [helper.make_tensor_value_info(name, kind, ["b", "s"]) for name in names]


def lookup(*outputs: str, dtype: type = np.float32) -> onnx.ModelProto:
    """A graph that looks each of its outputs up for every token, and needs the mask for nothing."""
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    return helper.make_model(
        helper.make_graph(
            [
                helper.make_node("Gather", [f"{name}.table", "input_ids"], [name])
                for name in outputs
            ],
            "lookup",
            values(["input_ids", "attention_mask"]),
            [helper.make_tensor_value_info(name, kind, None) for name in outputs],
            [
                numpy_helper.from_array(TABLES[name].astype(dtype), f"{name}.table")
                for name in outputs
            ],
        ),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=9,
    )


def first_token(proto: onnx.ModelProto, name: str) -> onnx.ModelProto:
    """Give an output of the first token only."""
    proto.graph.node[-1].output[0] = "every"
    proto.graph.initializer.append(numpy_helper.from_array(np.array(0), "zero"))
    proto.graph.node.append(helper.make_node("Gather", ["every", "zero"], [name], axis=1))
    return proto


def graph_for(task: str) -> onnx.ModelProto:
    match task:
        case "classification":
            return first_token(lookup("logits"), "logits")
        case "ner":
            return lookup("logits")
        case "qa":
            return lookup("start_logits", "end_logits")
    return lookup("last_hidden_state")


def write(folder: Path, task: str, proto: onnx.ModelProto | None = None, **config: Any) -> Path:
    """Write a graph with its configuration."""
    document = {
        "model_type": "lookup",
        "architectures": [ARCHITECTURES[task]],
        "vocab_size": VOCAB,
        "max_position_embeddings": 64,
        "id2label": LABELS,
        **config,
    }
    write_json(folder / "config.json", {k: v for k, v in document.items() if v is not None})
    onnx.save(proto or graph_for(task), folder / "model.onnx")
    return folder


def write_modules(folder: Path, *kinds: str) -> None:
    modules = [
        {"path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(["Transformer", *kinds])
    ]
    write_json(folder / "modules.json", modules)


# -- what comes of them ---------------------------------------------------------------------------


def export(given: Path, out: Path, *flags: str) -> Bundle:
    assert 0 == main([str(given), str(out), "--no-memory", *flags])
    return bundle.load(out)


def pack(made: Bundle) -> Packed:
    encoder = Encoder.from_file(made.file("tokenizer.json"), made.manifest.max_length)
    return packing.pack([item.windows[0] for item in encoder.texts(TEXTS)])


def run(made: Bundle) -> BatchOutputs:
    """A batch of mixed lengths, as it is served."""
    options = SessionOptions(threads=1)
    session = open_session(made, provider="cpu", options=options)
    assert CPU is session.kind
    return session.run(pack(made))


def per_text(made: Bundle, rows: np.ndarray) -> list[np.ndarray]:
    packed = pack(made)
    return np.split(rows, np.cumsum(packed.lengths)[:-1])


def looked_up(made: Bundle, name: str) -> np.ndarray:
    return TABLES[name][pack(made).input_ids]


def means(made: Bundle, name: str = "last_hidden_state") -> np.ndarray:
    return np.stack([rows.mean(axis=0) for rows in per_text(made, looked_up(made, name))])


def firsts(made: Bundle, name: str = "last_hidden_state") -> np.ndarray:
    return np.stack([rows[0] for rows in per_text(made, looked_up(made, name))])


def assert_gives(made: Bundle, head: str, expected: np.ndarray, atol: float = 1e-6) -> None:
    found = run(made)
    assert [head] == [*found]
    assert np.float32 == found[head].dtype
    np.testing.assert_allclose(found[head], expected, rtol=0, atol=atol)


@pytest.mark.parametrize("task", ARCHITECTURES)
def test_tasks(task, folder, out):
    """The architecture says the task, the head has its name, and gives what the graph looks up."""
    made = export(write(folder, task), out)
    expected = {
        "classification": lambda: firsts(made, "logits"),
        "ner": lambda: looked_up(made, "logits"),
        "qa": lambda: np.stack(
            [looked_up(made, "start_logits"), looked_up(made, "end_logits")], axis=-1
        ),
        "embedding": lambda: means(made),
    }[task]()
    assert_gives(made, task, expected)
    assert "padded" == made.manifest.graphs[0].layout
    (head,) = made.manifest.heads.values()
    assert ((*LABELS.values(),) if task in ("classification", "ner") else ()) == head.labels
    assert (("mean", WIDTH) if task == "embedding" else (None, None)) == (
        head.pooling,
        head.dimensions,
    )


def test_manifest(folder, out):
    """One graph, padded, whose weights' precision it has; and its own answers for goldens."""
    made = export(write(folder, "ner"), out, "--name", "tags", "--version", "2")
    manifest = made.manifest
    (graph,) = manifest.graphs
    assert ("tags@2", "fp32", 64, VOCAB) == (
        manifest.id,
        manifest.default_precision,
        manifest.max_length,
        manifest.vocabulary.size,
    )
    assert ("padded", "fp32", "any", 17, None) == (
        graph.layout,
        graph.precision,
        graph.provider,
        graph.opset,
        graph.weights,
    )
    assert 1e-3 == manifest.goldens.tolerance["fp32"].max_difference
    rows = TABLES["logits"][made.golden.input_ids]
    np.testing.assert_array_equal(made.golden.outputs["ner"], rows)
    card = (out / "README.md").read_text()
    assert "exported by another tool" in card
    assert "computed alone" not in card


@pytest.mark.parametrize("place", ["onnx/model.onnx", "onnx/model_quantized.onnx", "model_O3.onnx"])
@pytest.mark.parametrize("named", [True, False])
def test_places(place, named, folder, out):
    """The only graph of the directory or of its `onnx` is taken, and a graph may be named."""
    write(folder, "ner")
    (folder / place).parent.mkdir(exist_ok=True)
    (folder / "model.onnx").rename(folder / place)
    assert "padded" == export(folder / place if named else folder, out).manifest.graphs[0].layout


def test_a_directory_with_weights(folder, out, capsys):
    """A directory of a checkpoint and its graph is a checkpoint, unless `--onnx` selects the graph."""
    (write(folder, "ner") / "model.safetensors").write_bytes(b"")
    assert 1 == main([str(folder), str(out)])
    assert "model_type" in capsys.readouterr().err  # which only a checkpoint needs
    assert "padded" == export(folder, out, "--onnx").manifest.graphs[0].layout


def test_the_longest_input(folder, out, tmp_path):
    """The smallest stated limit; --max-length may lower it, and is the only limit if none is stated."""
    write_json(folder / "tokenizer_config.json", {**AS_SAVED, "model_max_length": 32})
    assert 32 == export(write(folder, "ner"), out).manifest.max_length
    assert 16 == export(folder, tmp_path / "b", "--max-length", "16").manifest.max_length
    write_json(folder / "tokenizer_config.json", {**AS_SAVED, "model_max_length": 10**30})
    write(folder, "ner", max_position_embeddings=None)
    assert 40 == export(folder, tmp_path / "c", "--max-length", "40").manifest.max_length


def test_metrics_of_labelled_data(folder, out, tmp_path):
    """The one graph is measured like any other."""
    row = {"text": "Ada drew a comet", "label": "sea"}
    (tmp_path / "data.jsonl").write_text(json.dumps(row) + "\n")
    made = export(
        write(folder, "classification"), out, "--eval", f"classification={tmp_path / 'data.jsonl'}"
    )
    assert {"fp32"} == {*made.manifest.metrics["classification"]}


# -- embeddings -----------------------------------------------------------------------------------


def test_the_assumed_pooling(folder, out, capsys):
    """Where no file declares the pooling, export warns of the mean, and of vectors of length 1."""
    export(write(folder, "embedding"), out)
    shown = capsys.readouterr().out
    assert "the pooling is assumed to be mean; --pooling selects another one" in shown
    assert "sentence-transformers does not normalize" in shown


def test_a_requested_pooling(folder, out, tmp_path, capsys):
    """`--pooling` selects the pooling without a warning; a declared one stays."""
    made = export(write(folder, "embedding"), out, "--pooling", "cls")
    assert_gives(made, "embedding", firsts(made))
    assert "cls" == made.manifest.heads["embedding"].pooling
    assert "assumed" not in capsys.readouterr().out
    write_json(folder / "1_Pooling" / "config.json", {"pooling_mode_mean_tokens": True})
    assert 1 == main([str(folder), str(tmp_path / "other"), "--pooling", "cls"])
    assert "its files declare the pooling mean" in capsys.readouterr().err


@pytest.mark.parametrize("pooled", [True, False])
def test_outputs_of_other_names(pooled, folder, out):
    """`--output` selects an output of another name, of a vector per token or per text."""
    proto = lookup("last_hidden_state")
    proto.graph.node[0].output[0] = "every"
    if pooled:
        proto.graph.initializer.append(numpy_helper.from_array(np.array(0), "zero"))
        node = helper.make_node("Gather", ["every", "zero"], ["461"], axis=1)
    else:
        node = helper.make_node("Identity", ["every"], ["461"])
    proto.graph.node.append(node)
    proto.graph.output[0].name = "461"
    made = export(write(folder, "embedding", proto), out, "--output", "461")
    assert_gives(made, "embedding", (firsts if pooled else means)(made, "last_hidden_state"))
    assert ("none" if pooled else "mean") == made.manifest.heads["embedding"].pooling


def test_other_names_of_logits(folder, out):
    """The outputs of the other tasks may have other names, too, in the order of the task's own."""
    proto = lookup("end_logits", "start_logits")
    for node, value, name in zip(proto.graph.node, proto.graph.output, "ab", strict=True):
        node.output[0] = value.name = name
    made = export(write(folder, "qa", proto), out, "--output", "b", "a")
    columns = [looked_up(made, name) for name in ("start_logits", "end_logits")]
    assert_gives(made, "qa", np.stack(columns, axis=-1))


def test_pooled_vectors_only(folder, out, capsys):
    """A graph whose only output is `sentence_embedding` has pooled already, and needs no pooling."""
    proto = first_token(lookup("last_hidden_state"), "sentence_embedding")
    proto.graph.output[0].name = "sentence_embedding"
    made = export(write(folder, "embedding", proto), out)
    assert_gives(made, "embedding", firsts(made))
    assert "none" == made.manifest.heads["embedding"].pooling
    assert "the graph pools its vectors itself" in capsys.readouterr().out


def weighted(rows: np.ndarray) -> np.ndarray:
    return np.average(rows, axis=0, weights=np.arange(1, len(rows) + 1))


POOLED: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "max": lambda rows: rows.max(axis=0),
    "lasttoken": lambda rows: rows[-1],
    "mean_sqrt_len_tokens": lambda rows: rows.sum(axis=0) / len(rows) ** 0.5,
    "weightedmean": weighted,
}


@pytest.mark.parametrize("mode", POOLED)
def test_other_poolings(mode, folder, out):
    """Each pooling of sentence-transformers is appended, alone and concatenated, and does not depend on the batch."""
    write_json(folder / "1_Pooling" / "config.json", {"pooling_mode": [mode, "cls"]})
    made = export(write(folder, "embedding"), out)
    rows = per_text(made, looked_up(made, "last_hidden_state"))
    expected = np.stack([np.concatenate([POOLED[mode](own), own[0]]) for own in rows])
    assert_gives(made, "embedding", expected)
    assert (mode, "cls") == made.manifest.heads["embedding"].pooling
    assert (2 * WIDTH, "padded") == (
        made.manifest.heads["embedding"].dimensions,
        made.manifest.graphs[0].layout,
    )


def test_prompts_of_modules(folder, out):
    """The prompts of sentence-transformers are in the manifest."""
    write_modules(folder, "Pooling")
    write_json(folder / "1_Pooling" / "config.json", {"pooling_mode": "mean"})
    prompts = {"prompts": {"query": "query: "}, "default_prompt_name": "query"}
    write_json(folder / "config_sentence_transformers.json", prompts)
    made = export(write(folder, "embedding"), out)
    assert "query: " == made.manifest.heads["embedding"].default_prompt_text


def test_modules(folder, out, tmp_path):
    """Dense layers of sentence-transformers are appended; Normalize says what the service does by default."""
    write_modules(folder, "Pooling", "Dense", "Dense")
    write_json(folder / "1_Pooling" / "config.json", {"pooling_mode": "mean"})
    weights = []
    for place, activation, bias in (("2_Dense", "Tanh", True), ("3_Dense", "Identity", False)):
        layer = torch.nn.Linear(WIDTH, WIDTH, bias=bias)
        weights.append(layer)
        config = {"in_features": WIDTH, "out_features": WIDTH, "bias": bias}
        config["activation_function"] = f"torch.nn.modules.{activation}"
        write_json(folder / place / "config.json", config)
        state = {f"linear.{name}": value for name, value in layer.state_dict().items()}
        save_file(state, folder / place / "model.safetensors")
    made = export(write(folder, "classification", lookup("last_hidden_state")), out)
    with torch.no_grad():
        expected = weights[1](torch.tanh(weights[0](torch.from_numpy(means(made))))).numpy()
    assert_gives(made, "embedding", expected)
    assert made.manifest.heads["embedding"].normalize is False
    write_modules(folder, "Pooling", "Normalize")
    plain = export(folder, tmp_path / "plain")
    assert plain.manifest.heads["embedding"].normalize is True
    assert plain.manifest.embedding_space != made.manifest.embedding_space


def test_a_cross_encoder(folder, out):
    """What sentence-transformers' CrossEncoder writes is a classifier, whose one label comes through a sigmoid."""
    write_modules(folder)
    write_json(folder / "config_sentence_transformers.json", {"model_type": "CrossEncoder"})
    proto = first_token(lookup("logits"), "logits")
    proto.graph.initializer[0].CopyFrom(
        numpy_helper.from_array(TABLES["logits"][:, :1], "logits.table")
    )
    made = export(write(folder, "classification", proto, id2label={"0": "fits"}), out)
    assert_gives(made, "classification", firsts(made, "logits")[:, :1])
    assert "single_label_classification" == made.manifest.heads["classification"].problem_type


@pytest.mark.parametrize(("pooling", "expected"), [("mean", means), ("cls", firsts)])
def test_sentence_embedding(pooling, expected, folder, out):
    """Vectors that the graph pools itself are taken as they are; how is seen from its tokens."""
    proto = lookup("token_embeddings")
    if pooling == "cls":
        node = helper.make_node(
            "Gather", ["token_embeddings", "zero"], ["sentence_embedding"], axis=1
        )
        proto.graph.initializer.append(numpy_helper.from_array(np.array(0), "zero"))
        proto.graph.node.append(node)
    else:
        mean_by_hand(proto)
    kind = helper.make_tensor_value_info("sentence_embedding", TensorProto.FLOAT, None)
    proto.graph.output.append(kind)
    made = export(write(folder, "embedding", proto), out)
    assert_gives(made, "embedding", expected(made, "token_embeddings"))
    assert pooling == made.manifest.heads["embedding"].pooling


def mean_by_hand(proto: onnx.ModelProto) -> None:
    proto.graph.initializer.append(numpy_helper.from_array(np.array([2]), "two"))
    proto.graph.initializer.append(numpy_helper.from_array(np.array([1]), "one"))
    proto.graph.node.extend(
        [
            helper.make_node("Cast", ["attention_mask"], ["real"], to=TensorProto.FLOAT),
            helper.make_node("Unsqueeze", ["real", "two"], ["column"]),
            helper.make_node("Mul", ["token_embeddings", "column"], ["kept"]),
            helper.make_node("ReduceSum", ["kept", "one"], ["sum"], keepdims=0),
            helper.make_node("ReduceSum", ["real", "one"], ["length"], keepdims=1),
            helper.make_node("Div", ["sum", "length"], ["sentence_embedding"]),
        ]
    )


def test_values_called_like_a_head(folder, out):
    """Whatever the graph calls its own values, the head's name is the head's."""
    proto = lookup("last_hidden_state")
    proto.graph.node[0].output[0] = "embedding"
    proto.graph.node.append(helper.make_node("Identity", ["embedding"], ["last_hidden_state"]))
    made = export(write(folder, "embedding", proto), out)
    assert_gives(made, "embedding", means(made))


def test_a_graph_without_a_mask(folder, out):
    """Pooling takes the mask, which the graph itself does not read."""
    proto = lookup("last_hidden_state")
    del proto.graph.input[1]
    made = export(write(folder, "embedding", proto), out)
    assert_gives(made, "embedding", means(made))
    assert "padded" == made.manifest.graphs[0].layout


@pytest.mark.parametrize("opset", [11, 16, 20])
@pytest.mark.parametrize("mode", ["mean", *POOLED])
def test_opsets(mode, opset, folder, out):
    """A pooling is appended to graphs of other opsets; the opset of an old graph is raised for it."""
    proto = lookup("last_hidden_state")
    del proto.opset_import[:]
    domains = [helper.make_opsetid("", opset), helper.make_opsetid("com.microsoft", 1)]
    proto.opset_import.extend(domains)
    proto.ir_version = helper.find_min_ir_version_for(domains[:1])
    proto.graph.node[0].output[0] = "looked"
    gelu = helper.make_node("Gelu", ["looked"], ["last_hidden_state"], domain="com.microsoft")
    proto.graph.node.append(gelu)
    write_json(folder / "1_Pooling" / "config.json", {"pooling_mode": mode})
    made = export(write(folder, "embedding", proto), out)
    states = torch.nn.functional.gelu(torch.from_numpy(looked_up(made, "last_hidden_state")))
    pooled = {"mean": lambda rows: rows.mean(axis=0), **POOLED}[mode]
    expected = np.stack([pooled(rows) for rows in per_text(made, states.numpy())])
    assert_gives(made, "embedding", expected)
    (graph,) = made.manifest.graphs
    assert ("padded", max(opset, 16)) == (graph.layout, graph.opset)


def test_positions(folder, out):
    """A graph that asks for positions gets each token's own, from 0."""
    proto = lookup("last_hidden_state")
    proto.graph.input.extend(values(["position_ids"]))
    proto.graph.node[0].input[1] = "position_ids"
    made = export(write(folder, "embedding", proto), out)
    table = TABLES["last_hidden_state"]
    expected = [table[:length].mean(axis=0) for length in pack(made).lengths]
    assert_gives(made, "embedding", np.stack(expected))


# -- weights --------------------------------------------------------------------------------------


def test_external_weights(folder, out):
    """They are copied as they are, and their hash is in the manifest."""
    write(folder, "ner")
    onnx.save(
        lookup("logits"),
        folder / "model.onnx",
        save_as_external_data=True,
        location="model.onnx_data",
        size_threshold=0,
    )
    made = export(folder, out)
    (graph,) = made.manifest.graphs
    assert graph.weights is not None
    assert "weights.bin" == graph.weights.file
    assert (folder / "model.onnx_data").read_bytes() == (out / "weights.bin").read_bytes()
    assert len((out / graph.file).read_bytes()) < TABLES["logits"].nbytes
    assert_gives(made, "ner", looked_up(made, "logits"))


@pytest.mark.parametrize("task", ["ner", "embedding"])
def test_half_precision(task, folder, out):
    """The manifest says fp16; outputs are still float32."""
    name = "logits" if task == "ner" else "last_hidden_state"
    made = export(write(folder, task, lookup(name, dtype=np.float16)), out)
    assert ["fp16"] == [*made.manifest.precisions]
    assert {task: 0.999} == made.manifest.goldens.tolerance["fp16"].min_cosine
    expected = looked_up(made, name) if task == "ner" else means(made)
    assert_gives(made, task, expected, atol=2e-3)


def matmul() -> onnx.ModelProto:
    """Hidden states through a matrix, which can be quantised."""
    proto = lookup("last_hidden_state")
    proto.graph.node[0].output[0] = "looked"
    weight = np.eye(WIDTH, dtype=np.float32) + 0.01
    proto.graph.initializer.append(numpy_helper.from_array(weight, "matrix"))
    proto.graph.node.append(helper.make_node("MatMul", ["looked", "matrix"], ["last_hidden_state"]))
    return proto


@pytest.mark.parametrize(
    ("operators", "layout"), [(["Gather", "MatMul"], "padded"), (["MatMul"], "alone")]
)
def test_quantised(operators, layout, folder, out):
    """A dynamic scale per batch makes results depend on the batch, so each text runs unbatched."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    write(folder, "embedding", matmul())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        quantize_dynamic(
            folder / "model.onnx",
            folder / "model_quantized.onnx",
            weight_type=QuantType.QInt8,
            op_types_to_quantize=operators,
        )
    made = export(folder / "model_quantized.onnx", out)
    (graph,) = made.manifest.graphs
    assert ("int8", "cpu", layout) == (graph.precision, graph.provider, graph.layout)
    assert 0.98 == made.manifest.goldens.tolerance["int8"].min_cosine["embedding"]
    assert ("computed alone" in (out / "README.md").read_text()) is (layout == "alone")
    session = open_session(made, provider="cpu", options=SessionOptions(threads=1))
    together = session.run(pack(made))["embedding"]
    alone = [session.run(own)["embedding"][0] for own in packing.each(pack(made))]
    np.testing.assert_allclose(np.stack(alone), together, rtol=0, atol=1e-6)


def test_a_graph_of_one_text(folder, out):
    """Where a batch of one is baked into what claims to be dynamic, texts run alone."""
    proto = first_token(lookup("logits"), "logits")
    proto.graph.initializer.append(numpy_helper.from_array(np.array([1, -1]), "shape"))
    proto.graph.node.insert(0, helper.make_node("Reshape", ["input_ids", "shape"], ["flat"]))
    proto.graph.node[1].input[1] = "flat"
    made = export(write(folder, "classification", proto), out)
    assert "alone" == made.manifest.graphs[0].layout
    assert_gives(made, "classification", firsts(made, "logits"))


# -- refusals -------------------------------------------------------------------------------------


def rewrite(**config: Any) -> Spoil:
    return lambda folder: write(folder, "ner", **config)


def regraph(change: Callable[[onnx.ModelProto], object], task: str = "ner", **config: Any) -> Spoil:
    def spoil(folder: Path) -> None:
        proto = graph_for(task)
        change(proto)
        write(folder, task, proto, **config)

    return spoil


def rename_input(proto: onnx.ModelProto, old: str, new: str) -> None:
    for value in proto.graph.input:
        value.name = new if value.name == old else value.name
    for node in proto.graph.node:
        node.input[:] = [new if name == old else name for name in node.input]


def fix_axis(proto: onnx.ModelProto, axis: int) -> None:
    proto.graph.input[0].type.tensor_type.shape.dim[axis].dim_value = 8


def make_int32(proto: onnx.ModelProto) -> None:
    proto.graph.input[0].type.tensor_type.elem_type = TensorProto.INT32


def drop_last_token(proto: onnx.ModelProto) -> None:
    """Rows for all tokens but one."""
    proto.graph.node[0].output[0] = "every"
    for name, value in (("start", [1]), ("end", [2**31]), ("axis", [1])):
        proto.graph.initializer.append(numpy_helper.from_array(np.array(value), name))
    proto.graph.node.append(
        helper.make_node("Slice", ["every", "start", "end", "axis"], ["logits"])
    )


def fill(value: float) -> Callable[[onnx.ModelProto], None]:
    def change(proto: onnx.ModelProto) -> None:
        table = np.full((VOCAB, 3), value, np.float32)
        proto.graph.initializer[0].CopyFrom(numpy_helper.from_array(table, "logits.table"))

    return change


def cast_output(kind: int) -> Callable[[onnx.ModelProto], None]:
    def change(proto: onnx.ModelProto) -> None:
        proto.graph.node[0].output[0] = "every"
        proto.graph.node.append(helper.make_node("Cast", ["every"], ["logits"], to=kind))
        proto.graph.output[0].type.tensor_type.elem_type = kind

    return change


def limit_positions(proto: onnx.ModelProto) -> None:
    """A table of positions with fewer rows than the configuration says."""
    proto.graph.input.extend(values(["position_ids"]))
    table = np.zeros((20, 3), np.float32)
    proto.graph.initializer.append(numpy_helper.from_array(table, "rows"))
    proto.graph.node[0].output[0] = "every"
    proto.graph.node.append(helper.make_node("Gather", ["rows", "position_ids"], ["where"]))
    proto.graph.node.append(helper.make_node("Add", ["every", "where"], ["logits"]))


def bfloat16(proto: onnx.ModelProto) -> None:
    table = helper.make_tensor("logits.table", TensorProto.BFLOAT16, (VOCAB, 3), [0.5] * VOCAB * 3)
    proto.graph.initializer[0].CopyFrom(table)
    proto.graph.node[0].output[0] = "every"
    proto.graph.node.append(helper.make_node("Cast", ["every"], ["logits"], to=TensorProto.FLOAT))


def four_bits(proto: onnx.ModelProto) -> None:
    """`com.microsoft.MatMulNBits` behind the table."""
    proto.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    proto.graph.node[0].output[0] = "every"
    for name, value in (("quantised", np.zeros((3, 1, 8), np.uint8)), ("scales", np.ones(3))):
        typed = value if value.dtype == np.uint8 else value.astype(np.float32)
        proto.graph.initializer.append(numpy_helper.from_array(typed, name))
    proto.graph.node.append(
        helper.make_node(
            "MatMulNBits",
            ["every", "quantised", "scales"],
            ["logits"],
            domain="com.microsoft",
            K=3,
            N=3,
            bits=4,
            block_size=16,
        )
    )


def two_weight_files(folder: Path) -> None:
    proto = lookup("start_logits", "end_logits")
    for tensor in proto.graph.initializer:
        (folder / tensor.name).write_bytes(tensor.raw_data)
        set_external_data(tensor, tensor.name, 0, len(tensor.raw_data))
        tensor.ClearField("raw_data")
    write(folder, "qa", proto)


def unreadable(folder: Path) -> None:
    (write(folder, "ner") / "model.onnx").write_bytes(b"this is none")


def several_graphs(folder: Path) -> None:
    write(folder, "ner")
    (folder / "model.onnx").rename(folder / "model_O3.onnx")
    (folder / "onnx").mkdir()
    onnx.save(graph_for("ner"), folder / "onnx" / "model_quantized.onnx")


def median_pooled(folder: Path) -> None:
    write_modules(folder, "Pooling")
    write_json(folder / "1_Pooling" / "config.json", {"pooling_mode": "median"})
    write(folder, "embedding")


REFUSALS: dict[str, tuple[Spoil, str]] = {
    "several graphs": (several_graphs, "give the path of one of model_O3.onnx, onnx/model_qu"),
    "no graph inside": (unreadable, "model.onnx cannot be opened"),
    "a decoder": (rewrite(is_decoder=True), "a decoder cannot be served"),
    "a generator": (
        rewrite(architectures=["GPT2ForCausalLM"]),
        "architecture GPT2ForCausalLM is none of ...ForSequenceClassification",
    ),
    "a masked language model": (
        rewrite(architectures=["LookupForMaskedLM"]),
        "--task names the task of the graph, such as --task embedding",
    ),
    "no vocabulary": (rewrite(vocab_size=None), "does not say vocab_size"),
    "a small vocabulary": (rewrite(vocab_size=99), "tokens, the model 99"),
    "no length": (rewrite(max_position_embeddings=None), "--max-length: the checkpoint does not"),
    "an unknown input": (
        regraph(lambda proto: proto.graph.input.extend(values(["bbox"]))),
        "cannot feed bbox: only input_ids, attention_mask, token_type_ids, position_ids",
    ),
    "a cache": (
        regraph(lambda proto: proto.graph.input.extend(values(["past_key_values.0.key"]))),
        "cannot feed past_key_values.0.key",
    ),
    "no tokens": (
        regraph(lambda proto: rename_input(proto, "input_ids", "position_ids")),
        "has no input_ids",
    ),
    "int32": (regraph(make_int32), "input_ids is a tensor(int32): int64 only"),
    "a fixed batch": (regraph(lambda proto: fix_axis(proto, 0)), "input_ids has shape [8, 's']"),
    "a fixed length": (regraph(lambda proto: fix_axis(proto, 1)), "input_ids has shape ['b', 8]"),
    "positions of another beginning": (
        regraph(
            lambda proto: proto.graph.input.extend(values(["position_ids"])), model_type="roberta"
        ),
        "position_ids of roberta begin behind its padding token's id",
    ),
    "another task's outputs": (
        rewrite(architectures=["LookupModel"]),
        "has no output last_hidden_state, only logits: embedding needs last_hidden_state or token_embeddings or "
        "sentence_embedding; --output NAME selects",
    ),
    "half of the outputs": (
        regraph(lambda proto: proto.graph.output.pop(), "qa"),
        "has no output end_logits, only start_logits: qa needs start_logits and end_logits",
    ),
    "a row per token where there is one": (
        rewrite(architectures=["LookupForSequenceClassification"]),
        "needs (1, 3), [1, labels]",
    ),
    "a row where there is one per token": (
        regraph(lambda proto: first_token(proto, "logits")),
        "logits has shape (1, 3) where ner needs",
    ),
    "fewer rows than tokens": (regraph(drop_last_token), "[1, tokens, labels]"),
    "other labels": (rewrite(id2label={"0": "a", "1": "b"}), "where ner needs (1, "),
    "no numbers": (regraph(fill(np.nan)), "logits has numbers that are not finite"),
    "whole numbers": (regraph(cast_output(TensorProto.INT64)), "logits is of int64"),
    "fewer positions than said": (regraph(limit_positions), "(--max-length sets the longest)"),
    "bfloat16": (regraph(bfloat16), "cannot serve weights of BFLOAT16"),
    "four bits": (regraph(four_bits), "cannot serve weights of 4 bits"),
    "weights in many files": (two_weight_files, "its weights lie in 2 files"),
    "pooled another way": (median_pooled, "cannot serve pooling median"),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_refused(what, folder, out, capsys):
    """Status 1, one line with the reason, and no file next to OUT, in it, or among temporary files."""
    spoil, said = REFUSALS[what]
    spoil(folder)
    assert 1 == main([str(folder), str(out)])
    errors = capsys.readouterr().err
    assert said in errors
    assert errors.startswith("export: ")
    assert 1 == errors.count("\n")
    assert [] == [*out.parent.iterdir()]
    assert [] == [*(out.parent.parent / "scratch").iterdir()]


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("../secret", "model.onnx cannot be opened"),
        ("parts/table", "its weights must be in its directory, not at parts/table"),
    ],
)
def test_weights_elsewhere(place, said, folder, out, capsys):
    """A bundle is flat, and no file from beyond the directory comes into it."""
    proto = lookup("logits")
    (folder / "parts").mkdir()
    (folder / place).write_bytes(proto.graph.initializer[0].raw_data)
    set_external_data(proto.graph.initializer[0], place, 0)
    proto.graph.initializer[0].ClearField("raw_data")
    write(folder, "ner", proto)
    assert 1 == main([str(folder), str(out)])
    assert said in capsys.readouterr().err


def test_an_external_graph_takes_no_precision(folder, out):
    """The graph has the one that it has."""
    with pytest.raises(SystemExit) as ended:
        main([str(write(folder, "ner")), str(out), "--precision", "int8"])
    assert 2 == ended.value.code

"""Each setting of a sentence-transformers directory has here the meaning that it has there, or is refused by name."""

import inspect
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from sentence_transformers import CrossEncoder, MultiVectorEncoder, SentenceTransformer
from sentence_transformers.base import model as base_model
from sentence_transformers.base.modules import Dense, Normalize, Router, Transformer
from sentence_transformers.multi_vector_encoder.modules import MultiVectorMask
from sentence_transformers.sentence_transformer.modules import (
    LayerNorm,
    Pooling,
    WeightedLayerPooling,
)

from export.goldens import run_torch
from model.checkpoints import sentence_config
from model.checkpoints.errors import CheckpointError
from model.checkpoints.sentence_config import (
    DENSE_TABLE,
    LAYER_NORM_TABLE,
    MASK_TABLE,
    NORMALIZE_TABLE,
    POOLING_MODES,
    POOLING_TABLE,
    ROOT_TABLE,
    SENTENCE_FILES,
    TRANSFORMER_TABLE,
    WEIGHTED_TABLE,
    read_module_list,
    read_pooling_mode,
    read_sentence_config,
    unknown_sentence_settings,
)
from model.checkpoints.settings_table import Handling
from model.checkpoints.source import read_source
from service.core import decode
from service.core.encode import Encoder
from service.core.manifest import PROMPT_NAMES
from tests import hub, samples
from tests.conftest import run_export
from tests.json_files import edit_json, write_json

TEXTS = [samples.text(words, seed=words) for words in (1, 9, 30, 200)]
TEXTS += [TEXTS[1].upper(), "Ada  DREW a \u00c9t\u00e9."]
SENTENCE, MODEL = SENTENCE_FILES[0], "config_sentence_transformers.json"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encoder, mean pooling, a dense layer and a norm, as sentence-transformers writes them."""
    folder = tmp_path_factory.mktemp("sentence") / "model"
    plain = hub.save(
        "bert", folder.with_name("plain"), hub.transformers.AutoModel, num_hidden_layers=1
    )
    torch.manual_seed(1)
    parts = [Transformer(str(plain)), Pooling(32, "mean"), Dense(32, 20), Normalize()]
    SentenceTransformer(modules=parts, device="cpu").save(str(folder))
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """The test's own copy."""
    return shutil.copytree(saved, tmp_path / "model")


def vectors(folder: Path) -> np.ndarray:
    source = read_source(folder)
    head = source.model.described["embedding"]
    encoded = Encoder(source.tokenizer, source.max_length).texts(TEXTS)
    outputs = run_torch(source.model, [item.windows[0] for item in encoded])
    made = (output["embedding"] for output in outputs)
    return np.stack(
        [decode.embed([v], [1], normalize=head.normalize, dimensions=None) for v in made]
    )


def assert_same_vectors(folder: Path) -> np.ndarray:
    """The vectors of sentence-transformers for the directory are ours; returns them."""
    reference = SentenceTransformer(str(folder), device="cpu")
    expected = np.asarray(reference.encode(TEXTS, show_progress_bar=False))
    np.testing.assert_allclose(vectors(folder), expected, rtol=0, atol=1e-5)
    return expected


def differs(found: np.ndarray, other: np.ndarray) -> bool:
    return found.shape != other.shape or float(np.abs(found - other).max()) > 1e-3


@pytest.mark.parametrize("name", SENTENCE_FILES)
def test_sentence_files(name, folder):
    """Each name of the Transformer's own file is read."""
    before = assert_same_vectors(folder)
    (folder / SENTENCE).unlink()
    write_json(folder / name, {"max_seq_length": 8, "do_lower_case": False})
    assert differs(before, assert_same_vectors(folder))


def test_first_file_counts(folder):
    """The first file that is not empty counts, as in sentence-transformers."""
    write_json(folder / SENTENCE_FILES[0], {})
    write_json(folder / SENTENCE_FILES[3], {"max_seq_length": 20})
    write_json(folder / SENTENCE_FILES[2], {"max_seq_length": 8})
    assert_same_vectors(folder)
    assert {"max_seq_length": 8} == read_sentence_config(folder)


def test_without_modules(folder):
    """Without `modules.json` none of these files is read, as in sentence-transformers."""
    write_json(folder / SENTENCE, {"max_seq_length": 8})
    edit_json(folder / MODEL, prompts={"query": "query: "}, default_prompt_name="query")
    for name in ("modules.json", "1_Pooling/config.json"):
        (folder / name).unlink()
    (folder / "1_Pooling").rmdir()
    source = read_source(folder)
    assert 64 == source.max_length == SentenceTransformer(str(folder), device="cpu").max_seq_length
    assert {} == read_sentence_config(folder)


def test_transformer_in_its_folder(folder):
    """The encoder, its tokenizer and its settings are read from the folder that `modules.json` names."""
    before = assert_same_vectors(folder)
    inner = folder / "0_Transformer"
    inner.mkdir()
    for name in ("model.safetensors", "tokenizer.json", "tokenizer_config.json", "config.json"):
        (folder / name).rename(inner / name)
    (folder / SENTENCE).unlink()
    write_json(inner / SENTENCE, {"max_seq_length": 8})
    write_json(folder / "config.json", {"__version__": "0.3.9"})
    modules = json.loads((folder / "modules.json").read_text())
    modules[0]["path"] = "0_Transformer"
    write_json(folder / "modules.json", modules)
    assert differs(before, assert_same_vectors(folder))


def test_lower_case(folder):
    """`do_lower_case` lowers the case for a tokenizer that keeps it."""
    state = json.loads((folder / "tokenizer.json").read_text())
    state["normalizer"] = {
        **{"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True},
        **{"strip_accents": False, "lowercase": False},
    }
    write_json(folder / "tokenizer.json", state)
    before = assert_same_vectors(folder)
    edit_json(folder / SENTENCE, do_lower_case=True)
    after = assert_same_vectors(folder)
    assert differs(before, after)
    np.testing.assert_allclose(after[1], after[4], atol=1e-6)


POOLINGS: dict[str, dict[str, Any]] = {
    "a name": {"pooling_mode": "cls"},
    "a list": {"pooling_mode": ["cls"]},
    "the mean": {"pooling_mode": "mean"},
    "no mode": {},
    "all off": {"pooling_mode_cls_token": False, "pooling_mode_max_tokens": False},
    "a switch": {"pooling_mode_cls_token": True},
    "a switch and a name": {"pooling_mode": "mean", "pooling_mode_max_tokens": True},
    "a number": {"pooling_mode_cls_token": 1, "pooling_mode_mean_tokens": 0},
    "without the prompt": {"pooling_mode": "cls", "include_prompt": False},
    "the last token": {"pooling_mode": "lasttoken"},
    "the largest numbers": {"pooling_mode": "max"},
    "by positions": {"pooling_mode": "weightedmean"},
    "by the root of the length": {"pooling_mode": "mean_sqrt_len_tokens"},
    "two in their order": {"pooling_mode": ["mean", "cls"]},
    "two switches": {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": True},
    "all": {"pooling_mode": [*POOLING_MODES.values()]},
}


@pytest.mark.parametrize("word", ["embedding_dimension", "word_embedding_dimension"])
@pytest.mark.parametrize("case", POOLINGS)
def test_pooling(case, word, folder):
    """Every way to write a pooling is read as sentence-transformers reads it."""
    write_json(folder / "1_Pooling/config.json", {word: 32, **POOLINGS[case]})
    widen(folder, len(read_pooling_mode(folder / "1_Pooling/config.json")))
    assert_same_vectors(folder)


def widen(folder: Path, modes: int) -> None:
    """Give the dense layer the width of several concatenated poolings."""
    edit_json(folder / "2_Dense/config.json", in_features=32 * modes)
    path = folder / "2_Dense/model.safetensors"
    layer = load_file(path)
    layer["linear.weight"] = torch.cat(
        [layer["linear.weight"].roll(n, dims=1) for n in range(modes)], dim=1
    ).contiguous()
    save_file(layer, path)


@pytest.mark.parametrize("fields", [{}, {"bias": True}, {"use_residual": False}])
def test_dense(fields, folder):
    """What a dense layer leaves out has sentence-transformers' value."""
    write_json(folder / "2_Dense/config.json", {"in_features": 32, "out_features": 20, **fields})
    assert_same_vectors(folder)


def test_layer_norm(folder):
    """A norm may follow the pooling or a dense layer."""
    made = SentenceTransformer(str(folder), device="cpu")
    for place, width in ((2, 32), (4, 20)):
        norm = LayerNorm(width)
        torch.nn.init.normal_(norm.norm.weight)
        made.insert(place, norm)
    made.save(str(folder))
    assert ["LayerNorm", "Dense", "LayerNorm"] == [kind for kind, _ in read_module_list(folder)][
        2:5
    ]
    assert_same_vectors(folder)


@pytest.mark.parametrize("has_states", [True, False])
@pytest.mark.parametrize("family", ["bert", "modernbert"])
def test_weighted_layers(family, has_states, tmp_path):
    """The mean of layers is pooled, if the encoder's configuration asks for all layers; exported, too."""
    hub.save_sentence_transformer(
        family, tmp_path / "first", "cls", output_hidden_states=has_states
    )
    made = SentenceTransformer(str(tmp_path / "first"), device="cpu")
    weighted = WeightedLayerPooling(32, num_hidden_layers=2, layer_start=1)
    weighted.layer_weights.data = torch.tensor([0.3, 1.2])
    made.insert(1, weighted)
    made.save(str(tmp_path / "second"))
    assert_same_vectors(tmp_path / "second")
    run_export(tmp_path / "second", tmp_path / "bundle")


def test_pickled_dense(folder):
    """A dense layer's weights may be pickled, as older releases wrote them."""
    path = folder / "2_Dense/model.safetensors"
    torch.save(load_file(path), folder / "2_Dense/pytorch_model.bin")
    path.unlink()
    assert_same_vectors(folder)


HARMLESS: list[tuple[str, str, Any]] = [
    (SENTENCE, "model_args", {}),
    (SENTENCE, "config_args", {"trust_remote_code": True}),
    (SENTENCE, "unpad_inputs", False),
    (SENTENCE, "processing_kwargs", {}),
    (SENTENCE, "query_length", None),
    (MODEL, "prompts", {"query": "query: ", "passage": "passage: "}),
    (MODEL, "default_prompt_name", "document"),
    (MODEL, "similarity_fn_name", "dot"),
    (MODEL, "truncate_dim", None),
    (MODEL, "requirements", []),
    (MODEL, "__version__", {"sentence_transformers": "2.0.0"}),
    ("3_Normalize/config.json", "module_input_name", "sentence_embedding"),
    ("2_Dense/config.json", "module_output_name", "sentence_embedding"),
    ("2_Dense/config.json", "activation_function", "torch.nn.modules.linear.Identity"),
]


@pytest.mark.parametrize(("file", "name", "value"), HARMLESS)
def test_harmless_values(file, name, value, folder):
    """A value that is read or has no effect gives sentence-transformers' vectors."""
    edit_json(folder / file, **{name: value})
    assert_same_vectors(folder)


REFUSED: list[tuple[str, str, Any]] = [
    (SENTENCE, "transformer_task", "fill-mask"),
    (SENTENCE, "transformer_task", "sequence-classification"),
    (SENTENCE, "modality_config", {"text": {"method": "forward", "method_output_name": "other"}}),
    (SENTENCE, "module_output_name", "causal_logits"),
    (SENTENCE, "processing_kwargs", {"text": {"max_length": 4}}),
    (SENTENCE, "query_length", 8),
    (SENTENCE, "document_length", 8),
    (SENTENCE, "query_expansion", {"strategy": "fixed", "length": 8}),
    (SENTENCE, "model_args", {"attn_implementation": "eager"}),
    (SENTENCE, "model_kwargs", {"dtype": "float16"}),
    (SENTENCE, "tokenizer_args", {"do_lower_case": False}),
    (SENTENCE, "processor_kwargs", {"model_max_length": 8}),
    (SENTENCE, "config_args", {"num_hidden_layers": 1}),
    (SENTENCE, "config_kwargs", {"num_hidden_layers": 1}),
    (SENTENCE, "tokenizer_name_or_path", "bert-base-uncased"),
    (SENTENCE, "max_seq_length", "64"),
    (SENTENCE, "max_seq_length", 0),
    (SENTENCE, "max_seq_length", True),
    (SENTENCE, "do_lower_case", "yes"),
    (MODEL, "model_type", "ImageEncoder"),
    (MODEL, "truncate_dim", 8),
    (MODEL, "default_prompt_name", "unknown"),
    (MODEL, "prompts", ["query: "]),
    (MODEL, "prompts", {"query": 3}),
    ("config.json", "matryoshka_dimensions", 16),
    ("config.json", "matryoshka_dimensions", ["16"]),
    ("config.json", "matryoshka_dimensions", [21]),
    ("1_Pooling/config.json", "pooling_mode", "median"),
    ("1_Pooling/config.json", "pooling_mode", ["mean", "median"]),
    ("1_Pooling/config.json", "pooling_mode", []),
    ("1_Pooling/config.json", "pooling_mode", 3),
    ("2_Dense/config.json", "module_input_name", "token_embeddings"),
    ("2_Dense/config.json", "module_output_name", "scores"),
    ("2_Dense/config.json", "use_residual", True),
    ("2_Dense/config.json", "activation_function", "torch.nn.modules.activation.ReLU"),
    ("2_Dense/config.json", "activation_function", "own.Tanh"),
    ("2_Dense/config.json", "activation_function", None),
    ("2_Dense/config.json", "in_features", "32"),
    ("2_Dense/config.json", "out_features", -1),
    ("2_Dense/config.json", "bias", "yes"),
    ("3_Normalize/config.json", "module_input_name", "token_embeddings"),
    ("3_Normalize/config.json", "module_output_name", "other"),
]


@pytest.mark.parametrize(("file", "name", "value"), REFUSED)
def test_refused(file, name, value, folder):
    """A value that is not served is named in one line."""
    edit_json(folder / file, **{name: value})
    word = re.escape(name).replace("_mode", "").replace("activation_function", "activation")
    with pytest.raises(CheckpointError, match=rf"^[^\n]*{word}[^\n]*$") as raised:
        read_source(folder)
    assert file.split("/")[0] in str(raised.value)


@pytest.mark.parametrize("default", [None, "query", "passage", "document"])
@pytest.mark.parametrize(
    "prompts",
    [
        {"query": "query: ", "passage": "passage: "},
        {"query": "Find texts for: ", "document": "text: ", "passage": "passage: "},
        {"query": None, "passage": ""},
    ],
)
def test_prompts(prompts, default, folder):
    """The head has the prompts of sentence-transformers, with the same default."""
    edit_json(folder / MODEL, prompts=prompts, default_prompt_name=default)
    peer = SentenceTransformer(str(folder), device="cpu")
    head = read_source(folder).model.described["embedding"]
    assert head.named_prompts == peer.prompts
    assert head.default_prompt_text == (peer.prompts[default] if default else "")


def test_prompts_that_are_not_pooled(folder):
    """Pooling without the prompt's tokens is refused where a prompt has a text, and recorded where none has."""
    edit_json(folder / "1_Pooling/config.json", include_prompt=False)
    assert not read_source(folder).model.described["embedding"].include_prompt
    edit_json(folder / MODEL, prompts={"query": "query: "})
    with pytest.raises(CheckpointError, match=r"1_Pooling/config\.json: include_prompt = False"):
        read_source(folder)


def test_default_prompt_of_a_cross_encoder(tmp_path):
    """A prompt before every pair is refused, with what to do."""
    hub.save_cross_encoder("bert", tmp_path, torch.nn.Sigmoid(), num_hidden_layers=1)
    edit_json(tmp_path / MODEL, prompts={"query": "query: "}, default_prompt_name="query")
    with pytest.raises(CheckpointError, match="'query: ' before the texts in requests"):
        read_source(tmp_path)


@pytest.fixture
def routed(folder: Path, tmp_path: Path) -> Path:
    """Queries and documents have dense layers of their own after one encoder."""
    shared = Transformer(str(folder))
    routes = [[shared, Pooling(32, "mean"), Dense(32, 20)] for _ in range(2)]
    router = Router.for_query_document(*routes)
    SentenceTransformer(modules=[router, Normalize()], device="cpu").save(str(tmp_path / "routed"))
    return tmp_path / "routed"


def routes(folder: Path) -> dict[str | None, str]:
    """The dense layer's folder of the head for each input type, and for none."""
    source = read_source(folder)
    first = next(iter(source.model.described))
    names = {side: side if side in source.model.described else first for side in PROMPT_NAMES}
    weights = {
        place: load_file(folder / place / "model.safetensors")["linear.weight"]
        for place in ("query_2_Dense", "document_2_Dense")
    }
    return {
        side: next(
            place
            for place, weight in weights.items()
            if torch.equal(weight, source.model.heads[name].dense[0].weight)
        )
        for side, name in {**names, None: first}.items()
    }


Parameters = dict[str, Any]
ROUTES: dict[str, Parameters] = {
    "as saved": {},
    "queries first": {"default_route": "query"},
    "no default": {"default_route": None},
    "exchanged": {
        "route_mappings": {"('query', 'text')": "document", "('document', None)": "query"}
    },
    "one for all": {"route_mappings": {"(None, None)": "query"}},
    "one for texts": {"route_mappings": {"(None, 'text')": "query", "(None, 'image')": "document"}},
}


@pytest.mark.parametrize("case", ROUTES)
def test_routes(case, routed):
    """Each input type has the route that sentence-transformers finds for a text."""
    router = json.loads((routed / "router_config.json").read_text())
    router["parameters"] |= ROUTES[case]
    write_json(routed / "router_config.json", router)
    peer = SentenceTransformer(str(routed), device="cpu")[0]
    expected = {
        task: f"{peer._resolve_route(task=task, modality='text')}_2_Dense"
        for task in ("query", "document", None)
    }
    assert expected == routes(routed)


BROKEN_ROUTES: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "no routes": (lambda r: r.update(structure={}), "has no route document"),
    "no types": (lambda r: r.pop("types"), "cannot read the routes: KeyError"),
    "a list": (lambda r: r.update(structure=[]), "cannot read the routes"),
    "a key that is none": (
        lambda r: r["parameters"].update(route_mappings={"query": "query"}),
        "cannot read the routes",
    ),
    "a path outside": (lambda r: r["structure"].update(query=["../x"]), "'../x' is no folder"),
    "an unknown route": (
        lambda r: r["parameters"].update(default_route="none"),
        "has no route none",
    ),
    "no route for queries": (
        lambda r: r["structure"].update(other=r["structure"].pop("query")),
        "has no route for query texts",
    ),
    "no default": (
        lambda r: r["parameters"].update(default_route=None, allow_empty_key=False),
        "has no route for texts without a task: default_route is missing",
    ),
    "a third default": (
        lambda r: (
            r["structure"].update(other=[*r["structure"]["query"], "query_2_Dense"]),
            r["parameters"].update(default_route="other"),
        ),
        "cannot serve a default_route for neither query nor document",
    ),
    "another module": (
        lambda r: r["types"].update(query_1_Pooling="sentence_transformers.models.LSTM"),
        "cannot serve the sentence-transformers module LSTM",
    ),
    "another package": (
        lambda r: r["types"].update(query_1_Pooling="own.Pooling"),
        "cannot serve the sentence-transformers module own.Pooling",
    ),
}


@pytest.mark.parametrize("case", BROKEN_ROUTES)
def test_broken_routes(case, routed):
    """A Router that cannot be served is refused in one line that names it."""
    change, message = BROKEN_ROUTES[case]
    router = json.loads((routed / "router_config.json").read_text())
    change(router)
    write_json(routed / "router_config.json", router)
    with pytest.raises(CheckpointError, match=message) as raised:
        read_source(routed)
    assert "\n" not in str(raised.value)


def test_routes_with_different_encoders(folder, tmp_path):
    """Two encoders do not fit in one graph; the message names them, and what to do."""
    sides = [[Transformer(str(folder)), Pooling(32, "mean")] for _ in range(2)]
    made = SentenceTransformer(modules=[Router.for_query_document(*sides)], device="cpu")
    made.save(str(tmp_path / "two"))
    with pytest.raises(CheckpointError, match="document_0_Transformer, query_0_Transformer"):
        read_source(tmp_path / "two")


CARDS = {
    "one loss": ('"matryoshka_dims": [\n 16,\n 8\n ]', [8, 16]),
    "the same twice": ('"matryoshka_dims": [16, 8], ... "matryoshka_dims": [8, 16]', [8, 16]),
    "two losses": ('"matryoshka_dims": [16], "matryoshka_dims": [8]', []),
    "no list": ('"matryoshka_dims": null', []),
}


@pytest.mark.parametrize("case", CARDS)
def test_trained_dimensions(case, folder):
    """`config.json` states them, else the model card, if it states one list only."""
    text, expected = CARDS[case]
    (folder / "README.md").write_text(f"# A model\n{text}\n")
    assert tuple(expected) == read_source(folder).model.described["embedding"].matryoshka_dimensions
    edit_json(folder / "config.json", matryoshka_dimensions=[20, 4])
    assert (4, 20) == read_source(folder).model.described["embedding"].matryoshka_dimensions


Change = Callable[[list[dict[str, Any]]], Any]
BROKEN_MODULES: dict[str, tuple[Change, str]] = {
    "an object": (lambda modules: {}, "must be a list of modules, not dict"),
    "no object": (lambda modules: [7], "7 is no module"),
    "no type": (lambda modules: [{"path": ""}], "does not say type"),
    "a path that is a number": (lambda modules: [{**modules[0], "path": 3}], "does not say path"),
    "a path outside": (lambda modules: [{**modules[0], "path": "../x"}], r"'\.\./x' is outside"),
    "an absolute path": (lambda modules: [{**modules[0], "path": "/x"}], "'/x' is outside"),
    "a drive": (lambda modules: [{**modules[0], "path": "C:\\x"}], "is outside"),
    "another module": (
        lambda modules: [{**modules[0], "type": "sentence_transformers.models.WordWeights"}],
        "cannot serve the sentence-transformers module WordWeights",
    ),
    "a router without its file": (
        lambda modules: [{**modules[0], "type": "sentence_transformers.base.modules.Router"}],
        "router_config.json is missing",
    ),
}


@pytest.mark.parametrize("case", BROKEN_MODULES)
def test_broken_modules(case, folder):
    """A list of modules that is none, and a module that is not served, are refused in one line."""
    change, message = BROKEN_MODULES[case]
    write_json(folder / "modules.json", change(json.loads((folder / "modules.json").read_text())))
    with pytest.raises(CheckpointError, match=message):
        read_source(folder)


def test_unused_tensor_of_a_dense(folder):
    """A tensor that a dense layer does not use is refused by name."""
    path = folder / "2_Dense/model.safetensors"
    save_file({**load_file(path), "residual.weight": torch.ones(20, 32)}, path)
    with pytest.raises(CheckpointError, match=r"2_Dense: .* residual\.weight"):
        read_source(folder)


@pytest.mark.parametrize("activation", [torch.nn.Sigmoid(), torch.nn.Identity()])
def test_cross_encoder(activation, tmp_path):
    """The files of a CrossEncoder are read with its own task and activation."""
    hub.save_cross_encoder("bert", tmp_path / "cross", activation, num_hidden_layers=1)
    reference = CrossEncoder(str(tmp_path / "cross"), device="cpu")
    source = read_source(tmp_path / "cross")
    head = source.model.described["classification"]
    encoded = Encoder(source.tokenizer, source.max_length).pairs(["Ada drew."], ["A map."])
    (output,) = run_torch(source.model, [encoded[0].windows[0]])
    found = torch.as_tensor(output["classification"]).reshape(-1)
    if head.problem_type != "regression":
        found = found.sigmoid()
    expected = reference.predict([("Ada drew.", "A map.")])
    np.testing.assert_allclose(found.numpy(), expected, rtol=0, atol=1e-5)


def parameters(*kinds: Any) -> set[str]:
    """The settings that classes of sentence-transformers take from their files."""
    found: set[str] = set()
    for kind in kinds:
        found |= {*inspect.signature(inspect.unwrap(kind.__init__)).parameters} | {
            *kind.config_keys
        }
        found |= {*getattr(kind, "config_key_renames", {})}
    return found - {"self", "model_name_or_path", "backend", "init_weight", "init_bias"}


TABLES = [
    (TRANSFORMER_TABLE, (Transformer,), {"model_args", "tokenizer_args", "config_args"}),
    (POOLING_TABLE, (Pooling,), {*sentence_config.POOLING_MODES}),
    (DENSE_TABLE, (Dense,), set()),
    (LAYER_NORM_TABLE, (LayerNorm,), set()),
    (WEIGHTED_TABLE, (WeightedLayerPooling,), set()),
    (NORMALIZE_TABLE, (Normalize,), set()),
    (MASK_TABLE, (MultiVectorMask,), set()),
]


@pytest.mark.parametrize(
    ("table", "kinds", "more"), TABLES, ids=lambda value: getattr(value, "file", "")
)
def test_every_setting_is_in_a_table(table, kinds, more):
    """No setting that sentence-transformers reads is unknown here, and none is here that it does not read."""
    expected = parameters(*kinds) | more
    assert expected == {setting.name for setting in table.settings}


def test_every_setting_of_the_root_is_in_a_table():
    """Also what the model classes look up in `config_sentence_transformers.json`."""
    sources = [
        inspect.getsource(inspect.getmodule(kind))
        for kind in (base_model.BaseModel, SentenceTransformer, CrossEncoder, MultiVectorEncoder)
    ]
    names = {
        name
        for source in sources
        for name in re.findall(r'\bmodel_config(?:\.get\(|\[)"(\w+)"', source)
    }
    assert {"prompts", "truncate_dim", "activation_fn"} < names
    assert names <= {setting.name for setting in ROOT_TABLE.settings}


def test_files_of_the_transformer():
    """The file names are the ones that sentence-transformers reads, in its order."""
    source = inspect.getsource(Transformer.load_config)
    assert [*SENTENCE_FILES] == re.findall(r'"(sentence_[\w-]+_config\.json)"', source)


def test_every_refused_setting_is_compared():
    """Each refused setting of a table has a value above."""
    values = {name for _, name, _ in REFUSED}
    tables = [TRANSFORMER_TABLE, ROOT_TABLE, DENSE_TABLE, NORMALIZE_TABLE]
    names = {s.name for table in tables for s in table.settings if s.handling is Handling.REFUSED}
    assert set() == names - values


def test_unknown_settings(folder):
    """Names that sentence-transformers does not read are listed by their files."""
    assert {} == unknown_sentence_settings(folder)
    edit_json(folder / "1_Pooling/config.json", colour="red")
    edit_json(folder / MODEL, author="Ada", b=1)
    expected = {"1_Pooling/config.json": ["colour"], MODEL: ["author", "b"]}
    assert expected == unknown_sentence_settings(folder)

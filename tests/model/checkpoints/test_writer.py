"""Checkpoints in the hub's layout: transformers and sentence-transformers read what we write."""

import json
from pathlib import Path
from typing import Any, get_args

import pytest
import sentence_transformers
import torch
import transformers
from safetensors.torch import load_file
from tokenizers import Tokenizer

from model.bert import Bert
from model.checkpoints import reader, writer
from model.checkpoints.source import read_source
from model.checkpoints.tokenizer_files import read_tokenizer
from model.heads import EncoderWithHeads, Pretraining
from service.core import packing
from service.core.encode import Encoder
from service.core.manifest import Head, PoolingMode
from tests.model.checkpoints.helpers import HEADS, PACKED, our_output, peer_output
from tests.model.helpers import TOLERANCE, ours, perturb, real, shape, theirs

AUTO = {
    "classification": transformers.AutoModelForSequenceClassification,
    "ner": transformers.AutoModelForTokenClassification,
    "qa": transformers.AutoModelForQuestionAnswering,
    "embedding": transformers.AutoModel,
}


def read_by_transformers(auto: Any, path: Path, missing: frozenset[str] = frozenset()) -> Any:
    """Return transformers' model of a checkpoint; it uses every tensor and lacks only `missing`."""
    peer, report = auto.from_pretrained(path, output_loading_info=True)
    assert set(report["missing_keys"]) == missing
    assert not report["unexpected_keys"]
    assert not report["mismatched_keys"]
    return peer.eval()


class TestWhatWeSave:
    @pytest.mark.parametrize("kind", HEADS)
    def test_heads(self, kind, tmp_path, tokenizer_file):
        """transformers reads every kind of head that we save, and gives our logits."""
        head = HEADS[kind]
        model = perturb(EncoderWithHeads(shape(), {kind: head}))

        writer.save_head(tmp_path, model, kind, tokenizer_file)

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
    def test_heads_of_a_joint_model(self, kind, joint, tmp_path, tokenizer_file):
        """Any one head of a joint model, written out alone, gives the joint model's logits there."""
        task, name = HEADS[kind].task, kind.replace(" ", "_")

        writer.save_head(tmp_path, joint, name, tokenizer_file)

        peer = AUTO[task].from_pretrained(tmp_path).eval()
        expected = our_output(joint, name, PACKED)
        torch.testing.assert_close(expected, peer_output(task, peer, PACKED), **TOLERANCE)
        alone = reader.load_model(tmp_path)
        assert alone.described == {task: HEADS[kind]}
        torch.testing.assert_close(our_output(alone, task, PACKED), expected, rtol=0, atol=0)

    def test_encoder(self, tmp_path, tokenizer_file):
        """transformers reads the bare encoder that we save, with its pooler."""
        encoder = perturb(Bert(shape()))
        arguments = ours(PACKED)

        writer.save_encoder(tmp_path, encoder, tokenizer_file)

        peer = read_by_transformers(transformers.AutoModel, tmp_path)
        with torch.no_grad():
            expected, last = peer(**theirs(PACKED)), encoder(*arguments)
        torch.testing.assert_close(last, real(expected.last_hidden_state, PACKED), **TOLERANCE)
        torch.testing.assert_close(
            encoder.pooler(last, arguments[-1]), expected.pooler_output, **TOLERANCE
        )

    @pytest.mark.parametrize(
        ("auto", "next_sentence"),
        [(transformers.AutoModelForPreTraining, True), (transformers.AutoModelForMaskedLM, False)],
        ids=["pretraining", "masked LM"],
    )
    @torch.no_grad()
    def test_pretraining(self, auto, next_sentence, tmp_path, tokenizer_file):
        """transformers reads the pretraining model that we save, with and without next sentences."""
        model = perturb(Pretraining(shape(), next_sentence))

        writer.save_pretraining(tmp_path, model, tokenizer_file)

        found = read_by_transformers(auto, tmp_path)(**theirs(PACKED))
        token_logits, next_logits = model(*ours(PACKED))
        theirs_logits = found.prediction_logits if next_sentence else found.logits
        torch.testing.assert_close(token_logits, real(theirs_logits, PACKED), **TOLERANCE)
        if next_sentence:
            torch.testing.assert_close(next_logits, found.seq_relationship_logits, **TOLERANCE)

    def test_tokenizer(self, tmp_path, tokenizer_file):
        """AutoTokenizer reads the tokenizer next to the weights, and truncates texts and pairs at the same tokens."""
        writer.save_encoder(tmp_path, Bert(shape()), tokenizer_file)
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

    def test_tokenizer_with_other_special_tokens(self, tmp_path, tokenizer_file):
        """A tokenizer without the family's usual special tokens gets no further tokens, here and there."""
        text = tokenizer_file.read_text(encoding="utf-8").replace("[MASK]", "<mask>")
        other = tmp_path / "other.json"
        other.write_text(text, encoding="utf-8")
        writer.save_encoder(tmp_path / "saved", Bert(shape()), other)
        expected = Tokenizer.from_file(str(other)).get_vocab()
        assert expected == read_tokenizer(tmp_path / "saved").get_vocab()
        peer = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
        assert expected == peer.get_vocab()

    @torch.no_grad()
    def test_pairs_end_to_end(self, tmp_path, tokenizer_file):
        """A pair of texts, cut and classified here, gets the logits that it gets in transformers."""
        head = HEADS["single label"]
        vocab_size = Tokenizer.from_file(str(tokenizer_file)).get_vocab_size()
        model = perturb(EncoderWithHeads(shape(vocab_size=vocab_size), {"pair": head}))
        firsts, seconds = ["Ada drew a comet.", "Who?"], ["Lise doubted.", "Emmy sold every river!"]
        writer.save_head(tmp_path, model, "pair", tokenizer_file)
        encoder = Encoder.from_file(tmp_path / "tokenizer.json", 64)

        packed = packing.pack([item.windows[0] for item in encoder.pairs(firsts, seconds)])

        cut = transformers.AutoTokenizer.from_pretrained(tmp_path)
        peer = read_by_transformers(AUTO["classification"], tmp_path)
        expected = peer(**cut(firsts, seconds, padding=True, return_tensors="pt")).logits
        torch.testing.assert_close(our_output(model, "pair", packed), expected, **TOLERANCE)

    @pytest.mark.parametrize("pooling", [*get_args(PoolingMode), ("mean", "cls")])
    def test_sentence_transformers(self, pooling, tmp_path, tokenizer_file):
        """sentence-transformers reads an embedding head: pooling, prompts, and that it is normalised; and so do we."""
        vocab_size = Tokenizer.from_file(str(tokenizer_file)).get_vocab_size()
        fields = {"prompts": {"query": "find: "}, "default_prompt": "query"}
        head = Head.model_validate(
            {
                **{"task": "embedding", "pooling": pooling, "matryoshka_dimensions": [16]},
                **{"dimensions": 32 if isinstance(pooling, str) else 64, **fields},
            }
        )
        model = perturb(EncoderWithHeads(shape(vocab_size=vocab_size), {"vectors": head}))
        texts = ["Ada drew a comet.", "Lise painted two prime numbers, twice."]
        writer.save_head(tmp_path, model, "vectors", tokenizer_file)
        encoder = Encoder.from_file(tmp_path / "tokenizer.json", 64)

        prompted = encoder.texts([head.default_prompt_text + text for text in texts])
        packed = packing.pack([item.windows[0] for item in prompted])
        vectors = our_output(model, "vectors", packed)

        peer = sentence_transformers.SentenceTransformer(str(tmp_path), device="cpu")
        expected = torch.from_numpy(peer.encode(texts))
        unit = torch.nn.functional.normalize(vectors, dim=1)
        torch.testing.assert_close(unit, expected, **TOLERANCE)
        assert head == read_source(tmp_path).model.described["embedding"]


class TestJoint:
    def test_round_trip(self, joint, tmp_path, tokenizer_file):
        """A joint checkpoint comes back with all its heads, in order, and all their outputs."""
        writer.save_joint(tmp_path, joint, tokenizer_file)

        again = reader.load_model(tmp_path)

        assert list(again.described.items()) == list(joint.described.items())
        with torch.no_grad():
            before, after = joint(*ours(PACKED)), again(*ours(PACKED))
        assert all(torch.equal(after[name], output) for name, output in before.items())

    def test_files(self, joint, tmp_path, tokenizer_file):
        """The trunk has BERT's own names, the heads have theirs, and `heads.json` describes them."""
        writer.save_joint(tmp_path, joint, tokenizer_file)

        hub_names = set(load_file(tmp_path / "model.safetensors"))
        assert "encoder.layer.1.attention.self.query.weight" in hub_names
        assert "heads.single_label.pooler.dense.weight" in hub_names
        assert "heads.regression.classifier.bias" in hub_names
        assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["BertModel"]
        described = json.loads((tmp_path / "heads.json").read_text())
        assert list(described) == list(joint.described)
        assert described["ner"] == {"task": "ner", "labels": list(HEADS["ner"].labels)}

    def test_trunk_by_transformers(self, joint, tmp_path, tokenizer_file):
        """transformers reads a joint checkpoint's trunk."""
        writer.save_joint(tmp_path, joint, tokenizer_file)

        peer = transformers.AutoModel.from_pretrained(tmp_path, add_pooling_layer=False).eval()

        with torch.no_grad():
            expected = real(peer(**theirs(PACKED)).last_hidden_state, PACKED)
            torch.testing.assert_close(joint.encoder(*ours(PACKED)), expected, **TOLERANCE)

"""Blanks are filled as transformers fills them, and shown as a table."""

import re
import sys
from pathlib import Path

import huggingface_hub
import pytest
import torch
import transformers
from tokenizers import Tokenizer

from model import fill, tokenizer
from model.bert import Bert
from model.checkpoints import reader, writer
from model.config import preset
from model.families.registry import FAMILIES
from model.heads import Pretraining, make_pretraining
from tests.model.helpers import perturb, shape

TEXT = "Ada drew [MASK] in [MASK]."


@pytest.fixture(scope="module")
def pretrained(tokenizer_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a masked language model that has strong opinions."""
    config = shape(vocab_size=Tokenizer.from_file(str(tokenizer_file)).get_vocab_size())
    model = perturb(perturb(Pretraining(config), 1), 2)
    assert isinstance(model, Pretraining)
    path = tmp_path_factory.mktemp("pretrained")
    writer.save_pretraining(path, model, tokenizer_file)
    return path


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["fill", *arguments])
    fill.main()


def refusal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *arguments: str
) -> str:
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, *arguments)
    return capsys.readouterr().err


def test_as_transformers(pretrained):
    """Every blank gets the tokens and probabilities that it gets in transformers."""
    model = reader.load_pretraining(pretrained)

    blanks = fill.fill(model, fill.read_encoder(pretrained), TEXT, top_k=7)

    peer = transformers.BertForMaskedLM.from_pretrained(pretrained).eval()
    cutter = transformers.AutoTokenizer.from_pretrained(pretrained)
    cut = cutter(TEXT, return_tensors="pt")
    with torch.no_grad():
        logits = peer(**cut).logits[cut.input_ids == cutter.mask_token_id]
    best = logits.softmax(-1).topk(7)
    assert len(blanks) == 2
    for guesses, ids, probabilities in zip(blanks, best.indices, best.values, strict=True):
        assert [token for token, _ in guesses] == cutter.convert_ids_to_tokens(ids)
        assert [p for _, p in guesses] == pytest.approx(probabilities.tolist(), abs=1e-5)


@pytest.mark.parametrize("name", ["roberta", "electra"])
def test_other_families(name, documents, tmp_path):
    """A blank is spelt as the family spells it, and ELECTRA's are filled by its generator."""
    family = FAMILIES[name]
    mask = family.special_tokens["mask"]
    learnt = tokenizer.train([text for d in documents for text in d], 400, family=family)
    learnt.save(str(tmp_path / "tokenizer.json"))
    config = preset("tiny", family.config, vocab_size=learnt.get_vocab_size())
    made = perturb(make_pretraining(config, next_sentence=False))
    writer.save_pretraining(tmp_path / "made", made, tmp_path / "tokenizer.json")

    folder = fill.find_checkpoint(str(tmp_path / "made"))
    model, text = reader.load_pretraining(folder), f"Ada drew {mask}."
    [[(token, probability)]] = fill.fill(model, fill.read_encoder(folder), text, top_k=1)

    filler = transformers.pipeline("fill-mask", str(folder), device="cpu")
    best = filler(text, top_k=1)[0]
    assert token == filler.tokenizer.convert_ids_to_tokens(best["token"])
    assert probability == pytest.approx(best["score"], abs=1e-5)
    with pytest.raises(ValueError, match=f"has no {re.escape(mask)} to fill in"):
        fill.fill(model, fill.read_encoder(folder), "Ada drew.", top_k=1)


def test_more_than_there_are(pretrained):
    """Asked for more tokens than there are, it gives all, and their probabilities sum to one."""
    model, encoder = reader.load_pretraining(pretrained), fill.read_encoder(pretrained)

    [guesses] = fill.fill(model, encoder, "[MASK]", top_k=10**6)

    assert len(guesses) == encoder.tokenizer.get_vocab_size()
    assert sum(probability for _, probability in guesses) == pytest.approx(1)


def test_table(monkeypatch, capsys, pretrained):
    """The command prints the text, and for each blank its best tokens with probabilities."""
    run(monkeypatch, TEXT, "--checkpoint", str(pretrained), "--top-k", "2")

    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    model = reader.load_pretraining(pretrained)
    first, second = fill.fill(model, fill.read_encoder(pretrained), TEXT, top_k=2)
    assert lines[0] == TEXT.split()
    assert ["blank", "token", "probability"] in lines
    for number, guesses in (("1", first), ("2", second)):
        rows = [[token, f"{probability:.1%}"] for token, probability in guesses]
        assert [number, *rows[0]] in lines
        assert rows[1] in lines


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Ada drew a comet.", "the text has no [MASK] to fill in"),
        ("[MASK] " * 63, "longer than 64 tokens"),
    ],
)
def test_refused_texts(monkeypatch, capsys, pretrained, text, message):
    """A text without a blank, or one that is too long, is an error."""
    assert message in refusal(monkeypatch, capsys, text, "--checkpoint", str(pretrained))


def test_default_checkpoint(monkeypatch, capsys, pretrained, tmp_path):
    """Without a name our own pretrained checkpoint is taken; if there is none, how to get one."""
    monkeypatch.chdir(tmp_path)
    advice = refusal(monkeypatch, capsys, "[MASK]")
    assert f"no checkpoint at {fill.DEFAULT_CHECKPOINT}" in advice
    assert "python -m model.pretrain model/configs/mini-pretrain.toml" in advice
    assert "--checkpoint" in advice

    fill.DEFAULT_CHECKPOINT.parent.mkdir(parents=True)
    fill.DEFAULT_CHECKPOINT.symlink_to(pretrained)
    run(monkeypatch, "[MASK]")

    assert "probability" in capsys.readouterr().out


def test_hub_name(monkeypatch, capsys, pretrained):
    """A name that is no directory is looked for on the hub."""
    monkeypatch.setattr(
        huggingface_hub,
        "snapshot_download",
        lambda name, **_: {"someone/bert": str(pretrained)}[name],
    )

    run(monkeypatch, "[MASK]", "--checkpoint", "someone/bert")

    assert "probability" in capsys.readouterr().out


def test_no_masked_lm(monkeypatch, capsys, tokenizer_file, tmp_path):
    """A checkpoint without a masked language model is an error, as is one without a tokenizer."""
    writer.save_encoder(tmp_path, Bert(shape()), tokenizer_file)
    arguments = ("[MASK]", "--checkpoint", str(tmp_path))
    assert "has no masked language model" in refusal(monkeypatch, capsys, *arguments)

    writer.save_pretraining(tmp_path, Pretraining(shape()), tokenizer_file)
    (tmp_path / "tokenizer.json").unlink()
    assert "has neither tokenizer.json nor vocab.txt" in refusal(monkeypatch, capsys, *arguments)

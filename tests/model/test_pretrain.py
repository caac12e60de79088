"""Pretraining learns, at masked positions only, and an interrupted run is an uninterrupted one."""

import itertools
import json
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from tokenizers import Tokenizer

from model import fill, pretrain
from model import tokenizer as model_tokenizer
from model.checkpoints import reader
from model.data import corpus, pretraining_batches
from model.data.pretraining_batches import PretrainingBatch, Sampler, Specials
from model.families.bert_names import BERT
from model.families.registry import FAMILIES
from model.heads import EncoderWithHeads, Pretraining
from model.training import optim
from model.training.training_run import TrainingRun
from tests.model.helpers import TOLERANCE, interrupted, perturb, shape, stopped, watch_steps
from tests.model.report.test_page import EXTERNAL

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("step", "length"), [(0, 128), (89, 128), (90, 512), (99, 512), (100, 512)]
)
def test_phases(step, length):
    """Each phase has its share of the steps, and the last one what is left."""
    phases = [pretrain.Phase(0.9, 128, 8192), pretrain.Phase(0.1, 512, 8192)]
    assert pretrain.phase_at(step, 100, phases).length == length


def test_corpus_files(tmp_path):
    """Folders stand for the corpus files in them, in order; lists of titles are none."""
    for name in ("b.gz", "a.txt", "a.titles.txt", "README.md", "c.xz"):
        (tmp_path / name).touch()

    found = corpus.corpus_files([str(tmp_path), str(tmp_path / "b.gz")])

    assert [file.name for file in found] == ["a.txt", "b.gz", "c.xz", "b.gz"]


@pytest.fixture
def held(corpus_file: Path, small_tokenizer: Tokenizer) -> pretraining_batches.Samples:
    """Pairs from the made-up corpus."""
    text = corpus.build([corpus_file], small_tokenizer)
    sampler = Sampler(text, Specials.of(small_tokenizer, BERT), "nsp")
    return sampler.samples(seed=1, step=0, size=6, length=32, rate=0.15)


@pytest.fixture
def drawn(held: pretraining_batches.Samples) -> PretrainingBatch:
    """The same as a batch."""
    return held.pack()


def model_for(tokenizer: Tokenizer, **fields: Any) -> Pretraining:
    next_sentence = fields.pop("next_sentence", True)
    config = shape(vocab_size=tokenizer.get_vocab_size(), **fields)
    model = perturb(Pretraining(config, next_sentence))
    assert isinstance(model, Pretraining)
    return model


def test_losses(drawn, small_tokenizer):
    """The losses are the mean over masked tokens, the mean over pairs, and their sum."""
    model = model_for(small_tokenizer)

    with torch.no_grad():
        found = pretrain.losses(model, drawn)

        token_logits, next_logits = model(*drawn.inputs)
    targets = torch.full((len(token_logits),), -100)
    targets[drawn.masked] = drawn.labels
    mlm = F.cross_entropy(token_logits, targets, ignore_index=-100)
    nsp = F.cross_entropy(next_logits, drawn.is_next)
    torch.testing.assert_close(found, {"loss": mlm + nsp, "mlm": mlm, "nsp": nsp}, **TOLERANCE)


def test_loss_at_masked_positions_only(drawn, small_tokenizer):
    """The state and the target of a token change the loss only if the token is masked."""
    model = model_for(small_tokenizer, next_sentence=False)
    states = []
    hook = model.encoder.register_forward_hook(lambda m, i, output: states.append(output))

    found = pretrain.losses(model, drawn)
    hook.remove()
    [gradient] = torch.autograd.grad(found["loss"], states)

    taught = gradient.abs().sum(dim=1).nonzero().flatten()
    assert found.keys() == {"loss", "mlm"}
    assert taught.tolist() == drawn.masked.tolist()
    assert len(drawn.labels) == len(drawn.masked) < len(drawn.inputs[0]) / 4


def test_evaluate(held, small_tokenizer):
    """Evaluating averages over samples without dropout, and leaves the model in training."""
    model = model_for(small_tokenizer, hidden_dropout_prob=0.5).train()

    found = pretrain.evaluate(model, [held, held])

    assert model.training
    assert found == pretrain.evaluate(model, [held])


def test_accuracies(held, small_tokenizer):
    """The accuracy of an objective is its share of right predictions, in pieces, too."""
    model = model_for(small_tokenizer)
    batch = held.pack()
    with torch.no_grad():
        token_logits, next_logits = model.eval()(*batch.inputs, batch.masked)

    found = pretrain.evaluate(model, [held], tokens=80)

    tokens = (token_logits.argmax(-1) == batch.labels).float().mean().item()
    pairs = (next_logits.argmax(-1) == batch.is_next).float().mean().item()
    assert (found["mlm_accuracy"], found["nsp_accuracy"]) == pytest.approx((tokens, pairs))


def test_evaluate_in_pieces(held, small_tokenizer):
    """With a lower limit of tokens the losses are the same, and no batch exceeds the limit."""
    model, read = model_for(small_tokenizer), []
    model.encoder.register_forward_pre_hook(lambda _, inputs: read.append(len(inputs[0])))

    whole = pretrain.evaluate(model, [held])
    read.clear()
    found = pretrain.evaluate(model, [held], tokens=80)

    assert found == pytest.approx(whole, rel=1e-5)
    assert len(read) == 3
    assert max(read) <= 80


@pytest.fixture
def arguments(tmp_path: Path, corpus_file: Path, tokenizer_file: Path) -> dict[str, Any]:
    """Settings of a run of a few steps, dropout included, next sentences too."""
    return {
        "corpus": [str(corpus_file)],
        "tokenizer": str(tokenizer_file),
        "cache": str(tmp_path / "cache"),
        "preset": "tiny",
        "max_position_embeddings": 32,
        "phases": [[0.5, 16], [0.5, 32]],
        "batch_tokens": 128,
        "steps": 8,
        "save_every": 3,
        "dropout": 0.1,
        "precision": "fp32",
        "held_out": 0.0,
    }


def options(output: Path, arguments: dict[str, Any]) -> list[str]:
    """Return settings as command-line arguments."""
    named = {"output": str(output), **arguments}
    values = ((f"--{k.replace('_', '-')}", v) for k, v in named.items())
    return [part for k, v in values for part in (k, v if isinstance(v, str) else json.dumps(v))]


def run(output: Path, arguments: dict[str, Any]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["pretrain", *options(output, arguments)])
        pretrain.main()


def last(output: Path) -> dict[str, Any]:
    state: dict[str, Any] = torch.load(output / "last.pt", weights_only=True)
    return state


def tensors(state: Any) -> list[torch.Tensor]:
    """All tensors of a nested state, in order."""
    if isinstance(state, torch.Tensor):
        return [state]
    inner = state.values() if isinstance(state, dict) else state if isinstance(state, list) else ()
    return [tensor for part in inner for tensor in tensors(part)]


@pytest.mark.parametrize(
    ("family", "optimizer"),
    [("bert", "adamw"), ("bert", "muon"), ("albert", "adamw"), ("electra", "adamw")],
)
def test_resumed_is_uninterrupted(tmp_path, arguments, family, optimizer):
    """A run killed two steps after it saved ends, resumed, with the same losses bit by bit.

    Whatever was drawn meanwhile, as the tokens of ELECTRA's generator are when it is evaluated.
    """
    arguments = {**arguments, "optimizer": optimizer, "family": family, "eval_every": 5}
    run(tmp_path / "whole", arguments)

    with interrupted(at=5):
        run(tmp_path / "parts", arguments)
    assert last(tmp_path / "parts")["step"] == 3
    run(tmp_path / "parts", arguments)

    whole, parts = last(tmp_path / "whole"), last(tmp_path / "parts")
    assert len(whole["history"]) == 8
    assert len(tensors(whole["optimizer"])) > 30
    assert parts["history"] == whole["history"]
    assert all(torch.equal(parts["model"][name], t) for name, t in whole["model"].items())
    assert all(map(torch.equal, tensors(parts["optimizer"]), tensors(whole["optimizer"])))

    run(tmp_path / "parts", arguments)  # when nothing is left to do
    found = [json.loads((tmp_path / n / "metrics.json").read_text()) for n in ("whole", "parts")]
    assert found[0]["fixed_batches"] == found[1]["fixed_batches"]


def test_text_is_held_out(tmp_path, arguments, corpus_file, capsys):
    """A share of the documents is not trained on: losses and accuracies on it are logged and written."""
    texts = corpus_file.read_text(encoding="utf-8").split("\n\n")
    many = tmp_path / "many.txt"
    many.write_text("\n\n".join(texts[n % len(texts)] for n in range(40)))
    arguments |= {"corpus": [str(many)], "steps": 2, "held_out": 0.1}
    run(tmp_path / "run", arguments)

    lines = capsys.readouterr().out
    assert re.search(
        r"tokens in 36 documents; .*\n[\d,]+ tokens in 4 documents are held out\n", lines
    )
    expected = r"step 2 of 2: held-out text: MLM loss \d+\.\d{3}, accuracy \d+\.\d%; NSP loss "
    assert re.search(expected, lines)
    metrics = json.loads((tmp_path / "run" / "metrics.json").read_text())
    assert 0 <= metrics["held_out"]["mlm_accuracy"] <= 1


@pytest.mark.usefixtures("pictures")
@pytest.mark.parametrize("family", ["bert", "electra", "roberta"])
def test_report(tmp_path, arguments, family):
    """The page has curves, predictions for masked tokens over the steps, also before a pause, and attention."""
    tokenizer_file = arguments["tokenizer"]
    if family == "roberta":
        tokenizer_file = str(tmp_path / "tokenizer.json")
        texts = Path(arguments["corpus"][0]).read_text(encoding="utf-8").splitlines()
        model_tokenizer.train(texts, 300, family=FAMILIES[family]).save(tokenizer_file)
    more = {"family": family, "eval_every": 2, "steps": 6, "tokenizer": tokenizer_file}
    more["max_position_embeddings"] = 34
    with interrupted(at=4):
        run(tmp_path / "run", arguments | more)
    run(tmp_path / "run", arguments | more)

    page = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert not EXTERNAL.search(page)
    shown = ["Loss of training", "mlm_accuracy", "Learning rate", "Cloze examples", "(right: "]
    steps = ["step 2", "step 4", "step 6"]
    assert [] == [text for text in (*shown, *steps, "data:image/png;base64,") if text not in page]


@pytest.mark.parametrize(("end", "saved"), [(interrupted, 3), (stopped, 5)])
def test_a_stopped_run_has_a_checkpoint(tmp_path, arguments, end, saved):
    """Every save writes a checkpoint that fine-tuning and `fill` read; resumed, the run has the same bytes."""
    run(tmp_path / "whole", arguments)
    cut = tmp_path / "cut"

    with end(at=4):
        run(cut, arguments)
    assert last(cut)["step"] == saved
    assert (cut / "loss.png").is_file() is (end is stopped)
    assert json.loads((cut / "checkpoint/training_settings.json").read_text())["step"] == saved
    folder = cut / "checkpoint"
    masked = reader.load_pretraining(folder)
    assert len(fill.fill(masked, fill.read_encoder(folder), "Ada [MASK].", 3)[0]) == 3
    reader.init_from(EncoderWithHeads(reader.read_config(folder), {}), folder)
    run(cut, arguments)

    paths = [tmp_path / name / "checkpoint/model.safetensors" for name in ("cut", "whole")]
    assert paths[0].read_bytes() == paths[1].read_bytes()
    assert last(cut)["history"] == last(tmp_path / "whole")["history"]


def test_another_run_into_the_same_directory_is_refused(tmp_path, arguments, corpus_file):
    """A corpus with other text is another run, also under the same name; --fresh begins anew."""
    text = tmp_path / "text.txt"
    text.write_text(corpus_file.read_text())
    arguments = {**arguments, "corpus": [str(text)], "steps": 2}
    run(tmp_path / "run", arguments)
    text.write_text(corpus_file.read_text() + "Ada sold it.\n")
    with pytest.raises(SystemExit, match=r"corpus: .*text\.txt has changed: SHA-256"):
        run(tmp_path / "run", arguments)
    run(tmp_path / "run", {**arguments, "fresh": True, "steps": 1})
    assert len(last(tmp_path / "run")["history"]) == 1


def test_dropout_is_on(tmp_path, arguments):
    """The same run without dropout has other losses: what is resumed equally is drawn at random."""
    short = {**arguments, "steps": 1}
    run(tmp_path / "on", short)
    run(tmp_path / "off", {**short, "dropout": 0.0})

    assert last(tmp_path / "on")["history"] != last(tmp_path / "off")["history"]


def test_what_a_run_leaves(tmp_path, arguments, drawn):
    """A run writes metrics and a resumable checkpoint that transformers reads, with the teachers' names."""
    run(tmp_path / "first", {**arguments, "steps": 2})
    folder = tmp_path / "first" / "checkpoint"

    peer, report = transformers.AutoModelForPreTraining.from_pretrained(
        folder, output_loading_info=True
    )
    assert not report["missing_keys"]
    assert isinstance(peer, transformers.BertForPreTraining)
    metrics = json.loads((tmp_path / "first" / "metrics.json").read_text())
    objectives = {"loss", "mlm", "nsp", "mlm_accuracy", "nsp_accuracy"}
    assert metrics["fixed_batches"].keys() == objectives

    assert not (folder / "provenance.json").exists()

    told = '{\n  "teachers": [\n    "a large model"\n  ]\n}\n'
    (folder / "provenance.json").write_text(told)
    further = {**arguments, "init_from": str(folder), "lr": 1e-9, "steps": 1}
    run(tmp_path / "second", further)
    assert (tmp_path / "second/checkpoint/provenance.json").read_text() == told
    kept, first = last(tmp_path / "second")["model"], last(tmp_path / "first")["model"]
    torch.testing.assert_close(kept, first, rtol=0, atol=1e-8)


def test_a_checkpoint_is_replaced_whole(monkeypatch, tmp_path, arguments):
    """A run that cannot write its own leaves the one that there was; one that can leaves nothing of it."""
    output, folder = tmp_path / "run", tmp_path / "run" / "checkpoint"
    run(output, {**arguments, "family": "electra", "steps": 1})
    (output / "last.pt").unlink()
    electra = contents(folder)

    def full_disk(source, target):
        raise OSError("no space")

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "copyfile", full_disk)
        with pytest.raises(SystemExit, match="no space"):
            run(output, {**arguments, "steps": 1})
    assert contents(folder) == electra

    run(output, {**arguments, "steps": 1})
    assert json.loads((folder / "config.json").read_text())["model_type"] == "bert"
    assert not (folder / "generator").exists()
    assert [path.name for path in output.glob("checkpoint*")] == ["checkpoint"]


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_weights_of_losses(monkeypatch, tmp_path, arguments):
    """The total is the weighted sum of the losses, with weights of the settings or the family."""
    told = []
    step = TrainingRun.step

    def listen(run, number, losses, *rest):
        told.append(losses)
        step(run, number, losses, *rest)

    monkeypatch.setattr(TrainingRun, "step", listen)
    short = {**arguments, "steps": 1, "family": "electra"}
    run(tmp_path / "own", short)
    run(tmp_path / "asked", {**short, "weights": {"rtd": 2.5}})

    own, asked = told
    assert own["loss"] == pytest.approx(own["mlm"] + 50 * own["rtd"])
    assert asked["loss"] == pytest.approx(asked["mlm"] + 2.5 * asked["rtd"])


@pytest.mark.parametrize(
    ("family", "rate"), [("bert", 0.15), ("modernbert", 0.3), ("nomic_bert", 0.3)]
)
def test_share_of_hidden_tokens(monkeypatch, tmp_path, arguments, family, rate):
    """The default share is the family's."""
    made, drawn = [], Sampler.samples
    monkeypatch.setattr(
        Sampler, "samples", lambda self, **named: made.append(named["rate"]) or drawn(self, **named)
    )
    run(tmp_path / "run", {**arguments, "steps": 1, "family": family})
    assert set(made) == {rate}


@pytest.mark.parametrize("had", [True, False])
@pytest.mark.parametrize("wanted", [True, False])
def test_next_sentences_and_dropout_are_as_set(tmp_path, arguments, had, wanted):
    """The settings replace the checkpoint's; weights of both continue."""
    first = {**arguments, "steps": 1, "next_sentence": had}
    run(tmp_path / "first", first)
    settings = {"init_from": str(tmp_path / "first/checkpoint"), "lr": 1e-9, "dropout": 0.0}
    run(tmp_path / "second", {**first, **settings, "next_sentence": wanted})

    config = json.loads((tmp_path / "second/checkpoint/config.json").read_text())
    states = [last(tmp_path / name)["model"] for name in ("first", "second")]
    both = states[0].keys() & states[1].keys()
    assert config["architectures"] == ["BertForPreTraining" if wanted else "BertForMaskedLM"]
    assert config["hidden_dropout_prob"] == config["attention_probs_dropout_prob"] == 0.0
    assert wanted == any(name.startswith("next_sentence") for name in states[1])
    assert any(name.startswith("masked_lm") for name in both)
    for name in both:
        torch.testing.assert_close(states[1][name], states[0][name], rtol=0, atol=1e-8)


def test_heads_that_match(tmp_path, arguments):
    """Token-matching heads are made in the configured number of layers, and training continues from them."""
    settings = {"family": "nomic_bert", "steps": 1, "lr": 1e-9}
    for layers in (0, 1):
        run(tmp_path / str(layers), {**arguments, **settings, "matching_layers": layers})

    without, matching = (last(tmp_path / name)["model"] for name in ("0", "1"))
    for name, weight in matching.items():
        wanted = name == "encoder.layers.0.attention.qkv.weight"
        assert wanted != torch.allclose(weight, without[name], rtol=0, atol=1e-6)


def test_the_recipe_is_followed(monkeypatch, tmp_path, arguments):
    """The rate rises and falls as planned, gradients are clipped, and as many tokens masked as asked."""
    rates, norms = watch_steps(monkeypatch)
    masked, losses = [], pretrain.losses

    def counted(model, batch, *shares):
        masked.append(len(batch.masked) / len(batch.inputs[0]))
        return losses(model, batch, *shares)

    monkeypatch.setattr(pretrain, "losses", counted)
    recipe = {"steps": 10, "lr": 1e-3, "warmup": 0.2, "clip": 0.01, "mask_rate": 0.4}
    run(tmp_path / "run", {**arguments, **recipe})

    planned = [0.5, 1, 1, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125]
    assert [rate for [rate] in rates] == pytest.approx([1e-3 * share for share in planned])
    assert norms == pytest.approx([0.01] * 10, rel=1e-3)
    assert 0.3 < sum(masked) / len(masked) < 0.45


def test_fewer_and_fewer_are_hidden(monkeypatch, tmp_path, arguments):
    """From the first rate evenly to the last one; what is measured on the way is hidden at the mean of both."""
    trained, held = [], []
    step, evaluate = pretrain.Trainer.step, pretrain.evaluate

    def stepped(self, whole, *args):
        trained.append(sum(whole.predictions) / whole.tokens)
        return step(self, whole, *args)

    def evaluated(model, fixed, tokens):
        held.extend(sum(whole.predictions) / whole.tokens for whole in fixed)
        return evaluate(model, fixed, tokens)

    monkeypatch.setattr(pretrain.Trainer, "step", stepped)
    monkeypatch.setattr(pretrain, "evaluate", evaluated)
    recipe = {"mask_rate": 0.5, "final_mask_rate": 0.1, "steps": 5, "phases": [[1.0, 32]]}
    run(tmp_path / "run", {**arguments, **recipe, "family": "nomic_bert"})

    room = 30 / 32  # without [CLS] and [SEP]
    assert trained == pytest.approx([rate * room for rate in (0.5, 0.4, 0.3, 0.2, 0.1)], abs=0.02)
    assert held == pytest.approx([0.3 * room] * len(held), abs=0.02)


@pytest.mark.parametrize("rates", [{"mask_rate": 0.0}, {"final_mask_rate": 1.0}])
def test_a_rate_that_is_no_share(rates):
    with pytest.raises(
        ValueError, match=r"^(final_)?mask_rate: Input should be .* than [01], not [01]\.0$"
    ):
        pretrain.PretrainSettings(output="", corpus=[], tokenizer="", **rates)


def test_minutes(monkeypatch, tmp_path, arguments):
    """A budget becomes a run's number of steps, once; what was measured it by leaves no trace in the model."""
    seconds = itertools.count(step=0.5)
    monkeypatch.setattr(pretrain.time, "monotonic", lambda: next(seconds))
    del arguments["steps"]
    phases = [[0.25, 16], [0.75, 32, 64]]
    run(tmp_path / "run", {**arguments, "phases": phases, "minutes": 0.025})

    plan = json.loads((tmp_path / "run/plan.json").read_text())
    each = 0.5 / 3  # between two looks at the clock, three steps
    assert plan == {
        "steps": round(1.5 / each),
        "minutes": 0.025,
        "seconds_per_step": pytest.approx(each),
    }
    assert len(last(tmp_path / "run")["history"]) == plan["steps"] == 9

    planned = {**arguments, "phases": phases, "steps": plan["steps"]}
    run(tmp_path / "steps", planned)
    assert last(tmp_path / "steps")["history"] == last(tmp_path / "run")["history"]

    run(tmp_path / "run", {**arguments, "phases": phases, "minutes": 0.05})
    assert len(last(tmp_path / "run")["history"]) == 2 * plan["steps"]  # at the measured speed

    (tmp_path / "run/last.pt").unlink()  # which begins anew
    run(tmp_path / "run", {**arguments, "phases": phases, "minutes": 0.05})
    assert len(last(tmp_path / "run")["history"]) == 2 * plan["steps"]


def test_phases_of_a_run(monkeypatch, tmp_path, arguments):
    """Steps are of as many tokens, in samples as long, as their phase says."""
    drawn = []
    step = pretrain.Trainer.step

    def listen(trainer, whole, *rest):
        drawn.append(whole.lengths)
        return step(trainer, whole, *rest)

    monkeypatch.setattr(pretrain.Trainer, "step", listen)
    phases = {"phases": [[0.5, 16, 64], [0.25, 16], [0.25, 32]], "steps": 4, "next_sentence": False}
    run(tmp_path / "run", {**arguments, **phases})

    assert drawn == [(16,) * 4] * 2 + [(16,) * 8] + [(32,) * 4]


def test_whole_words(monkeypatch, tmp_path, arguments):
    """With whole-word masking, the masking code receives the continuation tokens."""
    known = []
    make = pretraining_batches.Sampler
    monkeypatch.setattr(pretrain, "Sampler", lambda *given: known.append(given[-1]) or make(*given))
    for asked in (False, True):
        short = {**arguments, "steps": 1, "whole_words": asked}
        run(tmp_path / str(asked), short)

    goes_on = pretraining_batches.continues(Tokenizer.from_file(arguments["tokenizer"]))
    assert known == [None, goes_on]
    assert 0 < sum(goes_on) < len(goes_on)


@pytest.mark.parametrize(
    ("asked", "device", "compiled"),
    [("yes", "cpu", True), ("no", "cpu", False), ("auto", "cpu", False), ("auto", "cuda", True)],
)
def test_compiling(monkeypatch, asked, device, compiled):
    """The step is compiled as asked, and by itself on a GPU."""
    done = []
    monkeypatch.setattr(pretrain.Objective, "compile", lambda self: done.append(True))
    monkeypatch.setattr(torch.nn.Module, "to", lambda self, device: self)
    monkeypatch.setattr(optim, "precision", lambda *_: torch.float32)
    settings = pretrain.PretrainSettings(output="", corpus=[], tokenizer="", compile=asked)

    pretrain.Trainer(settings, shape(), False, pretrain.Ranks(0, 1, torch.device(device)))

    assert bool(done) == compiled


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"optimizer": "moun"}, "optimizer: 'moun' is none of adamw, muon"),
        ({"precision": "fp16"}, "precision: 'fp16' is none of auto, fp32, bf16"),
        ({"compile": "maybe"}, "compile: 'maybe' is none of auto, yes, no"),
        ({"phases": [[1]]}, "phases: [1.0] is not [share, tokens per sample"),
        ({"corpus": "text.txt"}, "corpus: 'text.txt' is not JSON"),
        ({"corpus": {"a": 1}}, "corpus: Input should be a valid list"),
        ({"steps": 0}, "steps: Input should be greater than or equal to 1, not 0"),
        ({"batch_tokens": 0}, "batch_tokens: Input should be greater than or equal to 1, not 0"),
        ({"eval_every": 0}, "eval_every: Input should be greater than or equal to 1, not 0"),
        ({"save_every": 0}, "save_every: Input should be greater than or equal to 1, not 0"),
        ({"preset": "huge"}, "preset: 'huge' is none of tiny, mini"),
        ({"family": "gpt2"}, "family: 'gpt2' is none of bert, roberta"),
        ({"shape": {"depth": 3}}, "bert has no 'depth': one of vocab_size, hidden_size"),
        ({"weights": {"rtd": 3}}, "weights: 'rtd' is none of mlm, nsp"),
        ({"family": "electra", "next_sentence": True}, "electra is given one text at a time"),
        (
            {"family": "roberta"},
            "the tokenizer lacks roberta's special tokens: ['</s>', '<mask>', '<s>']",
        ),
        ({"tokenizer": "nowhere.json"}, "nowhere.json cannot be read"),
        ({"corpus": ["nowhere.txt"]}, "nowhere.txt"),
    ],
)
def test_mistakes_are_reported(tmp_path, arguments, capsys, fields, message):
    """In one line, before anything is written."""
    with pytest.raises(SystemExit) as ended:
        run(tmp_path / "run", {**arguments, **fields})
    assert message in f"{ended.value} {capsys.readouterr().err}"
    assert not (tmp_path / "run").exists()


def test_goes_on_with_the_same_tokens(tmp_path, arguments, small_tokenizer, tokenizer_file):
    """A checkpoint whose tokens have other numbers is refused, be there as many of them."""
    begun = tmp_path / "begun"
    model = Pretraining(
        shape(vocab_size=small_tokenizer.get_vocab_size(), max_position_embeddings=32)
    )
    pretrain.writer.save_pretraining(begun, model, tokenizer_file)
    told = json.loads(tokenizer_file.read_text())
    words = told["model"]["vocab"]
    (a, number), (b, other) = [*words.items()][-2:]
    words |= {a: other, b: number}
    (begun / "tokenizer.json").write_text(json.dumps(told))

    with pytest.raises(SystemExit, match="begun knows other tokens than"):
        run(tmp_path / "run", {**arguments, "init_from": str(begun)})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"phases": [[1, 33]]}, "samples of 33 do not fit .* 32 positions"),
        ({"init_from": "other"}, "tokens .* vocabulary of 150"),
        ({"init_from": "other", "family": "albert"}, "other is bert, not albert"),
        ({"init_from": "other", "shape": {"hidden_size": 8}}, "other is of another shape"),
        ({"init_from": "other", "shape": {"width": 8}}, "other has no 'width'"),
        ({"corpus": ["notes.md"]}, r"notes\.md: the corpus is read from"),
    ],
)
def test_what_does_not_fit(monkeypatch, tmp_path, arguments, tokenizer_file, fields, message):
    """Samples longer than the positions, or ids beyond the vocabulary, are refused at the start."""
    monkeypatch.chdir(tmp_path)
    Path("notes.md").touch()
    other = Pretraining(shape(vocab_size=150, max_position_embeddings=32))
    pretrain.writer.save_pretraining("other", other, tokenizer_file)

    with pytest.raises(SystemExit, match=message):
        run(tmp_path / "run", {**arguments, **fields})

    assert not (tmp_path / "run").exists()

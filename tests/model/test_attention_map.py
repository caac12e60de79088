"""What is drawn is what the encoder does, and what transformers says it does."""

import sys
from pathlib import Path

import matplotlib.image
import pytest
import torch
import transformers
from tokenizers import Tokenizer

from model import attention_map
from model.bert import Bert
from model.checkpoints import reader, writer
from model.fill import read_encoder
from tests.model.helpers import TOLERANCE, perturb, shape

TEXT = "Ada drew a comet, twice!"


@pytest.fixture(scope="module")
def saved(tokenizer_file: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two layers with four heads."""
    vocab_size = Tokenizer.from_file(str(tokenizer_file)).get_vocab_size()
    encoder = perturb(perturb(Bert(shape(vocab_size=vocab_size)), 1), 2)
    assert isinstance(encoder, Bert)
    path = tmp_path_factory.mktemp("saved")
    writer.save_encoder(path, encoder, tokenizer_file)
    return path


def run(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> None:
    monkeypatch.setattr(sys, "argv", ["attention_map", *arguments])
    attention_map.main()


def test_as_transformers(saved):
    """The weights of every layer and head equal transformers' weights, and rows sum to one."""
    encoder = reader.load_encoder(saved)
    [encoded] = read_encoder(saved).texts([TEXT])

    maps = attention_map.attention_maps(encoder, encoded.windows[0])

    peer = transformers.BertModel.from_pretrained(saved, attn_implementation="eager").eval()
    cut = transformers.AutoTokenizer.from_pretrained(saved)(TEXT, return_tensors="pt")
    with torch.no_grad():
        expected = torch.cat(peer(**cut, output_attentions=True).attentions)
    size = len(encoded.windows[0])
    assert maps.shape == (2, 4, size, size)
    torch.testing.assert_close(maps, expected, **TOLERANCE)
    torch.testing.assert_close(maps.sum(-1), torch.ones(2, 4, size))


def test_picture():
    """There is a cell for each layer and head, and the outer cells name every token."""
    maps = torch.rand(3, 2, 4, 4).softmax(-1)
    tokens = ["[CLS]", "$", "##x_1$", "[SEP]"]

    figure = attention_map.draw(maps, tokens, "$x_1$ " * 40)

    *cells, bar = figure.axes
    assert len(cells) == 6
    for index, axes in enumerate(cells):
        [image] = axes.images
        assert torch.equal(torch.as_tensor(image.get_array()), maps.flatten(0, 1)[index])
    for axis in (cells[0].yaxis, cells[4].yaxis, cells[4].xaxis, cells[5].xaxis):
        labels = axis.get_ticklabels()
        assert [label.get_text() for label in labels] == tokens
        assert not any(label.get_parse_math() for label in labels)
    assert [cells[i].get_title() for i in range(2)] == ["head 1", "head 2"]
    assert [cells[i].get_ylabel() for i in (0, 2, 4)] == ["layer 1", "layer 2", "layer 3"]
    assert bar.get_ylim() == (0, 1)
    assert figure.get_suptitle().endswith(" …")


def test_command(monkeypatch, capsys, saved, tmp_path):
    """The command writes the picture to the given path and prints the path."""
    run(monkeypatch, TEXT, "-o", str(tmp_path / "map.png"), "--checkpoint", str(saved))

    height, width, _ = matplotlib.image.imread(tmp_path / "map.png").shape
    assert width > height > 300
    assert capsys.readouterr().out == f"{tmp_path / 'map.png'}\n"


def test_some_layers_and_heads_of_a_pair(monkeypatch, saved, tmp_path):
    """`--layer`, `--head` and `--pair` draw the named cells, by their numbers, of both texts together."""
    drawn = []
    draw = attention_map.draw
    monkeypatch.setattr(attention_map, "draw", lambda *given: drawn.append(given) or draw(*given))
    chosen = ["--pair", "It cost nothing.", "--layer", "2", "--head", "4", "1"]
    run(monkeypatch, TEXT, "-o", str(tmp_path / "map.png"), "--checkpoint", str(saved), *chosen)

    [(maps, tokens, title, *numbers)] = drawn
    [encoded] = read_encoder(saved).pairs([TEXT], ["It cost nothing."])
    expected = attention_map.attention_maps(reader.load_encoder(saved), encoded.windows[0])
    torch.testing.assert_close(maps, expected[1:, [0, 3]])
    assert (f"{TEXT} / It cost nothing.", [[2], [1, 4]]) == (title, numbers)
    assert 2 == tokens.count("[SEP]")
    cells = draw(*drawn[0]).axes
    assert ["layer 2", "head 1", "head 4"] == [
        cells[0].get_ylabel(),
        *(axes.get_title() for axes in cells[:2]),
    ]


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("the", ["-o", "map.png", "--layer", "3"], "--layer: 3 is not from 1 to 2"),
        ("the", ["-o", "map.png", "--head", "0"], "--head: 0 is not from 1 to 4"),
        ("the " * 47, ["-o", "map.png"], "49 tokens are too many to draw: at most 48"),
        ("the", ["-o", "map.png", "--checkpoint", "package:no_such_package"], "no installed package"),
        ("the", [], "-o/--output"),
    ],
)  # fmt: skip
def test_refusals(monkeypatch, capsys, saved, text, options, message):
    """Texts too long to be read, unknown checkpoints, and no place to write to, are errors."""
    with pytest.raises(SystemExit, match="2"):
        run(monkeypatch, text, "--checkpoint", str(saved), *options)

    assert message in capsys.readouterr().err

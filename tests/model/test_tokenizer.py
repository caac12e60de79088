"""A tokenizer trained here is BERT's: WordPiece, its special tokens, its template for texts and pairs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from model import tokenizer
from model.families.registry import FAMILIES
from model.tokenizer import train
from tests import samples

TEXTS = ["the unaffable river affected the café", "The river is unaffected, unlike the Café"] * 10


def test_special_tokens_come_first():
    """The special tokens have the first five ids, in the order that is Google's."""
    trained = train(TEXTS, vocab_size=60)

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    assert [trained.token_to_id(token) for token in special] == [0, 1, 2, 3, 4]


FRAMED = ("[CLS] {0} [SEP]", "[CLS] {0} [SEP] {1} [SEP]")
OTHERWISE = dict.fromkeys(
    ("roberta", "xlm-roberta", "camembert", "mpnet", "jina_embeddings_v3", "gte"),
    ("<s> {0} </s>", "<s> {0} </s> </s> {1} </s>"),
)
START, END = "<|begin_of_text|>", "<|end_of_text|>"
OTHERWISE["eurobert"] = (f"{START} {{0}} {END}", f"{START} {{0}} {END} {{1}} {END}")
OTHERWISE["gemma3_text"] = ("<bos> {0} <eos>", "<bos> {0} <eos> <bos> {1} <eos>")
OTHERWISE["qwen3"] = ("{0} <|endoftext|>", "{0} {1} <|endoftext|>")


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_has_its_own(name):
    """Its special tokens come first, stand where they should, and texts come back as they were."""
    family = FAMILIES[name]
    trained = train(TEXTS, vocab_size=400, family=family)
    special = dict.fromkeys(family.special_tokens.values())
    assert [*map(trained.token_to_id, special)] == [*range(len(special))]
    if name not in (
        "modernbert",
        "eurobert",
        "qwen3",
    ):  # whose special tokens come last when published
        assert trained.token_to_id(family.special_tokens["pad"]) == family.config().pad_token_id

    text, pair = "the river", "the cafe"
    single, both = (" ".join(trained.encode(*texts).tokens) for texts in ((text,), (text, pair)))
    pieces = [" ".join(trained.encode(t, add_special_tokens=False).tokens) for t in (text, pair)]
    assert [single, both] == [framed.format(*pieces) for framed in OTHERWISE.get(name, FRAMED)]
    assert trained.decode(trained.encode(text).ids) == text


def test_word_pieces():
    """Words are cut into known pieces, continued by ##; what has none is unknown."""
    trained = train(TEXTS, vocab_size=60)

    encoding = trained.encode("unaffected 漢", add_special_tokens=False)

    assert encoding.tokens[-1] == "[UNK]"
    first, *others = encoding.tokens[:-1]
    assert others
    assert all(piece.startswith("##") for piece in others)
    assert first + "".join(piece.removeprefix("##") for piece in others) == "unaffected"
    assert trained.decode(encoding.ids[:-1]) == "unaffected"


def test_vocabulary_size_is_a_limit():
    """The vocabulary is not larger than the limit."""
    assert train(TEXTS, vocab_size=50).get_vocab_size() == 50


@pytest.mark.parametrize("family", ["bert", "roberta"])
def test_the_same_everywhere(family):
    """Another process learns the same tokenizer from the same texts."""
    program = (
        "from model.families.registry import FAMILIES; from model.tokenizer import train; from tests import samples;"
        f"print(train(samples.corpus(), 400, family=FAMILIES[{family!r}]).to_str())"
    )
    root = Path(tokenizer.__file__).parents[1]
    command = [sys.executable, "-c", program]
    output = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True)

    here = train(samples.corpus(), 400, family=FAMILIES[family])

    assert json.loads(output.stdout) == json.loads(here.to_str())


def test_letters_within_words():
    """Every letter can go on with a word, and nothing else can: not what is always split off."""
    vocabulary = train(["a b, c 漢"], vocab_size=60).get_vocab()

    assert {token for token in vocabulary if token.startswith("##")} == {"##a", "##b", "##c"}
    assert vocabulary.keys() >= {",", "漢"}


@pytest.mark.parametrize(
    ("lowercase", "tokens"), [(True, ["the", "cafe"]), (False, ["The", "Café"])]
)
def test_lowercase(lowercase, tokens):
    """The uncased kind drops case and accents, the cased kind keeps both."""
    trained = train(TEXTS, vocab_size=200, lowercase=lowercase)

    assert trained.encode("The Café", add_special_tokens=False).tokens == tokens


def test_template():
    """A text is framed by [CLS] and [SEP]; of a pair, the second with its [SEP] is segment 1."""
    trained = train(TEXTS, vocab_size=200)

    single, pair = trained.encode("the river"), trained.encode("the river", "the café is")

    assert single.tokens == ["[CLS]", "the", "river", "[SEP]"]
    assert single.type_ids == [0, 0, 0, 0]
    assert pair.tokens == ["[CLS]", "the", "river", "[SEP]", "the", "cafe", "is", "[SEP]"]
    assert pair.type_ids == [0, 0, 0, 0, 1, 1, 1, 1]


def test_mask_in_a_text():
    """[MASK] written in a text is the mask token, not five pieces."""
    trained = train(TEXTS, vocab_size=200)

    assert trained.encode("the [MASK] is", add_special_tokens=False).tokens[1] == "[MASK]"


def test_round_trip(tmp_path):
    """A tokenizer comes back whole from its file, without truncation or padding."""
    trained = train(TEXTS, vocab_size=100)

    trained.save(str(tmp_path / "tokenizer.json"))

    again = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert again.to_str() == trained.to_str()
    assert again.truncation is None
    assert again.padding is None


@pytest.mark.parametrize(("flags", "cased"), [([], False), (["--cased"], True)])
def test_command(monkeypatch, capsys, tmp_path, corpus_file, flags, cased):
    """The command reads files, writes `tokenizer.json` to the given path, and prints the vocabulary size."""
    out = tmp_path / "new" / "tokenizer.json"
    arguments = [str(out), str(corpus_file), "--vocab-size", "150", *flags]
    monkeypatch.setattr(sys, "argv", ["tokenizer", *arguments])

    tokenizer.main()

    vocabulary = Tokenizer.from_file(str(out)).get_vocab()
    assert len(vocabulary) == 150
    assert ("A" in vocabulary) == cased
    assert capsys.readouterr().out == f"{out}: 150 tokens\n"


def test_the_command_says_which_file_is_none_of_text(monkeypatch, tmp_path):
    """In a line, not a traceback; nothing is written."""
    (tmp_path / "README.md").write_text("a")
    arguments = [str(tmp_path / "tokenizer.json"), str(tmp_path / "README.md")]
    monkeypatch.setattr(sys, "argv", ["tokenizer", *arguments])
    with pytest.raises(SystemExit, match=r"README\.md: the corpus is read from"):
        tokenizer.main()
    assert not (tmp_path / "tokenizer.json").exists()

"""What the tests of `model` share: a corpus made up on the spot, its tokenizer, and the real MiniLM."""

import random
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from model import cloze_examples, tokenizer
from model.report.page import Section
from model.training import training_run

NAMES = ["Ada", "Grace", "Emmy", "Sofya", "Mary", "Rosalind", "Chien-Shiung", "Lise"]
VERBS = ["measured", "drew", "doubted", "repaired", "described", "forgot", "sold", "painted"]
THINGS = ["a comet", "the old engine", "two prime numbers", "every river", "some café tables"]
PLACES = ["in Turin", "at dawn", "near the harbour", "without a word", "for Dr. Noether", "twice"]


def make_documents(count: int, seed: int = 0) -> list[list[str]]:
    """Documents of one to four paragraphs of two to five sentences."""
    rng = random.Random(seed)

    def sentence() -> str:
        return " ".join(map(rng.choice, (NAMES, VERBS, THINGS, PLACES))) + rng.choice(".!?")

    def paragraph() -> str:
        return " ".join(sentence() for _ in range(rng.randint(2, 5)))

    return [[paragraph() for _ in range(rng.randint(1, 4))] for _ in range(count)]


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> None:
    """Models this small are slowed by a second thread."""
    torch.set_num_threads(1)


@pytest.fixture
def pictures() -> None:
    """Let the runs of a test draw their pictures."""


@pytest.fixture(autouse=True)
def _no_pictures(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let other runs draw none, which takes longer than a few steps."""
    if "pictures" not in request.fixturenames:
        section = Section("attention", "Attention", "")
        monkeypatch.setattr(cloze_examples, "attention", lambda *_: section)
        monkeypatch.setattr(training_run, "draw_loss", lambda _, path: path.touch())


@pytest.fixture(scope="session")
def documents() -> list[list[str]]:
    """The paragraphs of sixty made-up documents."""
    return make_documents(60)


@pytest.fixture(scope="session")
def corpus_file(documents: list[list[str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The documents as a file: one paragraph per line, an empty line between documents."""
    path = tmp_path_factory.mktemp("corpus") / "made-up.txt"
    path.write_text("\n\n".join("\n".join(d) for d in documents), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def tokenizer_file(documents: list[list[str]], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A `tokenizer.json` of some two hundred tokens, trained on the documents."""
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    texts = (paragraph for document in documents for paragraph in document)
    tokenizer.train(texts, vocab_size=200).save(str(path))
    return path


@pytest.fixture
def small_tokenizer(tokenizer_file: Path) -> Tokenizer:
    """The trained tokenizer, the test's own copy."""
    return Tokenizer.from_file(str(tokenizer_file))


@pytest.fixture(scope="session")
def minilm(minilm_folder: Path) -> Path:
    """The directory of the real all-MiniLM-L6-v2 (22.7 million parameters)."""
    return minilm_folder

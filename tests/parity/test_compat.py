"""Results equal transformers' pipeline results, but for docs/reference/compat.md: a small share of `make compat`."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import transformers

from benchmarks.compat import checkpoints, compare, pipelines, texts
from benchmarks.compat.checkpoints import MAX_LENGTH
from benchmarks.compat.compare import Ask, Tally
from tests import samples
from tests.conftest import chosen, run_export
from tests.e2e.conftest import Server, serving

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

FAMILIES = ("bert", "roberta", "xlm-roberta")  # one of each kind of tokenizer


class Inputs(NamedTuple):
    texts: list[str]
    pairs: list[tuple[str, str]]
    questions: list[tuple[str, str]]


def made_up() -> Inputs:
    """Short and long texts, and strange ones."""
    plain = [samples.text(words, seed=words) for words in (1, 5, 20, 60, 150, 500)]
    found = [*plain, *samples.STRANGE.values()]
    asked = [(f"Who {verb} it?", text) for verb, text in zip(samples.VERBS, plain, strict=False)]
    return Inputs(found, list(zip(found, found[::-1], strict=True)), asked)


@cache  # pytest sets up the fixture again for each group of its tests
def real() -> Inputs:
    if not texts.DATA.is_dir():
        pytest.skip(f"{texts.DATA} (real texts) is not next to this checkout")
    return Inputs(texts.singles(10), texts.pairs(6), texts.questions(8))


@pytest.fixture(scope="module")
def inputs(request: pytest.FixtureRequest) -> Inputs:
    source: Callable[[], Inputs] = request.param
    return source()


each_case = pytest.mark.parametrize(
    ("family", "inputs"),
    [*((family, made_up) for family in FAMILIES), (FAMILIES[0], real)],
    ids=[*FAMILIES, "real texts"],
    indirect=["inputs"],
)


@pytest.fixture(scope="module")
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of every family that this run tests, as transformers reads it and as a bundle."""
    transformers.logging.disable_progress_bar()
    root = tmp_path_factory.mktemp("compat")
    for family in sorted(chosen(request, "family") | {FAMILIES[0]}):
        own = checkpoints.at_random(
            family, samples.corpus(), root / family, vocab_size=600, no_entity=0
        )
        flags = ("--precision", "fp32", "--max-length", str(MAX_LENGTH))
        run_export(own / "joint", root / "bundles" / family, *flags)
    return root


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    with serving(*(folder / "bundles").iterdir()) as running:
        yield running


@pytest.fixture
def ask(server: Server, family: str) -> Ask:
    """What that model of the service answers."""

    def answer(
        path: str, columns: Mapping[str, Sequence[Any]], fields: Mapping[str, Any]
    ) -> list[Any]:
        body = {"model": family, **columns, **fields}
        answer = server.answer(path, body)
        results: list[Any] = answer.get("results") or answer["embeddings"]
        return results

    return answer


def differences(tallies: Iterator[Tally]) -> dict[str, set[str]]:
    """The names of the differences, for each option. Fails for a difference without a listed reason."""
    found = [*tallies]
    for tally in found:
        assert [] == tally.unexplained, tally.what
        assert tally.answers > 0, tally.what
    return {tally.what: {name for names in tally.texts for name in names} for tally in found}


@each_case
@pytest.mark.parametrize(
    ("compared", "asked"),
    [
        (compare.classify, ("texts", "pairs")),
        (compare.zero_shot, ("texts",)),
        (compare.rerank, ("pairs",)),
        (compare.fill_mask, ("texts",)),
    ],
)
def test_there_is_no_difference(ask, folder, family, inputs, compared, asked):
    """Scores, labels, orders and tokens are the pipeline's, with each function, also where a text is cut."""
    own = [getattr(inputs, name) for name in asked]
    found = compared(ask, folder / family, *own, MAX_LENGTH)

    assert set() == set().union(*differences(found).values())


@each_case
def test_vectors(ask, folder, family, inputs):
    """Vectors of texts and of tokens, and weights of tokens, equal sentence-transformers' values."""
    found = differences(compare.vectors(ask, folder / family, inputs.texts, MAX_LENGTH))

    assert {"/embed", "/embed-tokens", "/embed-tokens, query", "/embed-sparse"} == found.keys()
    assert set() == set().union(*found.values())


@each_case
def test_ner(ask, folder, family, inputs):
    """Tokens are the same everywhere; words may be others, and long texts are read in another way."""
    found = differences(compare.ner(ask, folder / family, inputs.texts, MAX_LENGTH))

    assert 9 == len(found)
    assert {pipelines.EMPTY, pipelines.CLEAN} >= found["/ner none"] | found["/ner simple"]
    assert pipelines.CONTEXT in found["/ner simple, in windows"]
    assert pipelines.CONTEXT not in found["/ner max"]


@each_case
def test_qa(ask, folder, family, inputs):
    """Within a window only the edges of words and characters make a difference."""
    found = differences(compare.qa(ask, folder / family, inputs.questions, MAX_LENGTH))
    short = [(question, context[:200]) for question, context in inputs.questions]
    alone = differences(compare.qa(ask, folder / family, short, MAX_LENGTH))

    assert all(pipelines.ONE_SOFTMAX in names for names in found.values())
    of_edges = {pipelines.EMPTY, pipelines.CLEAN, pipelines.WORDS}
    assert of_edges >= set().union(*alone.values())


def test_pipelines_have_their_own_ways(folder):
    """The pipelines behave as docs/reference/compat.md describes for empty and for too many requests."""
    long = samples.text(700)
    tagger = pipelines.load("token-classification", folder / "bert" / "entities", MAX_LENGTH)
    classifier = pipelines.load("text-classification", folder / "bert" / "topic", MAX_LENGTH)

    assert max(found["end"] for found in tagger(long)) < len(long) / 2
    assert {"entity", "index"} < {name for found in tagger(long) for name in found}
    assert ["label", "score"] == [*classifier("sea")[0]]
    with pytest.raises(ValueError, match="stride"):
        tagger(long, stride=1, aggregation_strategy="none")
    with pytest.raises((IndexError, RuntimeError)):
        classifier(long)

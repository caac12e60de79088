"""Every task on one joint model: the reference's answers, alone and in batches, long inputs, and errors."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio

from export.verify import BATCH_TOLERANCE
from model.checkpoints import writer
from service.core.decode import SparseVector
from service.core.manifest import Head, LateInteraction, Sparse
from service.engines.engine import Engine, EngineTask, Reply
from service.errors import InvalidInput, UnknownHead
from service.tasks.analysis import TASKS, Analysis
from service.tasks.classification import Classification
from service.tasks.embedding import Embedding
from service.tasks.entity_recognition import EntityRecognition
from service.tasks.late_interaction import LateInteractionRanking, TokenEmbedding
from service.tasks.question_answering import QuestionAnswering
from service.tasks.reranking import Reranking
from service.tasks.similarity import Similarity
from service.tasks.sparse_embedding import SparseEmbedding, SparseRanking
from service.tasks.zero_shot import ZeroShot
from tests import samples
from tests.conftest import run_export
from tests.served import engine_of
from tests.service.fakes import ticket
from tests.tiny import make_tiny

pytestmark = pytest.mark.asyncio(loop_scope="module")

MAX_LENGTH = 48
HEADS = {
    "sentiment": Head(task="classification", labels=("negative", "neutral", "positive")),
    "relevance": Head(task="classification", labels=("relevance",)),
    "entailment": Head(task="classification", labels=("contradiction", "entailment", "neutral")),
    "entities": Head(task="ner", labels=("O", "B-PER", "I-PER", "B-LOC", "I-LOC")),
    "answers": Head(task="qa", max_answer_tokens=12, max_query_tokens=24),
    "embeddings": Head(task="embedding", pooling="mean", dimensions=64),
    "tokens": Head(
        task="late-interaction",
        dimensions=32,
        late_interaction=LateInteraction(
            query_prefix="query: ",
            document_prefix="doc: ",
            query_length=20,
            query_expansion=20,
            expansion_token_id=4,  # [MASK]
            skip_token_ids=(8, 9, 10, 11),
        ),
    ),
}
VOCABULARY = 327  # tokens of the tiny tokenizer
HEADS["sparse"] = Head(
    task="sparse-embedding", sparse=Sparse(activation="relu"), vocabulary_size=VOCABULARY
)
QUERY = "Who repaired the old engine?"
LABELS = ["trade", "the sea", "a long story about engines"]
TEXTS = [samples.text(words, seed=words) for words in (3, 11, 20, 26)]
LONG = samples.text(150, seed=9)


@dataclass(frozen=True)
class Case:
    """A task of texts, and its reference: the numbers that a library computes from a checkpoint of the head alone.

    numbers: the same numbers of our results
    int8: the largest difference of a number at int8
    """

    head: str
    task: Callable[..., EngineTask[Any]]
    reference: Callable[[Path, Sequence[str]], Any]
    numbers: Callable[[Any], Any]
    int8: float = 0.2


def scores(found: Sequence[Any]) -> list[float]:
    """The scores of labels, in the order of the labels' names."""
    return [one.score for one in sorted(found, key=lambda one: one.label)]


def cross_encoder(folder: Path, texts: Sequence[str]) -> Any:
    from sentence_transformers import CrossEncoder

    model = CrossEncoder(str(folder), max_length=MAX_LENGTH)
    return model.predict([(QUERY, text) for text in texts], show_progress_bar=False)


def bi_encoder(folder: Path, texts: Sequence[str]) -> Any:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder))
    model.max_seq_length = MAX_LENGTH
    vectors = model.encode([*texts, QUERY], show_progress_bar=False)
    return model.similarity(vectors[:-1], vectors[-1])[:, 0]


def late_interaction(folder: Path, texts: Sequence[str]) -> Any:
    from sentence_transformers import MultiVectorEncoder

    model = MultiVectorEncoder(str(folder))
    model.max_seq_length = MAX_LENGTH
    documents = model.encode_document([*texts], show_progress_bar=False)
    return model.similarity(model.encode_query([QUERY]), documents)[0]


def sparse_encoder(folder: Path, texts: Sequence[str]) -> Any:
    from sentence_transformers import SparseEncoder

    model = SparseEncoder(str(folder))
    model.max_seq_length = MAX_LENGTH
    return model.encode([*texts], convert_to_sparse_tensor=False, show_progress_bar=False)


def sparse_ranking(folder: Path, texts: Sequence[str]) -> Any:
    rows = sparse_encoder(folder, [QUERY, *texts])
    return rows[1:] @ rows[0]


def all_weights(found: tuple[list[int], list[float]]) -> Any:
    row = np.zeros(VOCABULARY)
    row[found[0]] = found[1]
    return row


def pipeline(task: str, folder: Path) -> Any:
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, model_max_length=MAX_LENGTH)
    return transformers.pipeline(task, model=str(folder), tokenizer=tokenizer)


def zero_shot(folder: Path, texts: Sequence[str], multi_label: bool) -> Any:
    asked = pipeline("zero-shot-classification", folder)
    found = asked([*texts], candidate_labels=LABELS, multi_label=multi_label)
    return [
        [score for _, score in sorted(zip(one["labels"], one["scores"], strict=True))]
        for one in found
    ]


CASES: dict[str, Case] = {
    "rerank": Case(
        "relevance",
        lambda texts, **options: Reranking(query=QUERY, documents=texts, **options),
        cross_encoder,
        float,
    ),
    "rerank by tokens": Case(
        "tokens",
        lambda texts, **options: LateInteractionRanking(query=QUERY, documents=texts, **options),
        late_interaction,
        float,
        int8=1.0,  # a sum over 20 tokens
    ),
    "sparse": Case(
        "sparse",
        lambda texts, **options: SparseEmbedding(inputs=texts, **options),
        sparse_encoder,
        all_weights,
        int8=0.4,
    ),
    "rerank by sparse": Case(
        "sparse",
        lambda texts, **options: SparseRanking(query=QUERY, documents=texts, **options),
        sparse_ranking,
        float,
        int8=10.0,  # a sum over the vocabulary
    ),
    "zero-shot": Case(
        "entailment",
        lambda texts, **options: ZeroShot(inputs=texts, labels=LABELS, **options),
        lambda folder, texts: zero_shot(folder, texts, multi_label=False),
        scores,
    ),
    "zero-shot of several labels": Case(
        "entailment",
        lambda texts, **options: ZeroShot(inputs=texts, labels=LABELS, multi_label=True, **options),
        lambda folder, texts: zero_shot(folder, texts, multi_label=True),
        scores,
    ),
}
OTHERS: tuple[tuple[str, EngineTask[Any]], ...] = (
    ("sentiment", Classification(inputs=TEXTS)),
    ("entities", EntityRecognition(inputs=[LONG, *TEXTS])),
    ("answers", QuestionAnswering(questions=[QUERY] * 2, contexts=[LONG, TEXTS[2]])),
    ("embeddings", Embedding(inputs=TEXTS)),
    ("embeddings", Similarity(source=QUERY, inputs=TEXTS)),
    ("tokens", TokenEmbedding(inputs=[QUERY, TEXTS[0]], input_type="query")),
    ("tokens", TokenEmbedding(inputs=[LONG, *TEXTS], truncate="window")),
)
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The joint checkpoint, a checkpoint of each head alone, and the bundle."""
    from model import tokenizer

    root = tmp_path_factory.mktemp("tasks")
    learnt = tokenizer.train(samples.corpus(), vocab_size=600)
    learnt.save(str(root / "tokenizer.json"))
    assert VOCABULARY == learnt.get_vocab_size()
    model = make_tiny(learnt, HEADS)
    writer.save_joint(root / "joint", model, root / "tokenizer.json")
    for head in HEADS:
        writer.save_head(root / head, model, head, root / "tokenizer.json")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("model.heads.VOCABULARY_PART", 100)
        run_export(root / "joint", root / "bundle", "--max-length", str(MAX_LENGTH))
    return root


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["fp32", "int8"])
async def engine(request: pytest.FixtureRequest, folder: Path) -> AsyncIterator[Engine]:
    async with engine_of(folder / "bundle", precision=request.param) as engine:
        yield engine


async def results(engine: Engine, case: Case, texts: Sequence[str], **options: Any) -> list[Any]:
    task = case.task(texts, **options)
    return numbered(engine, task, await engine.answer(task, ticket(), (case.head,)))


def numbered(engine: Engine, task: EngineTask[Any], reply: Reply[Any]) -> list[Any]:
    """The results of a reply, sparse vectors as lists; of a ranking, the scores of the documents."""
    if hasattr(task, "scores"):
        return [*task.scores(engine, reply)]
    return [as_lists(one) if isinstance(one, SparseVector) else one for one in reply.results]


def as_lists(found: SparseVector) -> tuple[list[int], list[float]]:
    return found.indices.tolist(), found.values.tolist()


@each_case
async def test_parity(case, engine, folder):
    """The reference's answers to 1e-4 at fp32, for short texts and for texts that are cut."""
    texts = [*TEXTS, LONG]

    found = [case.numbers(one) for one in await results(engine, case, texts, truncate=True)]

    expected = np.asarray(case.reference(folder / case.head, texts), np.float64)
    limit = 1e-4 if engine.runs_on.precision == "fp32" else case.int8
    assert np.abs(np.asarray(found) - expected).max() <= limit
    assert np.ptp(expected) > 1e-3  # the model tells the texts apart


async def test_similarity_parity(engine, folder):
    """The cosines of sentence-transformers."""
    task = Similarity(source=QUERY, inputs=[*TEXTS, LONG])

    found = np.asarray(task.scores(engine, await engine.answer(task, ticket())))

    expected = bi_encoder(folder / "embeddings", [*TEXTS, LONG]).numpy()
    limit = 1e-4 if engine.runs_on.precision == "fp32" else 0.1
    assert np.abs(found - expected).max() <= limit


@each_case
async def test_batch_invariance(case, engine):
    """A result is the same alone and in batches with inputs of every other task."""
    alone = [(await results(engine, case, [text]))[0] for text in TEXTS]

    task = case.task(TEXTS)
    requests = [engine.answer(task, ticket(), (case.head,)) for _ in range(3)]
    requests += [engine.answer(one, ticket(), (head,)) for head, one in OTHERS for _ in range(3)]
    together = await asyncio.gather(*requests)

    assert any(reply.timing.batch_size > len(TEXTS) for reply in together)
    assert all(alone == numbered(engine, task, reply) for reply in together[:3])


@pytest.mark.parametrize("heads", [(), ("entities", "sentiment"), ("embeddings",)], ids=str)
async def test_analysis_equals_each_head_alone(engine, heads):
    """The results of several heads from one pass equal each head's, also for long texts in windows.

    Mean pooling sums the tokens of a window in another order if the window happens to run in a batch of its own.
    """
    texts = [*TEXTS, LONG]
    of_texts = ("sentiment", "relevance", "entailment", "entities", "embeddings", "sparse")

    reply = await engine.answer(Analysis(inputs=texts), ticket(), heads)

    assert (heads or of_texts) == reply.heads
    for head in reply.heads:
        task = TASKS[HEADS[head].task](inputs=texts, truncate="window")
        expected = await engine.answer(task, ticket(), (head,))
        assert expected.usage == reply.usage
        for one, other in zip(expected.results, reply.results, strict=True):
            if head == "embeddings":
                np.testing.assert_allclose(other[head], one, rtol=0, atol=BATCH_TOLERANCE)
            elif head == "sparse":
                np.testing.assert_array_equal(np.stack(other[head]), np.stack(one))
            else:
                assert one == other[head]


async def test_windows_of_a_document(engine):
    """The score of a long document is that of its best window, and no window is without the query."""
    tokens = engine.encoder.tokenizer.encode(LONG, add_special_tokens=False)
    asked = len(engine.encoder.tokenizer.encode(QUERY, add_special_tokens=False))
    room = MAX_LENGTH - 3 - asked
    parts = [
        LONG[tokens.offsets[start][0] : tokens.offsets[min(start + room, len(tokens)) - 1][1]]
        for start in range(0, len(tokens), room)
    ]

    (long,) = await results(engine, CASES["rerank"], [LONG], stride=0)
    each = await results(engine, CASES["rerank"], parts, truncate=False)

    assert len(parts) > 2
    assert max(each) == long


async def test_token_vectors_of_windows(engine):
    """A long document has the vectors of its windows, each of which begins with the prefix."""
    encoding = engine.encoder.tokenizer.encode(LONG, add_special_tokens=False)
    prefix = len(engine.encoder.tokenizer.encode("doc: ", add_special_tokens=False))
    room = MAX_LENGTH - 2 - prefix
    ends = [encoding.offsets[min(i + room, len(encoding)) - 1][1] for i in range(0, 999, room)]
    starts = [encoding.offsets[i][0] for i in range(0, len(encoding), room)]
    parts = [LONG[start:end] for start, end in zip(starts, ends, strict=False)]

    long = TokenEmbedding(inputs=[LONG], truncate="window", stride=0)
    (whole,) = (await engine.answer(long, ticket())).results
    each = (await engine.answer(TokenEmbedding(inputs=parts, truncate=False), ticket())).results

    assert len(parts) > 2
    assert np.array_equal(np.concatenate(each), whole)


async def test_sparse_windows(engine):
    """A long text has the largest weight of each token over its windows, or the largest weights alone."""
    texts = [LONG, TEXTS[0]]
    cut = SparseEmbedding(inputs=texts)
    windows = SparseEmbedding(inputs=texts, truncate="window")
    best = SparseEmbedding(inputs=texts, truncate="window", top_k=5)

    first, whole, few = [
        [all_weights(as_lists(one)) for one in (await engine.answer(task, ticket())).results]
        for task in (cut, windows, best)
    ]

    assert (whole[0] >= first[0]).all()
    assert (whole[0] > first[0]).any()
    assert np.array_equal(first[1], whole[1])
    for every, largest in zip(whole, few, strict=True):
        assert 5 == np.count_nonzero(largest)
        assert np.array_equal(np.sort(every)[-5:], np.sort(largest)[-5:])


async def test_queries_have_no_windows(engine):
    """A query is truncated or refused, and is filled up with tokens that have vectors."""
    windows = TokenEmbedding(inputs=[QUERY], input_type="query", truncate="window")
    with pytest.raises(InvalidInput, match="queries have no windows"):
        await engine.answer(windows, ticket())
    whole = TokenEmbedding(inputs=[LONG], input_type="query", truncate=False)
    with pytest.raises(InvalidInput, match="longer than 20 tokens"):
        await engine.answer(whole, ticket())

    task = TokenEmbedding(inputs=[QUERY, LONG, "a"], input_type="query")
    reply = await engine.answer(task, ticket())

    assert [(20, 32)] * 3 == [vectors.shape for vectors in reply.results]
    assert [1] == reply.usage.truncated
    assert np.allclose(1, [np.linalg.norm(vectors, axis=1) for vectors in reply.results])


@each_case
async def test_errors(case, engine):
    """A head for another task is refused; a text that is too long fails alone where errors are isolated."""
    with pytest.raises(UnknownHead, match=case.head):
        await engine.answer(case.task(TEXTS), ticket(), ("entities",))
    with pytest.raises(InvalidInput, match=r"inputs\[1\]: longer than 48 tokens"):
        await results(engine, case, [TEXTS[0], LONG], truncate=False)

    task = case.task([LONG, TEXTS[0]], truncate=False)
    reply = await engine.answer(task, replace(ticket(), isolate_errors=True), (case.head,))

    assert [None] + await results(engine, case, TEXTS[:1]) == numbered(engine, task, reply)
    assert [0] == [*reply.errors]


async def test_analysis_refuses_heads(engine):
    """A head that reads pairs of a question and a context is refused, and so is an unknown one."""
    with pytest.raises(InvalidInput, match="answers does not read single texts"):
        await engine.answer(Analysis(inputs=TEXTS), ticket(), ("answers",))
    with pytest.raises(UnknownHead, match="no head 'mood'"):
        await engine.answer(Analysis(inputs=TEXTS), ticket(), ("mood",))

"""Compare Quartet's answers with a pipeline's: count equal ones, and explain the differences of the others."""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sentence_transformers import MultiVectorEncoder, SentenceTransformer, SparseEncoder

from benchmarks.compat import pipelines
from benchmarks.compat.pipelines import Names
from quartet.comparison.servers import answers, entities
from service.core.decode import AGGREGATION_STRATEGIES, AnswerSpan, EntitySpan, LabelScore

# Path, columns of the body that have a value for each input, the other fields -> results.
Ask = Callable[[str, Mapping[str, Sequence[Any]], Mapping[str, Any]], list[Any]]
Answers = Sequence[LabelScore | EntitySpan | AnswerSpan]
Read = Callable[[Names], Answers]

TOLERANCE = 1e-4  # of a score, by its size, and a little more where it is small: another runtime sums in another order
LITTLE = 1e-5
STRIDE = 128  # the pipeline's own for questions
SHOWN = 3  # of what nothing explains


@dataclass
class Tally:
    """The number of inputs by the differences of their answers, which are empty for equal ones."""

    what: str
    texts: Counter[tuple[str, ...]] = field(default_factory=Counter)
    answers: int = 0
    largest: float = 0.0  # difference of a score
    unexplained: list[str] = field(default_factory=list)

    def add(
        self, text: str, found: Answers, peer: Answers, read: Read, names: Sequence[str]
    ) -> None:
        """One text: Quartet's answer, the pipeline's, and how the pipeline's reads with differences of these names."""
        self.answers += len(found)
        if distance(peer, read(())) is None:
            self.unexplained.append(f"our reading of the pipeline is wrong: {text!r}: {peer}")
            return
        for chosen in pipelines.subsets(names):
            apart = distance(found, read(chosen) if chosen else peer)
            if apart is not None:
                self.texts[chosen] += 1
                self.largest = max(self.largest, apart)
                return
        self.unexplained.append(f"{text!r}: {found} and not {peer}")


def distance(one: Answers, other: Answers) -> float | None:
    """The largest difference of a score; None where the answers are not the same."""
    plain, others = ([answer._replace(score=0) for answer in side] for side in (one, other))
    if plain != others:
        return None
    pairs = [(a.score, b.score) for a, b in zip(one, other, strict=True)]
    if any(abs(a - b) > TOLERANCE * max(abs(a), abs(b)) + LITTLE for a, b in pairs):
        return None
    return max((abs(a - b) for a, b in pairs), default=0.0)


# -- classification -------------------------------------------------------------------------------


def classify(
    ask: Ask, folder: Path, texts: Sequence[str], pairs: Sequence[tuple[str, str]], max_length: int
) -> Iterator[Tally]:
    """One label of several, several at once, a number for a pair, one label for a pair; and each function for one."""
    of_texts = {"inputs": texts}
    of_pairs = {"inputs": [a for a, _ in pairs], "text_pair": [b for _, b in pairs]}
    for head, columns, function in (
        ("topic", of_texts, None),
        ("topics", of_texts, None),
        ("alike", of_pairs, None),
        ("follows", of_pairs, None),
        ("topic", of_texts, "sigmoid"),
        ("topics", of_texts, "softmax"),
        ("alike", of_pairs, "sigmoid"),
        ("follows", of_pairs, "none"),
    ):
        pipeline = pipelines.load("text-classification", folder / head, max_length)
        tally = Tally(f"/classify {head}" + (f", {function}" if function else ""))
        fields = {"function_to_apply": function} if function else {}
        found = ask("/classify", columns, {"head": head, **fields})
        for result, *own in zip(found, *columns.values(), strict=True):
            given = dict(zip(("text", "text_pair"), own, strict=False))
            peer = labels(pipeline(given, top_k=None, truncation=True, **fields))
            tally.add(str(own), labels(result), peer, lambda _, same=peer: same, ())
        yield tally


def labels(document: list[dict[str, Any]]) -> list[LabelScore]:
    return [LabelScore(one["label"], one["score"]) for one in document]


# -- other uses of a classification head -----------------------------------------------------------

LABELS = ("business", "sports", "science", "a war")
AT_ONCE = 10  # documents of a query


def zero_shot(ask: Ask, folder: Path, texts: Sequence[str], max_length: int) -> Iterator[Tally]:
    """Labels that exclude each other, and labels that may hold together."""
    pipeline = pipelines.load("zero-shot-classification", folder / "follows", max_length)
    for multi_label in (False, True):
        tally = Tally("/zero-shot" + (", several labels" if multi_label else ""))
        fields = {"head": "follows", "labels": LABELS, "multi_label": multi_label}
        for text, result in zip(texts, ask("/zero-shot", {"inputs": texts}, fields), strict=True):
            given = pipeline(text, candidate_labels=list(LABELS), multi_label=multi_label)
            peer = [*map(LabelScore, given["labels"], given["scores"])]
            tally.add(text, labels(result), peer, lambda _, same=peer: same, ())
        yield tally


def rerank(
    ask: Ask, folder: Path, pairs: Sequence[tuple[str, str]], max_length: int
) -> Iterator[Tally]:
    """The documents of ten pairs, for the query of each; long pairs are cut."""
    pipeline = pipelines.load("text-classification", folder / "alike", max_length)
    tally = Tally("/rerank")
    for start in range(0, len(pairs), AT_ONCE):
        documents = [document for _, document in pairs[start : start + AT_ONCE]]
        query = pairs[start][0]
        fields = {"head": "alike", "query": query, "truncate": True, "return_text": True}
        found = ask("/rerank", {"documents": documents}, fields)
        given = [pipeline({"text": query, "text_pair": d}, truncation=True) for d in documents]
        scores = [one[0]["score"] if isinstance(one, list) else one["score"] for one in given]
        ranked = sorted(zip(documents, scores, strict=True), key=lambda one: -one[1])
        peer = [LabelScore(*one) for one in ranked]
        own = [LabelScore(one["text"], one["score"]) for one in found]
        tally.add(query, own, peer, lambda _, same=peer: same, ())
    yield tally


# -- vectors, and tokens of the vocabulary --------------------------------------------------------


def vectors(ask: Ask, folder: Path, texts: Sequence[str], max_length: int) -> Iterator[Tally]:
    """A vector of a text, of each of its tokens, and the weights of its tokens, as sentence-transformers has them."""
    options = {"show_progress_bar": False}
    model = pipelines.load_encoder(SentenceTransformer, folder / "vectors", max_length)
    late = pipelines.load_encoder(MultiVectorEncoder, folder / "tokens", max_length)
    sparse = pipelines.load_encoder(SparseEncoder, folder / "weights", max_length)
    dense_rows = sparse.encode([*texts], convert_to_sparse_tensor=False, **options)
    for path, head, fields, peers in (
        ("/embed", "vectors", {}, model.encode([*texts], **options)),
        ("/embed-tokens", "tokens", {}, late.encode_document([*texts], **options)),
        (
            "/embed-tokens",
            "tokens",
            {"input_type": "query"},
            late.encode_query([*texts], **options),
        ),
        ("/embed-sparse", "weights", {}, dense_rows.numpy()),
    ):
        tally = Tally(", ".join([path, *fields.values()]))
        found = ask(path, {"inputs": texts}, {"head": head, "truncate": True, **fields})
        for text, own, peer in zip(texts, found, peers, strict=True):
            same = numbers(as_row(own, len(peer)))
            expected = numbers(np.asarray(peer).ravel())
            tally.add(text, same, expected, lambda _, same=expected: same, ())
        yield tally


def as_row(found: Any, size: int) -> NDArray[Any]:
    """Return the numbers of a result; of a sparse one all `size` weights."""
    if not isinstance(found, dict):
        return np.ravel(found)
    row = np.zeros(size)
    row[found["indices"]] = found["values"]
    return row


def numbers(row: NDArray[Any]) -> list[LabelScore]:
    return [LabelScore(str(place), float(value)) for place, value in enumerate(row)]


def fill_mask(ask: Ask, folder: Path, texts: Sequence[str], max_length: int) -> Iterator[Tally]:
    """The five best tokens in place of the third word; long texts are cut."""
    pipeline = pipelines.load("fill-mask", folder / "masks", max_length)
    mask, tally = pipeline.tokenizer.mask_token, Tally("/fill-mask")
    masked = [" ".join([*words[:2], mask, *words[3:]]) for words in map(str.split, texts)]
    found = ask("/fill-mask", {"inputs": masked}, {"head": "masks", "truncate": True})
    for text, result in zip(masked, found, strict=True):
        given = pipeline(text, tokenizer_kwargs={"truncation": True})
        own, peer = tokens(result), tokens(given)
        tally.add(text, own, peer, lambda _, same=peer: same, ())
    yield tally


def tokens(document: list[dict[str, Any]]) -> list[LabelScore]:
    return [LabelScore(str(one["token"]), one["score"]) for one in document]


# -- entities -------------------------------------------------------------------------------------


def ner(ask: Ask, folder: Path, texts: Sequence[str], max_length: int) -> Iterator[Tally]:
    """Every strategy: on the beginning of long texts, and in windows where the pipeline can."""
    pipeline = pipelines.load("token-classification", folder / "entities", max_length)
    for stride in (None, STRIDE):
        tagged = [pipelines.tag(pipeline, text, stride) for text in texts]
        how = {"truncate": True} if stride is None else {"truncate": "window", "stride": stride}
        for strategy in AGGREGATION_STRATEGIES[0 if stride is None else 1 :]:
            fields = {"head": "entities", "aggregation_strategy": strategy, **how}
            tally = Tally(f"/ner {strategy}" + ("" if stride is None else ", in windows"))
            found = ask("/ner", {"inputs": texts}, fields)
            for one, result in zip(tagged, found, strict=True):
                read = partial(pipelines.read_entities, pipeline, one, strategy)
                peer = pipelines.entities(pipeline, one, strategy)
                tally.add(one.text, entities(result), peer, read, pipelines.OF_NER)
            yield tally


# -- answers --------------------------------------------------------------------------------------

# Options in the pipeline's names. The longest answer is not among them, because it is a setting of the head.
QUESTIONS: tuple[dict[str, Any], ...] = (
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": 1, "handle_impossible_answer": True},
    {"top_k": 5, "handle_impossible_answer": True},
)


def qa(
    ask: Ask,
    folder: Path,
    questions: Sequence[tuple[str, str]],
    max_length: int,
    peer_answers: Sequence[Sequence[Answers]] | None = None,
) -> Iterator[Tally]:
    """The best and the best five, with and without the answer that there is none.

    peer_answers: a pipeline's, for each question and each of QUESTIONS; None: computed from the logits
    """
    answerer = pipelines.load_answerer(folder / "answers", max_length)
    windows = [pipelines.ask(answerer, *question, STRIDE) for question in questions]
    columns = {"inputs": [{"question": q, "context": c} for q, c in questions]}
    for number, options in enumerate(QUESTIONS):
        found = ask("/qa", columns, {"head": "answers", "stride": STRIDE, **options})
        tally = Tally("/qa " + ", ".join(f"{name} {value}" for name, value in options.items()))
        for which, (result, (question, context)) in enumerate(zip(found, questions, strict=True)):
            read = partial(pipelines.read_answers, windows[which], context, **options)
            peer = read(()) if peer_answers is None else peer_answers[which][number]
            tally.add(question, answers(result), peer, read, pipelines.OF_QA)
        yield tally

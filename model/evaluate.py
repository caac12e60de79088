"""Evaluate heads: `python -m model.evaluate CHECKPOINT --eval HEAD=FILE ... [--max-length N]`.

The service's own code encodes text and decodes outputs, so the metrics hold for the served model.
`judge` evaluates any function from encodings to outputs: PyTorch, or a session of the exported graph.
"""

import json
import math
import re
import string
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from rich.console import Console
from rich.table import Table
from scipy import stats
from seqeval.metrics import f1_score as entity_f1
from seqeval.metrics import precision_score as entity_precision
from seqeval.metrics import recall_score as entity_recall
from sklearn.metrics import accuracy_score, average_precision_score, f1_score, matthews_corrcoef

from model.checkpoints.source import read_source
from model.data import examples, head_rows, labelled_rows
from model.evaluate_arguments import STRIDE, parser
from model.heads import EncoderWithHeads
from model.training import optim
from service.core import decode, packing, tags
from service.core.decode import Floats
from service.core.encode import Encoded, Encoder, Encoding
from service.core.manifest import Head

Run = Callable[[Sequence[Encoding]], Sequence[Mapping[str, Floats]]]  # each encoding's own outputs
HeadOutputs = Sequence[tuple[Encoded, list[Floats]]]  # of each text: its windows, and their outputs

BATCH_TOKENS = 8192  # slots of one evaluation batch, including padding

ROUNDING = 1e-6  # cosines of equal vectors differ by less


class Evaluation(NamedTuple):
    """Metrics by name, the main one first, from 0 to 1 (correlations from -1), and the answers.

    answers: a label, a list of labels, or a score in tenths of the largest gold score (of 1, if that is less); the
    tags of a sentence; an answer's text; for each text of an embedding's pairs, the index of its nearest other text
    """

    metrics: dict[str, float]
    answers: list[Any]


def judge(
    run: Run,
    encoder: Encoder,
    head: Head,
    name: str,
    file: str | Path,
    *,
    stride: int = STRIDE,
    limit: int = 0,
) -> Evaluation:
    """Evaluate the head `name` on a file, or on `limit` evenly spaced rows of it (0: all). Raises DataError."""
    rows = spread(head_rows.read(file, head), limit)
    return judge_rows(run, encoder, head, name, rows, stride=stride)


def judge_rows(
    run: Run, encoder: Encoder, head: Head, name: str, rows: Sequence[Any], *, stride: int = STRIDE
) -> Evaluation:
    """Evaluate the head `name` on rows of its task. Raises DataError as `judge` does."""
    return judge_outputs(rows, head_outputs(run, encoder, head, name, rows, stride), head)


def head_outputs(
    run: Run, encoder: Encoder, head: Head, name: str, rows: Sequence[Any], stride: int
) -> HeadOutputs:
    """Return the outputs of the head `name` for each text of the rows, in their order."""
    encoded = list(examples.encode(rows, head, encoder, stride))
    windows = [window for row in encoded for text in row for window in text.windows]
    outputs = (output[name] for output in run_sorted(run, windows))
    return [(text, [next(outputs) for _ in text.windows]) for row in encoded for text in row]


def judge_outputs(rows: Sequence[Any], texts: HeadOutputs, head: Head) -> Evaluation:
    """Evaluate a head by its outputs for rows, see `head_outputs`."""
    match head.task:
        case "classification":
            return judge_texts(rows, texts, head)
        case "ner":
            return judge_sentences(rows, texts, head)
        case "qa":
            return judge_questions(rows, texts, head)
        case "embedding" | "sparse-embedding":
            return judge_vectors(rows, texts, head)


def spread(rows: list[Any], limit: int) -> list[Any]:
    """Return `limit` evenly spaced rows; all for 0."""
    if not 0 < limit < len(rows):
        return rows
    return [rows[i] for i in np.linspace(0, len(rows) - 1, limit).round().astype(int)]


def run_sorted(run: Run, encodings: Sequence[Encoding]) -> list[Mapping[str, Floats]]:
    """Run encodings in batches of similar lengths, and return the outputs in the order of the encodings."""
    batches: list[list[int]] = [[]]
    for index in sorted(range(len(encodings)), key=lambda i: len(encodings[i])):
        if (len(batches[-1]) + 1) * len(encodings[index]) > BATCH_TOKENS and batches[-1]:
            batches.append([])
        batches[-1].append(index)
    outputs: dict[int, Mapping[str, Floats]] = {}
    for batch in batches:
        outputs |= zip(batch, run([encodings[i] for i in batch]), strict=True)
    return [outputs[i] for i in range(len(encodings))]


def torch_run(model: EncoderWithHeads, heads: list[str], dtype: torch.dtype = torch.float32) -> Run:
    """Return a function that runs heads of a model on the model's device, without dropout."""
    device = next(model.parameters()).device
    per_token = [name for name in heads if model.described[name].per_token]

    @torch.inference_mode()
    def run(encodings: Sequence[Encoding]) -> Sequence[Mapping[str, Floats]]:
        training = model.training
        model.eval()
        with torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
            outputs = examples.forward(model, encodings, heads)
        model.train(training)
        arrays = {name: output.cpu().numpy() for name, output in outputs.items()}
        ends = packing.make_layout(map(len, encodings)).cu_seqlens
        return packing.split(arrays, encodings, dict.fromkeys(per_token, ends))

    return run


# -- classification -------------------------------------------------------------------------------


def judge_texts(found: Sequence[labelled_rows.Text], texts: HeadOutputs, head: Head) -> Evaluation:
    """Evaluate a classifier.

    Metrics: accuracy, macro F1 and Matthews; for several labels micro and macro F1; for numbers correlations; for a
    single label that holds or not, average precision and accuracy.
    """
    ranked = [
        decode.classify(
            logits,
            [len(window) for window in text.windows],
            labels=head.labels,
            problem_type=head.problem_type,
            top_k=None,
        )
        for text, logits in texts
    ]
    gold = [examples.text_labels(row, head) for row in found]
    if head_rows.is_graded(head):
        scores = [labels[0].score for labels in ranked]
        grades = np.concatenate(gold)
        if head.problem_type != "regression" and {*grades.tolist()} == {0, 1}:
            metrics = {
                "average_precision": float(average_precision_score(grades, scores)),
                "accuracy": float(accuracy_score(grades, np.asarray(scores) >= 0.5)),
            }
        else:
            metrics = correlations(scores, [row.score for row in found])
        unit = max(1.0, float(np.abs(grades).max()))
        return Evaluation(metrics, [round(score / unit, 1) for score in scores])
    if head.problem_type == "multi_label_classification":
        above = [{label for label, score in labels if score >= 0.5} for labels in ranked]
        answers = [[label for label in head.labels if label in chosen] for chosen in above]
        guess = [[label in chosen for label in head.labels] for chosen in above]
        kinds = ("micro", "macro")
        f1 = {f"{kind}_f1": f1_score(gold, guess, average=kind, zero_division=0) for kind in kinds}
        return Evaluation({name: float(value) for name, value in f1.items()}, answers)
    top = [head.labels.index(labels[0].label) for labels in ranked]
    metrics = {
        "accuracy": float(accuracy_score(gold, top)),
        "macro_f1": float(f1_score(gold, top, average="macro", zero_division=0)),
        "matthews": float(matthews_corrcoef(gold, top)),
    }
    return Evaluation(metrics, [labels[0].label for labels in ranked])


def correlations(found: Sequence[float], gold: Sequence[float]) -> dict[str, float]:
    """Return Spearman's and Pearson's correlation; 0 where one side is constant."""
    if np.ptp(found) == 0 or np.ptp(gold) == 0:
        return {"spearman": 0.0, "pearson": 0.0}
    return {
        "spearman": float(stats.spearmanr(found, gold).statistic),
        "pearson": float(stats.pearsonr(found, gold).statistic),
    }


# -- named entities -------------------------------------------------------------------------------


def judge_sentences(
    found: Sequence[labelled_rows.Sentence], texts: HeadOutputs, head: Head
) -> Evaluation:
    """Evaluate a tagger: F1, precision and recall of whole entities (CoNLL's). A word's tag is its first token's."""
    answers = [
        word_tags(row, text.windows, logits, head.labels)
        for row, (text, logits) in zip(found, texts, strict=True)
    ]
    gold = [row.tags for row in found]
    metrics = {
        "f1": float(entity_f1(gold, answers, zero_division=0)),
        "precision": float(entity_precision(gold, answers, zero_division=0)),
        "recall": float(entity_recall(gold, answers, zero_division=0)),
    }
    return Evaluation(metrics, answers)


def word_tags(
    sentence: labelled_rows.Sentence,
    windows: Sequence[Encoding],
    logits: Sequence[Floats],
    labels: Sequence[str],
) -> list[str]:
    """Return a BIO tag for each of the data's words; O for a word without a token."""
    named = [f"={label}" for label in labels]  # because `ner` leaves tokens of "O" out
    tokens = decode.ner(windows, logits, sentence.text, labels=named, aggregation_strategy="none")
    tag_at: dict[int, str] = {}
    for token in tokens:  # a character may be several tokens
        tag_at.setdefault(token.start, token.entity[1:])
    outside = tags.OUTSIDE
    found = [outside] * len(sentence.words)
    for window, (at, words, begins) in zip(
        windows, examples.place_words(sentence, windows), strict=True
    ):
        starts = window.offsets[at, 0]
        for word, start in zip(words[begins].tolist(), starts[begins].tolist(), strict=True):
            found[word] = tag_at.get(start, outside)
    return tags.to_bio(found, [*labels, outside])


# -- answers --------------------------------------------------------------------------------------


def judge_questions(
    found: Sequence[labelled_rows.QuestionRow], texts: HeadOutputs, head: Head
) -> Evaluation:
    """Evaluate answers by SQuAD's exact match and F1.

    Where some questions have no answer, also `best_f1`, and `best_f1_threshold`, its null threshold on this data.
    """

    def answers_of(threshold: float, top_k: int = 1) -> list[list[decode.AnswerSpan]]:
        return [
            decode.qa(
                text.windows,
                logits,
                row.context,
                top_k=top_k,
                handle_impossible_answer=impossible,
                null_threshold=threshold,
                max_answer_tokens=head.max_answer_tokens,
            )
            for row, (text, logits) in zip(found, texts, strict=True)
        ]

    impossible = any(not row.answers for row in found)
    golds = [[text for text, _ in row.answers] for row in found]
    answers = [best[0].answer if best else "" for best in answers_of(head.null_threshold)]
    pairs = list(zip(answers, golds, strict=True))
    metrics = {
        "f1": float(np.mean([answer_f1(answer, gold) for answer, gold in pairs])),
        "em": float(np.mean([exact_match(answer, gold) for answer, gold in pairs])),
    }
    if impossible:
        # With a threshold of -inf the null answer comes first, the best span second.
        both = answers_of(-np.inf, top_k=2)
        spans = [answer_f1(b[-1].answer, gold) for b, gold in zip(both, golds, strict=True)]
        nulls = [answer_f1("", gold) for gold in golds]
        metrics["best_f1"], metrics["best_f1_threshold"] = best_threshold(
            [null_margin(b) for b in both], spans, nulls
        )
    return Evaluation(metrics, answers)


def null_margin(both: Sequence[decode.AnswerSpan]) -> float:
    """Return the log-score of the null answer minus that of the best answer."""
    null, span = both[0].score, both[1].score if len(both) > 1 else 0.0
    least = sys.float_info.min  # a score may be too small for a float
    return math.log(max(null, least)) - math.log(max(span, least))


def best_threshold(
    margins: Sequence[float], spans: Sequence[float], nulls: Sequence[float]
) -> tuple[float, float]:
    """Return the highest mean score of spans or nulls, and its threshold, halfway between two of `null_margin`."""
    order = np.argsort(margins, kind="stable")
    sorted_margins = np.asarray(margins)[order]
    # For every k from 0 to n, the k questions with the lowest margins are answered.
    answered = np.concatenate([[0.0], np.cumsum(np.asarray(spans)[order])])
    refused = np.concatenate([np.cumsum(np.asarray(nulls)[order][::-1])[::-1], [0.0]])
    edges = np.concatenate([[sorted_margins[0] - 2], sorted_margins, [sorted_margins[-1] + 2]])
    apart = edges[1:] > edges[:-1]  # questions with equal margins are answered or not as one
    totals = np.where(apart, answered + refused, -1)
    best = int(np.argmax(totals))
    return float(totals[best] / len(margins)), float((edges[best] + edges[best + 1]) / 2)


def normalize_answer(text: str) -> str:
    """Normalize as SQuAD: lower case, without punctuation, articles and extra spaces."""
    text = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", text).split())


def _right(golds: Sequence[str]) -> list[str]:
    """Return the right answers, normalized, without empty ones; "" if all are empty."""
    return [gold for gold in map(normalize_answer, golds) if gold] or [""]


def exact_match(answer: str, golds: Sequence[str]) -> float:
    """Return 1.0 if the normalized answer is a right answer, else 0.0."""
    return float(normalize_answer(answer) in _right(golds))


def answer_f1(answer: str, golds: Sequence[str]) -> float:
    """Return the highest F1 of the answer's words over all right answers."""
    return max(_words_f1(normalize_answer(answer).split(), gold.split()) for gold in _right(golds))


def _words_f1(words: list[str], gold: list[str]) -> float:
    if not words or not gold:
        return float(words == gold)
    common = sum((Counter(words) & Counter(gold)).values())
    return 2 * common / (len(words) + len(gold))


# -- embeddings -----------------------------------------------------------------------------------


def judge_vectors(
    found: Sequence[labelled_rows.Similar], texts: HeadOutputs, head: Head
) -> Evaluation:
    """Evaluate an embedding: correlations of cosine and score; without scores, the metrics of `retrieval`."""
    examples.check(found, head)
    vectors = np.stack(unit_vectors(texts, head))
    active = {"active": float(np.count_nonzero(vectors, axis=1).mean())} if head.sparse else {}
    if found[0].score is None:
        return Evaluation(retrieval(found, vectors) | active, nearest(vectors))
    cosines = (vectors[0::2] * vectors[1::2]).sum(axis=1)
    metrics = correlations(cosines.tolist(), [row.score for row in found])
    return Evaluation(metrics | active, nearest(vectors))


def unit_vectors(texts: HeadOutputs, head: Head) -> list[Floats]:
    """Return the vector of each text, of length 1: `[D]`, or `[V]` of a sparse embedding."""
    if head.sparse is not None:
        return [_sparse_row(pooled, head) for _, pooled in texts]
    return [
        decode.embed(pooled, [len(w) for w in text.windows], normalize=True, dimensions=None)
        for text, pooled in texts
    ]


def _sparse_row(pooled: Sequence[Floats], head: Head) -> Floats:
    found = decode.sparse_vector(pooled, activation=head.sparse and head.sparse.activation)
    row = np.zeros(head.vocabulary_size or 0, np.float32)
    row[found.indices] = found.values / max(float(np.linalg.norm(found.values)), 1e-12)
    return row


def retrieval(found: Sequence[labelled_rows.Similar], vectors: Floats) -> dict[str, float]:
    """Evaluate the rank of each row's second text for its first, among the second texts and negatives of all rows.

    vectors: `[n, D]`, of length 1, of every row's texts and then its negatives
    `mrr` is the mean of 1 / rank, `accuracy` the share of first ranks, and `triplets`, where there are negatives, the
    share of them that are less similar to the first text than the second is. Equally similar texts rank before the
    second, and other right texts of an equal first text are left out.
    """
    starts = np.cumsum([0, *(len(row.every) for row in found)])[:-1].tolist()
    places: dict[str, int] = {}  # the index of each candidate's vector
    right: dict[str, list[int]] = {}  # the right candidates of a first text
    for row, start in zip(found, starts, strict=True):
        for offset in (1, *range(len(row.texts), len(row.every))):
            places.setdefault(row.every[offset], start + offset)
    numbers = {text: number for number, text in enumerate(places)}
    candidates = vectors[[*places.values()]]
    for row in found:
        right.setdefault(row.texts[0], []).append(numbers[row.texts[1]])
    ranks, triplets = [], []
    for row, start in zip(found, starts, strict=True):
        cosines = candidates @ vectors[start]
        before = cosines >= cosines[numbers[row.texts[1]]] - ROUNDING
        triplets += [not before[numbers[text]] for text in row.negatives]
        before[right[row.texts[0]]] = False
        ranks.append(1 + int(before.sum()))
    metrics = {
        "mrr": float(np.mean(1 / np.asarray(ranks))),
        "accuracy": float(np.mean(np.asarray(ranks) == 1)),
    }
    return {**metrics, "triplets": float(np.mean(triplets))} if triplets else metrics


def nearest(vectors: Floats) -> list[int]:
    """Return for each vector `[n, D]`, of length 1, the index of the other vector with the highest cosine."""
    indices: list[int] = []
    for start in range(0, len(vectors), 1024):
        cosines = vectors[start : start + 1024] @ vectors.T
        own = np.arange(len(cosines))
        cosines[own, own + start] = -np.inf
        indices += cosines.argmax(axis=1).tolist()
    return indices


# -- script ---------------------------------------------------------------------------------------


def fail(source: str, error: Exception) -> NoReturn:
    """Print the reason in one line, and exit with the status of wrong input files."""
    reason = f"{source}: {error.strerror}" if isinstance(error, OSError) and error.errno else error
    parser().exit(2, f"evaluate: {reason}\n")


def main() -> None:
    arguments = parser().parse_args()
    try:
        source = read_source(arguments.checkpoint)
    except (OSError, ValueError) as error:
        fail(arguments.checkpoint, error)
    model = source.model.to(optim.pick_device())
    encoder = Encoder(source.tokenizer, min(arguments.max_length, source.max_length))

    metrics: dict[str, dict[str, float]] = {}
    table = Table("head", "file", "metrics", title=str(arguments.checkpoint))
    for pair in arguments.eval:
        name, _, file = pair.partition("=")
        if name not in model.described or not file:
            parser().error(f"--eval {pair}: HEAD=FILE, with a head of {', '.join(model.described)}")
        head = model.described[name]
        run = torch_run(model, [name])
        windows = {"stride": arguments.stride, "limit": arguments.limit}
        try:
            metrics[pair] = judge(run, encoder, head, name, file, **windows).metrics
        except (OSError, ValueError) as error:
            fail(file, error)
        values = "  ".join(f"{metric} {value:.4f}" for metric, value in metrics[pair].items())
        table.add_row(name, file, values)
    Console().print(table)
    print(json.dumps({"checkpoint": str(arguments.checkpoint), "metrics": metrics}))


if __name__ == "__main__":
    main()

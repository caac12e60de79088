"""Score a bundle and list right and wrong results: `python -m export.samples BUNDLE --eval HEAD=FILE ...`

The output is Markdown for a model card: metrics through the bundle's CPU graph, then the first right and the first
wrong results of a seeded sample. Files have the formats of training data. `--card` writes it to the bundle's card
instead, as the section "Samples", which replaces an existing one.
"""

import argparse
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from export import verify
from export.model_card import CARD
from model.data import head_rows
from model.data.labelled_rows import QuestionRow, Sentence, Similar, Text
from model.evaluate import Evaluation, exact_match, head_outputs, judge, unit_vectors
from service.core.bundle import Bundle, BundleError, load
from service.core.cpu import CPU
from service.core.decode import Floats
from service.core.encode import Encoder, load_tokenizer
from service.core.manifest import Head

# A pair's rank by cosine and its rank by score, as shares of the file, agree within this value.
SAME_RANK = 0.15
OTHER_RANK = 0.4  # and disagree beyond this
TITLE = "Samples"  # of the section that this program writes
NEXT = "Parity"  # the section that follows it


@dataclass(frozen=True)
class Result:
    """One row of a file: its text, the expected answer, the bundle's answer, and whether they agree.

    right: None for a pair whose ranks neither agree nor disagree
    """

    text: str
    expected: str
    answer: str
    right: bool | None


def cpu_run(bundle: Bundle) -> verify.RunGraph:
    """Run the graph that a CPU serves by default."""
    for precision in bundle.manifest.precisions:
        for graph in bundle.manifest.graphs:
            served = graph.layout != "portable" and graph.provider in CPU.graphs
            if graph.precision == precision and served:
                return verify.graph_runner(bundle, graph, threads=os.cpu_count() or 1)
    raise BundleError(bundle.path, "it has no graph for the CPU")


def judge_rows(
    run: verify.RunGraph, encoder: Encoder, name: str, head: Head, file: Path
) -> tuple[dict[str, float], list[Result]]:
    """Score a head on a file, and compare the result of each row.

    The metrics include `right`, the share of right results among the right and the wrong ones.
    Raises DataError for a file that does not fit the head.
    """
    rows = head_rows.read(file, head)
    evaluation = judge(run, encoder, head, name, file)
    match head.task:
        case "classification":
            results = _compare_texts(rows, evaluation, head)
        case "ner":
            results = _compare_sentences(rows, evaluation)
        case "qa":
            results = _compare_questions(rows, evaluation)
        case "embedding":
            results = _compare_pairs(rows, run, encoder, name, head)
    rights = [each.right for each in results if each.right is not None]
    share = {"right": float(np.mean(rights))} if rights else {}
    return evaluation.metrics | share, results


def _compare_texts(found: Sequence[Text], evaluation: Evaluation, head: Head) -> list[Result]:
    if head_rows.is_graded(head) or head.problem_type == "multi_label_classification":
        return []  # an answer is not simply right or wrong
    return [
        Result(
            row.text + (f" / {row.pair}" if row.pair else ""),
            row.labels[0],
            answer,
            answer == row.labels[0],
        )
        for row, answer in zip(found, evaluation.answers, strict=True)
    ]


def _compare_sentences(found: Sequence[Sentence], evaluation: Evaluation) -> list[Result]:
    return [
        Result(
            row.text, _entities(row.words, row.tags), _entities(row.words, tags), tags == row.tags
        )
        for row, tags in zip(found, evaluation.answers, strict=True)
    ]


def _entities(words: Sequence[str], tags: Sequence[str]) -> str:
    """Join the words of each entity: "Ada Lovelace (PER), Turin (LOC)"."""
    entities: list[tuple[str, str]] = []
    before = "O"
    for word, tag in zip(words, tags, strict=True):
        if tag.startswith("I-") and before[2:] == tag[2:]:
            entities[-1] = (f"{entities[-1][0]} {word}", tag[2:])
        elif tag != "O":
            entities.append((word, tag[2:]))
        before = tag
    return ", ".join(f"{text} ({kind})" for text, kind in entities) or "none"


def _compare_questions(found: Sequence[QuestionRow], evaluation: Evaluation) -> list[Result]:
    golds = [[text for text, _ in row.answers] for row in found]
    return [
        Result(
            f"{row.question} ({_near(row)})",
            " / ".join(dict.fromkeys(gold)) or "no answer",
            answer or "no answer",
            bool(exact_match(answer, gold)),
        )
        for row, gold, answer in zip(found, golds, evaluation.answers, strict=True)
    ]


def _near(row: QuestionRow, reach: int = 60) -> str:
    """Cut the context around the first answer, or its beginning where there is none."""
    start = row.answers[0][1] if row.answers else 0
    end = start + len(row.answers[0][0]) if row.answers else 0
    cut = slice(max(0, start - reach), end + reach)
    before, after = "…" * (cut.start > 0), "…" * (cut.stop < len(row.context))
    return f"{before}{row.context[cut].strip()}{after}"


def _compare_pairs(
    found: Sequence[Similar], run: verify.RunGraph, encoder: Encoder, name: str, head: Head
) -> list[Result]:
    """Compare each pair's rank by cosine with its rank by score.

    Rows without scores are right if the second text is nearer to the first one than every negative is.
    """
    texts = head_outputs(run, encoder, head, name, found, 0)
    vectors = np.stack(unit_vectors(texts, head))  # [n, D]
    if found[0].score is None:
        return _compare_negatives(found, vectors)
    cosines = (vectors[0::2] * vectors[1::2]).sum(axis=1)
    scores = np.asarray([row.score for row in found])
    ranks = [stats.rankdata(values) / len(found) for values in (cosines, scores)]
    apart = np.abs(ranks[0] - ranks[1])
    rights = [
        True if each <= SAME_RANK else False if each >= OTHER_RANK else None for each in apart
    ]
    return [
        Result(" / ".join(row.texts), f"score {score:.2f}", f"cosine {cosine:.2f}", right)
        for row, score, cosine, right in zip(found, scores, cosines, rights, strict=True)
    ]


def _compare_negatives(found: Sequence[Similar], vectors: Floats) -> list[Result]:
    results = []
    starts = np.cumsum([0, *(len(row.every) for row in found)])
    for row, start, end in zip(found, starts[:-1], starts[1:], strict=True):
        cosines = vectors[start + 1 : end] @ vectors[start]
        nearest = row.every[1 + int(cosines.argmax())]
        right = nearest in row.texts[1:]
        results.append(Result(row.texts[0], row.texts[1], nearest, right))
    return results


def draw(
    results: Sequence[Result], right: int, wrong: int, seed: int
) -> tuple[list[Result], list[Result]]:
    """Shuffle by the seed, and take the first right and the first wrong results."""
    shuffled = [results[i] for i in np.random.default_rng(seed).permutation(len(results))]
    return (
        [each for each in shuffled if each.right is True][:right],
        [each for each in shuffled if each.right is False][:wrong],
    )


def render(
    name: str, file: Path, metrics: dict[str, float], drawn: Sequence[Sequence[Result]]
) -> str:
    """Format one head's metrics and results as Markdown."""
    shares = ", ".join(
        f"{metric} {100 * value:.1f}"
        for metric, value in metrics.items()
        if "threshold" not in metric
    )
    lines = [f"### `{name}` on {file.name}", "", shares]
    for title, results in zip(("Right", "Wrong"), drawn, strict=True):
        if results:
            lines += ["", f"{title}:", ""]
            lines += [f"- {_one_line(each)}" for each in results]
    return "\n".join(lines)


def _one_line(result: Result) -> str:
    text = " ".join(result.text.split())
    if result.right:
        return f"{text} → **{result.answer}**"
    return f"{text} → **{result.answer}**, expected {result.expected}"


def write_section(card: str, introduction: str, results: str) -> str:
    """Return a model card with the section "Samples", before the section "Parity" unless the card has it already.

    introduction: a text about the data; may be empty
    results: Markdown of each head, see `render`
    """
    body = "\n\n".join(part for part in (f"## {TITLE}", introduction, results) if part)
    parts = [part.strip() for part in re.split(r"^(?=## )", card, flags=re.MULTILINE)]
    titles = [part.splitlines()[0] for part in parts]
    if f"## {TITLE}" in titles:
        parts[titles.index(f"## {TITLE}")] = body
    else:
        place = titles.index(f"## {NEXT}") if f"## {NEXT}" in titles else len(parts)
        parts.insert(place, body)
    return "\n\n".join(parts) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m export.samples", description=__doc__)
    parser.add_argument("bundle", type=Path)
    parser.add_argument("--eval", nargs="+", required=True, metavar="HEAD=FILE")
    parser.add_argument("--right", type=int, default=10, help="right results of each head")
    parser.add_argument("--wrong", type=int, default=5, help="wrong results of each head")
    parser.add_argument("--seed", type=int, default=1, help="of the sample")
    parser.add_argument("--card", action="store_true", help="write to the bundle's model card")
    parser.add_argument(
        "--introduction", default="", help="a text about the data, for the section of the card"
    )
    options = parser.parse_args(arguments)
    try:
        bundle = load(options.bundle)
        run = cpu_run(bundle)
        manifest = bundle.manifest
        tokenizer = load_tokenizer(bundle.file(manifest.vocabulary.file))
        encoder = Encoder(tokenizer, manifest.max_length)
        parts: list[Any] = []
        for evaluation in options.eval:
            name, _, file = evaluation.partition("=")
            if name not in manifest.heads or not file:
                parser.error(
                    f"--eval {evaluation}: HEAD=FILE, with a head of {', '.join(manifest.heads)}"
                )
            metrics, results = judge_rows(run, encoder, name, manifest.heads[name], Path(file))
            drawn = draw(results, options.right, options.wrong, options.seed)
            parts.append(render(name, Path(file), metrics, drawn))
    except (OSError, ValueError, BundleError) as error:
        raise SystemExit(f"{error}") from None
    section = "\n\n".join(parts)
    if not options.card:
        print(section)
        return
    card = options.bundle / CARD
    text = write_section(card.read_text(encoding="utf-8"), options.introduction, section)
    card.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

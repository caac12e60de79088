"""What transformers answers, and what it would answer if it did what Quartet does on purpose.

A pipeline is taken apart into the three steps that it takes itself, `preprocess`, `forward` and `postprocess`, so that
texts are computed once for all that is asked of them. The readings repeat the last step with some of the differences
that docs/reference/compat.md lists, by name, and with none of them they are the pipeline: both is checked for every
text.
"""

import warnings
from collections.abc import Collection, Sequence
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from transformers.pipelines.token_classification import AggregationStrategy

from service.core.decode import AnswerSpan, EntitySpan
from service.core.words import Places

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Names = Collection[str]

# The differences of docs/reference/compat.md that change an answer, by the task that they are of.
WORDS = "words end where the text shows it"
CLEAN = "spans begin and end with characters"
CONTEXT = "windows are merged by context"
ONE_SOFTMAX = "one softmax over all windows"
EDGES = "words end where they do in the text"
EMPTY = "tokens without text do not count"
OF_NER = (WORDS, CONTEXT, EMPTY, CLEAN)
OF_QA = (ONE_SOFTMAX, EDGES, EMPTY, WORDS, CLEAN)


def subsets(names: Sequence[str]) -> list[tuple[str, ...]]:
    """The fewest first."""
    return [chosen for size in range(len(names) + 1) for chosen in combinations(names, size)]


def load(task: str, folder: Path, max_length: int) -> Any:
    """transformers' pipeline of a checkpoint."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, model_max_length=max_length)
    # What it calls an entity is not compared, and takes it most of its time.
    tokenizer.convert_tokens_to_string = "".join
    return transformers.pipeline(task, model=str(folder), tokenizer=tokenizer, device="cpu")


# -- entities -------------------------------------------------------------------------------------


def load_encoder(kind: Any, folder: Path, max_length: int) -> Any:
    """Return a model of one of sentence-transformers' classes, which cuts texts at `max_length` tokens."""
    encoder = kind(str(folder), device="cpu")
    encoder.max_seq_length = max_length
    return encoder


class Tagged(NamedTuple):
    """A text as the pipeline has read it, in one window or several that share some tokens.

    outputs: of its `forward`; tokens: of each window without the special ones, with the scores of all labels, the
    number that each has in the text (`place`), and its word (`of`) and its start and end (`edges`) by
    `service.core.words`
    """

    text: str
    outputs: list[dict[str, Any]]
    tokens: list[list[dict[str, Any]]]


def tag(pipeline: Any, text: str, stride: int | None) -> Tagged:
    """stride: None reads the beginning of a long text, as the pipeline does when nothing is said."""
    given, *_ = pipeline._sanitize_parameters(stride=stride)
    outputs = [as_lists(pipeline.forward(window)) for window in pipeline.preprocess(text, **given)]
    offsets, words = placed(pipeline.tokenizer, text)
    tokens, begin = [], 0
    for output in outputs:
        found = enumerate(gather(pipeline, text, output), begin)
        tokens.append(
            [
                {**one, "place": place, "of": words[place], "edges": offsets[place]}
                for place, one in found
            ]
        )
        begin += len(tokens[-1]) - (stride or 0)
    return Tagged(text, outputs, tokens)


def placed(tokenizer: Any, text: str) -> tuple[list[list[int]], list[int]]:
    """Offsets and words of a text's tokens as Quartet finds them, from what the tokenizer returns."""
    encoding = tokenizer(text, add_special_tokens=False).encodings[0]
    own = np.array([-1 if word is None else word for word in encoding.word_ids], np.int32)
    offsets, words = Places(tokenizer.backend_tokenizer).find(
        text,
        np.array(encoding.ids, np.int64),
        np.array(encoding.offsets, np.int32).reshape(-1, 2),
        own,
    )
    return offsets.tolist(), words.tolist()


def as_lists(output: dict[str, Any]) -> dict[str, Any]:
    """What the pipeline looks at token by token, in a form in which that is quick."""
    return {**output, **{name: output[name].tolist() for name in ("input_ids", "offset_mapping")}}


def gather(pipeline: Any, text: str, output: dict[str, Any]) -> list[dict[str, Any]]:
    """As the pipeline does it, for any strategy."""
    logits = output["logits"][0].numpy()
    exponentials = np.exp(logits - logits.max(axis=-1, keepdims=True))
    return pipeline.gather_pre_entities(
        text,
        output["input_ids"][0],
        exponentials / exponentials.sum(axis=-1, keepdims=True),
        output["offset_mapping"][0],
        output["special_tokens_mask"][0].numpy(),
        AggregationStrategy.SIMPLE,
    )


def entities(pipeline: Any, tagged: Tagged, strategy: str) -> list[EntitySpan]:
    """What the pipeline answers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the pipeline warns of tokenizers without word boundaries
        found = pipeline.postprocess(tagged.outputs, AggregationStrategy(strategy))
    return plain(tagged.text, found)


def read_entities(
    pipeline: Any, tagged: Tagged, strategy: str, differences: Names
) -> list[EntitySpan]:
    """The same, by the pipeline's own parts, with these differences."""
    windows = tagged.tokens
    if CONTEXT in differences:
        windows = [by_context(windows)]
    if EMPTY in differences:
        windows = [[one for one in window if is_wide(one)] for window in windows]
    if CLEAN in differences:
        windows = [[clean(one) for one in window] for window in windows]
    if WORDS in differences:
        windows = [by_words(window) for window in windows]
    aggregate = partial(pipeline.aggregate, aggregation_strategy=AggregationStrategy(strategy))
    found = [entity for window in windows for entity in aggregate(window)]
    found = [entity for entity in found if label_of(entity) != "O"]
    if len(windows) > 1:
        found = pipeline.aggregate_overlapping_entities(found)
    return plain(tagged.text, found)


def is_wide(token: dict[str, Any]) -> bool:
    start, end = token["edges"]
    return bool(start < end)


def clean(token: dict[str, Any]) -> dict[str, Any]:
    """A token without the spaces at its edges, and with the whole of the characters there."""
    start, end = token["edges"]
    return {**token, "start": start, "end": end} if is_wide(token) else token


def by_context(windows: list[list[Any]]) -> list[Any]:
    """Each token of the text once, from the window where its nearest edge is farthest, the earlier in a tie."""
    best: dict[int, tuple[int, Any]] = {}
    for window in windows:
        for row, token in enumerate(window):
            context = min(row + 1, len(window) - row)
            if context > best.get(token["place"], (0, None))[0]:
                best[token["place"]] = (context, token)
    return [best[place][1] for place in sorted(best)]


def by_words(window: list[Any]) -> list[Any]:
    """A token goes on with the one before it if the two are of one word."""
    before = [None, *(token["of"] for token in window)]
    return [
        {**token, "is_subword": token["of"] == word}
        for token, word in zip(window, before, strict=False)
    ]


def label_of(entity: dict[str, Any]) -> str:
    return entity["entity_group"] if "entity_group" in entity else entity["entity"]


def plain(text: str, found: list[dict[str, Any]]) -> list[EntitySpan]:
    """In Quartet's words: what an entity is called is the text where it stands."""
    places = [(entity["start"], entity["end"]) for entity in found]
    return [
        EntitySpan(label_of(entity), float(entity["score"]), text[start:end], start, end)
        for entity, (start, end) in zip(found, places, strict=True)
    ]


# -- answers --------------------------------------------------------------------------------------


class Window(NamedTuple):
    """A window of a question and its context: [CLS], and then the context's tokens.

    starts, ends [n] logits; offsets [n, 2], words [n] and places [n] of the tokens in the context
    whole [n, 2] their offsets where the context is not cut (the first token of a window may keep its blank)
    clean [n, 2] and own [n] their offsets and words by `service.core.words`; None: no others
    """

    starts: Floats
    ends: Floats
    offsets: Ints
    words: Ints
    places: Ints
    whole: Ints
    clean: Ints | None = None
    own: Ints | None = None

    def take(self, rows: Any) -> "Window":
        return Window(*(None if column is None else column[rows] for column in self))


class Answerer(NamedTuple):
    """The pipeline for questions is no more: its model and its tokenizer."""

    model: Any
    tokenizer: Any


def load_answerer(folder: Path, max_length: int) -> Answerer:
    model = transformers.AutoModelForQuestionAnswering.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, model_max_length=max_length)
    return Answerer(model, tokenizer)


@torch.no_grad()
def ask(answerer: Answerer, question: str, context: str, stride: int) -> list[Window]:
    """The logits of a question, in windows of its context that share `stride` tokens."""
    encoded = answerer.tokenizer(
        question,
        context,
        truncation="only_second",
        stride=stride,
        return_overflowing_tokens=True,
        return_offsets_mapping=True,
    )
    whole = answerer.tokenizer(context, add_special_tokens=False).encodings[0].offsets
    clean, own = placed(answerer.tokenizer, context)
    windows, begin = [], 0
    for number, encoding in enumerate(encoded.encodings):
        names = answerer.tokenizer.model_input_names
        inputs = {name: torch.tensor([encoded[name][number]]) for name in names}
        logits = answerer.model(**inputs)
        of_context = [row for row, owner in enumerate(encoding.sequence_ids) if owner == 1]
        rows = [encoding.ids.index(answerer.tokenizer.cls_token_id), *of_context]
        windows.append(
            Window(
                logits.start_logits[0, rows].double().numpy(),
                logits.end_logits[0, rows].double().numpy(),
                np.array([encoding.offsets[row] for row in rows]),
                np.array([-1, *(encoding.word_ids[row] for row in of_context)]),
                begin + np.arange(-1, len(of_context)),
                np.array([(0, 0), *whole[begin : begin + len(of_context)]]),
                np.array([(0, 0), *clean[begin : begin + len(of_context)]]),
                np.array([-1, *own[begin : begin + len(of_context)]]),
            )
        )
        begin += len(of_context) - stride
    return windows


def read_answers(
    windows: Sequence[Window],
    context: str,
    differences: Names = (),
    *,
    top_k: int = 1,
    handle_impossible_answer: bool = False,
    max_answer_len: int = 15,
) -> list[AnswerSpan]:
    """What the pipeline (as of 5.2) makes of the logits, with these differences."""
    if EDGES in differences:
        windows = [w._replace(offsets=w.whole) for w in windows]
    if EMPTY in differences:
        offsets = [w.offsets if w.clean is None else w.clean for w in windows]
        rows = [[0, *np.flatnonzero(places[:, 0] < places[:, 1])] for places in offsets]
        windows = [w.take(own) for w, own in zip(windows, rows, strict=True)]
    if CLEAN in differences:
        windows = [w if w.clean is None else w._replace(offsets=w.clean) for w in windows]
    if WORDS in differences:
        windows = [w if w.own is None else w._replace(words=w.own) for w in windows]
    count = 2 * top_k + 10
    spans, nulls = [], []
    for window, starts, ends in zip(windows, *probabilities(windows, differences), strict=True):
        nulls.append(float(starts[0] * ends[0]))
        known = windows if EDGES in differences else [window]
        spans += [
            Span(
                score,
                (int(window.places[first]), int(window.places[last])),
                edges(known, window.words[first])[0],
                edges(known, window.words[last])[1],
            )
            for score, first, last in best_pairs(starts, ends, count, max_answer_len)
        ]
    if ONE_SOFTMAX in differences:
        spans = once(spans)[:count]
    found: dict[str, AnswerSpan] = {}
    for score, _, start, end in spans:
        text = context[start:end]
        held = found.get(text.lower(), AnswerSpan(text, 0.0, start, end))
        found[text.lower()] = held._replace(score=held.score + score)
    answers = [*found.values()]
    if handle_impossible_answer:
        answers.append(AnswerSpan("", min(nulls), 0, 0))
    return sorted(answers, key=lambda answer: -answer.score)[:top_k]


class Span(NamedTuple):
    """tokens: its first and last one in the context; start and end in characters."""

    score: float
    tokens: tuple[int, int]
    start: int
    end: int


def once(spans: Sequence[Span]) -> list[Span]:
    """The likeliest first; each in the window where it is likeliest."""
    best: dict[tuple[int, int], Span] = {}
    for span in sorted(spans, key=lambda span: -span.score):
        best.setdefault(span.tokens, span)
    return [*best.values()]


def probabilities(
    windows: Sequence[Window], differences: Names
) -> tuple[list[Floats], list[Floats]]:
    """Of each token to be the start, and the end: a softmax over its window, or over all of them."""

    def softmax(parts: list[Floats]) -> list[Floats]:
        together = [np.concatenate(parts)] * len(parts) if ONE_SOFTMAX in differences else parts
        return [
            np.exp(own - all_.max()) / np.exp(all_ - all_.max()).sum()
            for own, all_ in zip(parts, together, strict=True)
        ]

    return softmax([w.starts for w in windows]), softmax([w.ends for w in windows])


def best_pairs(
    starts: Floats, ends: Floats, count: int, longest: int
) -> list[tuple[float, int, int]]:
    """Score, first and last token of the likeliest spans of at most `longest` tokens of the context."""
    scores = np.tril(np.triu(np.outer(starts[1:], ends[1:])), longest - 1)
    chosen = np.argsort(-scores, axis=None, kind="stable")[:count]
    firsts, lasts = np.unravel_index(chosen, scores.shape)
    return [
        (float(scores[first, last]), first + 1, last + 1)
        for first, last in zip(firsts, lasts, strict=True)
        if scores[first, last] > 0
    ]


def edges(windows: Sequence[Window], word: int) -> tuple[int, int]:
    """Where a word starts and ends, by its tokens in these windows."""
    own = np.concatenate([window.offsets[window.words == word] for window in windows])
    return int(own[:, 0].min()), int(own[:, 1].max())

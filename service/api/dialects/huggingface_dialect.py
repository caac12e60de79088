"""The Inference API of Hugging Face, under `/hf`: `inputs` and `parameters` for each task.

The path names the task (`/hf/pipeline/TASK`), the model and its head (`/hf/pipeline/TASK/MODEL/HEAD`,
`/hf/models/MODEL/HEAD`), or none of these (`/hf`, which huggingface_hub's client calls for every task by its URL). A
task that the path does not name follows from the body or from the model.
"""

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple, Self, TypeVar

import numpy as np
from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationInfo,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from service.api import openapi
from service.api.dialects import tei_dialect
from service.api.dialects.common import ErrorBody
from service.api.dialects.tei_dialect import (
    SentencesRequest,
    TeiEmbedRequest,
    TeiPredictRequest,
    TeiRequest,
    TeiSimilarityRequest,
    Truncation,
)
from service.api.engine_call import Call, engine_of, engines_of, json_response, receive_call
from service.api.native_routes import answer, each, entity, filled_masks, label, make_router
from service.api.responses import Answer, Entity, EntityGroup, FilledToken, Label
from service.api.schemas import OneHead, QaInput, numbered
from service.core.decode import AnswerSpan
from service.engines.engine import Engine, Reply
from service.errors import ErrorForm, InvalidInput, NotFound, QuartetError, RetryableError, TooLarge
from service.tasks.classification import Classification
from service.tasks.embedding import Embedding
from service.tasks.entity_recognition import Aggregation, EntityRecognition
from service.tasks.fields import AtLeastOne, AtLeastZero, ServedName, Strict, Texts, UpToHundred
from service.tasks.mask_filling import MaskFilling
from service.tasks.question_answering import QuestionAnswering
from service.tasks.similarity import Similarity
from service.tasks.zero_shot import Template, ZeroShot

PREFIX = "hf"
TAG = "Hugging Face Inference API"
NO_ANSWER = AnswerSpan("", 0.0, 0, 0)

T = TypeVar("T")

router = make_router(f"/{PREFIX}", "hf_")


class HfErrorResponse(ErrorBody):
    error: str
    estimated_time: float = Field(1.0, description="seconds; of status 503")


ERROR_MODEL = HfErrorResponse


def error_form(error: QuartetError) -> ErrorForm:
    status = 400 if isinstance(error, InvalidInput) else error.status
    body: dict[str, object] = {"error": error.message}
    if status == 503 and isinstance(error, RetryableError):
        body["estimated_time"] = error.retry_after_s
    return ErrorForm(status, body)


# -- requests -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Inputs:
    """The texts of a request. is_batch: whether the request has a list, which is answered by a list"""

    texts: list[str]
    is_batch: bool

    def __len__(self) -> int:
        return len(self.texts)

    def __iter__(self) -> Iterator[str]:
        return iter(self.texts)


def check_inputs(value: object) -> object:
    if isinstance(value, str):
        return Inputs([value], is_batch=False)
    if isinstance(value, list) and value and all(isinstance(one, str) for one in value):
        return Inputs(value, is_batch=True)
    raise PydanticCustomError("inputs", "must be a text or a list of texts")


def check_labels(value: object, info: ValidationInfo) -> object:
    """Return a list of labels; a text has them separated by commas, as transformers' pipeline accepts it.

    Raises TooLarge for more labels than a request may have, before they are split.
    """
    if isinstance(value, str):
        most: int = info.context or 0
        if (count := value.count(",") + 1) > most:
            name = f"parameters.{info.field_name}"
            raise TooLarge(f"{name} has {count} items; a request may have {most}", param=name)
        return [one for part in value.split(",") if (one := part.strip())]
    return value


def check_ignored(value: object) -> object:
    if isinstance(value, list) and "O" not in value:
        raise PydanticCustomError("ignored", 'must contain "O": tokens outside have no results')
    return value


def refuse_other(value: object, *, only: object, reason: str) -> object:
    if value is None or value is only or value == only:
        return value
    raise PydanticCustomError("other", "{reason}", {"reason": reason})


def always(only: bool | str, reason: str) -> Any:
    """Return a validator of a parameter that has only one value. reason: why another one is refused"""
    return BeforeValidator(partial(refuse_other, only=only, reason=reason))


HfTexts = Annotated[
    Inputs,
    BeforeValidator(check_inputs),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "string"},
                {"type": "array", "items": {"type": "string"}, "minItems": 1},
            ]
        }
    ),
]


class HfOptions(Strict):
    """Options of the API, which change nothing here: models are open, and there is no cache."""

    model_config = ConfigDict(extra="ignore")

    use_cache: bool | None = Field(None, description="no effect: there is no cache")
    wait_for_model: bool | None = Field(None, description="no effect: models are open")


class HfRequest(OneHead):
    """The common fields. `model` and `head`, which the API does not have, can be in the path instead."""

    options: HfOptions | None = Field(None, description="accepted without effect")


class HfTextsRequest(HfRequest):
    inputs: HfTexts = Field(description="a text, or a list, which is answered by a list")


class HfClassifyParameters(Strict):
    top_k: AtLeastOne | None = Field(None, description="labels to return; all when absent")
    function_to_apply: Literal["softmax", "sigmoid", "none"] | None = Field(
        None, description="turns logits into scores; as the head's problem type says when absent"
    )
    truncation: bool | None = Field(None, description="false refuses long texts; else they are cut")


class HfClassifyRequest(HfTextsRequest):
    task = "classification"

    parameters: HfClassifyParameters | None = None


class HfTokenParameters(Strict):
    aggregation_strategy: Aggregation | None = Field(
        None, description="how tokens become entities; simple when absent"
    )
    ignore_labels: Annotated[list[str] | None, BeforeValidator(check_ignored)] = Field(
        None, description='labels without results; "O" must be one of them'
    )
    stride: AtLeastZero | None = Field(
        None, description="tokens that neighboring windows of a long text share"
    )


class HfTokenRequest(HfTextsRequest):
    task = "ner"

    parameters: HfTokenParameters | None = None


class HfQaParameters(Strict):
    top_k: UpToHundred | None = Field(None, description="answers; with 1 or absent, an object")
    doc_stride: AtLeastZero | None = Field(
        None, description="tokens that neighboring windows of a long context share"
    )
    max_answer_len: UpToHundred | None = Field(
        None, description="tokens of the longest answer; the head's own when absent"
    )
    max_question_len: AtLeastOne | None = Field(
        None, description="tokens of a question that are read; the head's own when absent"
    )
    handle_impossible_answer: bool | None = Field(None, description='may answer ""')
    align_to_words: Annotated[
        bool | None, always(True, "must be true: answers are whole words")
    ] = Field(None, description="true or absent: answers are whole words")


class HfQaRequest(HfRequest):
    task = "qa"

    inputs: QaInput
    parameters: HfQaParameters | None = None

    @property
    def size(self) -> int:
        return 1

    @property
    def place(self) -> str:
        return "inputs.context"

    def texts(self) -> Iterator[tuple[str, str]]:
        yield "inputs.question", self.inputs.question
        yield "inputs.context", self.inputs.context


class HfFeatureFields(Truncation):
    normalize: bool | None = Field(None, description="scale vectors to length 1; true when absent")
    prompt_name: ServedName | None = Field(
        None, description="the head's prompt before each text; its default prompt when absent"
    )
    dimensions: AtLeastOne | None = Field(None, description="keep only the first dimensions")
    encoding_format: Annotated[
        str | None, always("float", 'must be "float"; /v1/embeddings has base64')
    ] = Field(None, description='"float" or absent')


class HfFeatureRequest(HfTextsRequest, HfFeatureFields):
    """Parameters are fields of the body itself, as huggingface_hub's client sends them, or in `parameters`."""

    task = "embedding"

    parameters: HfFeatureFields | None = None

    @model_validator(mode="after")
    def _once(self) -> Self:
        names = self.model_fields_set & HfFeatureFields.model_fields.keys()
        if self.parameters is not None and (both := names & self.parameters.model_fields_set):
            name = min(both)
            raise InvalidInput(f"{name}: is in parameters, too; give it once", param=name)
        return self

    def given(self, name: str) -> Any:
        """Return a parameter by its name, from the body or from `parameters`."""
        own = getattr(self, name)
        return getattr(self.parameters, name, None) if own is None else own


class HfSimilarityParameters(Truncation):
    pass


class HfSimilarityRequest(HfRequest, SentencesRequest):
    parameters: HfSimilarityParameters | None = None


class HfMaskParameters(Strict):
    top_k: UpToHundred | None = Field(None, description="tokens for each mask token; 5 when absent")
    targets: Texts | None = Field(None, description="the only tokens to consider, one or several")


class HfMaskRequest(HfTextsRequest):
    task = "fill-mask"
    nested_texts = ("parameters",)

    parameters: HfMaskParameters | None = None

    @property
    def targets(self) -> list[str]:
        return (self.parameters and self.parameters.targets) or []

    def texts(self) -> Iterator[tuple[str, str]]:
        yield from super().texts()
        yield from numbered("parameters.targets", self.targets)


class HfZeroShotParameters(Strict):
    candidate_labels: Annotated[
        list[str],
        Field(min_length=1),
        BeforeValidator(check_labels, json_schema_input_type=str | list[str]),
    ] = Field(description="the labels; a text has them separated by commas")
    hypothesis_template: Template | None = Field(
        None, description='the hypothesis about a label; "This example is {}." when absent'
    )
    multi_label: bool | None = Field(None, description="whether several labels may hold together")


class HfZeroShotRequest(HfTextsRequest):
    task = "zero-shot"
    nested_texts = ("parameters",)

    parameters: HfZeroShotParameters

    def texts(self) -> Iterator[tuple[str, str]]:
        yield from super().texts()
        yield from numbered("parameters.candidate_labels", self.parameters.candidate_labels)
        yield "parameters.hypothesis_template", self.parameters.hypothesis_template or ""


# -- tasks ----------------------------------------------------------------------------------------


def of_inputs(
    call: Call[Any], reply: Reply[T], show: Callable[[T], object], *, nested: bool = False
) -> Response:
    """Return the result of a text, or a list of the results of several texts. nested: a list in both cases"""

    def content() -> object:
        results = [show(result) for result in reply.results if result is not None]
        return results if nested or call.body.inputs.is_batch else results[0]

    return json_response(content, call.headers(reply))


async def classify_texts(call: Call[HfClassifyRequest]) -> Response:
    """Labels by falling score: for each text a list, which is within a list for a single text, too."""
    given = call.body.parameters or HfClassifyParameters()
    task = Classification(
        inputs=call.body.inputs.texts,
        top_k=given.top_k,
        function_to_apply=given.function_to_apply,
        truncate=given.truncation is not False,
    )
    return of_inputs(call, await call.compute(task), each(label), nested=True)


async def classify_tokens(call: Call[HfTokenRequest]) -> Response:
    """Entities in text order; `start` and `end` are code points, and `word` is the text between them."""
    given = call.body.parameters or HfTokenParameters()
    strategy, ignored = given.aggregation_strategy or "simple", set(given.ignore_labels or ())
    task = EntityRecognition(
        inputs=call.body.inputs.texts, aggregation_strategy=strategy, stride=given.stride
    )
    key = "entity" if strategy == "none" else "entity_group"

    def show(found: Sequence[Any]) -> object:
        return [entity(key, one) for one in found if one.entity not in ignored]

    return of_inputs(call, await call.compute(task), show)


async def answer_question(call: Call[HfQaRequest]) -> Response:
    """The best answer, or a list of `top_k` of them."""
    inputs, given = call.body.inputs, call.body.parameters or HfQaParameters()
    top_k = given.top_k or 1
    task = QuestionAnswering(
        questions=[inputs.question],
        contexts=[inputs.context],
        top_k=top_k,
        handle_impossible_answer=given.handle_impossible_answer or False,
        stride=given.doc_stride,
        max_answer_tokens=given.max_answer_len,
        max_query_tokens=given.max_question_len,
    )
    reply = await call.compute(task)
    (found,) = reply.results
    answers = [*map(answer, found or [NO_ANSWER])]
    return json_response(answers[0] if top_k == 1 else answers, call.headers(reply))


async def extract_features(call: Call[HfFeatureRequest]) -> Response:
    """One vector for each text: a list of vectors for a single text, too, as text-embeddings-inference has it."""
    body = call.body
    task = Embedding(
        inputs=body.inputs.texts,
        normalize=body.given("normalize") is not False,
        dimensions=body.given("dimensions"),
        prompt_name=body.given("prompt_name"),
        truncate=body.given("truncate") is not False,
    )
    return of_inputs(call, await call.compute(task), np.ascontiguousarray, nested=True)


async def compare_sentences(call: Call[HfSimilarityRequest]) -> Response:
    """The cosine of each sentence's vector with that of the source sentence."""
    inputs, given = call.body.inputs, call.body.parameters or HfSimilarityParameters()
    task = Similarity(source=inputs.source_sentence, inputs=inputs.sentences, truncate=given.cuts)
    reply = await call.compute(task)
    return json_response(task.scores(call.engine, reply), call.headers(reply))


async def fill_masks(call: Call[HfMaskRequest]) -> Response:
    """Tokens for the mask token by falling score; a list of them for each mask token of a text with several."""
    given = call.body.parameters or HfMaskParameters()
    task = MaskFilling(inputs=call.body.inputs.texts, top_k=given.top_k or 5, targets=given.targets)
    return of_inputs(call, await call.compute(task), filled_masks)


async def classify_zero_shot(call: Call[HfZeroShotRequest]) -> Response:
    """The labels of the request by falling score, by a head that was trained on entailment or for any label."""
    given = call.body.parameters
    task = ZeroShot(
        inputs=call.body.inputs.texts,
        labels=given.candidate_labels,
        multi_label=given.multi_label or False,
        hypothesis_template=given.hypothesis_template,
    )
    return of_inputs(call, await call.compute(task), each(label))


class HfTask(NamedTuple):
    """A task of the API. marks: parameters that only this task has"""

    schema: type[HfRequest]
    compute: Callable[[Call[Any]], Awaitable[Response]]
    response: Any
    marks: frozenset[str] = frozenset()


Tokens = list[FilledToken]
TASKS: Mapping[str, HfTask] = {
    "text-classification": HfTask(
        HfClassifyRequest, classify_texts, list[list[Label]], frozenset({"function_to_apply"})
    ),
    "token-classification": HfTask(
        HfTokenRequest,
        classify_tokens,
        list[EntityGroup] | list[Entity] | list[list[EntityGroup] | list[Entity]],
        frozenset(HfTokenParameters.model_fields),
    ),
    "question-answering": HfTask(HfQaRequest, answer_question, Answer | list[Answer]),
    "feature-extraction": HfTask(
        HfFeatureRequest,
        extract_features,
        list[list[float]],
        frozenset(HfFeatureFields.model_fields),
    ),
    "sentence-similarity": HfTask(HfSimilarityRequest, compare_sentences, list[float]),
    "fill-mask": HfTask(
        HfMaskRequest,
        fill_masks,
        Tokens | list[Tokens] | list[Tokens | list[Tokens]],
        frozenset({"targets"}),
    ),
    "zero-shot-classification": HfTask(
        HfZeroShotRequest,
        classify_zero_shot,
        list[Label] | list[list[Label]],
        frozenset(HfZeroShotParameters.model_fields),
    ),
}
ALIASES: Mapping[str, str] = {
    "sentiment-analysis": "text-classification",
    "ner": "token-classification",
}  # as transformers' pipeline has them
OF_HEADS: Mapping[str, str] = {
    "classification": "text-classification",
    "ner": "token-classification",
    "qa": "question-answering",
    "embedding": "feature-extraction",
    "fill-mask": "fill-mask",
}  # the API's task of a head


# -- routes ---------------------------------------------------------------------------------------


def add_task(name: str, task: HfTask) -> None:
    async def endpoint(request: HttpRequest) -> Response:
        return await task.compute(await receive_call(request, task.schema))

    declared = openapi.dialect(task.schema, task.response, TAG)
    router.add_api_route(
        f"/pipeline/{name}",
        endpoint,
        methods=["POST"],
        name=name.replace("-", "_"),
        description=task.compute.__doc__,
        **declared,
    )


for _name, _task in TASKS.items():
    add_task(_name, _task)


@router.post("/pipeline/{task}", include_in_schema=False)
@router.post("/pipeline/{task}/{id:path}", include_in_schema=False)
async def pipeline(request: HttpRequest) -> Response:
    """A task of the model, or of the model and its head, that the path names."""
    found = request.path_params
    return await answer_task(request, found["task"], found.get("id", ""))


@router.post("/models/{id:path}", include_in_schema=False)
async def model(request: HttpRequest) -> Response:
    """The task of the model, or of its head, that the path names, unless the path also names a task."""
    name, _, task = request.path_params["id"].partition("/pipeline/")
    if task:
        return await answer_task(request, task, name)
    return await answer_any(request, name)


@router.post("", include_in_schema=False)
async def root(request: HttpRequest) -> Response:
    """The task that the body or the first model's heads imply."""
    return await answer_any(request, "")


@tei_dialect.router.post("", include_in_schema=False)
async def tei_root(request: HttpRequest) -> Response:
    """The task that the body implies, which the client calls by the URL of TEI: as TEI, or else as this API."""
    call: Call[Any] = await receive_call(
        request, TeiRequest, partial(choose_tei_schema, engines_of(request).get(None))
    )
    match call.body:
        case TeiSimilarityRequest():
            return await tei_dialect.compare_sentences(call)
        case TeiPredictRequest():
            return await tei_dialect.label_sequences(call)
        case HfRequest():
            return await compute_task(call)
    return await tei_dialect.embed_texts(call)


def choose_tei_schema(engine: Engine, body: object) -> type[Any]:
    """Return the schema of a body. The client sends `parameters` for every task but vectors and cosines."""
    fields = body if isinstance(body, dict) else {}
    name = ""
    if "parameters" in fields or isinstance(fields.get("inputs"), dict):
        with suppress(InvalidInput):  # several tasks are possible
            name = choose_task(engine, fields)
    if name == "sentence-similarity":
        return TeiSimilarityRequest
    if name not in ("", "text-classification", "feature-extraction"):
        return TASKS[name].schema
    tasks = {head.task for head in engine.manifest.heads.values()}
    labels = "classification" in tasks and ("parameters" in fields or "embedding" not in tasks)
    return TeiPredictRequest if labels else TeiEmbedRequest


async def answer_task(request: HttpRequest, name: str, model: str) -> Response:
    task = TASKS.get(ALIASES.get(name, name))
    if task is None:
        raise NotFound(f"no task {name[:64]!r}; tasks here: {', '.join([*TASKS, *ALIASES])}")
    call = await receive_call(request, task.schema, fields=model_fields(request, model))
    return await task.compute(call)


async def answer_any(request: HttpRequest, model: str) -> Response:
    def choose(body: object) -> type[HfRequest]:
        if not isinstance(body, dict):
            return HfRequest
        name = body.get("model")
        engine = engine_of(request, name if isinstance(name, str) else None)
        return TASKS[choose_task(engine, body)].schema

    return await compute_task(
        await receive_call(request, HfRequest, choose, model_fields(request, model))
    )


async def compute_task(call: Call[Any]) -> Response:
    task = next(task for task in TASKS.values() if isinstance(call.body, task.schema))
    return await task.compute(call)


def model_fields(request: HttpRequest, model: str) -> dict[str, object]:
    """Return the fields of the body that MODEL or MODEL/HEAD in the path stands for; a name may contain "/"."""
    serves = engines_of(request).serves
    name, _, head = model.rpartition("/")
    if serves(model) or not serves(name):
        name, head = model, ""
    return {field: value for field, value in (("model", name), ("head", head)) if value}


def choose_task(engine: Engine, body: Mapping[str, Any]) -> str:
    """Return the task of a body: by its inputs, its parameters, its head, or the model's only task.

    Raises InvalidInput if these leave several tasks.
    """
    inputs, parameters = body.get("inputs"), body.get("parameters")
    if isinstance(inputs, dict):
        return "question-answering" if "question" in inputs else "sentence-similarity"
    names = {*body, *(parameters if isinstance(parameters, dict) else ())}
    for name, task in TASKS.items():
        if names & task.marks:
            return name
    heads = engine.manifest.heads
    head = heads.get(str(body.get("head")))
    if head is not None and head.task in OF_HEADS:
        return OF_HEADS[head.task]
    texts = inputs if isinstance(inputs, list) else [inputs]
    masks = {head.mask_token_id for head in heads.values() if head.task == "fill-mask"}
    spelled = [engine.encoder.tokenizer.id_to_token(mask) for mask in masks if mask is not None]
    if any(mask in text for mask in spelled for text in texts if mask and isinstance(text, str)):
        return "fill-mask"
    found = {OF_HEADS[head.task]: None for head in heads.values() if head.task in OF_HEADS}
    if len(found) == 1:
        return next(iter(found))
    has = ", ".join(found) or "no task of this API"
    raise InvalidInput(
        f"{engine.id} has heads for {has}: name the task in the path, /hf/pipeline/TASK, or the head,"
        " /hf/models/MODEL/HEAD"
    )


router.add_api_route("/info", tei_dialect.info, **openapi.dialect_page(tei_dialect.TeiInfo, TAG))
router.add_api_route(
    "/health", tei_dialect.health, **openapi.dialect_page(tei_dialect.TeiHealth, TAG)
)

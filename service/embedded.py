"""The service inside another program: direct calls on plain values, and the application for the program's own server.

    async with EmbeddedService("bundles/quartet-mini", precision="int8") as service:
        [labels] = await service.classify("It was worth the wait.", top_k=1)

It opens no port, handles no signal and starts no process. Several services in one process are independent.
"""

import asyncio
import itertools
import time
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any, Self, TypeVar

from fastapi import FastAPI
from starlette.types import Receive, Scope, Send

from service.api.app import create_app
from service.api.schemas import validate
from service.core.decode import AnswerSpan, EntitySpan, LabelScore, SparseVector, TokenScore, Vector
from service.engines.commands import (
    Command,
    ListModels,
    LoadModel,
    PromoteModel,
    RollBackModel,
    UnloadModel,
)
from service.engines.engine import Engine, EngineTask, Reply, Ticket
from service.errors import DeadlineExceeded, Draining
from service.middleware.service_state import Service
from service.observability import logs
from service.observability.metrics import Metrics
from service.processes.single_process import open_local_engines
from service.rollout.model_manager import do_nothing
from service.scheduling.load import Load
from service.settings import Settings
from service.settings_sources import find_bundles
from service.shutdown import Stage
from service.tasks.classification import Classification
from service.tasks.embedding import Embedding
from service.tasks.entity_recognition import EntityRecognition
from service.tasks.late_interaction import TokenEmbedding
from service.tasks.mask_filling import MaskFilling
from service.tasks.question_answering import QuestionAnswering
from service.tasks.reranking import Ranked, Reranking, make_ranking, rank, select_ranking_head
from service.tasks.similarity import Similarity
from service.tasks.sparse_embedding import SparseEmbedding
from service.tasks.zero_shot import ZeroShot

T = TypeVar("T")

Texts = str | list[str]
BY = "embedded"  # the origin of the commands, for the log


class MountedApp:
    """The HTTP application, to mount under any path or to serve at the root.

    Its lifespan does nothing while the service is open. Otherwise, it opens and closes the service.
    """

    def __init__(self, app: FastAPI) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" and self._app.state.service.engines is not None:
            for event in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{event}.complete"})
            return
        root = scope.get(
            "root_path", ""
        )  # where it is mounted, which its own routes do not contain
        path = scope.get("path", "").removeprefix(root) or "/"
        await self._app({**scope, "path": path, "root_path": ""}, receive, send)


class EmbeddedService:
    """The service in this process, for as long as an `async with` block lasts.

    bundles: directories of bundles, the default model first; none for those of the default
    settings: further settings of the service (docs/reference/settings.md), by name; those of addresses and processes
        have no effect

    app: the HTTP application, see `MountedApp`

    Calls return what the native API returns, as tuples with named fields and as arrays. `model` selects a model by its
    name, an alias or `name@version`, and `head` a head. Calls raise the errors of `service.errors`: InvalidInput for
    wrong options, UnknownModel, UnknownHead, TooLarge, Overloaded, DeadlineExceeded after `deadline_ms`, and Draining.
    Entering raises BundleError or ProviderError for a bundle or a device that cannot be used.
    """

    def __init__(self, *bundles: str | Path, **settings: Any) -> None:
        logs.use_logging()
        self.settings = Settings(bundles=tuple(map(Path, bundles)) or find_bundles(), **settings)
        self._metrics = metrics = Metrics()
        # A model is not opened in a process of its own first, because the program would get a child.
        open_engines = partial(open_local_engines, metrics, trial=do_nothing)
        app = create_app(self.settings, open_engines, metrics)
        self.app = MountedApp(app)
        self._lifespan = partial(app.router.lifespan_context, app)
        self._state: Service = app.state.service
        self._stack = AsyncExitStack()
        self._numbers = itertools.count(1)

    async def __aenter__(self) -> Self:
        """Open the bundles, check their golden outputs and warm up."""
        await self._stack.enter_async_context(self._lifespan())
        return self

    async def __aexit__(self, *error: Any) -> None:
        """Complete the calls that wait, within `drain_s`, and close the engines."""
        await self._stack.__aexit__(*error)

    # -- results ----------------------------------------------------------------------------------

    async def classify(
        self, inputs: Texts, *, model: str | None = None, head: str | None = None, **options: Any
    ) -> list[list[LabelScore]]:
        """Return the labels of each text by falling score. options: of `Classification`"""
        task = validate(Classification, {"inputs": inputs, **options})
        return await self._results(task, model, head)

    async def ner(
        self, inputs: Texts, *, model: str | None = None, head: str | None = None, **options: Any
    ) -> list[list[EntitySpan]]:
        """Return the entities of each text in their order. options: of `EntityRecognition`"""
        task = validate(EntityRecognition, {"inputs": inputs, **options})
        return await self._results(task, model, head)

    async def qa(
        self,
        questions: list[str],
        contexts: list[str],
        *,
        model: str | None = None,
        head: str | None = None,
        **options: Any,
    ) -> list[list[AnswerSpan]]:
        """Return the spans of each context that answer its question. options: of `QuestionAnswering`"""
        task = validate(
            QuestionAnswering, {"questions": questions, "contexts": contexts, **options}
        )
        return await self._results(task, model, head)

    async def embed(
        self, inputs: Texts, *, model: str | None = None, head: str | None = None, **options: Any
    ) -> list[Vector]:
        """Return the vector `[D]` of each text. options: of `Embedding`"""
        task = validate(Embedding, {"inputs": inputs, **options})
        return await self._results(task, model, head)

    async def embed_sparse(
        self, inputs: Texts, *, model: str | None = None, head: str | None = None, **options: Any
    ) -> list[SparseVector]:
        """Return the weights of the tokens of each text. options: of `SparseEmbedding`"""
        task = validate(SparseEmbedding, {"inputs": inputs, **options})
        return await self._results(task, model, head)

    async def embed_tokens(
        self, inputs: Texts, *, model: str | None = None, head: str | None = None, **options: Any
    ) -> list[Vector]:
        """Return the vectors `[n, D]` of the tokens of each text. options: of `TokenEmbedding`"""
        task = validate(TokenEmbedding, {"inputs": inputs, **options})
        return await self._results(task, model, head)

    async def fill_mask(
        self, inputs: Texts, *, model: str | None = None, head: str | None = None, **options: Any
    ) -> list[list[list[TokenScore]]]:
        """Return the tokens for each mask token of each text. options: of `MaskFilling`"""
        task = validate(MaskFilling, {"inputs": inputs, **options})
        return await self._results(task, model, head)

    async def zero_shot(
        self,
        inputs: Texts,
        labels: list[str],
        *,
        model: str | None = None,
        head: str | None = None,
        **options: Any,
    ) -> list[list[LabelScore]]:
        """Return the given labels for each text by falling score. options: of `ZeroShot`"""
        task = validate(ZeroShot, {"inputs": inputs, "labels": labels, **options})
        return await self._results(task, model, head)

    async def similarity(
        self,
        source: str,
        inputs: Texts,
        *,
        model: str | None = None,
        head: str | None = None,
        **options: Any,
    ) -> list[float | None]:
        """Return the cosine of the vector of each text with that of the source. options: of `Similarity`"""
        task = validate(Similarity, {"source": source, "inputs": inputs, **options})
        return task.scores(self.engine(model), await self.answer(task, model=model, head=head))

    async def rerank(
        self,
        query: str,
        documents: list[str],
        *,
        top_n: int | None = None,
        model: str | None = None,
        head: str | None = None,
        **options: Any,
    ) -> list[Ranked]:
        """Return the `top_n` documents (None: all) by falling relevance to the query. options: of `Reranking`

        A model without a cross-encoder ranks by its vectors.
        """
        engine = self.engine(model)
        asked = validate(Reranking, {"query": query, "documents": documents, **options})
        if asked.weights is None:
            head = head or select_ranking_head(engine)
        ranking = make_ranking(engine, head, asked)
        reply = await self.answer(ranking, model=model, head=head)
        return rank(ranking.scores(engine, reply), top_n)

    async def _results(self, task: EngineTask[T], model: str | None, head: str | None) -> list[T]:
        reply = await self.answer(task, model=model, head=head)
        return [result for result in reply.results if result is not None]

    async def answer(
        self,
        task: EngineTask[T],
        *,
        model: str | None = None,
        head: str | None = None,
        isolate_errors: bool = False,
        priority: int = 0,
        tenant: str = "",
        timeout_s: float | None = None,
    ) -> Reply[T]:
        """Compute a task of `service.tasks`, and return its results with token counts and times.

        isolate_errors: whether an input that fails has an entry in `errors`, and None for its result
        priority: 0 interactive, 1 bulk
        tenant: whose fair share of the device this uses
        timeout_s: in place of `deadline_ms`
        """
        engine = self.engine(model)
        seconds = self.settings.deadline_ms / 1000 if timeout_s is None else timeout_s
        ticket = Ticket(
            request_id=f"embedded-{next(self._numbers)}",
            deadline=time.monotonic() + seconds,
            priority=priority,
            tenant=tenant,
            isolate_errors=isolate_errors,
        )
        engine.acquire()
        try:
            async with asyncio.timeout(seconds):
                return await engine.answer(task, ticket, () if head is None else (head,))
        except TimeoutError:
            raise DeadlineExceeded("the answer was not ready in time") from None
        finally:
            engine.release()

    def engine(self, model: str | None = None) -> Engine:
        """Return the engine of a model; None for the default one. Raises UnknownModel and Draining."""
        if self._state.draining:
            raise Draining("the service is draining")
        return self._state.open_engines().get(model, self.settings.rule_of_unknown_models("refuse"))

    # -- state ------------------------------------------------------------------------------------

    @property
    def load(self) -> Load:
        """The backlog: `queue_tokens`, `drain_s` until it is computed, and `problem` where nothing can be computed."""
        return self._state.open_engines().load()

    @property
    def fingerprint(self) -> str:
        """The default model's bundle hash, precision, provider and runtime."""
        return self._state.open_engines().get(None).fingerprint

    @property
    def alive(self) -> bool:
        """Whether the device can still compute; if not, only a new process helps."""
        return self._state.open_engines().alive()

    def samples(self) -> Iterator[tuple[str, str, dict[str, str], float]]:
        """Yield each sample of the metrics: name, description, labels and value, for an exporter of the program."""
        for family in self._metrics.registry.collect():
            for sample in family.samples:
                yield sample.name, family.documentation, sample.labels, sample.value

    async def drain(self) -> None:
        """Refuse further direct calls, report "not ready", and wait for the accepted calls and requests.

        Raises TimeoutError after `drain_s`.
        """
        self._state.shutdown.advance(Stage.DRAINING)
        async with asyncio.timeout(self.settings.drain_s):
            for engine in self._state.open_engines().all():
                await engine.unused()

    # -- models -----------------------------------------------------------------------------------

    async def models(self) -> Mapping[str, Any]:
        """Return the models, as `GET /admin/models` does."""
        return await self._execute(ListModels())

    async def load_model(self, path: str, **options: Any) -> Mapping[str, Any]:
        """Serve a bundle of `models_dir`, as `POST /admin/models` does. options: `LoadModel`"""
        return await self._execute(LoadModel(path=path, by=BY, **options))

    async def promote_model(self, model: str, **options: Any) -> Mapping[str, Any]:
        """Let the loaded `name@version` answer for its name. options: `PromoteModel`"""
        return await self._execute(PromoteModel(model=model, by=BY, **options))

    async def roll_back_model(self, model: str) -> Mapping[str, Any]:
        """Let the previous version answer for a name."""
        return await self._execute(RollBackModel(model=model, by=BY))

    async def unload_model(self, model: str) -> Mapping[str, Any]:
        """Stop serving `name@version`; return when its memory is free."""
        return await self._execute(UnloadModel(model=model, by=BY))

    async def _execute(self, command: Command) -> Mapping[str, Any]:
        return await self._state.open_engines().execute(command)

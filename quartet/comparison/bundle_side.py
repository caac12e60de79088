"""A side that is a bundle, which also answers as other servers would: by a recipe."""

import asyncio
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Self

import numpy as np
import onnx
from numpy.typing import NDArray

from export.external.onnx_source import POOLINGS
from quartet.comparison.recipes import (
    SERVED,
    Recipe,
    RecipeEncoder,
    convert,
    encoding_of,
    options_of,
)
from quartet.comparison.servers import PATHS, READERS, make_body
from quartet.comparison.sides import Item, SideError, Task
from service.bulk.predictor import post
from service.core import bundle
from service.core.bundle import Bundle
from service.core.cpu import CPU
from service.core.encode import Encoder
from service.core.manifest import Head
from service.core.packing import pack
from service.core.session import SessionOptions, open_graph, packed_feeds, padded_feeds
from service.embedded import EmbeddedService

HIDDEN = ("LayerNormalization", "SimplifiedLayerNormalization")  # the end of an encoder
TASKS: Mapping[str, Task] = {
    "embedding": "embeddings",
    "classification": "labels",
    "ner": "entities",
    "qa": "answers",
    "sparse-embedding": "sparse",
}
Floats = NDArray[np.float32]


class BundleSide:
    """A bundle, opened in this process while an `async with` block lasts. Raises SideError and BundleError.

    name: its path, or PATH:PRECISION; head: of the answers, "" for the first of the task
    """

    is_local = True

    def __init__(self, name: str, head: str = "") -> None:
        path, _, precision = name.rpartition(":") if not Path(name).exists() else (name, "", "")
        self.name, self.path, self.precision = name, Path(path), precision or "auto"
        self.bundle = bundle.load(self.path)
        self._wanted = head
        heads = self.bundle.manifest.heads.values()
        known = [own for own in heads if own.task in TASKS]
        tasks = ["reranking" if len(own.labels) == 1 else TASKS[own.task] for own in known]
        # Vectors rank, too.
        ranks: list[Task] = ["reranking"] if {"embeddings", "sparse"} & {*tasks} else []
        self.tasks = [*dict.fromkeys(tasks + ranks)]
        self._services: dict[str, EmbeddedService] = {}
        self._encoders: dict[Recipe, Encoder] = {}
        self._hidden: Callable[[Any], Floats] | None = None
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        self._encoders[SERVED] = (await self._service(self.precision)).engine().encoder
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._stack.aclose()

    async def _service(self, precision: str) -> EmbeddedService:
        if precision not in self._services:
            service = EmbeddedService(self.path, precision=precision)
            self._services[precision] = await self._stack.enter_async_context(service)
        return self._services[precision]

    def head(self, task: Task) -> Head:
        """Return the head that answers a task."""
        heads = self.bundle.manifest.heads
        if self._wanted in heads:
            return heads[self._wanted]
        for head in heads.values():
            if TASKS.get(head.task) == task or (task == "reranking" and len(head.labels) == 1):
                return head
        return next(iter(heads.values()))

    async def answer(self, task: Task, item: Item, recipe: Recipe = SERVED) -> Any:
        """Return the answer of the service in this process. Recipes other than SERVED are computed one at a time."""
        service = await self._service(recipe.precision or self.precision)
        if task == "embeddings":
            head = self.head(task)
            prompt = head.default_prompt_text if recipe.prompt is None else recipe.prompt
            item = (prompt + item[0],)
            if recipe.pooling is not None:
                return await asyncio.to_thread(self._pooled, item[0], recipe)
        body = {**make_body("quartet", task, item, ""), **options_of(task, recipe)}
        if self._wanted:
            body["head"] = self._wanted
        service.engine().encoder = self.encoder(recipe)
        content = json.dumps(body).encode()
        status, found, _ = await post(service.app, PATHS["quartet"][task], content)
        if status != 200:
            raise SideError(f"{self.name}: {found['error']['message']}")
        return convert(task, READERS[task](found), item[-1], recipe)

    def encoder(self, recipe: Recipe) -> Encoder:
        """Return the encoder of a recipe."""
        key = encoding_of(recipe)
        if key not in self._encoders:
            self._encoders[key] = RecipeEncoder(self._encoders[SERVED], key)
        return self._encoders[key]

    def _pooled(self, text: str, recipe: Recipe) -> Any:
        """Return a vector that is pooled otherwise than the graph does."""
        head = self.head("embeddings")
        cut = options_of("embeddings", recipe)["truncate"]
        [own] = self.encoder(recipe).windows([text], truncate=cut)
        if self._hidden is None:
            self._hidden = open_hidden(self.bundle, self.precision)
        vector = POOLINGS[recipe.pooling or ""](self._hidden(own.windows[0]))
        normalize = head.normalize if recipe.normalize is None else recipe.normalize
        length = np.linalg.norm(vector) if normalize else 1.0
        return convert("embeddings", (vector / (length or 1.0)).astype(np.float32), text, recipe)


def open_hidden(opened: Bundle, precision: str) -> Callable[[Any], Floats]:
    """Return a function from a window to the vectors of its tokens, `[n, H]`. Raises SideError for an unknown graph.

    The last norm before the head's output is one more output of a copy of the graph.
    """
    graphs = opened.manifest.graphs_for(CPU, precision)
    graph = next((own for own in graphs if own.layout == "portable"), graphs[0])
    model = onnx.load(opened.file(graph.file), load_external_data=False)
    name = hidden_tensor(model)
    model.graph.output.append(onnx.ValueInfoProto(name=name))
    with tempfile.TemporaryDirectory() as folder:
        if graph.weights:
            shutil.copyfile(opened.file(graph.weights.file), Path(folder, graph.weights.file))
        onnx.save(model, Path(folder, graph.file))
        options = SessionOptions(os.cpu_count() or 1)
        session = open_graph(Path(folder, graph.file), CPU, options)
    known = {value.name for value in session.get_inputs()}

    def run(window: Any) -> Floats:
        packed = pack([window])
        made = packed_feeds(packed, known) if graph.layout == "packed" else padded_feeds(packed)
        [rows] = session.run([name], {key: made[key] for key in known if key in made})
        return np.asarray(rows, np.float32).reshape(-1, rows.shape[-1])[: len(window)]

    return run


def hidden_tensor(model: onnx.ModelProto) -> str:
    """Return the output of the norm that is nearest before an embedding. Raises SideError where there is none."""
    makers = {name: node for node in model.graph.node for name in node.output}
    waiting = [output.name for output in model.graph.output]
    for name in waiting:  # which grows
        node = makers.get(name)
        if node is not None and node.op_type in HIDDEN:
            return str(name)
        waiting += [] if node is None else [own for own in node.input if own not in waiting]
    raise SideError("the graph has no norm at the end of its encoder")

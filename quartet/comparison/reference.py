"""A side that is a checkpoint, run by the reference library: sentence-transformers, or transformers."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np

from quartet.cache import HUB_NAME
from quartet.comparison import servers
from quartet.comparison.sides import Item, SideError, Task
from service.core.decode import SparseVector

TASKS: dict[str, Task] = {
    "ForSequenceClassification": "labels",
    "ForTokenClassification": "entities",
    "ForMaskedLM": "sparse",
}


class Reference:
    """A checkpoint's folder or its name on the hub."""

    is_local = True

    def __init__(self, name: str) -> None:
        self.name = name
        if not Path(name).is_dir() and (name.startswith(".") or not HUB_NAME.fullmatch(name)):
            raise SideError(f"{name}: no such directory")
        self.tasks: list[Task] = [self._find_task()]
        self._model = self._open(self.tasks[0])

    def _find_task(self) -> Task:
        """Return the task that the files of a folder declare. A checkpoint without a head makes vectors."""
        config = Path(self.name, "config.json")
        fields = json.loads(config.read_text(encoding="utf-8")) if config.is_file() else {}
        architecture = (fields.get("architectures") or [""])[0]
        modules = Path(self.name, "modules.json")
        if modules.is_file() and "SpladePooling" not in modules.read_text(encoding="utf-8"):
            return "embeddings"
        fits = (own for end, own in TASKS.items() if architecture.endswith(end))
        task: Task = next(fits, "embeddings")
        is_ranker = task == "labels" and len(fields.get("id2label", "..")) == 1
        return "reranking" if is_ranker else task

    def _open(self, task: Task) -> Any:
        try:
            import sentence_transformers
            import transformers

            match task:
                case "embeddings":
                    return sentence_transformers.SentenceTransformer(self.name, device="cpu")
                case "reranking":
                    return sentence_transformers.CrossEncoder(self.name, device="cpu")
                case "sparse":
                    return sentence_transformers.SparseEncoder(self.name, device="cpu")
                case "labels":
                    return transformers.pipeline("text-classification", self.name, top_k=None)
            return transformers.pipeline(
                "token-classification", self.name, aggregation_strategy="first"
            )
        except ModuleNotFoundError as error:
            raise SideError(
                f"{self.name}: a checkpoint needs {error.name}, which is not installed:"
                " pip install sentence-transformers, or name a bundle"
            ) from None
        except (OSError, ValueError) as error:
            raise SideError(f"{self.name}: {' '.join(str(error).split())}") from None

    async def answer(self, task: Task, item: Item) -> Any:
        return await asyncio.to_thread(self._answer, task, item)

    def _answer(self, task: Task, item: Item) -> Any:
        if task not in self.tasks:
            raise SideError(f"{self.name}: the checkpoint has no {task}")
        match task:
            case "embeddings":
                return np.asarray(self._model.encode(item[0]), np.float32)
            case "reranking":
                scored = self._model.predict([(item[0], document) for document in item[1:]])
                return servers.by_score((str(n), float(one)) for n, one in enumerate(scored))
            case "sparse":
                row = self._model.encode(item[0], convert_to_sparse_tensor=False).cpu().numpy()
                ids = np.flatnonzero(row)
                return SparseVector(ids, row[ids].astype(np.float32))
            case "labels":
                return servers.labels(self._model(item[0], truncation=True))
        return servers.entities(
            [{**own, "score": float(own["score"])} for own in self._model(item[0])]
        )

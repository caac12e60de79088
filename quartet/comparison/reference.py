"""A side that is a checkpoint, run by the reference library: sentence-transformers, or transformers."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np

from quartet.cache import HUB_NAME
from quartet.comparison import servers
from quartet.comparison.sides import Item, SideError, Task
from service.core import decode
from service.core.decode import AnswerSpan, SparseVector
from service.core.encode import Encoding
from service.core.manifest import Head
from service.engines.engine import STRIDE

TASKS: dict[str, Task] = {
    "ForSequenceClassification": "labels",
    "ForTokenClassification": "entities",
    "ForQuestionAnswering": "answers",
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
                case "answers":
                    network = transformers.AutoModelForQuestionAnswering.from_pretrained(self.name)
                    return transformers.AutoTokenizer.from_pretrained(self.name), network.eval()
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
                row = self._model.encode(item[0], convert_to_sparse_tensor=False).float().numpy()
                ids = np.flatnonzero(row)
                return SparseVector(ids, row[ids].astype(np.float32))
            case "labels":
                return servers.labels(self._model(item[0], truncation=True))
            case "answers":
                return answer_spans(*self._model, *item)
        return servers.entities(
            [{**own, "score": float(own["score"])} for own in self._model(item[0])]
        )


def answer_spans(tokenizer: Any, network: Any, question: str, context: str) -> list[AnswerSpan]:
    """Return the best span by transformers' tokens and scores. Version 5 has no pipeline that chooses spans."""
    import torch

    longest = min(tokenizer.model_max_length, network.config.max_position_embeddings)
    own = len(tokenizer(question, add_special_tokens=False)["input_ids"])
    capacity = longest - own - tokenizer.num_special_tokens_to_add(pair=True)
    more = ("return_overflowing_tokens", "return_offsets_mapping")
    made = tokenizer(
        question,
        context,
        truncation="only_second",
        max_length=longest,
        stride=min(STRIDE, capacity // 2),
        **dict.fromkeys(more, True),
    )
    windows, scores = [], []
    for number, ids in enumerate(made["input_ids"]):
        names = {"input_ids", "attention_mask", "token_type_ids"} & made.keys()
        with torch.no_grad():
            found = network(**{name: torch.tensor([made[name][number]]) for name in names})
        scores.append(torch.stack([found.start_logits[0], found.end_logits[0]], -1).float().numpy())
        columns = (made["offset_mapping"][number], made.word_ids(number), made.sequence_ids(number))
        offsets, words, sequence = (
            np.array([-1 if one is None else one for one in column]) for column in columns
        )
        windows.append(Encoding(np.array(ids), np.zeros(len(ids), int), offsets, words, sequence))
    most = Head(task="qa").max_answer_tokens
    return decode.qa(
        windows,
        scores,
        context,
        top_k=1,
        handle_impossible_answer=False,
        null_threshold=0.0,
        max_answer_tokens=most,
    )

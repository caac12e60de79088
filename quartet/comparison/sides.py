"""What a side is: something that answers texts."""

from typing import Any, Literal, Protocol

Task = Literal["embeddings", "labels", "entities", "answers", "reranking", "sparse"]
# A text; a question and its context; or a query and its documents.
Item = tuple[str, ...]


class SideError(Exception):
    """A side that cannot be opened, or that does not answer; the message has its name and the reason in one line."""


class Side(Protocol):
    """A server, bundle or checkpoint that answers texts.

    name: as the command line has it
    tasks: what it can do, or may be able to do, the first one by default
    is_local: whether it computes in this process, so that its processor time can be measured
    """

    name: str
    tasks: list[Task]
    is_local: bool

    async def answer(self, task: Task, item: Item) -> Any:
        """Return a vector, or a list of labels or spans; of reranking, the positions of documents as labels.

        Raises SideError.
        """
        ...

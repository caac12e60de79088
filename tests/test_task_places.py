"""The modules that know a task by its name: what one more task has to touch."""

import ast
from typing import get_args

import pytest

from service.core.manifest import Task
from tests.rooms import MODULES

# Whatever serves a head of the task. Routes of several tasks, and of other servers' APIs, name some of them.
SERVICE = {
    "classification": {"tasks.classification", "tasks.reranking", "tasks.zero_shot", "api.schemas"},
    "ner": {"tasks.entity_recognition", "api.schemas"},
    "qa": {"tasks.question_answering", "api.schemas"},
    "embedding": {"tasks.embedding", "tasks.reranking", "api.schemas", "engines.engine"},
    "late-interaction": {"tasks.late_interaction", "tasks.reranking", "api.schemas"},
    "fill-mask": {"tasks.mask_filling", "api.schemas"},
    "sparse-embedding": {"tasks.sparse_embedding", "tasks.reranking", "api.schemas"},
    "hidden-states": set(),  # no endpoint: the heads of other bundles read it
    "zero-shot-ner": {"tasks.labelled_entities"},
    "zero-shot-classification": {"tasks.zero_shot"},
}
EVERY_TASK = {"core.manifest"}
SEVERAL_TASKS = {
    *("bulk.output_files", "bulk.predictor", "bulk.rows"),
    "tasks.analysis",
    "api.native_routes",
    "core.data_files.columns",
}
DIALECTS = "api.dialects."
# What reads, exports and describes heads that are not trained here.
ELSEWHERE = {
    "late-interaction": {
        *("model.heads", "model.checkpoints.reader", "model.checkpoints.source"),
        *("model.checkpoints.bge_heads", "model.checkpoints.writer", "model.data.head_rows"),
        *("export.model_card", "export.external.onnx_source"),
    },
    "fill-mask": {
        *("model.config", "model.heads", "model.families.spec", "model.checkpoints.reader"),
        *("model.checkpoints.sentence_config", "model.checkpoints.writer"),
        "export.external.onnx_source",
    },
    "hidden-states": {
        *("model.heads", "model.data.head_rows", "export.arguments", "export.from_checkpoint")
    },
    "zero-shot-ner": {"model.heads", "model.checkpoints.gliner"},
    "zero-shot-classification": {"model.heads", "model.checkpoints.gliclass"},
    "sparse-embedding": {
        *("model.heads", "model.families.spec", "model.checkpoints.reader"),
        *("model.checkpoints.source", "model.checkpoints.bge_heads"),
        *("model.data.examples", "model.data.head_rows", "model.evaluate", "model.dev_report"),
        "quartet.comparison.bundle_side",
    },
}


def modules_that_name(task: str) -> set[str]:
    return {
        module
        for module, path in MODULES.items()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Constant) and node.value == task
    }


@pytest.mark.parametrize("task", get_args(Task))
def test_a_task_is_known_in_few_places(task):
    """The service names a task where its heads are described, planned, decoded and documented, and nowhere else."""
    found = modules_that_name(task)
    served = {m.removeprefix("service.") for m in found if m.startswith("service.")}

    own = {module for module in served - SEVERAL_TASKS if not module.startswith(DIALECTS)}
    assert SERVICE[task] | EVERY_TASK == own
    if task in ELSEWHERE:
        assert ELSEWHERE[task] == {m for m in found if not m.startswith("service.")}

"""What becomes of those that are served when others come and go."""

from dataclasses import replace

import pytest

from service.engines.device import RunsOn
from service.engines.model_state import (
    Models,
    ServedModel,
    ServingState,
    add_model,
    assign_aliases,
    current,
    introduce_model,
    previous,
    remove_model,
    settled,
)

RUNS_ON = RunsOn("fp32", "packed", "CPUExecutionProvider", None, "onnxruntime 1")
NOW = 50.0


def model(name: str, state: ServingState = "pinned") -> ServedModel:
    return ServedModel(name, f"/models/{name}", "0123", state, 1.0, RUNS_ON)


def served(*said: str) -> Models:
    """Models from words such as `a@1 current`."""
    return tuple(model(*word.split()) for word in said)


def shown(models: Models) -> list[str]:
    return [f"{model.id} {model.state}" for model in models]


@pytest.mark.parametrize(
    ("found", "then"),
    [
        (["a@1 pinned"], ["a@1 current"]),
        (["a@1 pinned", "b@1 pinned", "a@2 pinned"], ["a@1 current", "b@1 current", "a@2 pinned"]),
        (["a@3 pinned", "a@2 previous"], ["a@3 pinned", "a@2 current"]),
        (["a@3 pinned", "a@2 current"], ["a@3 pinned", "a@2 current"]),
    ],
)
def test_every_name_has_a_version_that_answers(found, then):
    """The first, unless another did before."""
    assert then == shown(settled(served(*found), NOW))


@pytest.mark.parametrize(
    ("before", "new", "options", "then"),
    [
        ("a@1 current", "a@2", {}, "a@2 current, a@1 previous"),
        ("a@2 current, a@1 previous", "a@3", {}, "a@3 current, a@2 previous"),
        ("a@1 current, a@0 pinned", "a@2", {}, "a@2 current, a@1 previous, a@0 pinned"),
        ("a@1 current", "b@1", {}, "a@1 current, b@1 current"),
        ("a@1 current, b@1 current", "a@2", {}, "a@2 current, a@1 previous, b@1 current"),
        # A pinned version can answer for its name.
        ("a@2 current, b@1 current, a@1 pinned", "a@1", {}, "a@1 current, a@2 previous, b@1 current"),
        # A resident version stays pinned.
        ("a@2 current, a@1 previous", "a@3", {"resident": {"0123"}}, "a@3 current, a@2 previous, a@1 pinned"),
        # A rollback must not reach a version that was replaced long ago.
        ("b@1 current, a@2 current, a@1 previous", "a@3", {"keep_old": False}, "b@1 current, a@3 current"),
    ],
)  # fmt: skip
def test_a_new_one_takes_the_place_of_the_old(before, new, options, then):
    """The replaced version is kept, and the one kept before is unloaded."""
    models = introduce_model(served(*before.split(", ")), model(new), NOW, **options)
    assert then == ", ".join(shown(models))


def test_an_alias_has_one_name():
    """All versions of the name share it, and the name that had it before loses it."""
    models = assign_aliases(served("a@2 current", "a@1 previous", "b@1 current"), "a", ["x", "y"])
    assert [("x", "y"), ("x", "y"), ()] == [model.aliases for model in models]
    models = assign_aliases(models, "b", ["y"])
    assert [("x",), ("x",), ("y",)] == [model.aliases for model in models]


def test_a_pinned_version_answers_if_it_is_the_only_one():
    """A pinned version answers for the name only if the model has no other version."""
    before = served("a@1 current")
    later = add_model(add_model(before, model("a@2"), NOW), model("b@1"), NOW)
    assert ["a@1 current", "a@2 pinned", "b@1 current"] == shown(later)


def test_one_of_a_name_gets_copies():
    """The newest version for mirrored requests gets them, unless it answers or answered for the name."""
    models = add_model(served("a@1 current"), replace(model("a@2"), shadow=0.5), NOW)
    models = add_model(models, replace(model("a@3"), shadow=0.1), NOW)
    assert [0.0, 0.0, 0.1] == [each.shadow for each in models]
    models = introduce_model(add_model(models, replace(models[2], shadow=0.2), NOW), models[2], NOW)
    assert ["a@3 current", "a@1 previous", "a@2 pinned"] == shown(models)
    assert not any(each.shadow for each in models)


def test_there_and_back():
    """The previous one and the current one change places, any number of times."""
    models = served("a@2 current", "a@1 previous", "b@1 current")
    for expected in ("a@1", "a@2", "a@1"):
        former = previous(models, "a")
        assert former is not None
        models = introduce_model(models, former, NOW)
        answering, kept = current(models, "a"), previous(models, "a")
        assert answering is not None
        assert kept is not None
        assert expected == answering.id == models[0].id
        assert {"a@1", "a@2"} == {answering.id, kept.id}


@pytest.mark.parametrize(
    ("gone", "then"),
    [
        ("a@2", ["a@1 current", "a@0 pinned", "b@1 current"]),
        ("a@1", ["a@2 current", "a@0 pinned", "b@1 current"]),
        ("b@1", ["a@2 current", "a@1 previous", "a@0 pinned"]),
    ],
)
def test_the_previous_version_follows_an_unloaded_one(gone, then):
    """The rest stays as it was."""
    before = served("a@2 current", "a@1 previous", "a@0 pinned", "b@1 current")
    assert then == shown(remove_model(before, gone, NOW))


def test_a_successor_takes_the_place():
    """Wherever it stood itself, so that another name does not become the default."""
    before = served("a@0 pinned", "b@1 current", "a@1 current", "c@1 current", "a@2 previous")
    then = ["a@0 pinned", "b@1 current", "a@2 current", "c@1 current"]
    assert then == shown(remove_model(before, "a@1", NOW))
    assert ["a@2 current", "b@1 current"] == shown(
        remove_model(served("a@1 current", "b@1 current", "a@2 pinned"), "a@1", NOW)
    )


def test_since_when():
    """A model is in its state since the change that put it there."""
    models = introduce_model(served("a@1 current", "b@1 current"), model("a@2"), NOW)
    assert [NOW, NOW, 1.0] == [model.since for model in models]

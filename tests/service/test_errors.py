import re

import pytest

from service import errors
from service.errors import QuartetError


def kinds(base: type[QuartetError] = QuartetError) -> list[type[QuartetError]]:
    """The classes of the module below one of them; a class elsewhere has the status and the code of its base."""
    own = [kind for kind in base.__subclasses__() if kind.__module__ == errors.__name__]
    return [kind for sub in own for kind in (sub, *kinds(sub))]


PUBLIC = [kind for kind in kinds() if kind is not errors.RetryableError]


def drawn() -> dict[str, str]:
    """The classes in the drawing of the module's docstring, each with its parent."""
    above: dict[str, str] = {}
    line: list[tuple[int, str]] = []
    for spaces, name in re.findall(r"^( {4,})(\w+)", errors.__doc__, re.M):
        line = [(depth, over) for depth, over in line if depth < len(spaces)]
        above[name] = line[-1][1] if line else ""
        line.append((len(spaces), name))
    return above


def test_the_drawn_tree_is_the_real_one():
    """Every class stands in the module's docstring below its base."""
    tree = {kind.__name__: kind.__base__.__name__ for kind in kinds()}
    assert {"QuartetError": ""} | tree == drawn()


@pytest.mark.parametrize("kind", PUBLIC, ids=lambda kind: kind.__name__)
def test_the_drawn_tree_tells_statuses_and_codes(kind):
    """Of each class that has some."""
    assert re.search(rf"^ +{kind.__name__} {kind.status} {kind.code}\b", errors.__doc__, re.M)


@pytest.mark.parametrize(
    ("seconds", "header"), [(0.0, "1"), (0.2, "1"), (1.0, "1"), (1.01, "2"), (59.5, "60")]
)
def test_retry_after_is_whole_seconds_and_at_least_one(seconds, header):
    """`Retry-After` rounds up."""
    assert errors.Overloaded("full", retry_after_s=seconds).headers == {"Retry-After": header}


@pytest.mark.parametrize("kind", [errors.NotReady, errors.Draining, errors.ReplicaLost])
def test_a_503_says_when_to_come_back(kind):
    """Every 503 carries `Retry-After`."""
    assert kind("later").headers == {"Retry-After": "1"}


def test_an_error_keeps_its_arguments():
    """The message and the field at fault survive, also as `str`."""
    error = errors.InvalidInput("top_k: must be at least 1", param="top_k")
    assert (str(error), error.message, error.param) == (error.message, error.message, "top_k")

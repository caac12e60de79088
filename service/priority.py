"""The priority classes of requests."""

from typing import Literal, get_args

Class = Literal["interactive", "bulk"]

CLASSES: tuple[Class, ...] = get_args(Class)  # by priority: the index of a class is its priority

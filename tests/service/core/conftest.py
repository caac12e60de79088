from collections.abc import Iterator

import pytest

from service.core.session import device_problem


@pytest.fixture(autouse=True)
def unknown_device() -> Iterator[None]:
    """The device is queried anew in every test, and after the last one."""
    device_problem.cache_clear()
    yield
    device_problem.cache_clear()

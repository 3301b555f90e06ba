"""Fails tests that leave a thread running."""

import threading
from collections.abc import Iterator

import pytest

from patience import PATIENCE_S


@pytest.fixture(autouse=True)
def no_thread_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    if "compile" in request.node.name:
        return  # torch's compiler keeps a pool of threads
    for thread in set(threading.enumerate()) - before:
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), f"{thread} is left behind"

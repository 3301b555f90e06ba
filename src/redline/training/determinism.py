"""The same numbers every time, on a GPU too: kernels that add in a fixed order, or none.

Some backward kernels add what many threads found in whatever order they finish, and the last bits differ from run to
run. Between two runs that should be equal to the bit, that is the only difference left.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """While inside, torch takes deterministic kernels, and raises where there are none."""
    if not wanted:
        yield
        return
    # Read by cuBLAS when a process first uses it; without it torch refuses its products.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    memory: Any = torch.utils.deterministic
    before, filled = torch.are_deterministic_algorithms_enabled(), memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    # It guards against reading what was never written, which tests do, and costs a pass over all new memory.
    memory.fill_uninitialized_memory = False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        memory.fill_uninitialized_memory = filled

"""The same numbers every time, on a GPU too: kernels that add in a fixed order, or none.

Some backward kernels add what many threads found in whatever order they finish, and the last bits differ from run to
run. Between two runs that should be equal to the bit, that is the only difference left.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from redline.errors import RedlineError

_NONE_THERE = re.compile(r"(\S+) does not have a deterministic implementation")


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """While inside, torch takes deterministic kernels; where there is none, that is an error."""
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
    except RuntimeError as error:
        found = _NONE_THERE.match(str(error))
        if found is None:
            raise
        raise RedlineError(
            f"torch has no kernel for {found[1]} that gives the same numbers every time: set deterministic = false."
        ) from error
    finally:
        torch.use_deterministic_algorithms(before)
        memory.fill_uninitialized_memory = filled

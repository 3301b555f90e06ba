"""Makes torch use deterministic kernels on a GPU.

Some backward kernels sum the results of many threads in the order in which they finish, so the last bits differ from
run to run. Everything else in training is deterministic.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from redline.errors import RedlineError

_NO_KERNEL = re.compile(r"(\S+) does not have a deterministic implementation")


@contextmanager
def deterministic(wanted: bool) -> Iterator[None]:
    """Makes torch use deterministic kernels inside the block if `wanted`; operations that have no such kernel raise."""
    if not wanted:
        yield
        return
    # cuBLAS reads this variable when it starts; if it is not set, torch refuses deterministic matrix products.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    memory: Any = torch.utils.deterministic
    before, filled = torch.are_deterministic_algorithms_enabled(), memory.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    # In this mode torch also fills newly allocated memory, a debugging aid that costs an additional write.
    memory.fill_uninitialized_memory = False
    try:
        yield
    except RuntimeError as error:
        found = _NO_KERNEL.match(str(error))
        if found is None:
            raise
        raise RedlineError(
            f"torch has no deterministic kernel for {found[1]}: set deterministic = false under [training]."
        ) from error
    finally:
        torch.use_deterministic_algorithms(before)
        memory.fill_uninitialized_memory = filled

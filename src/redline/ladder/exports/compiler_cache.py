"""A context in which torch's compiler stores its compiled code in Redline's cache."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from redline.ladder.measuring.compile_cache import compile_cache
from redline.machine.compiler_files import prepare_compiler
from redline.machine.machine import Machine

_FOLDER = "TORCHINDUCTOR_CACHE_DIR"


@contextmanager
def compiler_cache(machine: Machine) -> Iterator[None]:
    """Makes the compiler use Redline's cache of compiled code, unless the environment names another folder."""
    if _FOLDER in os.environ:
        yield
        return
    folder = compile_cache() / "inductor"
    os.environ[_FOLDER] = str(folder)
    try:
        if not machine.is_cuda:
            prepare_compiler(machine, folder, Path(tempfile.gettempdir()))
        yield
    finally:
        del os.environ[_FOLDER]

"""Suppresses warnings, log lines and prints of libraries.

Exporters and quantizers print progress, warn about packages that are not installed, and configure the root logger when
they are imported. Such output does not belong in the table of a climb, or in a pipe that expects JSON.
"""

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def unadvised() -> Iterator[None]:
    """Suppresses torch.compile's warnings about tensor types without a cache hash, and about TF32 being off."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "TensorFloat32 tensor cores for float32 matrix multiplication")
        warnings.filterwarnings("ignore", ".* does not implement _stable_hash_for_caching")
        yield


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Suppresses Python-level output in the block, and restores log levels, handlers and warning filters after it."""
    root = logging.getLogger()
    handlers, level, disabled = list(root.handlers), root.level, logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        away = io.StringIO()
        with warnings.catch_warnings(), contextlib.redirect_stdout(away), contextlib.redirect_stderr(away):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)
        root.handlers[:] = handlers
        root.setLevel(level)

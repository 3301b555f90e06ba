"""Keeps a library's chatter (warnings, log lines, prints) out of the user's terminal.

Exporters and quantizers print progress, warn about packages nobody asked for, and configure the root logger
when they are imported. None of it belongs in a climb's table or in a pipe that expects JSON.
"""

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def unadvised() -> Iterator[None]:
    """Without torch.compile's advice to turn TF32 on, and to authors of tensor types.

    What fp32 products are rounded to is said elsewhere.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "TensorFloat32 tensor cores for float32 matrix multiplication")
        warnings.filterwarnings("ignore", ".* does not implement _stable_hash_for_caching")
        yield


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences Python-level output inside; levels, handlers and warning filters are as before afterwards."""
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

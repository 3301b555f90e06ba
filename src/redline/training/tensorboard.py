"""Logs the metrics of a training run to TensorBoard if it is installed."""

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from redline.training.journal import Entry

WHY_NOT = "no TensorBoard log: it is not installed (pip install tensorboard)"


def is_installed() -> bool:
    return importlib.util.find_spec("tensorboard") is not None


class TensorBoard:
    """Adds each number of a journal entry to the TensorBoard curve of its name.

    The file is created with the first entry, so that a run that fails early leaves no folder. After a write error, it
    logs the error once and stops writing; training continues.
    """

    def __init__(self, folder: Path, log: Callable[[str], None] = lambda text: None) -> None:
        self._folder, self._log = folder, log
        self._writer: Any = None
        self._stopped = False
        self._first_step = 0

    def starting_after(self, step: int) -> "TensorBoard":
        """Drops points after `step`: a killed run may have logged beyond its checkpoint."""
        self._first_step = step + 1
        return self

    def __call__(self, entry: Entry) -> None:
        with self._stop_on_error():
            if self._writer is None and not self._stopped:
                from torch.utils.tensorboard.writer import SummaryWriter

                self._writer = SummaryWriter(str(self._folder), purge_step=self._first_step)
            for name, value in entry.metrics.items():
                if self._writer is not None and value is not None:
                    self._writer.add_scalar(name, value, entry.step)

    def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            with self._stop_on_error():
                writer.close()

    @contextmanager
    def _stop_on_error(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self._stopped:
                self._log(f"TensorBoard logging stopped: {error.strerror or error}")
            self._writer, self._stopped = None, True

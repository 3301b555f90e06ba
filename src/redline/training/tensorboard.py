"""A training's figures for TensorBoard, where that is installed; the journal has all of them in any case."""

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

WHY_NOT = "TensorBoard gets nothing, as it is not installed (pip install tensorboard)"
# Of an entry: where it stands, not what was found.
_PLACE = ("step", "elapsed_s")


def is_installed() -> bool:
    return importlib.util.find_spec("tensorboard") is not None


class TensorBoard:
    """Called with each entry of the journal, it adds one point to the curve of each of its numbers.

    Its file is made at the first one, so that a training which does not begin leaves no folder. Where it cannot write,
    it says so once and writes no more: the training and its journal go on.
    """

    def __init__(self, folder: Path, say: Callable[[str], None] = lambda text: None) -> None:
        self._folder, self._say = folder, say
        self._writer: Any = None
        self._gave_up = False
        self._begins = 0

    def behind(self, step: int) -> "TensorBoard":
        """What a killed run drew beyond its checkpoint will be drawn again."""
        self._begins = step + 1
        return self

    def __call__(self, entry: Mapping[str, Any]) -> None:
        numbers = {name: value for name, value in entry.items() if type(value) in (int, float) and name not in _PLACE}
        with self._trying():
            if self._writer is None and not self._gave_up:
                from torch.utils.tensorboard.writer import SummaryWriter

                self._writer = SummaryWriter(str(self._folder), purge_step=self._begins)
            for name, value in numbers.items():
                if self._writer is not None:
                    self._writer.add_scalar(name, value, entry["step"])

    def close(self) -> None:
        writer, self._writer = self._writer, None
        if writer is not None:
            with self._trying():
                writer.close()

    @contextmanager
    def _trying(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self._gave_up:
                self._say(f"TensorBoard gets no more: {error.strerror or error}")
            self._writer, self._gave_up = None, True

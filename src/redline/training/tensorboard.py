"""A training's figures for TensorBoard, where that is installed; the journal has all of them in any case."""

import importlib.util
from pathlib import Path
from typing import Any

from redline.training.loop import Progress

WHY_NOT = "TensorBoard gets nothing, as it is not installed (pip install tensorboard)"
_NAMES = ("loss", "gradient_norm", "learning_rate", "items_per_s", "utilization", "peak_bytes", "skipped")


def is_installed() -> bool:
    return importlib.util.find_spec("tensorboard") is not None


class TensorBoard:
    """Called with each `Progress`, it adds one point to every curve."""

    def __init__(self, folder: Path) -> None:
        from torch.utils.tensorboard.writer import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder))

    def __call__(self, seen: Progress) -> None:
        figures = {name: getattr(seen, name) for name in _NAMES} | seen.figures
        for name, value in figures.items():
            if value is not None:
                self._writer.add_scalar(name, value, seen.step)

    def close(self) -> None:
        self._writer.close()

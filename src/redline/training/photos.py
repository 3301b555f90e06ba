"""The base classes of training on photos: the settings and the task."""

import typing
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Self

import torch
from torch.optim import Optimizer

from redline.datasets.photo_crops import PhotoCrops
from redline.datasets.photo_pairs import PhotoPairs
from redline.files.config_fields import decode
from redline.training.config_file import ConfigSource, override, read_config
from redline.training.optimizers import build_optimizer
from redline.training.precision import resolve_precision
from redline.training.task import Task


class PhotoTraining:
    """The settings: one dataclass for each table of the config. The field `loop` is the table [training]."""

    # Subclasses are frozen, and the type checker objects to a field that is read-only in the subclass alone.
    model: Any
    data: Any
    loop: Any

    @classmethod
    def read(
        cls,
        config: ConfigSource,
        photos: str | None = None,
        validation: list[str] | None = None,
        start: str | None = None,
        steps: int | None = None,
        minutes: float | None = None,
    ) -> Self:
        """Returns the settings of a config file or dict; arguments that are not None replace its values."""
        kinds = typing.get_type_hints(cls)
        with read_config(config, tuple(map(_table, kinds))) as tables:
            override(tables["model"], start=start)
            override(tables["data"], photos=photos, validation=validation)
            override(tables["training"], steps=steps, minutes=minutes)
            return cls(
                **{name: decode(kind, tables[_table(name)], f"under [{_table(name)}]") for name, kind in kinds.items()}
            )

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """Returns the settings for JSON, with the names of files and folders instead of their paths."""
        tables = {_table(name): asdict(getattr(self, name)) for name in typing.get_type_hints(type(self))}
        tables["data"]["photos"] = folder_name(self.data.photos)
        tables["data"]["validation"] = [folder_name(folder) for folder in self.data.validation]
        if start := tables["model"].get("start"):
            tables["model"]["start"] = Path(start).name
        return tables


class PhotoTask(Task):
    """Trains on crops of photos; `start` describes the initial weights if they are not random.

    `card` is the template of the model card, and `save` writes the weights in a dtype, with metadata.
    """

    card: str
    save: Callable[[Any, Path, torch.dtype, dict[str, str]], None]

    crops: PhotoCrops
    start: Any = None

    def __init__(self, settings: Any, device: torch.device) -> None:
        self.settings, self.device = settings, device
        self.items_per_step = settings.data.batch
        self.precision = resolve_precision(settings.loop.precision, device)

    @property
    def pairs(self) -> PhotoPairs:
        return self.crops.pairs

    @property
    def photos_identity(self) -> Mapping[str, Any]:
        """Returns an identity of the photos that does not depend on their location."""
        return {"photos": self.pairs.photos, "pixels": self.pairs.pixels}

    def optimizer(self) -> Optimizer:
        return build_optimizer(self.averaged, self.settings.loop)

    @abstractmethod
    def score_result(self, model: Any) -> tuple[dict[str, Any], dict[str, str]]:
        """Returns the scores as fields of the result, and as metadata of the weight file."""


def folder_name(folder: str) -> str:
    return Path(folder).resolve().name


def _table(field: str) -> str:
    return "training" if field == "loop" else field

"""The messages between a worker and its parent."""

from dataclasses import dataclass

from redline.upscale.settings import Tiles, TileSizes, UpscaleSettings
from redline.upscale.tasks import Task


@dataclass(frozen=True)
class Job:
    """The parent's first message: the settings, and the image sizes from which the worker proposes a tile size.

    Every worker calibrates its plan on the first tiles of the images in `samples`, so that all have the same plan.
    """

    settings: UpscaleSettings
    samples: tuple[Task, ...]
    tiles: Tiles | None
    sizes: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Proposal:
    """A worker's answer: the tile sizes and batch size that fit its memory, and its plan and weights."""

    tiles: TileSizes
    batch: int
    plan: str
    digest: str


@dataclass(frozen=True)
class Agreed:
    """The tile sizes and batch size that all workers use; different ones would give different pixels."""

    tiles: TileSizes
    batch: int


@dataclass(frozen=True)
class Ask:
    """A worker asks for a task, and waits until there is one. With `at_once` it gets an image task or None now."""

    at_once: bool


@dataclass(frozen=True)
class ListenerCall:
    """A call of a function of the worker's listener, which the parent repeats with its own listener."""

    function: str
    arguments: tuple[object, ...]


@dataclass(frozen=True)
class Failed:
    """A worker's last message: why it cannot run any task, for example because a single tile does not fit in memory."""

    sentence: str

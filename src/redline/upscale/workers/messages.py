"""What a worker and its parent say to each other."""

from dataclasses import dataclass

from redline.upscale.settings import Tiles, TileSizes, UpscaleSettings
from redline.upscale.tasks import Task


@dataclass(frozen=True)
class Job:
    """The parent's first word: what to do in general, and from what a tile is proposed.

    `samples` are pictures on whose first tiles every worker calibrates its plan, so that all of them have the same one.
    """

    settings: UpscaleSettings
    samples: tuple[Task, ...]
    tiles: Tiles | None
    sizes: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Proposal:
    """A worker's answer: the tiles and the batch that fit it, and what decides how its pixels look."""

    tiles: TileSizes
    batch: int
    plan: str
    digest: str


@dataclass(frozen=True)
class Agreed:
    """The tiles and the batch for everyone: others would give other pixels."""

    tiles: TileSizes
    batch: int


@dataclass(frozen=True)
class Ask:
    """A worker wants a task: any, as soon as there is one, or (`at_once`) a picture that is there now, or None."""

    at_once: bool


@dataclass(frozen=True)
class Heard:
    """What a worker's listener was told: which of its functions, with what."""

    what: str
    arguments: tuple[object, ...]


@dataclass(frozen=True)
class Failed:
    """A worker's last word: why it cannot go on with any task, for want of memory for a single tile, say."""

    sentence: str

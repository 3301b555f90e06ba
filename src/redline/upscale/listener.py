"""What an upscaling tells while it runs, and what became of each file; in one process or several, the same is heard."""

from collections.abc import Callable
from dataclasses import dataclass

from redline.upscale.tasks import Task
from redline.upscale.video import VideoProgress


@dataclass(frozen=True)
class Outcome:
    """What became of a image or video: `error` is a sentence when nothing did; `source_state` is of when it was
    opened."""

    task: Task
    width: int = 0
    height: int = 0
    seconds: float = 0.0
    notes: tuple[str, ...] = ()
    error: str = ""
    skipped: bool = False
    source_state: tuple[int, int] | None = None


@dataclass(frozen=True)
class Listener:
    """What is heard meanwhile: sentences, how far a image or video is, and each file's outcome; from any thread."""

    say: Callable[[str], None] = lambda _text: None
    finished: Callable[[Outcome], None] = lambda _outcome: None
    image_progress: Callable[[Task, float, int], None] = lambda _task, _rows, _total: None
    video_progress: Callable[[Task, VideoProgress], None] = lambda _task, _progress: None

"""The outcome of a file, and the callbacks of a run: the same in one process as in several."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from redline.upscale.tasks import Task
from redline.upscale.video import VideoProgress


@dataclass(frozen=True)
class Outcome:
    """The result for one file: its size and notes, or why it failed.

    `source_state` is the size and modification time of the source when it was opened.
    """

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
    """Callbacks for a run, which may come from any thread.

    `started` receives all tasks, `say` a message, `finished` the outcome of a file, `image_progress` the finished and
    the total number of rows of tiles of an image, and `video_progress` the progress of a video.
    """

    say: Callable[[str], None] = lambda _text: None
    finished: Callable[[Outcome], None] = lambda _outcome: None
    image_progress: Callable[[Task, float, int], None] = lambda _task, _rows, _total: None
    video_progress: Callable[[Task, VideoProgress], None] = lambda _task, _progress: None
    started: Callable[[Sequence[Task]], None] = lambda _tasks: None

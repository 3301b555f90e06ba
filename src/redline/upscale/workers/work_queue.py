"""Hands out tasks as workers ask for them, and hands out those of a dead worker again.

Videos come first, then images from the largest file to the smallest, so that long tasks do not start last. A large
image that would keep one worker busy longer than all others is split into parts.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Sequence

from redline.upscale.tasks import Outcome, Task
from redline.upscale.workers.split_image import Part, Split

# A task fails if so many workers died while they held it, because it is probably the cause.
_MAX_DEATHS = 2


class WorkQueue:
    """The tasks that wait or are held by workers. Workers are identified by name.

    `split` takes an image and a number, and splits the image into at most that many parts, or returns None.
    """

    def __init__(
        self, tasks: Sequence[Task], workers: Sequence[str], split: Callable[[Task, int], Split | None]
    ) -> None:
        self._bytes = {task: (task.source_state() or (0, 0))[0] for task in tasks}
        self._waiting = deque(sorted(tasks, key=lambda task: (not task.is_video, -self._bytes[task])))
        self._waiting_bytes = sum(self._bytes.values())
        self._held: dict[str, list[Task]] = {name: [] for name in workers}
        self._deaths: Counter[Task] = Counter()
        self._split = split
        self._splits: dict[Task, Split] = {}

    @property
    def unfinished(self) -> bool:
        return bool(self._waiting) or any(self._held.values())

    def take(self, worker: str, image_only: bool = False) -> Task | None:
        """Returns the next task for a worker, or None if there is none. With `image_only`, a video also gives None."""
        if not self._waiting or (image_only and self._waiting[0].is_video):
            return None
        task = self._waiting.popleft()
        if not isinstance(task, Part):
            share = self._bytes[task] / max(self._waiting_bytes, 1)
            self._waiting_bytes -= self._bytes[task]
            count = math.ceil(share * len(self._held))
            if count > 1 and not task.is_video and (found := self._split(task, count)):
                self._splits[task] = found
                self._waiting.extendleft(reversed(found.parts))
                task = self._waiting.popleft()
        self._held[worker].append(task)
        return task

    def finished(self, worker: str, outcome: Outcome) -> Outcome | Split | None:
        """Records an outcome. Returns that of a whole file, a split image after its last part, and None before that."""
        self._held[worker].remove(outcome.task)
        return self._settled(outcome)

    def lost(self, worker: str, why: str, its_own_fault: bool = False) -> list[Outcome | Split]:
        """Requeues the tasks of a worker that is gone; returns the outcomes of tasks that cannot be requeued."""
        settled: list[Outcome | Split | None] = []
        for task in self._held.pop(worker):
            self._deaths[task] += not its_own_fault
            if self._deaths[task] >= _MAX_DEATHS:
                settled.append(self._settled(_failed(task, why)))
            elif isinstance(task, Part) and self._splits[task.whole].error:
                settled.append(self._settled(Outcome(task)))
            else:
                self._waiting.appendleft(task)
                self._waiting_bytes += self._bytes.get(task, 0)  # a part counts no longer
        if not self._held:
            while self._waiting:
                settled.append(self._settled(_failed(self._waiting.popleft(), why)))
        return [one for one in settled if one is not None]

    def rows_done(self, part: Part, rows: float) -> tuple[float, int]:
        """Records the progress of a part; returns the finished and the total rows of tiles of its image."""
        found = self._splits[part.whole]
        found.rows_done[part] = rows
        return sum(found.rows_done.values()), found.parts[-1].last

    def discard(self) -> None:
        """Deletes the parts of images that are not assembled yet."""
        for found in self._splits.values():
            found.discard()

    def _settled(self, outcome: Outcome) -> Outcome | Split | None:
        part = outcome.task
        if not isinstance(part, Part):
            return outcome
        found = self._splits[part.whole]
        found.unfinished.discard(part)
        found.notes += outcome.notes
        if outcome.error:
            found.error = found.error or outcome.error
            # Drops the waiting parts; those in progress may finish.
            for other in [task for task in self._waiting if task in found.unfinished]:
                self._waiting.remove(other)
                found.unfinished.discard(other)
        return None if found.unfinished else found


def _failed(task: Task, why: str) -> Outcome:
    return Outcome(task, error=f"cannot upscale {str(task.source)!r}: {why}.")

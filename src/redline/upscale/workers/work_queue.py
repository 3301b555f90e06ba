"""Who does what: files are given out as workers ask for them, and what a worker had when it died is given to another.

Films come first and then pictures from the largest file down, so that what takes long is not begun last. A large
picture that alone would keep a worker busy longer than the others have work is cut into parts.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Sequence

from redline.upscale.listener import Outcome
from redline.upscale.tasks import Task
from redline.upscale.workers.split_image import Part, Split

# A file at which that many workers died is the reason, and not given to a third.
_MOST_DEATHS = 2


class WorkQueue:
    """`split` cuts a picture into at most so many parts, or refuses; workers are known by their names."""

    def __init__(
        self, tasks: Sequence[Task], workers: Sequence[str], split: Callable[[Task, int], Split | None]
    ) -> None:
        self._bytes = {task: _file_bytes(task) for task in tasks}
        self._waiting = deque(sorted(tasks, key=lambda task: (not task.is_video, -self._bytes[task])))
        self._waiting_bytes = sum(self._bytes.values())
        self._held: dict[str, list[Task]] = {name: [] for name in workers}
        self._deaths: Counter[Task] = Counter()
        self._split = split
        self._splits: dict[Task, Split] = {}

    @property
    def unfinished(self) -> bool:
        return bool(self._waiting) or any(self._held.values())

    def take(self, worker: str, picture: bool = False) -> Task | None:
        """The next task for a worker, if there is one (and, where only that will do, it is a picture)."""
        if not self._waiting or (picture and self._waiting[0].is_video):
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
        """A file's outcome; a picture all of whose parts are done and that is to be assembled; None for a part."""
        self._held[worker].remove(outcome.task)
        return self._settled(outcome)

    def lost(self, worker: str, why: str, its_own_fault: bool = False) -> list[Outcome | Split]:
        """A worker is gone: what it had goes to the others; gives what cannot be given to anyone."""
        settled: list[Outcome | Split | None] = []
        for task in self._held.pop(worker):
            self._deaths[task] += not its_own_fault
            if self._deaths[task] >= _MOST_DEATHS:
                settled.append(self._settled(_cannot(task, why)))
            elif isinstance(task, Part) and self._splits[task.whole].error:
                settled.append(self._settled(Outcome(task)))
            else:
                self._put_back(task)
        if not self._held:
            while self._waiting:
                settled.append(self._settled(_cannot(self._waiting.popleft(), why)))
        return [one for one in settled if one is not None]

    def rows_done(self, part: Part, rows: float) -> tuple[float, int]:
        """How many rows of tiles of the whole picture are done now, and of how many."""
        found = self._splits[part.whole]
        found.rows_done[part] = rows
        return sum(found.rows_done.values()), found.parts[-1].last

    def discard(self) -> None:
        """Nothing more will come of pictures whose parts are not put together yet."""
        for found in self._splits.values():
            found.discard()

    def _put_back(self, task: Task) -> None:
        self._waiting.appendleft(task)
        if not isinstance(task, Part):
            self._waiting_bytes += self._bytes[task]

    def _settled(self, outcome: Outcome) -> Outcome | Split | None:
        part = outcome.task
        if not isinstance(part, Part):
            return outcome
        found = self._splits[part.whole]
        found.unfinished.discard(part)
        found.notes += outcome.notes
        if outcome.error:
            found.error = found.error or outcome.error
            # The others are of no use any more; those under way are let finish.
            for other in [task for task in self._waiting if task in found.unfinished]:
                self._waiting.remove(other)
                found.unfinished.discard(other)
        if found.unfinished:
            return None
        return found


def _cannot(task: Task, why: str) -> Outcome:
    return Outcome(task, error=f"cannot enlarge {str(task.source)!r}: {why}.")


def _file_bytes(task: Task) -> int:
    try:
        return task.source.stat().st_size
    except OSError:
        return 0

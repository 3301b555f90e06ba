"""The parent's side of an upscaling run with workers: agrees on tiles, distributes tasks, and forwards messages.

Videos come first, then images from the largest file to the smallest, so that long tasks do not start last. A large
image that would keep one worker busy longer than all others is split into parts. The tasks of a dead worker are
distributed again.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from redline.errors import RedlineError
from redline.upscale.settings import Tiles
from redline.upscale.tasks import Listener, Outcome, Task
from redline.upscale.tiling import Tiling
from redline.upscale.workers.crew import Ask, Crew, Job, ListenerCall, Member, Proposal
from redline.upscale.workers.split_image import Part, Split, split

# The number of images that are assembled from their parts at the same time.
_ASSEMBLERS = 2
# If this many workers died while they held a task, the task fails, because it is probably the cause.
_MAX_DEATHS = 2


class WorkQueue:
    """The tasks that are waiting or are held by workers. Workers are identified by name.

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
        """Returns the next task for a worker; None if there is none or if it is a video and `image_only` is set."""
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
        """Records an outcome and returns it; for a part, returns the image's `Split` after the last part, else None."""
        self._held[worker].remove(outcome.task)
        return self._settled(outcome)

    def lost(self, worker: str, why: str, its_own_fault: bool = False) -> list[Outcome | Split]:
        """Requeues the tasks of a worker that has ended; returns the outcomes of tasks that cannot be requeued."""
        settled: list[Outcome | Split | None] = []
        for task in self._held.pop(worker):
            self._deaths[task] += not its_own_fault
            if self._deaths[task] >= _MAX_DEATHS:
                settled.append(self._settled(_failed(task, why)))
            elif isinstance(task, Part) and self._splits[task.whole].error:
                settled.append(self._settled(Outcome(task)))
            else:
                self._waiting.appendleft(task)
                self._waiting_bytes += self._bytes.get(task, 0)  # 0 for a part of an image
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


class SharedRun:
    """Runs the tasks of one run on the workers of a crew. Callers first call `agree`, then `run`."""

    def __init__(self, crew: Crew, job: Job, listener: Listener) -> None:
        self._crew, self._job, self._listener = crew, job, listener

    def agree(self, plan: str, digest: str) -> Tiles:
        """Waits until all workers are ready; returns the smallest of their tile sizes and batch sizes.

        Raises RedlineError if a worker has another plan or other weights than `plan` and `digest`.
        """
        proposals: dict[Member, Proposal] = {}
        for member in self._crew.members:
            member.send(self._job)
        why = ""
        for member, message in self._crew.messages():
            match message:
                case None:
                    why = member.why_gone()
                    self._listener.say(f"{why}; it did not start")
                case Proposal():
                    _check_same(member, message, plan, digest)
                    proposals[member] = message
            if all(member in proposals for member in self._crew.members):
                break
        if not self._crew.members:
            raise RedlineError(f"no worker could start: {why}.")
        there = [proposals[member] for member in self._crew.members]
        smallest = min(there, key=lambda one: max(width * height for width, height in one.tiles))
        agreed = Tiles(smallest.tiles, min(one.batch for one in there))
        for member in self._crew.members:
            member.send(agreed)
        return agreed

    def run(
        self, tasks: Sequence[Task], tiling: Tiling, scale: int, finished: Callable[[Outcome], None]
    ) -> list[Outcome]:
        settings = self._job.settings
        outcomes: list[Outcome] = []

        def settle(done: Outcome | Split) -> None:
            """Runs in another thread, because it reads or writes a whole file, and workers must not wait for that."""
            outcome = done.assemble(settings.images, scale) if isinstance(done, Split) else done
            outcomes.append(outcome)
            finished(outcome)

        names = [member.name for member in self._crew.members]
        queue = WorkQueue(tasks, names, lambda task, count: split(task, count, settings, tiling, scale))
        settling: list[Future[None]] = []
        try:
            with (
                ThreadPoolExecutor(_ASSEMBLERS, "assembling") as assembling,
                ThreadPoolExecutor(1, "recording") as recording,
            ):
                try:
                    for done in self._serve_workers(queue):
                        thread = assembling if isinstance(done, Split) else recording
                        settling.append(thread.submit(settle, done))
                except BaseException:
                    assembling.shutdown(cancel_futures=True)
                    raise
            for future in settling:
                future.result()
        finally:
            queue.discard()
        return outcomes

    def _serve_workers(self, queue: WorkQueue) -> Iterator[Outcome | Split]:
        """Answers the workers until all tasks are done; yields the outcomes and the split images that are complete."""
        idle: list[Member] = []
        for member, message in self._crew.messages():
            match message:
                case None:
                    why = member.why_gone()
                    member.remove_partial_files()
                    idle = [other for other in idle if other is not member]
                    if member.failure and not self._crew.members:
                        raise RedlineError(member.failure)
                    self._listener.say(f"{why}; {'the others continue' if self._crew.members else 'no worker is left'}")
                    yield from queue.lost(member.name, why, its_own_fault=bool(member.failure))
                case Ask(at_once=True):
                    member.give(queue.take(member.name, image_only=True))
                case Ask():
                    idle.append(member)
                case ListenerCall("finished", (Outcome() as outcome,)):
                    settled = queue.finished(member.name, outcome)
                    if settled is not None:
                        yield settled
                case ListenerCall("image_progress", (Part() as part, int() | float() as rows, _)):
                    self._listener.image_progress(part.whole, *queue.rows_done(part, rows))
                case ListenerCall("say", (text,)):
                    self._listener.say(f"{member.name}: {text}")
                case ListenerCall(function, arguments):
                    getattr(self._listener, function)(*arguments)
            while idle and (task := queue.take(idle[0].name)) is not None:
                idle.pop(0).give(task)
            if not queue.unfinished:
                return


def _check_same(member: Member, proposal: Proposal, plan: str, digest: str) -> None:
    """Raises RedlineError if the worker would give different pixels, which nothing else would detect."""
    if proposal.plan != plan:
        raise RedlineError(
            f"{member.name} has the plan {proposal.plan} and others have {plan}, which gives different pixels: "
            "choose a --precision that all workers support, or one kind of --device."
        )
    if proposal.digest != digest:
        raise RedlineError(f"{member.name} has different weights: use the same weights file on all machines.")


def _failed(task: Task, why: str) -> Outcome:
    return Outcome(task, error=f"cannot upscale {str(task.source)!r}: {why}.")

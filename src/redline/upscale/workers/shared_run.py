"""One upscaling by several workers, seen from the parent: agrees on tiles, hands out tasks, forwards messages."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

from redline.errors import RedlineError
from redline.upscale.settings import Tiles
from redline.upscale.tasks import Listener, Outcome, Task
from redline.upscale.tiling import Tiling
from redline.upscale.workers.crew import Ask, Crew, Job, ListenerCall, Member, Proposal
from redline.upscale.workers.split_image import Part, Split, split
from redline.upscale.workers.work_queue import WorkQueue

# The number of images that are assembled from their parts at the same time.
_ASSEMBLERS = 2


class SharedRun:
    """One run: call `agree`, then `run`."""

    def __init__(self, crew: Crew, job: Job, listener: Listener) -> None:
        self._crew, self._job, self._listener = crew, job, listener

    def agree(self, plan: str, digest: str) -> Tiles:
        """Waits until all workers are ready; returns the smallest tile sizes and batch size that one of them proposes.

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

        split_task = partial(split, settings=settings, tiling=tiling, scale=scale)
        queue = WorkQueue(tasks, [member.name for member in self._crew.members], split_task)
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
    """Raises RedlineError if the worker would give different pixels, which would go unnoticed."""
    if proposal.plan != plan:
        raise RedlineError(
            f"{member.name} has the plan {proposal.plan} and others have {plan}, which gives different pixels: "
            "choose a --precision that all workers support, or one kind of --device."
        )
    if proposal.digest != digest:
        raise RedlineError(f"{member.name} has different weights: use the same weights file on all machines.")

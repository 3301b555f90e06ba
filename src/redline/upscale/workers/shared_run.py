"""Several workers on one upscaling: they agree on a tile, ask for tasks, and what they say is passed on as one's."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from redline.errors import RedlineError
from redline.upscale.listener import Listener, Outcome
from redline.upscale.tasks import Task
from redline.upscale.tiling import Tiling
from redline.upscale.workers.crew import Crew, Member
from redline.upscale.workers.messages import Agreed, Ask, Heard, Job, Proposal
from redline.upscale.workers.split_image import Part, Split, split
from redline.upscale.workers.work_queue import WorkQueue

# Pictures that are put together from their parts at once.
_ASSEMBLERS = 2


class SharedRun:
    """One run: first `agree`, then `run`."""

    def __init__(self, crew: Crew, job: Job, listener: Listener) -> None:
        self._crew, self._job, self._listener = crew, job, listener

    def agree(self, plan: str, digest: str) -> Agreed:
        """The smallest tiles and batch that any worker proposes, once all of them are ready to work as we would."""
        proposals: dict[Member, Proposal] = {}
        for member in self._crew.members:
            member.send(self._job)
        why = ""
        for member, message in self._crew.messages():
            match message:
                case None:
                    why = member.why_gone()
                    self._listener.say(f"{why}; it never began")
                case Proposal():
                    _check_same(member, message, plan, digest)
                    proposals[member] = message
            if all(member in proposals for member in self._crew.members):
                break
        if not self._crew.members:
            raise RedlineError(f"no worker could begin: {why}.")
        there = [proposals[member] for member in self._crew.members]
        smallest = min(there, key=lambda one: max(width * height for width, height in one.tiles))
        agreed = Agreed(smallest.tiles, min(one.batch for one in there))
        for member in self._crew.members:
            member.send(agreed)
        return agreed

    def run(
        self, tasks: Sequence[Task], tiling: Tiling, scale: int, finished: Callable[[Outcome], None]
    ) -> list[Outcome]:
        settings = self._job.settings
        outcomes: list[Outcome] = []

        def settle(done: Outcome | Split) -> None:
            """In another thread, because it reads or even writes a whole file and workers must not wait for that."""
            outcome = done.assemble(settings.images, scale) if isinstance(done, Split) else done
            outcomes.append(outcome)
            finished(outcome)

        def cut_up(task: Task, count: int) -> Split | None:
            return split(task, count, settings, tiling, scale)

        queue = WorkQueue(tasks, [member.name for member in self._crew.members], cut_up)
        settling: list[Future[None]] = []
        try:
            with ThreadPoolExecutor(_ASSEMBLERS, "assembling") as assembling, ThreadPoolExecutor(1, "noting") as noting:
                try:
                    for done in self._give_out(queue):
                        thread = assembling if isinstance(done, Split) else noting
                        settling.append(thread.submit(settle, done))
                except BaseException:
                    assembling.shutdown(cancel_futures=True)
                    raise
            for future in settling:
                future.result()
        finally:
            queue.discard()
        return outcomes

    def _give_out(self, queue: WorkQueue) -> Iterator[Outcome | Split]:
        """Answers the workers until all is done; gives what is settled."""
        idle: list[Member] = []
        for member, message in self._crew.messages():
            match message:
                case None:
                    why = member.why_gone()
                    member.remove_partial_files()
                    idle = [other for other in idle if other is not member]
                    if member.failure and not self._crew.members:
                        raise RedlineError(member.failure)
                    self._listener.say(f"{why}; " + ("the others go on" if self._crew.members else "no other is left"))
                    yield from queue.lost(member.name, why, its_own_fault=bool(member.failure))
                case Ask(at_once=True):
                    member.give(queue.take(member.name, picture=True))
                case Ask():
                    idle.append(member)
                case Heard("finished", (Outcome() as outcome,)):
                    settled = queue.finished(member.name, outcome)
                    if settled is not None:
                        yield settled
                case Heard("image_progress", (Part() as part, int() | float() as rows, _)):
                    self._listener.image_progress(part.whole, *queue.rows_done(part, rows))
                case Heard("say", (text,)):
                    self._listener.say(f"{member.name}: {text}")
                case Heard(what, arguments):
                    getattr(self._listener, what)(*arguments)
            while idle and (task := queue.take(idle[0].name)) is not None:
                idle.pop(0).give(task)
            if not queue.unfinished:
                return


def _check_same(member: Member, proposal: Proposal, plan: str, digest: str) -> None:
    """A worker of another kind would give other pixels, which nobody would see until two of them are compared."""
    if proposal.plan != plan:
        raise RedlineError(
            f"{member.name} would work under {proposal.plan} and others under {plan}, which gives other pixels: "
            f"choose a --precision that all of them have, or --device for one of them."
        )
    if proposal.digest != digest:
        raise RedlineError(f"{member.name} has other weights: give all of them the same file.")

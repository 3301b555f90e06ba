"""A search for kernels (`max-autotune`) that runs while other plans are set up, and pauses while plans are timed.

A search takes minutes and uses the GPU only now and then. Its processes are stopped by a signal during every
comparison, so they need no cores of their own and cannot change a measurement.
"""

import os
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress

from redline.ladder.measuring.trial import JUDGE_SEEDS, Arm, TrialSpec, close, open_arm
from redline.ladder.measuring.worker_pool import Worker, WorkerFailed, WorkerPool
from redline.ladder.plan import Plan


class BackgroundSearch:
    """At most one search at a time; `take` waits for its end."""

    def __init__(self, pool: WorkerPool, spec: TrialSpec) -> None:
        self._pool, self._spec = pool, spec
        self.plan: Plan | None = None
        self._future: Future[Arm] | None = None
        self._worker: Worker | None = None

    @property
    def is_running(self) -> bool:
        return self._future is not None and not self._future.done()

    def start(self, plan: Plan, timeout_s: float) -> None:
        def started(worker: Worker) -> None:
            self._worker = worker

        self.stop()
        self.plan = plan
        threads = ThreadPoolExecutor(1, "kernel search")
        self._future = threads.submit(open_arm, self._pool, self._spec, plan, JUDGE_SEEDS, timeout_s, started)
        threads.shutdown(wait=False)

    def take(self) -> Arm:
        """Waits for the end of the search, and returns the arm. Raises `WorkerFailed`."""
        assert self._future is not None
        future, self._future, self._worker, self.plan = self._future, None, None, None
        return future.result()

    @contextmanager
    def paused(self) -> Iterator[None]:
        worker = self._worker if self.is_running else None
        if worker is None:
            yield
            return
        self._signal(worker, signal.SIGSTOP)
        try:
            yield
        finally:
            self._signal(worker, signal.SIGCONT)

    def stop(self) -> None:
        """Ends the search; its result is lost."""
        future, worker = self._future, self._worker
        self._future = self._worker = self.plan = None
        if future is None:
            return
        if worker is not None:
            worker.end("the search was ended")
        with suppress(WorkerFailed):
            close(future.result())

    def _signal(self, worker: Worker, number: int) -> None:
        # The worker leads a process group with the compilers that it started.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(worker.pid, number)

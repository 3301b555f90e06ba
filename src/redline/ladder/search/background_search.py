"""Runs the kernel search of `max-autotune` while other plans are set up, and pauses it while plans are timed.

A search takes minutes and uses the GPU only now and then. During every comparison its processes are suspended with
SIGSTOP, so the search needs no cores of its own and cannot change a measurement.
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
    """Runs at most one search at a time; `take` waits until the search has ended."""

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
        """Waits until the search has ended, and returns the plan's running process. Raises `WorkerFailed`."""
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
        """Ends the search and discards its result."""
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

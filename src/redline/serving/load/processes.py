"""Spreads a level over several processes, because one core reads only some ten thousand chunks per second."""

import asyncio
import multiprocessing
import signal
import threading
from collections.abc import Callable, MutableSequence
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from multiprocessing.synchronize import Barrier
from typing import Any

import msgspec

from redline.errors import RedlineError
from redline.serving.load.arrivals import Load
from redline.serving.load.client import Target
from redline.serving.load.outcome import Outcome
from redline.serving.load.prompts import Prompts
from redline.serving.load.run import Extent, Part, Progress, run_level

_REPORT_EVERY_S = 0.5
# The longest time that the processes may take to start and to make their prompts.
_READY_S = 600.0
_decode = msgspec.msgpack.Decoder(list[Outcome]).decode


def run_level_in_processes(
    processes: int,
    target: Target,
    prompts: Prompts,
    load: Load,
    extent: Extent,
    first: int = 0,
    report: Callable[[Progress], None] = lambda _: None,
) -> list[Outcome]:
    """Does what `run_level` does; all processes measure with the same clock and begin at the same time.

    With a rate, each process sends every n-th request; otherwise each has its share of clients and their requests.
    """
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(processes)
    counts = context.Array("q", 3 * processes, lock=False)
    running: list[tuple[SpawnProcess, Connection]] = []
    try:
        for index in range(processes):
            ours, theirs = context.Pipe(duplex=False)
            arguments = (theirs, barrier, counts, target, prompts, load, extent, first, Part(index, processes))
            process = context.Process(target=_run, args=arguments, daemon=True)
            process.start()
            theirs.close()
            running.append((process, ours))
        found = _receive(running, lambda: report(_progress(counts)))
    finally:
        for process, connection in running:
            process.terminate()
            connection.close()
        for process, _ in running:
            process.join()
    return sorted(found, key=lambda outcome: outcome.number)


def _receive(running: list[tuple[SpawnProcess, Connection]], report: Callable[[], None]) -> list[Outcome]:
    outcomes: list[Outcome] = []
    pending = {connection: process for process, connection in running}
    while pending:
        for connection in wait(list(pending), _REPORT_EVERY_S):
            assert isinstance(connection, Connection)
            process = pending.pop(connection)
            try:
                outcomes += _decode(connection.recv_bytes())
            except EOFError as error:
                process.join()
                raise RedlineError(f"a process of the load generator ended with {process.exitcode}.") from error
        report()
    return outcomes


def _progress(counts: Any) -> Progress:
    return Progress(*(sum(counts[place::3]) for place in range(3)))


def _run(
    results: Connection,
    barrier: Barrier,
    counts: MutableSequence[int],
    target: Target,
    prompts: Prompts,
    load: Load,
    extent: Extent,
    first: int,
    part: Part,
) -> None:
    # Ctrl-C reaches all processes of the terminal; the parent ends this one.
    signal.signal(signal.SIGINT, signal.SIG_IGN)

    def report(progress: Progress) -> None:
        place = 3 * part.index
        counts[place : place + 3] = [progress.sent, progress.ended, progress.output_tokens]

    def wait_for_others() -> None:
        # A broken barrier means that another process failed, which the parent reports.
        with suppress(threading.BrokenBarrierError):
            barrier.wait(_READY_S)

    outcomes = asyncio.run(
        run_level(target, prompts, load, extent, first, report, part=part, wait_for_others=wait_for_others)
    )
    results.send_bytes(msgspec.msgpack.encode(outcomes))

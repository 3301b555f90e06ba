"""Times several implementations ("arms") of the same operation on a CUDA device, interleaved, and checks their results.

Each arm is captured as a CUDA graph, so that kernels are timed and not Python; an arm that cannot be captured runs
without a graph, and its row says so. All graphs of a case share one memory pool, because their results are discarded.
The arms take turns. Before each turn the L2 cache is flushed by reading, because flushing by writing would cause
write-backs during the arm's time. An arm with wrong results gets no time, and a row of an arm that fails has the
reason. Rows are JSON lines and are written after every arm and case, so a run that is killed keeps its measurements.
Rates divide the minimum traffic and arithmetic of the operation by the time, whatever the arm really did.
"""

import argparse
import gc
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from redline.files.atomic import write_text
from redline.ladder.search.run_log import command_line
from redline.machine.cuda_graphs import CudaGraphCapturer

Run = Callable[[], tuple[Tensor, ...]]
Rows = list[dict[str, object]]
CUT_OFF = "the run was cut off before it was timed"
# Arms slower than this take part in the first few rounds only.
SLOW_MS, SLOW_ROUNDS = 50.0, 8


@dataclass(frozen=True)
class Case:
    """One operation at one size. `needed_bytes` and `needed_flop` are the minimum traffic and arithmetic.

    `restore` restores inputs that an arm may have overwritten, before every turn and outside its time. `judged`
    converts random results to values that can be compared. Arms in `on_request` take minutes to build, and run only if
    `--with` names them. Arms in `asks_the_host` synchronize, so they are not captured: a failed capture keeps the
    memory of its pool.
    """

    name: str
    sizes: dict[str, object]
    arms: dict[str, Callable[[], Run]]
    expected: Run
    largest_error: float
    needed_bytes: float = 0.0
    needed_flop: float = 0.0
    restore: Callable[[], object] | None = None
    judged: Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]] | None = None
    on_request: tuple[str, ...] = ()
    asks_the_host: tuple[str, ...] = ()


def main(op: str, cases: Callable[[], Iterable[Case]], sweep: Callable[[], Iterable[Case]] | None = None) -> int:
    """Runs the command line of a benchmark: times the cases one after the other and writes rows after each arm.

    `sweep` returns the cases for `--sweep`, whose arms are tiles of the kernels.
    """
    parser = argparse.ArgumentParser(description=f"Times {op} against its peers on a CUDA device.")
    parser.add_argument("--out", type=Path, required=True, help="file for the rows, as JSON lines")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--limit-s", type=float, default=math.inf, help="start no further arm after this many seconds")
    parser.add_argument("--only", help="run only cases whose printed title contains this")
    parser.add_argument("--without", metavar="ARM", action="append", default=[], help="skip this arm; repeatable")
    parser.add_argument(
        "--with",
        metavar="ARM",
        action="append",
        default=[],
        dest="asked",
        help="run this arm, which is slow to build; repeatable",
    )
    parser.add_argument(
        "--compilers", type=int, default=1, help="number of processes that compile kernels before the timing"
    )
    parser.add_argument("--compile-share", metavar="I/N", help=argparse.SUPPRESS)
    if sweep is not None:
        parser.add_argument("--sweep", action="store_true", help="time tiles of the Triton kernels instead")
    arguments = parser.parse_args()
    if sweep is not None and arguments.sweep:
        cases = sweep
    if not torch.cuda.is_available():
        print(f"The benchmark of {op} needs a CUDA device.", file=sys.stderr)
        return 2
    begun = time.perf_counter()
    if arguments.compilers > 1 and not arguments.compile_share:
        compile_beforehand(arguments.compilers)
    import triton

    about: dict[str, Any] = {
        "op": op,
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }
    about["copy_tb_per_s"] = 0.0 if arguments.compile_share else copy_rate()
    about["command"] = command_line(sys.argv)
    rows: Rows = []

    def is_late() -> bool:
        return time.perf_counter() - begun > arguments.limit_s

    for case in cases():
        if arguments.only and arguments.only not in title(case):
            del case
            continue
        torch.compiler.reset()  # resets its limit on recompilations of one function
        case = with_arms(case, arguments.without, arguments.asked)
        if arguments.compile_share:
            run_share(case, *map(int, arguments.compile_share.split("/")))
            continue
        measured = measure(
            case,
            arguments.rounds,
            is_late,
            keep=lambda so_far: write_rows(arguments.out, [*rows, *(about | row for row in so_far)]),
        )
        rows.extend(about | row for row in measured)
        write_rows(arguments.out, rows)
        show(case, measured)
        # Frees the tensors of this case before the next one is created.
        del case
        free()
    return 0


def write_rows(out: Path, rows: Rows) -> None:
    """Writes all rows so far. Rows without a time get a failure, in case the run is killed."""
    said = [row if "median_ms" in row or "failure" in row else {**row, "failure": CUT_OFF} for row in rows]
    write_text(out, "".join(json.dumps(row) + "\n" for row in said))


def compile_beforehand(processes: int) -> None:
    """Runs every arm once in several processes, which fills the kernel caches for this one."""
    command = [sys.executable, *sys.argv]
    shares = [subprocess.Popen([*command, "--compile-share", f"{i}/{processes}"]) for i in range(processes)]
    for share in shares:
        share.wait()


def run_share(case: Case, index: int, count: int) -> None:
    """Runs one of `count` equal parts of the arms and ignores failures, which the timing run reports."""
    for build in list(case.arms.values())[index::count]:
        with suppress(Exception):
            build()()
    torch.cuda.synchronize()


def with_arms(case: Case, without: Iterable[str], asked: Iterable[str]) -> Case:
    """Returns the case without the arms in `without`, and without on-request arms that are not in `asked`."""
    unwanted = {*without, *(name for name in case.on_request if name not in asked)}
    return replace(case, arms={name: build for name, build in case.arms.items() if name not in unwanted})


def free() -> None:
    """Frees unreferenced memory. Reference cycles of autograd need the garbage collector."""
    gc.collect()
    torch.cuda.empty_cache()


def copy_rate() -> float:
    """Returns the TB/s that a copy reads and writes, the ceiling of memory-bound operations."""
    source = torch.randn(2**28, device="cuda")
    target = torch.empty_like(source)
    samples = race({"copy": lambda: target.copy_(source)}, 20)["copy"]
    return 2 * source.nbytes / statistics.median(samples) / 1e9


def worst_error(found: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> float:
    errors = [
        ((one.float() - other.float()).norm() / other.float().norm()).item()
        for one, other in zip(found, expected, strict=True)
    ]
    return max(errors) if all(error == error for error in errors) else float("nan")


class Graphs:
    """Captures runs into one memory pool. Their results are discarded."""

    def __init__(self) -> None:
        self._capturer: CudaGraphCapturer | None = None
        # Keeps tensors alive that only the run references and a replay reads.
        self._captured: list[Run] = []

    def captured(self, run: Run) -> Callable[[], object]:
        # A pool in which a capture failed cannot be used again, so the next capture gets a new one.
        capturer = self._capturer or CudaGraphCapturer(torch.device("cuda", torch.cuda.current_device()))
        self._capturer = None
        for _ in range(3):
            capturer.warm_up(run)
        _, replay = capturer.capture(run)
        self._capturer = capturer
        self._captured.append(run)
        return replay


def forward(function: Callable[..., Tensor | tuple[Tensor, ...]], inputs: tuple[Tensor, ...]) -> Run:
    """Returns a run of the function without gradients."""

    def run() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return _tuple(function(*inputs))

    return run


def both(
    function: Callable[..., Tensor | tuple[Tensor, ...]], inputs: tuple[Tensor, ...], grads: tuple[Tensor, ...]
) -> Run:
    """Returns a run of the function and of the gradients of its inputs, given the gradients of its outputs."""
    trained = [tensor for tensor in inputs if tensor.requires_grad]

    def run() -> tuple[Tensor, ...]:
        outputs = _tuple(function(*inputs))
        gradients = torch.autograd.grad(outputs, trained, grads)
        return (*(tensor.detach() for tensor in outputs), *gradients)

    return run


def kept(*tensors: Tensor) -> Callable[[], None]:
    """Returns a function that restores the present values of these tensors."""
    values = [tensor.detach().clone() for tensor in tensors]

    def restore() -> None:
        for tensor, value in zip(tensors, values, strict=True):
            tensor.detach().copy_(value)

    return restore


def with_values(owner: object, values: dict[str, object], run: Run) -> Run:
    """Returns the run with other values of attributes of a module, such as its tiles."""

    @contextmanager
    def changed() -> Iterator[None]:
        before = {name: getattr(owner, name) for name in values}
        for name, value in values.items():
            setattr(owner, name, value)
        try:
            yield
        finally:
            for name, value in before.items():
                setattr(owner, name, value)

    def call() -> tuple[Tensor, ...]:
        with changed():
            return run()

    return call


def _tuple(outputs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return (outputs,) if isinstance(outputs, Tensor) else tuple(outputs)


class ArmFailed(Exception):
    """Raised if an arm that ran alone fails next to the others, mostly for lack of memory."""

    def __init__(self, name: str, failure: Exception) -> None:
        super().__init__(f"beside the others: {type(failure).__name__}: {failure}"[:500])
        self.name = name


def race(
    runs: dict[str, Callable[[], object]], rounds: int, restore: Callable[[], object] = lambda: None
) -> dict[str, list[float]]:
    """Returns the milliseconds of each turn. All arms take part in every round, slow ones only in the first few."""
    cache = torch.zeros(2**26, device="cuda")
    events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in runs}
    turns = dict.fromkeys(runs, rounds)
    for warm in (True, False):
        for turn in range(3 if warm else rounds):
            for name, run in runs.items():
                if not warm and turn >= turns[name]:
                    continue
                begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                restore()
                cache.sum()
                begin.record()
                try:
                    run()
                except Exception as failure:
                    raise ArmFailed(name, failure) from failure
                end.record()
                if not warm:
                    events[name].append((begin, end))
                elif turn == 2:
                    end.synchronize()
                    turns[name] = rounds if begin.elapsed_time(end) < SLOW_MS else min(rounds, SLOW_ROUNDS)
        torch.cuda.synchronize()
    return {name: [begin.elapsed_time(end) for begin, end in pairs] for name, pairs in events.items()}


def measure(
    case: Case,
    rounds: int,
    is_late: Callable[[], bool] = lambda: False,
    keep: Callable[[Rows], None] = lambda rows: None,
) -> Rows:
    """Returns a row per arm, with a failure instead of a time if it fails or is wrong. Calls `keep` after each arm."""
    judged = case.judged or (lambda results: results)
    restore = case.restore or (lambda: None)
    expected = judged(case.expected())
    rows: dict[str, dict[str, object]] = {}
    runs: dict[str, Callable[[], object]] = {}
    graphs = Graphs()
    for name, build in case.arms.items():
        rows[name] = {"case": case.name, **case.sizes, "arm": name}
        if is_late():
            rows[name]["failure"] = "left out: the time of --limit-s was over"
            continue
        try:
            run = build()
            restore()
            run()
            restore()
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            found = run()
            torch.cuda.synchronize()
            rows[name]["peak_bytes"] = torch.cuda.max_memory_allocated() - before
            error = rows[name]["relative_error"] = worst_error(judged(found), expected)
            del found
            if not error <= case.largest_error:
                raise ArithmeticError(f"off by {error:.3g}")
            runs[name], rows[name]["captured"] = run, False
            if name not in case.asks_the_host:
                try:
                    runs[name], rows[name]["captured"] = graphs.captured(run), True
                except Exception:  # noqa: BLE001
                    torch.cuda.synchronize()
        except Exception as failure:  # noqa: BLE001
            rows[name]["failure"] = f"{type(failure).__name__}: {failure}"[:500]
            torch.cuda.synchronize()
        restore()
        free()
        keep(list(rows.values()))
    del expected
    for name, samples in race_and_drop_failures(runs, rounds, restore, rows).items():
        deciles, median = statistics.quantiles(samples, n=10), statistics.median(samples)
        rows[name] |= {"median_ms": median, "p20_ms": deciles[1], "p80_ms": deciles[7], "samples": len(samples)}
        if case.needed_bytes:
            rows[name]["tb_per_s"] = case.needed_bytes / median / 1e9
        if case.needed_flop:
            rows[name]["tflop_per_s"] = case.needed_flop / median / 1e9
    return list(rows.values())


def race_and_drop_failures(
    runs: dict[str, Callable[[], object]],
    rounds: int,
    restore: Callable[[], object],
    rows: dict[str, dict[str, object]],
) -> dict[str, list[float]]:
    """Times the arms, and drops those that fail, whose failure is added to their rows."""
    while True:
        try:
            return race(runs, rounds, restore)
        except ArmFailed as failure:
            rows[failure.name]["failure"] = str(failure)
            del runs[failure.name]
        free()


def title(case: Case) -> str:
    return f"{case.name}: {', '.join(f'{name} {value}' for name, value in case.sizes.items())}"


def show(case: Case, rows: list[dict[str, object]]) -> None:
    print(f"\n{title(case)}")
    for row in sorted(rows, key=lambda row: float(str(row.get("median_ms", "inf")))):
        if "failure" in row:
            print(f"  {row['arm']}: {row['failure']}")
            continue
        said = [f"{row['median_ms']:.4f} ms ({row['p20_ms']:.4f} to {row['p80_ms']:.4f})"]
        said += [f"{row[key]:.3g} {unit}" for key, unit in RATES.items() if key in row]
        said += [f"{float(str(row['peak_bytes'])) / 2**30:.2f} GiB", f"error {row['relative_error']:.1e}"]
        print(f"  {row['arm']}: {', '.join(said)}{'' if row['captured'] else ', not captured'}")
    sys.stdout.flush()


RATES = {"tb_per_s": "TB/s", "tflop_per_s": "TFLOP/s"}

"""Times the training step of the small DRCT on a CUDA device, by compilation and by window attention.

    python benchmarks/drct_training.py --out rows.jsonl [--profile] [--only triton] [--batch 32]

A step is one iteration of the training loop: crops, forward, loss, backward, clipping, optimizer, EMA. Photos are
generated. Every arm (`drct_training_arms.py`) runs in its own process; all arms compile at the same time and are then
timed in turns while the others are idle. The gradients of each arm are compared with those of the first arm. An arm
with wrong gradients, or one that fails or is not ready in time, is not timed, and its row contains the reason. Rows are
JSON lines:

- `ms_per_step`: the time of consecutive steps, until the device has finished the last one;
- `cpu_ms_per_step`: the time to launch all kernels of one step on an idle device. If it is close to `ms_per_step`, the
  host is the bottleneck.
"""

import argparse
import json
import math
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
import torch
from drct_training_arms import ARMS, KERNELS_SHOWN, Arm, Bench, Steps
from PIL import Image

from redline.files.atomic import write_text

# The largest relative error of the gradient norms of a kind of weight, in bf16.
LARGEST_ERROR = 0.08
LARGEST_ERROR_OF_LOSS = 0.01


class LocalArm:
    """An arm in this process."""

    def __init__(self, arm: Arm, bench: Bench, folder: Path) -> None:
        self.steps = Steps(arm, bench, folder)

    def call(self, method: str, *arguments: Any) -> dict[str, Any]:
        return getattr(self.steps, method)(*arguments)

    def close(self) -> None:
        pass


class ArmProcess:
    """An arm in its own process, which handles one request at a time."""

    def __init__(self, arm: Arm, bench: Bench, folder: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, arm, bench, folder), daemon=True)
        self._process.start()
        theirs.close()

    def send(self, method: str, *arguments: Any) -> None:
        self.connection.send((method, arguments))

    def receive(self) -> dict[str, Any]:
        reply = self.connection.recv()
        if isinstance(reply, str):
            raise RuntimeError(reply)
        return reply

    def call(self, method: str, *arguments: Any) -> dict[str, Any]:
        self.send(method, *arguments)
        return self.receive()

    def close(self) -> None:
        """Kills the process and the compilers that it may have started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid or 0, signal.SIGKILL)
        self._process.kill()  # in case it does not lead a process group yet
        self._process.join(5)


def serve(connection: Connection, arm: Arm, bench: Bench, folder: Path) -> None:
    os.setsid()
    try:
        steps = Steps(arm, bench, folder)
        while True:
            method, arguments = connection.recv()
            connection.send(getattr(steps, method)(*arguments))
    except EOFError:
        return
    except Exception as failure:  # noqa: BLE001 (reported in the arm's row)
        connection.send(describe(failure))


def describe(failure: Exception) -> str:
    if type(failure) is RuntimeError and ": " in str(failure)[:60]:
        return str(failure)[:500]  # already described by another process
    return f"{type(failure).__name__}: {failure}"[:500]


def prepare_processes(arms: dict[str, Arm], bench: Bench, folder: Path, limit_s: float) -> dict[str, Any]:
    """Prepares all arms in parallel; returns each with its result, or the reason of its failure."""
    # Divides the cores among the arms; by default each arm starts as many compilers as there are cores.
    compiling = sum(arm.compiled != "eager" for arm in arms.values())
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(4, (os.cpu_count() or 1) // max(compiling, 1))))
    members = {name: ArmProcess(arm, bench, folder / str(index)) for index, (name, arm) in enumerate(arms.items())}
    for member in members.values():
        member.send("prepare")
    names: dict[Any, str] = {member.connection: name for name, member in members.items()}
    deadline, ready = time.monotonic() + limit_s, dict[str, Any]()
    while names and (left := deadline - time.monotonic()) > 0:
        for connection in wait(list(names), left):
            name = names.pop(connection)
            try:
                ready[name] = (members[name], members[name].receive())
            except (RuntimeError, EOFError, OSError) as failure:
                ready[name] = describe(failure)
                members[name].close()
    for name in names.values():
        ready[name] = f"not ready after {limit_s:.0f} s"
        members[name].close()
    return ready


def prepare_locally(arms: dict[str, Arm], bench: Bench, folder: Path) -> dict[str, Any]:
    ready: dict[str, Any] = {}
    for index, (name, arm) in enumerate(arms.items()):
        try:
            member = LocalArm(arm, bench, folder / str(index))
            ready[name] = (member, member.call("prepare"))
        except Exception as failure:  # noqa: BLE001
            ready[name] = describe(failure)
    return ready


def relative_error(seen: dict[str, Any], expected: dict[str, Any]) -> float:
    """Returns the relative error of the gradient norms for the worst kind of weight; raises if it is too large."""
    kinds: dict[str, list[tuple[float, float]]] = {}
    for name, theirs in expected["gradient_norms"].items():
        kind = name.removesuffix(".weight").rpartition(".")[2] if name.endswith("weight") else name.rpartition(".")[2]
        kinds.setdefault(kind, []).append((seen["gradient_norms"].get(name, math.inf), theirs))
    error = max(
        math.hypot(*(ours - theirs for ours, theirs in pairs)) / math.hypot(*(theirs for _, theirs in pairs))
        for pairs in kinds.values()
    )
    if not (error <= LARGEST_ERROR and abs(seen["loss"] / expected["loss"] - 1) <= LARGEST_ERROR_OF_LOSS):
        raise ArithmeticError(f"off by {error:.3g} in its gradients, with a loss of {seen['loss']:.5g}")
    return error


def measure(arms: dict[str, Arm], bench: Bench, rounds: int, limit_s: float, profile: bool) -> list[dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {name: {"arm": name, **asdict(arm)} for name, arm in arms.items()}
    with tempfile.TemporaryDirectory(prefix="redline-bench-") as temporary:
        folder = Path(temporary)
        if bench.processes:
            prepared = prepare_processes(arms, bench, folder, limit_s)
        else:
            prepared = prepare_locally(arms, bench, folder)
        try:
            _time(rows, prepared, bench, rounds, profile)
        finally:
            for found in prepared.values():
                if not isinstance(found, str):
                    found[0].close()
    return list(rows.values())


def _time(rows: dict[str, dict[str, Any]], prepared: dict[str, Any], bench: Bench, rounds: int, profile: bool) -> None:
    first = prepared[ARMS[0].name]
    ready: dict[str, Any] = {}
    for name, found in prepared.items():
        try:
            if isinstance(found, str):
                raise RuntimeError(found)
            if isinstance(first, str):
                raise RuntimeError("the first arm, the reference for all others, failed")
            member, seen = found
            rows[name] |= {"relative_error": relative_error(seen, first[1]), "setup_s": round(seen["setup_s"], 2)}
            ready[name] = member
        except Exception as failure:  # noqa: BLE001
            rows[name]["failure"] = str(failure) if type(failure) is RuntimeError else describe(failure)
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in ready}

    def each(do: Callable[[str, Any], None]) -> None:
        for name, member in list(ready.items()):
            try:
                do(name, member)
            except Exception as failure:  # noqa: BLE001
                rows[name]["failure"] = describe(failure)
                del ready[name]

    for _ in range(rounds):
        each(lambda name, member: samples[name].append(member.call("sample")))
    each(lambda name, member: rows[name].update(member.call("finish", profile)))
    for name in ready:
        ms = statistics.median(one["ms"] for one in samples[name])
        rows[name] |= {
            "ms_per_step": round(ms, 3),
            "ms_per_step_samples": [round(one["ms"], 4) for one in samples[name]],
            "cpu_ms_per_step": round(statistics.median(one["cpu_ms"] for one in samples[name]), 3),
            "images_per_s": round(1e3 * bench.batch / ms, 1),
        }


def make_photos(folder: Path, count: int, width: int, height: int) -> None:
    """Writes images of noise at several scales, with a spectrum like that of photos."""
    folder.mkdir(parents=True)
    for index in range(count):
        rng = np.random.default_rng(index)
        total = np.zeros((height, width, 3), np.float32)
        for cells in (4, 16, 64):
            coarse = Image.fromarray(rng.integers(0, 256, (cells, cells, 3), dtype=np.uint8))
            total += np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), np.float32) / 3
        Image.fromarray(total.astype(np.uint8)).save(folder / f"{index}.png", compress_level=1)


def format_row(row: dict[str, Any]) -> str:
    if "failure" in row:
        return f"{row['arm']}: {row['failure']}"
    lines = [
        f"{row['arm']}: {row['ms_per_step']:.2f} ms a step, {row['images_per_s']:,.0f} images/s, host "
        f"{row['cpu_ms_per_step']:.2f} ms, {row['peak_bytes'] / 2**30:.2f} GiB, ready in {row['setup_s']:.0f} s"
    ]
    if "kernels" in row:
        lines.append(f"  {row['kernels_per_step']:.0f} kernels, busy {row['busy_ms_per_step']:.2f} ms a step")
        lines += [f"  {one['ms']:8.3f} ms  {one['count']:6.1f} ×  {one['name']}" for one in row["kernels"]]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description="Times the training step of the small DRCT.")
    parser.add_argument("--out", type=Path, required=True, help="file for the rows, as JSON lines")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=10, help="steps per sample")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds until an arm must be ready")
    parser.add_argument("--only", help="run only arms whose name contains this, and the first arm")
    parser.add_argument("--profile", action="store_true", help=f"list the {KERNELS_SHOWN} largest kernels of each arm")
    parser.add_argument("--tiny", action="store_true", help="run a tiny model on the CPU, as a smoke test")
    parser.add_argument("--processes", action="store_true", help="with --tiny, run each arm in its own process, too")
    arguments = parser.parse_args()
    if not arguments.tiny and not torch.cuda.is_available():
        print("this benchmark needs a CUDA device (or --tiny).", file=sys.stderr)
        return 2
    chosen = [arm for index, arm in enumerate(ARMS) if not index or not arguments.only or arguments.only in arm.name]
    batch = 2 if arguments.tiny else arguments.batch
    gpu = "none" if arguments.tiny else torch.cuda.get_device_name()
    with tempfile.TemporaryDirectory(prefix="redline-photos-") as photos:
        make_photos(Path(photos) / "photos", 4, *((48, 40) if arguments.tiny else (1024, 768)))
        processes = arguments.processes or not arguments.tiny
        bench = Bench(str(Path(photos) / "photos"), batch, arguments.steps, arguments.tiny, processes)
        arms = {arm.name: arm for arm in chosen}
        measured = measure(arms, bench, arguments.rounds, arguments.limit, arguments.profile)
    about = {"gpu": gpu, "torch": torch.__version__, "batch": batch, "crop_px": bench.training.data.crop_px}
    rows = [about | row for row in measured]
    write_text(arguments.out, "".join(json.dumps(row) + "\n" for row in rows))
    for row in sorted(rows, key=lambda row: row.get("ms_per_step", float("inf"))):
        print(format_row(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

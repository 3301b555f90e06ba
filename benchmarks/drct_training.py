"""Times the training step of the small DRCT on a CUDA device, by compilation and by window attention.

    python benchmarks/drct_training.py --out rows.jsonl [--profile] [--only triton] [--batch 32]

The step is the training loop's own: crops, forward, loss, backward, clipping, optimizer, average. Photos are made on
the spot. Every arm has a process of its own; all of them compile at the same time, and then they are timed turn by turn
while the others rest. An arm's gradients are held against the plain one's, and one that is off gets no time; neither
does one that fails or is not ready in time, and its row says why. Rows are JSON lines:

- `ms_per_step`: steps begun one after another, from the first until the device is done with the last;
- `cpu_ms_per_step`: of one step on an idle device, until its last kernel is launched. Where it is near `ms_per_step`,
  the host is what is waited for.
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
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import nn

from redline.files.atomic import write_text
from redline.models.drct import Drct
from redline.nn import SwitchableModule
from redline.training.bundled import CONFIGS
from redline.training.checkpoints import Checkpoints, Position, State
from redline.training.ema import Ema
from redline.training.loop import _Loop
from redline.training.super_resolution import DrctTask, DrctTraining

KERNELS_SHOWN = 25
# Of the norms of any kind of weight's gradients, in bf16.
LARGEST_ERROR = 0.08
LARGEST_ERROR_OF_LOSS = 0.01


@dataclass(frozen=True)
class Arm:
    """What is compiled (nothing, each group, the whole model), how, and who computes attention."""

    compiled: str
    attention: str
    mode: str | None = None
    options: tuple[tuple[str, bool], ...] = ()
    cudnn_benchmark: bool = False
    recorded: bool = False

    @property
    def name(self) -> str:
        added = [self.mode, *(name for name, _ in self.options), "cudnn.benchmark" if self.cudnn_benchmark else None]
        added.append("recorded" if self.recorded else None)
        return ", ".join([self.compiled, self.attention, *(word for word in added if word)])


# The first is what the others are held against.
ARMS = (
    Arm("eager", "reference"),
    Arm("eager", "sdpa"),
    Arm("eager", "triton"),
    Arm("eager", "triton", recorded=True),
    Arm("groups", "sdpa"),
    Arm("groups", "triton"),
    Arm("groups", "triton", recorded=True),
    Arm("groups", "triton", cudnn_benchmark=True, recorded=True),
    Arm("whole", "triton", recorded=True),
)


@dataclass(frozen=True)
class Bench:
    photos: str
    batch: int
    steps: int
    tiny: bool
    apart: bool

    @property
    def device(self) -> torch.device:
        return torch.device("cpu" if self.tiny else "cuda")

    @property
    def training(self) -> DrctTraining:
        read = DrctTraining.read(CONFIGS / "drct-small-x4.toml", photos=self.photos, steps=10**6)
        data, loop = replace(read.data, shrink=(1,), batch=self.batch), replace(read.loop, compile=False)
        if not self.tiny:
            return replace(read, data=data, loop=loop)
        model = replace(read.model, scale=2, groups=1, width=8, growth=4, features=6, window=4)
        return DrctTraining(model, replace(data, crop_px=8), replace(loop, precision="fp32"))


class Steps:
    """One arm's training, ready to take steps."""

    def __init__(self, arm: Arm, bench: Bench, folder: Path) -> None:
        self.arm, self.bench, self.device = arm, bench, bench.device
        training = bench.training
        training = replace(training, loop=replace(training.loop, cuda_graph=arm.recorded))
        torch.backends.cudnn.benchmark = arm.cudnn_benchmark
        task = DrctTask(training, self.device)
        assert isinstance(task.model, Drct)
        stir(task.model)
        for module in task.model.modules():
            if isinstance(module, SwitchableModule):
                module.implementation = arm.attention
        options: dict[str, Any] = {"mode": arm.mode} if arm.mode else {"options": dict(arm.options) or None}
        for module in {"eager": [], "groups": task.model.layers, "whole": [task.model]}[arm.compiled]:
            module.compile(**options)
        self.task = task
        ema = Ema(task.model, training.loop.ema_decay)
        state = State(task.model, ema, task.optimizer(), task.arithmetic, task.identity)
        checkpoints = Checkpoints(folder / "checkpoints")
        self._loop = _Loop(
            task, training.loop, state, checkpoints, self.device, lambda _: None, time.monotonic, Position(), None
        )

    def prepare(self) -> dict[str, Any]:
        """Compiles, and gives what an arm is judged by: its loss, and the norm of every weight's gradient."""
        begun = time.perf_counter()
        loss = self.task.loss(0)
        loss.backward()
        named = {name: weight.grad for name, weight in self.task.model.named_parameters() if weight.grad is not None}
        norms = dict(zip(named, torch.stack(torch._foreach_norm(list(named.values()))).tolist(), strict=True))
        self.task.model.zero_grad(set_to_none=True)
        for _ in range(3):
            self._loop._one_step()
        self.wait()
        seen = {"loss": loss.item(), "gradient_norms": norms, "setup_s": time.perf_counter() - begun}
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        return seen

    def sample(self) -> dict[str, float]:
        """Milliseconds a step, and what the host needs for one."""
        self.wait()
        begun = time.perf_counter()
        self._loop._one_step()
        launched = time.perf_counter()
        self.wait()
        again = time.perf_counter()
        for _ in range(self.bench.steps):
            self._loop._one_step()
        self.wait()
        done = time.perf_counter()
        return {"ms": 1e3 * (done - again) / self.bench.steps, "cpu_ms": 1e3 * (launched - begun)}

    def finish(self, profile: bool) -> dict[str, Any]:
        peak = torch.cuda.max_memory_allocated() if self.device.type == "cuda" else 0
        return {"peak_bytes": peak, **(self.profile() if profile else {})}

    def profile(self) -> dict[str, Any]:
        """What the device (in the tiny one, the host) spends a step on, the largest first."""
        from torch.autograd import DeviceType
        from torch.profiler import ProfilerActivity, profile

        on_gpu = self.device.type == "cuda"
        activities = [ProfilerActivity.CUDA if on_gpu else ProfilerActivity.CPU]
        with profile(activities=activities) as seen:
            for _ in range(self.bench.steps):
                self._loop._one_step()
            self.wait()
        rows = []
        for event in seen.key_averages():
            total_us = event.self_device_time_total if on_gpu else event.self_cpu_time_total
            kind = DeviceType.CUDA if on_gpu else DeviceType.CPU
            if total_us > 0 and event.device_type == kind and not (on_gpu and event.is_user_annotation):
                rows.append((total_us / 1e3 / self.bench.steps, event.count / self.bench.steps, event.key))
        rows.sort(reverse=True)
        kernels = [{"ms": round(ms, 4), "count": count, "name": name[:160]} for ms, count, name in rows[:KERNELS_SHOWN]]
        return {
            "kernels": kernels,
            "kernels_per_step": round(sum(count for _, count, _ in rows), 1),
            "busy_ms_per_step": round(sum(ms for ms, _, _ in rows), 3),
        }

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()


@torch.no_grad()
def stir(model: nn.Module) -> None:
    """As a training starts, nothing of the body reaches the output, and no mistake in it would show."""
    random = torch.Generator().manual_seed(1)
    for weight in model.parameters():
        weight += 0.1 * torch.randn(weight.shape, generator=random).to(weight.device)


class Here:
    """An arm in this process."""

    def __init__(self, arm: Arm, bench: Bench, folder: Path) -> None:
        self.steps = Steps(arm, bench, folder)

    def ask(self, what: str, *arguments: Any) -> dict[str, Any]:
        return getattr(self.steps, what)(*arguments)

    def close(self) -> None:
        pass


class Apart:
    """An arm in a process of its own, which answers one question at a time."""

    def __init__(self, arm: Arm, bench: Bench, folder: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.line, theirs = context.Pipe()
        self._process = context.Process(target=answer, args=(theirs, arm, bench, folder), daemon=True)
        self._process.start()
        theirs.close()

    def tell(self, what: str, *arguments: Any) -> None:
        self.line.send((what, arguments))

    def heard(self) -> dict[str, Any]:
        seen = self.line.recv()
        if isinstance(seen, str):
            raise RuntimeError(seen)
        return seen

    def ask(self, what: str, *arguments: Any) -> dict[str, Any]:
        self.tell(what, *arguments)
        return self.heard()

    def close(self) -> None:
        """With the compilers that it may have started."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid or 0, signal.SIGKILL)
        self._process.kill()  # in case it has not come so far as to lead a group
        self._process.join(5)


def answer(line: Connection, arm: Arm, bench: Bench, folder: Path) -> None:
    os.setsid()
    try:
        steps = Steps(arm, bench, folder)
        while True:
            what, arguments = line.recv()
            line.send(getattr(steps, what)(*arguments))
    except EOFError:
        return
    except Exception as failure:  # noqa: BLE001 (an arm that fails is a row that says so)
        line.send(sentence(failure))


def sentence(failure: Exception) -> str:
    if type(failure) is RuntimeError and ": " in str(failure)[:60]:
        return str(failure)[:500]  # as another process put it
    return f"{type(failure).__name__}: {failure}"[:500]


def prepare_apart(arms: dict[str, Arm], bench: Bench, folder: Path, limit_s: float) -> dict[str, Any]:
    """All at once; what each has to say for itself, or why it has nothing."""
    # Each of them would start as many compilers as there are cores.
    compiling = sum(arm.compiled != "eager" for arm in arms.values())
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(max(4, (os.cpu_count() or 1) // max(compiling, 1))))
    members = {name: Apart(arm, bench, folder / str(index)) for index, (name, arm) in enumerate(arms.items())}
    for member in members.values():
        member.tell("prepare")
    by_line = {member.line: name for name, member in members.items()}
    until, ready = time.monotonic() + limit_s, dict[str, Any]()
    while by_line and (left := until - time.monotonic()) > 0:
        for line in wait(list(by_line), left):
            name = by_line.pop(line)  # pyright: ignore[reportArgumentType]
            try:
                ready[name] = (members[name], members[name].heard())
            except (RuntimeError, EOFError, OSError) as failure:
                ready[name] = sentence(failure)
                members[name].close()
    for name in by_line.values():
        ready[name] = f"not ready after {limit_s:.0f} s"
        members[name].close()
    return ready


def prepare_here(arms: dict[str, Arm], bench: Bench, folder: Path) -> dict[str, Any]:
    ready: dict[str, Any] = {}
    for index, (name, arm) in enumerate(arms.items()):
        try:
            member = Here(arm, bench, folder / str(index))
            ready[name] = (member, member.ask("prepare"))
        except Exception as failure:  # noqa: BLE001
            ready[name] = sentence(failure)
    return ready


def judge(seen: dict[str, Any], expected: dict[str, Any]) -> float:
    """How far the gradients' norms are from the plain arm's: of the worst kind of weight, for none to hide another."""
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
        prepared = prepare_apart(arms, bench, folder, limit_s) if bench.apart else prepare_here(arms, bench, folder)
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
                raise RuntimeError("the plain arm, which others are held against, failed")
            member, seen = found
            rows[name] |= {"relative_error": judge(seen, first[1]), "setup_s": round(seen["setup_s"], 2)}
            ready[name] = member
        except Exception as failure:  # noqa: BLE001
            rows[name]["failure"] = str(failure) if type(failure) is RuntimeError else sentence(failure)
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in ready}

    def each(do: Callable[[str, Any], None]) -> None:
        for name, member in list(ready.items()):
            try:
                do(name, member)
            except Exception as failure:  # noqa: BLE001
                rows[name]["failure"] = sentence(failure)
                del ready[name]

    for _ in range(rounds):
        each(lambda name, member: samples[name].append(member.ask("sample")))
    each(lambda name, member: rows[name].update(member.ask("finish", profile)))
    for name in ready:
        ms = statistics.median(one["ms"] for one in samples[name])
        rows[name] |= {
            "ms_per_step": round(ms, 3),
            "ms_per_step_samples": [round(one["ms"], 4) for one in samples[name]],
            "cpu_ms_per_step": round(statistics.median(one["cpu_ms"] for one in samples[name]), 3),
            "pictures_per_s": round(1e3 * bench.batch / ms, 1),
        }


def make_photos(folder: Path, count: int, width: int, height: int) -> None:
    """Coarse noise under finer and finer, as photos have."""
    folder.mkdir(parents=True)
    for index in range(count):
        rng = np.random.default_rng(index)
        total = np.zeros((height, width, 3), np.float32)
        for cells in (4, 16, 64):
            coarse = Image.fromarray(rng.integers(0, 256, (cells, cells, 3), dtype=np.uint8))
            total += np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), np.float32) / 3
        Image.fromarray(total.astype(np.uint8)).save(folder / f"{index}.png", compress_level=1)


def say(row: dict[str, Any]) -> str:
    if "failure" in row:
        return f"{row['arm']}: {row['failure']}"
    lines = [
        f"{row['arm']}: {row['ms_per_step']:.2f} ms a step, {row['pictures_per_s']:,.0f} pictures/s, host "
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
    parser.add_argument("--steps", type=int, default=10, help="of one sample")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds until an arm must be ready")
    parser.add_argument("--only", help="arms whose name holds this, beside the plain one")
    parser.add_argument("--profile", action="store_true", help=f"also the {KERNELS_SHOWN} largest kernels of each arm")
    parser.add_argument("--tiny", action="store_true", help="a toy on the CPU, to see that everything runs")
    parser.add_argument("--processes", action="store_true", help="a process for each arm in the tiny one, too")
    arguments = parser.parse_args()
    if not arguments.tiny and not torch.cuda.is_available():
        print("the benchmark of training needs a CUDA device (or --tiny).", file=sys.stderr)
        return 2
    chosen = [arm for index, arm in enumerate(ARMS) if not index or not arguments.only or arguments.only in arm.name]
    batch = 2 if arguments.tiny else arguments.batch
    gpu = "none" if arguments.tiny else torch.cuda.get_device_name()
    with tempfile.TemporaryDirectory(prefix="redline-photos-") as photos:
        make_photos(Path(photos) / "photos", 4, *((48, 40) if arguments.tiny else (1024, 768)))
        apart = arguments.processes or not arguments.tiny
        bench = Bench(str(Path(photos) / "photos"), batch, arguments.steps, arguments.tiny, apart)
        arms = {arm.name: arm for arm in chosen}
        measured = measure(arms, bench, arguments.rounds, arguments.limit, arguments.profile)
    about = {"gpu": gpu, "torch": torch.__version__, "batch": batch, "crop_px": bench.training.data.crop_px}
    rows = [about | row for row in measured]
    write_text(arguments.out, "".join(json.dumps(row) + "\n" for row in rows))
    for row in sorted(rows, key=lambda row: row.get("ms_per_step", float("inf"))):
        print(say(row), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The arms of drct_training.py: configurations of the small DRCT's training step, and the steps themselves."""

import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from redline.models.drct import Drct
from redline.nn import SwitchableModule
from redline.training.bundled import CONFIGS
from redline.training.checkpoints import Checkpoints, Position, State
from redline.training.ema import Ema
from redline.training.loop import _Loop
from redline.training.super_resolution import DrctTask, DrctTraining

KERNELS_SHOWN = 25


@dataclass(frozen=True)
class Arm:
    """A configuration: the compiled part (eager, groups or whole), how, and the implementation of attention."""

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


# The gradients of all arms are compared with those of the first.
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
    processes: bool

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
    """The training of one arm."""

    def __init__(self, arm: Arm, bench: Bench, folder: Path) -> None:
        self.arm, self.bench, self.device = arm, bench, bench.device
        training = bench.training
        training = replace(training, loop=replace(training.loop, cuda_graph=arm.recorded))
        torch.backends.cudnn.benchmark = arm.cudnn_benchmark
        task = DrctTask(training, self.device)
        assert isinstance(task.model, Drct)
        perturb(task.model)
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
        """Compiles and warms up; returns the loss and the gradient norm of every weight for comparison."""
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
        """Returns the milliseconds per step, and those that the host needs to launch one."""
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
        """Returns the kernels of a step on the device (with --tiny, on the host), the largest first."""
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
def perturb(model: nn.Module) -> None:
    """Adds noise to all weights, because at initialization the body does not affect the output and hides errors."""
    random = torch.Generator().manual_seed(1)
    for weight in model.parameters():
        weight += 0.1 * torch.randn(weight.shape, generator=random).to(weight.device)

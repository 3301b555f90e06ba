"""Measures the time of each kernel of a step (on a CPU, of each operator). Also works for compiled models."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from redline.ladder.profile.subject import Subject

# A kernel whose name contains one of these counts as attention.
_ATTENTION_WORDS = ("scaled_dot_product", "attention", "attend_kernel", "flash_fwd", "flash_bwd", "fmha", "sdpa")


@dataclass(frozen=True)
class KernelTime:
    """Calls and seconds per step; `share` is relative to the time of all kernels."""

    name: str
    calls: float
    seconds: float
    share: float

    @property
    def is_attention(self) -> bool:
        name = self.name.lower()
        return any(word in name for word in _ATTENTION_WORDS)


@contextmanager
def profiled(subject: Subject, **options: Any) -> Iterator[profile]:
    """Profiles the block with torch's profiler, on the CPU and on the subject's GPU (if any)."""
    cuda = [ProfilerActivity.CUDA] if subject.device.type == "cuda" else []
    before = os.environ.get("KINETO_LOG_LEVEL")
    if before is None:
        os.environ["KINETO_LOG_LEVEL"] = "6"  # otherwise the profiler prints to stderr at every start and stop
    try:
        with profile(activities=[ProfilerActivity.CPU, *cuda], acc_events=True, **options) as seen:
            yield seen
            subject.wait()
    finally:
        if before is None:
            del os.environ["KINETO_LOG_LEVEL"]


def time_kernels(subject: Subject, steps: int = 3) -> tuple[KernelTime, ...]:
    """Returns all kernels, sorted by decreasing time."""
    with profiled(subject) as seen:
        for _ in range(steps):
            subject.step()
    found: dict[str, tuple[float, float]] = {}
    for event in seen.key_averages():
        if subject.device.type == "cuda":
            on_device = event.device_type == DeviceType.CUDA and not event.is_user_annotation
            seconds = event.self_device_time_total / 1e6 if on_device else 0.0
        else:
            seconds = event.self_cpu_time_total / 1e6
        if seconds > 0:
            found[event.key] = (event.count / steps, seconds / steps)
    total = sum(seconds for _, seconds in found.values())
    rows = [KernelTime(name, calls, seconds, seconds / total) for name, (calls, seconds) in found.items()]
    return tuple(sorted(rows, key=lambda row: -row.seconds))

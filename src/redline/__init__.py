"""Redline runs PyTorch models at the limit of the machine they are on, and proves it."""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

import redline.training.workload_prefix as _workload_prefix  # noqa: F401  registers train:
from redline.version import VERSION as __version__  # noqa: F401

if _TYPE_CHECKING:
    from redline.errors import RedlineError as RedlineError
    from redline.evaluation.super_resolution import evaluate_super_resolution as evaluate_super_resolution
    from redline.generation.memory_evaluation import evaluate_memory as evaluate_memory
    from redline.generation.text_generator import TextGenerator as TextGenerator
    from redline.ladder.batch_size import find_optimal_batch_size as find_optimal_batch_size
    from redline.ladder.bench import BenchRun as BenchRun
    from redline.ladder.bench import bench as bench
    from redline.ladder.doctor import doctor as doctor
    from redline.ladder.exports.export import export as export
    from redline.ladder.exports.load import load_exported as load_exported
    from redline.ladder.gate import Gate as Gate
    from redline.ladder.measurement import Measurement as Measurement
    from redline.ladder.optimize import optimize as optimize
    from redline.ladder.plan import Plan as Plan
    from redline.ladder.profile import profile as profile
    from redline.ladder.report import report as report
    from redline.ladder.rung import Rung as Rung
    from redline.ladder.rung import Stage as Stage
    from redline.ladder.search.climb import climb as climb
    from redline.ladder.verify import verify as verify
    from redline.ladder.workload import Workload as Workload
    from redline.ladder.workloads.addresses import load_workload as load_workload
    from redline.machine.machine import Machine as Machine
    from redline.machine.memory import MemoryMonitor as MemoryMonitor
    from redline.machine.memory import MemoryPool as MemoryPool
    from redline.machine.memory import PerformanceTracker as PerformanceTracker
    from redline.stream.drift import evaluate_drift as evaluate_drift
    from redline.stream.stream import Stream as Stream
    from redline.training.run import train as train
    from redline.upscale.upscaler import Upscaler as Upscaler

# The module of each public name. A name is imported when it is first used, so that `--help` does not wait for torch.
_PLACES = {
    "BenchRun": "ladder.bench",
    "Gate": "ladder.gate",
    "Machine": "machine.machine",
    "Measurement": "ladder.measurement",
    "MemoryMonitor": "machine.memory",
    "MemoryPool": "machine.memory",
    "PerformanceTracker": "machine.memory",
    "Plan": "ladder.plan",
    "RedlineError": "errors",
    "Rung": "ladder.rung",
    "Stage": "ladder.rung",
    "Stream": "stream.stream",
    "TextGenerator": "generation.text_generator",
    "Upscaler": "upscale.upscaler",
    "Workload": "ladder.workload",
    "bench": "ladder.bench",
    "climb": "ladder.search.climb",
    "doctor": "ladder.doctor",
    "evaluate_drift": "stream.drift",
    "evaluate_memory": "generation.memory_evaluation",
    "evaluate_super_resolution": "evaluation.super_resolution",
    "export": "ladder.exports.export",
    "find_optimal_batch_size": "ladder.batch_size",
    "load_exported": "ladder.exports.load",
    "load_workload": "ladder.workloads.addresses",
    "optimize": "ladder.optimize",
    "profile": "ladder.profile",
    "report": "ladder.report",
    "train": "training.run",
    "verify": "ladder.verify",
}

__all__ = sorted([*_PLACES, "__version__"])


def __getattr__(name: str) -> _Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'redline' has no attribute {name!r}")
    globals()[name] = value = getattr(_import_module(f"redline.{_PLACES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

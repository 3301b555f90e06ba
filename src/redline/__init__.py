"""Redline runs PyTorch models at the limit of the machine they are on, and proves it."""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

from redline.version import VERSION as __version__

if _TYPE_CHECKING:
    from redline.batch_size import find_optimal_batch_size
    from redline.errors import RedlineError
    from redline.gate import Gate
    from redline.machine import Machine
    from redline.measurement import Measurement
    from redline.memory import MemoryMonitor, MemoryPool, PerformanceTracker
    from redline.plan import Plan
    from redline.rung import Rung, Stage
    from redline.workload import Workload, load_workload

__all__ = [
    "Gate",
    "Machine",
    "Measurement",
    "MemoryMonitor",
    "MemoryPool",
    "PerformanceTracker",
    "Plan",
    "RedlineError",
    "Rung",
    "Stage",
    "Workload",
    "__version__",
    "find_optimal_batch_size",
    "load_workload",
]

# Where each public name is, so that what needs no torch (a command's --help) does not wait for it.
_PLACES = {
    "Gate": "gate",
    "Machine": "machine",
    "Measurement": "measurement",
    "MemoryMonitor": "memory",
    "MemoryPool": "memory",
    "PerformanceTracker": "memory",
    "Plan": "plan",
    "RedlineError": "errors",
    "Rung": "rung",
    "Stage": "rung",
    "Workload": "workload",
    "find_optimal_batch_size": "batch_size",
    "load_workload": "workload",
}


def __getattr__(name: str) -> _Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'redline' has no attribute {name!r}")
    globals()[name] = value = getattr(_import_module(f"redline.{_PLACES[name]}"), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

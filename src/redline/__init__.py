"""Redline runs PyTorch models at the limit of the machine they are on, and proves it."""

from redline.batch_size import find_optimal_batch_size
from redline.errors import RedlineError
from redline.gate import Gate
from redline.machine import Machine
from redline.measurement import Measurement
from redline.memory import MemoryMonitor, MemoryPool, PerformanceTracker
from redline.plan import Plan
from redline.rung import Rung, Stage
from redline.version import VERSION as __version__
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

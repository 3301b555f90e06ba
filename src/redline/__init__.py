"""Redline runs PyTorch models at the limit of the machine they are on, and proves it."""

from redline.errors import RedlineError
from redline.gate import Gate
from redline.machine import Machine
from redline.measurement import Measurement
from redline.plan import Plan
from redline.rung import Rung, Stage
from redline.version import VERSION as __version__
from redline.workload import Workload, load_workload

__all__ = [
    "Gate",
    "Machine",
    "Measurement",
    "Plan",
    "RedlineError",
    "Rung",
    "Stage",
    "Workload",
    "__version__",
    "load_workload",
]

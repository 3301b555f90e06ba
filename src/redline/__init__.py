"""Redline runs PyTorch models at the limit of the machine they are on, and proves it."""

from redline.errors import RedlineError
from redline.gate import Gate
from redline.machine import Machine
from redline.measurement import Measurement
from redline.plan import Plan
from redline.rung import Rung, Stage
from redline.workload import Workload, load_workload

__version__ = "0.1.0"
__all__ = [
    "Gate",
    "Machine",
    "Measurement",
    "Plan",
    "RedlineError",
    "Rung",
    "Stage",
    "Workload",
    "load_workload",
]

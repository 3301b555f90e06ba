"""Imports packages that only some workloads need.

A workload is named by its address, such as `timm:NAME`, which needs the package timm.
"""

import importlib
from types import ModuleType

from redline.errors import WorkloadError


def import_for(address: str, package: str) -> ModuleType:
    """Imports a package, or raises WorkloadError with the command that installs it."""
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise WorkloadError(
            f"{address} needs {package}, which cannot be imported ({error}): pip install {package}."
        ) from error

"""Provides an OpenAI-compatible inference server and a batch processor. Both use the engine of `redline.generation`."""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

if _TYPE_CHECKING:
    from redline.serving.batch_processor import BatchProcessor as BatchProcessor
    from redline.serving.limits import Limits as Limits
    from redline.serving.server import Server as Server

# Maps each exported name to its module. A module is imported when its name is first used, because the engine process
# imports this package but needs none of these modules.
_PLACES = {"BatchProcessor": "batch_processor", "Limits": "limits", "Server": "server"}

__all__ = ["BatchProcessor", "Limits", "Server"]


def __getattr__(name: str) -> _Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'redline.serving' has no attribute {name!r}")
    globals()[name] = value = getattr(_import_module(f"redline.serving.{_PLACES[name]}"), name)
    return value

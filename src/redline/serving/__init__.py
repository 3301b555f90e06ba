"""An OpenAI-compatible inference server, and the batch processor: both on the engine of `redline.generation`."""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

if _TYPE_CHECKING:
    from redline.serving.batch_processor import BatchProcessor as BatchProcessor
    from redline.serving.limits import Limits as Limits
    from redline.serving.server import Server as Server

# The module of each name. The engine process imports this package, and needs none of them.
_PLACES = {"BatchProcessor": "batch_processor", "Limits": "limits", "Server": "server"}

__all__ = ["BatchProcessor", "Limits", "Server"]


def __getattr__(name: str) -> _Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'redline.serving' has no attribute {name!r}")
    globals()[name] = value = getattr(_import_module(f"redline.serving.{_PLACES[name]}"), name)
    return value

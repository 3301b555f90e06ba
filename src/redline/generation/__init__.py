"""Text generation with language models: the engine, the sampling, and the interface that models implement."""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING as _TYPE_CHECKING
from typing import Any as _Any

if _TYPE_CHECKING:
    from redline.generation.engine import InferenceEngine as InferenceEngine
    from redline.generation.language_model import Cache as Cache
    from redline.generation.language_model import LanguageModel as LanguageModel
    from redline.generation.sampling import Sampling as Sampling
    from redline.generation.token_stream import Completion as Completion
    from redline.generation.token_stream import TokenStream as TokenStream

# The module of each name. A name is imported when it is first used, so that the parts without torch start fast.
_PLACES = {
    "Cache": "language_model",
    "Completion": "token_stream",
    "InferenceEngine": "engine",
    "LanguageModel": "language_model",
    "Sampling": "sampling",
    "TokenStream": "token_stream",
}

__all__ = ["Cache", "Completion", "InferenceEngine", "LanguageModel", "Sampling", "TokenStream"]


def __getattr__(name: str) -> _Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'redline.generation' has no attribute {name!r}")
    globals()[name] = value = getattr(_import_module(f"redline.generation.{_PLACES[name]}"), name)
    return value

"""Text generation with language models: the engine, the sampling, and the interfaces that models implement."""

from importlib import import_module as _import_module
from typing import TYPE_CHECKING
from typing import Any as _Any

if TYPE_CHECKING:
    from redline.generation.engine import Engine as Engine
    from redline.generation.inference_engine import InferenceEngine as InferenceEngine
    from redline.generation.language_model import LanguageModel as LanguageModel
    from redline.generation.request import Request as Request
    from redline.generation.request import SamplingOptions as SamplingOptions
    from redline.generation.token_stream import Completion as Completion
    from redline.generation.token_stream import TokenStream as TokenStream

# Maps each public name to its module, which is imported when the name is first used: requests and the scheduler can
# then be used without importing torch.
_PLACES = {
    "Completion": "token_stream",
    "Engine": "engine",
    "InferenceEngine": "inference_engine",
    "LanguageModel": "language_model",
    "Request": "request",
    "SamplingOptions": "request",
    "TokenStream": "token_stream",
}

__all__ = sorted(_PLACES)


def __getattr__(name: str) -> _Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'redline.generation' has no attribute {name!r}")
    globals()[name] = value = getattr(_import_module(f"redline.generation.{_PLACES[name]}"), name)
    return value

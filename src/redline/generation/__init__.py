"""Text generation with language models: the engine, its sampling, and the interface of a model."""

from redline.generation.engine import InferenceEngine
from redline.generation.language_model import Cache, LanguageModel
from redline.generation.sampling import Sampling
from redline.generation.token_stream import Completion, TokenStream

__all__ = ["Cache", "Completion", "InferenceEngine", "LanguageModel", "Sampling", "TokenStream"]

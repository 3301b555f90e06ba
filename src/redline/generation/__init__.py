"""Text generation with language models: the engine, the sampling, and the interface that models implement."""

from redline.generation.engine import InferenceEngine
from redline.generation.language_model import Cache, LanguageModel
from redline.generation.sampling import Sampling
from redline.generation.token_stream import Completion, TokenStream

__all__ = ["Cache", "Completion", "InferenceEngine", "LanguageModel", "Sampling", "TokenStream"]

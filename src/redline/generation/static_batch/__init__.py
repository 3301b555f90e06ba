"""One batch at a time: the rows of a batch begin together, and one CUDA graph runs the whole decode step.

`TextGenerator` uses it on a GPU, where its speed has been measured; everything else uses `generation.engine`.
"""

from redline.generation.static_batch.engine import StaticBatchEngine

__all__ = ["StaticBatchEngine"]

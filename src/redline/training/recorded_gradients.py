"""Forward and backward of a batch, recorded as one CUDA graph: a small model's hundreds of launches become one.

What changes from step to step (the batch) is copied into the recording's own buffers; what it gives (a loss, and a
gradient for each weight) lies in its memory and is overwritten by the next replay. So gradients do not add up over
replays: a step is one batch.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from redline.cuda_graphs import GraphCapturer

# Lazily made things (compiled kernels, work spaces) must be there before the recording.
_REHEARSALS = 3


class RecordedGradients:
    """Called with a batch of always the same shapes; leaves gradients on the model's weights."""

    def __init__(self, model: nn.Module, loss: Callable[..., Tensor], recorder: GraphCapturer) -> None:
        self._model, self._loss, self._recorder = model, loss, recorder
        self._buffers: tuple[Tensor, ...] = ()
        self._gradients: list[tuple[nn.Parameter, Tensor]] = []
        self._replay: Callable[[], None] | None = None
        self._result: Tensor | None = None

    def __call__(self, *batch: Tensor) -> Tensor:
        """The batch's loss, until the next call."""
        if self._replay is None:
            self._record(batch)
        assert self._replay is not None and self._result is not None
        for buffer, tensor in zip(self._buffers, batch, strict=True):
            if buffer.shape != tensor.shape:
                shapes = f"{tuple(tensor.shape)}, not {tuple(buffer.shape)}"
                raise ValueError(f"a batch of another shape than the recorded one: {shapes}.")
            buffer.copy_(tensor, non_blocking=True)
        self._replay()
        for weight, gradient in self._gradients:
            weight.grad = gradient
        return self._result

    def _record(self, batch: tuple[Tensor, ...]) -> None:
        self._buffers = tuple(tensor.clone() for tensor in batch)
        for _ in range(_REHEARSALS):
            self._recorder.warm_up(self._pass)
        self._result, self._replay = self._recorder.capture(self._pass)
        self._gradients = [(weight, weight.grad) for weight in self._model.parameters() if weight.grad is not None]

    def _pass(self) -> Tensor:
        # Without gradients to add to, backward writes new ones, and so does every replay.
        self._model.zero_grad(set_to_none=True)
        with torch.enable_grad():
            loss = self._loss(*self._buffers)
        loss.backward()
        return loss.detach()

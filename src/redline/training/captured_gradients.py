"""Captures the forward and backward pass of a batch as one CUDA graph, which replaces hundreds of kernel launches.

The batch is copied into static input buffers. The loss and the gradients are in the graph's memory pool, and the next
replay overwrites them. Therefore gradients cannot accumulate over several batches: each step has exactly one batch.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from redline.machine.cuda_graphs import GraphCapturer

# The number of runs before the capture, which create the compiled kernels and workspaces that the capture needs.
_WARMUPS = 3


class CapturedGradients:
    """Computes the loss of a batch and sets the gradients of the model. All batches must have the same shapes."""

    def __init__(self, model: nn.Module, loss: Callable[..., Tensor], recorder: GraphCapturer) -> None:
        self._model, self._loss, self._recorder = model, loss, recorder
        self._buffers: tuple[Tensor, ...] = ()
        self._gradients: list[tuple[nn.Parameter, Tensor]] = []
        self._replay: Callable[[], None] | None = None
        self._result: Tensor | None = None

    def __call__(self, *batch: Tensor) -> Tensor:
        """Returns the loss, which the next call overwrites."""
        if self._replay is None:
            self._capture(batch)
        assert self._replay is not None and self._result is not None
        for buffer, tensor in zip(self._buffers, batch, strict=True):
            if buffer.shape != tensor.shape:
                shapes = f"{tuple(tensor.shape)}, not {tuple(buffer.shape)}"
                raise ValueError(f"the batch does not have the shape of the captured batch: {shapes}.")
            buffer.copy_(tensor, non_blocking=True)
        self._replay()
        for weight, gradient in self._gradients:
            weight.grad = gradient
        return self._result

    def _capture(self, batch: tuple[Tensor, ...]) -> None:
        self._buffers = tuple(tensor.clone() for tensor in batch)
        for _ in range(_WARMUPS):
            self._recorder.warm_up(self._pass)
        self._result, self._replay = self._recorder.capture(self._pass)
        self._gradients = [(weight, weight.grad) for weight in self._model.parameters() if weight.grad is not None]

    def _pass(self) -> Tensor:
        # Gradients must be None during the capture, so that every replay overwrites them instead of adding to them.
        self._model.zero_grad(set_to_none=True)
        with torch.enable_grad():
            loss = self._loss(*self._buffers)
        loss.backward()
        return loss.detach()

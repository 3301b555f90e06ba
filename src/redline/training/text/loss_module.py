"""A module that computes the training loss from plain tensors, so that rungs can wrap and compile it."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from redline.nn.packing import Packing
from redline.training.text.architectures import Architecture


class LossModule(nn.Module):
    def __init__(self, architecture: Architecture, model: nn.Module, z_loss: float = 0.0) -> None:
        super().__init__()
        self.model = model
        self.z_loss = z_loss
        self._architecture = architecture

    def forward(
        self, tokens_BS: Tensor, targets_BS: Tensor, documents_BS: Tensor, positions_BS: Tensor, borders: Tensor
    ) -> Tensor:
        packing = Packing(documents_BS, positions_BS, borders)
        # The validation loss is without the z-loss.
        z_loss = self.z_loss if self.training else 0.0
        return self._architecture.loss(self.model, tokens_BS, targets_BS, packing, z_loss)


def own_loss(output: Tensor, _batch: Mapping[str, Tensor]) -> Tensor:
    """Returns the output of a `LossModule`, which is the loss."""
    return output


def as_inputs(tokens_BS: Tensor, targets_BS: Tensor, packing: Packing, device: torch.device) -> dict[str, Tensor]:
    """Returns the arguments of `LossModule`, copied to the device asynchronously."""
    parts = {
        "tokens_BS": tokens_BS,
        "targets_BS": targets_BS,
        "documents_BS": packing.documents_BS,
        "positions_BS": packing.positions_BS,
        "borders": packing.borders,
    }
    if device.type == "cpu":
        return parts
    return {name: part.pin_memory().to(device, non_blocking=True) for name, part in parts.items()}

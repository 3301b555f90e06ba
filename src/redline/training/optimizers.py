"""The optimizers that a training can ask for, built the same way for every kind of model."""

import torch
from torch import nn
from torch.optim import Adam, AdamW, Optimizer

from redline.training.settings import LoopSettings


def build_optimizer(model: nn.Module, settings: LoopSettings, device: torch.device) -> Optimizer:
    """Weight decay is for matrices and kernels; biases and norms have nothing to shrink."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    groups = [
        {"params": [weight for weight in weights if weight.ndim >= 2], "weight_decay": settings.weight_decay},
        {"params": [weight for weight in weights if weight.ndim < 2], "weight_decay": 0.0},
    ]
    kind = {"adamw": AdamW, "adam": Adam}[settings.optimizer]
    betas = (settings.betas[0], settings.betas[1])
    return kind(
        [group for group in groups if group["params"]],
        lr=settings.learning_rate,
        betas=betas,
        fused=True if device.type == "cuda" else None,
    )

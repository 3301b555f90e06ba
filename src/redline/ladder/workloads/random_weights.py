"""Random weights that let every layer contribute to the output.

Many models initialize the last norm of a block to zero, or the layer scale of a block to 1e-6. An error inside such a
block would not change the output, so no gate could detect it.
"""

import torch
from torch import nn

_SMALL = 1e-3


@torch.no_grad()
def replace_near_zero_weights(model: nn.Module) -> nn.Module:
    """Replaces weight tensors whose values are all close to zero; biases are not changed."""
    for module in model.modules():
        norm = isinstance(module, (nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm, nn.RMSNorm))
        for name, weight in module.named_parameters(recurse=False):
            if "bias" in name or not weight.is_floating_point() or float(weight.abs().max()) > _SMALL:
                continue
            if weight.ndim < 2 and bool((weight == weight.flatten()[0]).all()):
                weight.fill_(1.0 if norm else 0.1)
            elif weight.ndim >= 2:
                nn.init.normal_(weight, std=0.02)
    return model

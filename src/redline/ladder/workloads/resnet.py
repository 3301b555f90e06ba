"""`resnet`: a ResNet-18 classifier whose gates detect a wrongly folded batch normalization.

The weights are random, but the network resembles a trained one in the properties that matter for judging:
- batch normalization has random scales and shifts, and running statistics of real activations, so that the error of
  folding it wrongly is far outside the gate;
- the last batch-norm scale of each block is small, as in trained networks, where a block adds a small correction;
- the logits are centered over images. Otherwise nine tenths of every output would not depend on the input, and a
  relative error of 3% could hide the loss of nearly all information about the input.

How the limit was chosen: correct static int8 (weights per channel, activations per tensor) has a relative error of 5–6%
on these logits, because eight bits round each of twenty layers by about 1%. Six bits give 19%, and one missing
batch-norm shift 33%. The limit is 8%; weights and limit were chosen together (see docs/workloads.md). No gate checks
the top-1 class: the two largest of a thousand random logits are so close that correct int8 sometimes swaps them.
"""

import torch
from torch import nn

from redline.ladder.gate import Gate
from redline.ladder.workload import Workload
from redline.ladder.workloads.images import random_images
from redline.models.resnet import ResNet


def resnet(batch: int = 4, size: int = 128, classes: int = 1000) -> Workload:
    """ResNet-18 inference on `batch` images of `size` × `size`."""
    return Workload(
        build=lambda: _init_batch_norms(ResNet(classes=classes)),
        inputs=lambda seed: random_images(batch, size),
        gates=(Gate("relative_error", 0.08), Gate("kl_divergence", 0.01)),
        items=batch,
        unit="image",
    )


@torch.no_grad()
def _init_batch_norms(model: ResNet) -> ResNet:
    """Samples batch-norm scales and shifts, then sets the running statistics and centers the logits for them."""
    norms = [(name, module) for name, module in model.named_modules() if isinstance(module, nn.BatchNorm2d)]
    for name, norm in norms:
        is_last_in_block = name.endswith("norm2")
        nn.init.uniform_(norm.weight, *((0.1, 0.3) if is_last_in_block else (0.5, 1.5)))
        nn.init.normal_(norm.bias, std=0.2)
        norm.momentum = None  # without momentum, the running statistics become those of the one batch below
    nn.init.normal_(model.head.weight, std=0.15)
    nn.init.zeros_(model.head.bias)
    # fp64 does not depend on flags such as TF32, so every process gets the same weights.
    seen = random_images(16, 64).double()
    model.double().train()(seen)
    for _, norm in norms:
        norm.momentum = 0.1
    model.head.bias.sub_(model.eval()(seen).mean(dim=0))
    return model.float()

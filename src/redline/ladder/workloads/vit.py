"""`vit`: a ViT-S/16 encoder whose attention is written by hand.

With the usual tiny initial weights every attention map is nearly uniform, and a rung could replace
attention by an average without anybody noticing. So positions are as large as the patches, and queries and
keys are drawn large enough that attention has something to choose: uniform attention everywhere is 20%
off, in the first block alone 11%, in the last alone 2%, which passes.

What the limits mean: weights rounded to bf16 land at a relative error of 0.4%, weights and activations (per
token) rounded to eight bits at 2%, to six bits at 7%. The limit of 3% lies between the last two.
"""

from torch import nn

from redline.ladder.gate import Gate
from redline.ladder.workload import Workload
from redline.ladder.workloads.pictures import pictures
from redline.models.vit import Attention, VisionTransformer


def vit(
    batch: int = 1,
    size: int = 224,
    patch: int = 16,
    width: int = 384,
    depth: int = 12,
    heads: int = 6,
    classes: int = 1000,
) -> Workload:
    """ViT inference on `batch` pictures of `size` × `size`; the default is ViT-S/16."""
    return Workload(
        build=lambda: _draw(VisionTransformer(size, patch, width, depth, heads, classes), width),
        inputs=lambda seed: pictures(batch, size),
        gates=(Gate("relative_error", 0.03), Gate("kl_divergence", 0.001)),
        items=batch,
        unit="image",
    )


def _draw(model: VisionTransformer, width: int) -> VisionTransformer:
    """Weights with which attention matters."""
    nn.init.normal_(model.class_token)
    nn.init.normal_(model.positions)
    for module in model.modules():
        if isinstance(module, Attention):
            nn.init.normal_(module.qkv.weight, std=1.5 * width**-0.5)
            nn.init.normal_(module.out.weight, std=0.5 * width**-0.5)
    nn.init.normal_(model.head.weight, std=width**-0.5)
    return model

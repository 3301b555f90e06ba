"""`vit`: a ViT-S/16 encoder with hand-written attention.

With the usual small initial weights every attention map is nearly uniform, and no gate would notice a rung that
replaces attention by an average. So position embeddings are as large as patch embeddings, and queries and keys are
large enough for selective attention: uniform attention in all blocks has an error of 20%, in the first block alone 11%,
and in the last alone 2%, which passes.

How the limit was chosen: weights rounded to bf16 have a relative error of 0.4%, weights and activations (per token)
rounded to eight bits 2%, and to six bits 7%. The limit is 3%.
"""

from torch import nn

from redline.ladder.gate import Gate
from redline.ladder.workload import Workload
from redline.ladder.workloads.images import random_images
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
    """ViT inference on `batch` images of `size` × `size`; the default is ViT-S/16."""
    return Workload(
        build=lambda: _draw(VisionTransformer(size, patch, width, depth, heads, classes), width),
        inputs=lambda seed: random_images(batch, size),
        gates=(Gate("relative_error", 0.03), Gate("kl_divergence", 0.001)),
        items=batch,
        unit="image",
    )


def _draw(model: VisionTransformer, width: int) -> VisionTransformer:
    """Samples weights that make attention selective."""
    nn.init.normal_(model.class_token)
    nn.init.normal_(model.positions)
    for module in model.modules():
        if isinstance(module, Attention):
            nn.init.normal_(module.qkv.weight, std=1.5 * width**-0.5)
            nn.init.normal_(module.out.weight, std=0.5 * width**-0.5)
    nn.init.normal_(model.head.weight, std=width**-0.5)
    return model

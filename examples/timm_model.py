"""timm models as workloads, with random weights, so that nothing is downloaded.

redline climb examples/timm_model.py:resnet50
redline climb examples/timm_model.py:named --shapes name=convnext_tiny,batch=8
"""

from torch import nn

from redline import Workload
from redline.errors import WorkloadError
from redline.ladder.workloads.images import random_images


def named(name: str = "resnet50", batch: int = 1, size: int = 224) -> Workload:
    return Workload(
        build=lambda: create_model(name),
        inputs=lambda seed: random_images(batch, size),
        items=batch,
        unit="image",
    )


def resnet50(batch: int = 1, size: int = 224) -> Workload:
    return named("resnet50", batch, size)


def vit_small(batch: int = 1, size: int = 224) -> Workload:
    return named("vit_small_patch16_224", batch, size)


def create_model(name: str) -> nn.Module:
    try:
        import timm
    except ImportError as error:
        raise WorkloadError("timm is not installed (pip install timm)") from error
    model = timm.create_model(name, pretrained=False)
    for module in model.modules():
        # Some models initialize the last norm of a block to zero; the gates could not check such a block.
        if isinstance(module, nn.BatchNorm2d) and not module.weight.any():
            nn.init.ones_(module.weight)
    return model

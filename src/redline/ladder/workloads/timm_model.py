"""The address `timm:NAME`: an image model of timm with random weights; nothing is downloaded."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from redline.errors import WorkloadError
from redline.ladder.workload import Workload
from redline.ladder.workload_prefixes import WorkloadPrefix, register_prefix
from redline.ladder.workloads.images import random_images
from redline.ladder.workloads.optional import import_for
from redline.ladder.workloads.random_weights import replace_near_zero_weights


def _find_function(name: str) -> Callable[..., Workload]:
    timm: Any = import_for(f"timm:{name}", "timm")
    if not timm.is_model(name):
        near = ", ".join(timm.list_models(f"*{name[:6]}*")[:3]) or "timm.list_models() lists all"
        raise WorkloadError(f"timm has no model {name!r} ({near}).")
    config = timm.get_pretrained_cfg(name)
    channels, height, width = config.input_size

    def model(batch: int = 1, size: int = 0) -> Workload:
        """Returns the workload; `size` is the height and width of the images, by default as in the model's training."""
        shape = (size, size) if size else (height, width)

        def build() -> nn.Module:
            # Only models whose weights depend on the image size accept `img_size`.
            options = {"img_size": size} if size and config.fixed_input_size else {}
            return replace_near_zero_weights(timm.create_model(name, pretrained=False, **options))

        def inputs(seed: int) -> torch.Tensor:
            return random_images(batch, shape, channels)

        return Workload(build, inputs, items=batch, unit="image", name=f"timm:{name}")

    return model


register_prefix(WorkloadPrefix("timm", _find_function, ("timm:NAME",)))

"""Registers `train:CONFIG` as a workload address, so that `redline climb train:decoder-tiny` finds it."""

from collections.abc import Callable
from typing import Any

from redline.ladder.workload_prefixes import WorkloadPrefix, register_prefix


def _find_function(config: str) -> Callable[..., Any]:
    # Imported on use, because registering must not import torch.
    from redline.training.text.workload import training_workload

    return training_workload(config)


register_prefix(
    WorkloadPrefix("train", _find_function, ("train:CONFIG.toml", "train:decoder-tiny"), steps_in_parts=True)
)

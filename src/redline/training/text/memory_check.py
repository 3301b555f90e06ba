"""Refuses a training run that cannot fit into memory, before anything is read or written.

The estimate is a lower bound, so a run that could fit is never refused. On a CPU there is no other warning: Linux
overcommits memory, and later kills the process that uses too much of it.
"""

import torch

from redline.errors import RedlineError
from redline.machine.host_memory import available_host_bytes
from redline.notation import format_bytes
from redline.training.text.config import AUTO, TextTraining
from redline.training.text.tokenizer import MIN_VOCABULARY

_WEIGHT_AND_GRADIENT = 8
# Bytes of optimizer state per weight.
_MOMENTS = {"adam": 8, "adamw": 8, "adamw8bit": 2, "adafactor": 0, "muon": 4}
_AVERAGE = 4
# Rungs of a plan that keep fewer activations for the backward pass.
_SAVING = ("checkpoint", "compress_activations")


def check_memory(training: TextTraining, device: torch.device) -> None:
    """Raises if the training state, alone or together with a batch's activations, exceeds the device's memory."""
    model, data, loop = training.model, training.data, training.loop
    on_cpu = device.type == "cpu"
    memory_bytes = available_host_bytes() if on_cpu else torch.cuda.mem_get_info(device)[1]
    where = "this machine has" if on_cpu else "this GPU has"
    vocabulary = model.vocabulary or (training.recall.vocabulary if training.recall else MIN_VOCABULARY)
    parameters = model.parameters(vocabulary)
    each = _WEIGHT_AND_GRADIENT + _MOMENTS[loop.optimizer] + (_AVERAGE if loop.ema_decay else 0)
    if (weights := each * parameters) > memory_bytes:
        raise RedlineError(
            f"training {parameters:,} parameters takes at least {format_bytes(weights)} of memory, and {where} "
            f"{format_bytes(memory_bytes)}: lower width or layers under [model]."
        )
    rows = 1 if data.batch == AUTO else int(data.batch)
    number = 4 if loop.asked_precision == "fp32" or (on_cpu and loop.asked_precision == AUTO) else 2
    kept = 0 if any(name in loop.applied_plan for name in _SAVING) else number * model.kept_per_token
    if on_cpu:
        # Adds the logits, which the unfused loss stores.
        kept += number * vocabulary
    if (step := weights + kept * rows * data.length) > memory_bytes:
        raise RedlineError(
            f"a batch of {rows:,} rows of {data.length:,} tokens takes at least {format_bytes(step)} of memory, and "
            f"{where} {format_bytes(memory_bytes)}: lower batch or length under [data]."
        )

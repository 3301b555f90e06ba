"""Whether a training can fit into memory at all, by counting alone: a slip is told before anything is read or written.

What is counted is the least that any training takes, so that nothing is refused that could have run. On a CPU it is all
the warning there is: Linux gives out more memory than it has, and ends whoever uses it.
"""

import torch

from redline.errors import RedlineError
from redline.machine.host_memory import available_host_bytes
from redline.notation import format_bytes
from redline.training.text.config import AUTO, TextTraining
from redline.training.text.tokenizer import SMALLEST

_WEIGHT_AND_GRADIENT = 8
# The optimizer's own bytes for every weight.
_MOMENTS = {"adam": 8, "adamw": 8, "adamw8bit": 2, "adafactor": 0, "muon": 4}
_AVERAGE = 4
# Rungs that keep less of a forward pass than it computes.
_SAVING = ("checkpoint", "compress_activations")


def check_room(training: TextTraining, device: torch.device) -> None:
    """Refuses a model, or a batch for it, that is larger than the device's memory."""
    model, data, loop = training.model, training.data, training.loop
    on_cpu = device.type == "cpu"
    room, where = _memory_bytes(device), "there are" if on_cpu else "this GPU has"
    vocabulary = model.vocabulary or (training.recall.vocabulary if training.recall else SMALLEST)
    parameters = model.parameters(vocabulary)
    each = _WEIGHT_AND_GRADIENT + _MOMENTS[loop.optimizer] + (_AVERAGE if loop.ema_decay else 0)
    if (weights := each * parameters) > room:
        raise RedlineError(
            f"training {parameters:,} parameters takes {format_bytes(weights)} or more, and {where} "
            f"{format_bytes(room)}: lower width or layers under [model]."
        )
    rows = 1 if data.batch == AUTO else int(data.batch)
    number = 4 if loop.asked_precision == "fp32" or (on_cpu and loop.asked_precision == AUTO) else 2
    kept = 0 if any(name in loop.applied_plan for name in _SAVING) else number * model.kept_per_token
    if on_cpu:
        # The plain loss stores the logits.
        kept += number * vocabulary
    if (step := weights + kept * rows * data.length) > room:
        raise RedlineError(
            f"a batch of {rows:,} rows of {data.length:,} tokens takes {format_bytes(step)} or more, and {where} "
            f"{format_bytes(room)}: lower batch or length under [data]."
        )


def _memory_bytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else available_host_bytes()

"""A batch that cannot fit is told before anything is written, and one that might is not."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from redline.errors import RedlineError
from redline.training.text import memory_check
from redline.training.text.config import TextTraining

CPU = torch.device("cpu")


@pytest.mark.parametrize("precision", ["fp32", "auto", "bf16"])
def test_the_cpu_estimate_counts_activations_and_logits(
    config: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    training = TextTraining.read(config(('precision = "fp32"', f'precision = "{precision}"')))
    number, tokens = (2 if precision == "bf16" else 4), 3 * 29
    weights = 16 * training.model.parameters(memory_check.MIN_VOCABULARY)
    least = weights + number * tokens * (training.model.kept_per_token + memory_check.MIN_VOCABULARY)
    monkeypatch.setattr(memory_check, "available_host_bytes", lambda: least)
    memory_check.check_memory(training, CPU)
    monkeypatch.setattr(memory_check, "available_host_bytes", lambda: least - 1)
    with pytest.raises(
        RedlineError, match=r"^a batch of 3 rows of 29 tokens takes at least .*, and this machine has .*: lower"
    ):
        memory_check.check_memory(training, CPU)

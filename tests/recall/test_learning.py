"""Memory that works: small models learn to recall within minutes on a CPU, and the same without memory do not."""

import math
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from redline.models.memory import TitanConfig, TitanModel
from redline.recall import Mqar, Needle, Recall, accuracy

SMALL = TitanConfig(vocabulary=64, width=48, layers=2, heads=2, segment=8, window_segments=1, memory_chunk=64)
NEURAL = replace(SMALL, attention_every=0, memory_heads=1)
WINDOW = replace(SMALL, attention_every=1)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Small products are no faster on two threads, and other tests run beside."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def learned(
    config: TitanConfig, task: Recall, length: int, steps: int, batch: int, rate: float, score_after: int | None = None
) -> TitanModel:
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = TitanModel(replace(config, vocabulary=task.vocabulary))
    optimizer = torch.optim.AdamW(model.parameters(), rate, (0.9, 0.95), weight_decay=0.1)
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1, (step + 1) / 20) * (0.55 + 0.45 * math.cos(math.pi * step / steps))
        if score_after is not None and step >= score_after:
            model.score_weight = 0.1
        sample = task.sample(generator, batch, length)
        optimizer.zero_grad()
        model.loss(sample.tokens_BS, sample.targets_BS).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model.eval()


def recalled(model: TitanModel, task: Recall, length: int, samples: int = 32) -> float:
    return accuracy(model, task.sample(torch.Generator().manual_seed(99), samples, length))


def with_slots(model: TitanModel, slots: int) -> TitanModel:
    changed = TitanModel(replace(model.config, memory_slots=slots))
    changed.load_state_dict(model.state_dict())
    return changed


def test_neural_memory_recalls_pairs_at_eight_times_the_length() -> None:
    task = Mqar()
    model = learned(NEURAL, task, 64, 200, 64, 2e-2)
    assert recalled(model, task, 64) >= 0.99
    assert recalled(model, task, 512) >= 0.95


def test_a_window_alone_does_not_recall_pairs() -> None:
    task = Mqar()
    assert recalled(learned(WINDOW, task, 64, 100, 64, 2e-2), task, 64) <= 0.2


def test_a_bank_of_slots_finds_needles_at_sixteen_times_the_length() -> None:
    task = Needle()
    model = learned(replace(WINDOW, memory_slots=16), task, 128, 200, 32, 1e-2, score_after=60)
    found = recalled(model, task, 2048, 16)
    assert found >= 0.95
    # Three needles do not fit into two slots.
    assert recalled(with_slots(model, 2), task, 2048, 16) <= found - 0.2


def test_a_window_alone_finds_no_needles() -> None:
    task = Needle()
    assert recalled(learned(WINDOW, task, 128, 100, 32, 1e-2), task, 128) <= 0.2

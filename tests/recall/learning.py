"""Small models that learn to recall on a CPU, with memory and without."""

import math
from dataclasses import replace

import torch

from redline.models.memory import TitanConfig, TitanModel
from redline.recall import Recall, accuracy

SMALL = TitanConfig(vocabulary=64, width=48, layers=2, heads=2, segment=8, window_segments=1, memory_chunk=64)
NEURAL = replace(SMALL, attention_every=0, memory_heads=1)
WINDOW = replace(SMALL, attention_every=1)


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

"""Small models that learn to recall on a CPU, with memory and without.

A model with memory trains until it recalls, the same without memory for exactly as many steps.
"""

import math
from collections.abc import Callable
from dataclasses import replace

import torch

from redline.evaluation.recall import Recall, accuracy
from redline.models.memory import TitanConfig, TitanModel

SMALL = TitanConfig(vocabulary=64, width=48, layers=2, heads=2, segment=8, window_segments=1, memory_chunk=64)
NEURAL = replace(SMALL, attention_every=0, memory_heads=1)
WINDOW = replace(SMALL, attention_every=1)
# The length of the schedule, and how many steps a training may take: after the schedule, which one CPU's rounding
# makes a little too short and another's does not, it goes on at the last learning rate.
STEPS, MOST_STEPS = 200, 500
# Questions to stop a training by, which are not those that it is judged by.
_PRACTICE, _EXAM = 77, 99


def learned(
    config: TitanConfig,
    task: Recall,
    length: int,
    batch: int,
    rate: float,
    score_after: int | None = None,
    steps: int = MOST_STEPS,
    enough: Callable[[TitanModel], bool] = lambda model: False,
) -> tuple[TitanModel, int]:
    """Returns the model and how many steps it took: until `enough`, and at most `steps`."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(0)
    model = TitanModel(replace(config, vocabulary=task.vocabulary))
    optimizer = torch.optim.AdamW(model.parameters(), rate, (0.9, 0.95), weight_decay=0.1)
    done = 0
    while done < steps and not (done and done % 20 == 0 and enough(model)):
        for group in optimizer.param_groups:
            decay = 0.55 + 0.45 * math.cos(math.pi * min(1, done / STEPS))
            group["lr"] = rate * min(1, (done + 1) / 20) * decay
        if score_after is not None and done >= score_after:
            model.score_weight = 0.1
        sample = task.sample(generator, batch, length)
        optimizer.zero_grad()
        model.loss(sample.tokens_BS, sample.targets_BS).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        done += 1
    return model.eval(), done


def recalled(model: TitanModel, task: Recall, length: int, samples: int = 32) -> float:
    return accuracy(model, task.sample(torch.Generator().manual_seed(_EXAM), samples, length))


def practised(model: TitanModel, task: Recall, length: int, samples: int = 16) -> float:
    return accuracy(model, task.sample(torch.Generator().manual_seed(_PRACTICE), samples, length))


def with_slots(model: TitanModel, slots: int) -> TitanModel:
    changed = TitanModel(replace(model.config, memory_slots=slots))
    changed.load_state_dict(model.state_dict())
    return changed

"""Computes embeddings of texts: averages the last hidden states over the text, or takes that of the last token."""

from collections.abc import Sequence
from typing import Any

import torch

from redline.errors import RedlineError
from redline.generation.planned import PlannedModel

POOLINGS = ("mean", "last")
_TOKENS_PER_CALL = 8192


@torch.no_grad()
def embed(
    model: PlannedModel, prompts: Sequence[Sequence[int]], pooling: str, device: torch.device
) -> list[list[float]]:
    """Returns one vector of length 1 per prompt."""
    if pooling not in POOLINGS:
        raise RedlineError(f"unknown pooling {pooling!r}: use one of {', '.join(POOLINGS)}.")
    context = model.context
    if context is not None and (longest := max(map(len, prompts))) > context:
        raise RedlineError(
            f"the prompt has {longest} tokens, and the model's context is {context}: shorten the prompt."
        )
    found: list[Any] = [None] * len(prompts)
    batch: list[int] = []
    # Batches prompts of similar length, to need little padding. Padding follows the prompt, so no token attends to it.
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    for place, index in enumerate(order):
        batch.append(index)
        following = order[place + 1] if place + 1 < len(order) else None
        if following is None or len(prompts[following]) * (len(batch) + 1) > _TOKENS_PER_CALL:
            for member, vector in zip(
                batch, _embed_batch(model, [prompts[one] for one in batch], pooling, device), strict=True
            ):
                found[member] = vector
            batch = []
    return found


def _embed_batch(
    model: PlannedModel, prompts: list[Sequence[int]], pooling: str, device: torch.device
) -> list[list[float]]:
    longest = max(map(len, prompts))
    tokens_BS = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts], device=device)
    counts_B = torch.tensor([len(prompt) for prompt in prompts], device=device)
    hidden_BSW = model.hidden(tokens_BS).float()
    if pooling == "last":
        vectors = hidden_BSW[torch.arange(len(prompts), device=device), counts_B - 1]
    else:
        inside = torch.arange(longest, device=device) < counts_B[:, None]
        vectors = torch.where(inside[:, :, None], hidden_BSW, 0).sum(1) / counts_B[:, None]
    return torch.nn.functional.normalize(vectors, dim=-1).tolist()

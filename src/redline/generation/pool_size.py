"""Chooses how many pages the key-value cache gets."""

from typing import Any

import torch

from redline.errors import RedlineError
from redline.generation.planned import PlannedModel
from redline.machine.host_memory import available_host_bytes
from redline.models.decoder.paged_cache import FlatCall
from redline.ops.paged_attention import PagedRows

# The default share of the free memory that the pages may take.
_SHARE = {"cuda": 0.92, "cpu": 0.25}


def choose_blocks(
    model: PlannedModel, size: int, rows: int, token_budget: int, device: torch.device, share: float | None = None
) -> int:
    """Returns the number of pages that `rows` whole contexts need, or that fit into the free memory if these are fewer.

    On a GPU, this first runs the largest step, so that the memory of the step is not counted as free.
    """
    context = model.context
    assert context is not None
    page_bytes = model.new_pages(1, size).bytes
    free = available_host_bytes()
    if device.type == "cuda":
        _run_largest_step(model, size, min(token_budget, context), device)
        free = torch.cuda.mem_get_info(device)[0]
        free += torch.cuda.memory_reserved(device) - torch.cuda.max_memory_reserved(device)
    share = _SHARE.get(device.type, _SHARE["cpu"]) if share is None else share
    if not 0 < share <= 1:
        raise RedlineError(f"memory_share must be above 0 and at most 1, not {share}.")
    fitting = int(free * share) // page_bytes
    if fitting < 1:
        raise RedlineError(
            f"the key-value cache needs {page_bytes:,} bytes for {size} tokens, and {free:,} bytes of memory are free."
        )
    return min(fitting, rows * -(-context // size))


@torch.no_grad()
def _run_largest_step(model: PlannedModel, size: int, tokens: int, device: torch.device) -> None:
    def numbers(*values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    pool: Any = model.new_pages(1, size)
    tables = torch.zeros((1, -(-tokens // size)), dtype=torch.int32, device=device)
    nothing_stored = torch.full((tokens,), -1, dtype=torch.int32, device=device)
    rows = PagedRows(nothing_stored, numbers(0, tokens), numbers(0), tables)
    call = FlatCall(torch.arange(tokens, dtype=torch.int32, device=device), numbers(tokens - 1), rows, pool)
    model.flat(torch.zeros(tokens, dtype=torch.int32, device=device), call, False)
    torch.cuda.synchronize(device)

"""Calibrates int8 inputs: finds the clipping limit for the inputs of each linear layer on the samples.

Quantization is symmetric and per tensor: an input x becomes round(x / scale), clipped to the integer range. `minmax`
clips at the largest value on the samples, which wastes integer levels on rare outliers. `percentile` clips outliers.
`mse` tries a grid of limits and uses the one with the smallest squared error.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from redline.errors import RungError
from redline.ladder.job import Job, entered
from redline.ladder.rewrites.sample_run import on_device, state_preserved, watch_inputs
from redline.ladder.workload import call

METHODS = ("minmax", "percentile", "mse")
_BINS = 4096
_GRID = tuple(fraction / 100 for fraction in range(10, 101))


@dataclass
class Seen:
    """Statistics of the inputs of one layer."""

    largest: float = 0.0
    ranks: set[int] = field(default_factory=set)
    # The number of rows in the call with the fewest rows.
    rows: int = 0
    histogram: Tensor | None = None


class Limit(NamedTuple):
    """The largest input value that int8 represents, and the number of dimensions of the inputs."""

    value: float
    rank: int


def outputs_on_samples(job: Job) -> list[Any]:
    """Returns the output of the model for each sample, with the job's context managers (such as autocast) entered."""
    outputs = []
    for batch in job.samples:
        if job.host_inputs:
            batch = on_device(batch, job.device)
        with torch.no_grad(), entered(job.contexts), state_preserved(job.model):
            outputs.append(call(job.model, batch))
    return outputs


def observe(job: Job, layers: Mapping[str, nn.Linear]) -> dict[str, Seen]:
    """Runs the samples and returns the input statistics of every layer that ran."""
    seen: dict[str, Seen] = {}

    def note(name: str, args: Any, kwargs: Any) -> None:
        x = args[0] if args else kwargs["input"]
        entry = seen.setdefault(name, Seen())
        largest = float(x.detach().abs().amax()) if x.numel() else 0.0
        if not math.isfinite(largest):
            problem = "its inputs on the samples contain NaN or infinity"
            raise RungError(f"int8: cannot calibrate layer {name!r}: {problem}.")
        rows = x.numel() // x.shape[-1]
        entry.rows = rows if not entry.ranks else min(entry.rows, rows)
        entry.ranks.add(x.ndim)
        entry.largest = max(entry.largest, largest)

    with watch_inputs(layers, note):
        outputs_on_samples(job)
    return seen


def clipping_limits(job: Job, layers: Mapping[str, nn.Linear], method: str, percentile: float) -> dict[str, Limit]:
    """Returns the clipping limit of each layer that can be calibrated.

    Omits layers that did not run, whose inputs were all zero, or whose inputs had several ranks.
    """
    seen = {n: s for n, s in observe(job, layers).items() if s.largest > 0 and len(s.ranks) == 1}
    if method == "minmax":
        return {name: Limit(s.largest, s.ranks.pop()) for name, s in seen.items()}

    def count(name: str, args: Any, kwargs: Any) -> None:
        entry = seen[name]
        sizes = (args[0] if args else kwargs["input"]).detach().abs().flatten().float()
        counts = torch.histc(sizes, _BINS, 0.0, entry.largest).double().cpu()
        entry.histogram = counts if entry.histogram is None else entry.histogram + counts

    with watch_inputs({name: layers[name] for name in seen}, count):
        outputs_on_samples(job)
    limits = {}
    for name, entry in seen.items():
        assert entry.histogram is not None
        if method == "percentile":
            value = percentile_limit(entry.histogram, entry.largest, percentile)
        else:
            value = mse_limit(entry.histogram, entry.largest)
        limits[name] = Limit(value, entry.ranks.pop())
    return limits


def percentile_limit(histogram: Tensor, largest: float, percentile: float) -> float:
    """Returns the smallest bin edge with at least this percentage of the values at or below it."""
    share = histogram.cumsum(0) / histogram.sum()
    index = int(torch.searchsorted(share, percentile / 100 - 1e-12))
    return largest * (min(index, len(histogram) - 1) + 1) / len(histogram)


def mse_limit(histogram: Tensor, largest: float, levels: int = 127) -> float:
    """Returns the limit from a grid with the smallest squared error of rounding and clipping."""
    centers = (torch.arange(len(histogram), dtype=torch.float64) + 0.5) * (largest / len(histogram))
    limits = torch.tensor(_GRID, dtype=torch.float64) * largest
    scales = (limits / levels)[:, None]
    restored = (centers / scales).round().clamp(max=levels) * scales
    errors = ((restored - centers) ** 2 * histogram).sum(1)
    return float(limits[int(errors.argmin())])

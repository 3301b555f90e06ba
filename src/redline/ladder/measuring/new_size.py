"""Calls a plan with inputs of a new size, in a worker process, to find what the plan does at the first call.

The plan may be ready for the size, set up again (compile, capture or build an engine), or fall back to a slower path.
"""

import time
from collections.abc import Callable
from typing import Any

import torch

from redline.ladder.job import Job
from redline.ladder.plan import Plan
from redline.ladder.rung import ShapeCounts
from redline.ladder.shape_ranges import FALLS_BACK, READY, SETS_UP
from redline.ladder.workload import Workload

_REGION = "Torch-Compiled Region"


def shape_counts(plan: Plan, job: Job) -> ShapeCounts:
    """Returns the set-ups and fallbacks of the plan so far, summed over its rungs."""
    counts = [rung.shape_counts(job) for rung in plan.rungs]
    reasons = [f"{rung.name}: {one.reason}" for rung, one in zip(plan.rungs, counts, strict=True) if one.reason]
    return ShapeCounts(sum(c.set_ups for c in counts), sum(c.fallbacks for c in counts), "; ".join(reasons))


def event_between(before: ShapeCounts, after: ShapeCounts) -> tuple[str, str]:
    """Returns what happened between two counts, and the reason if the plan fell back."""
    if after.fallbacks > before.fallbacks:
        return FALLS_BACK, after.reason
    return (SETS_UP if after.set_ups > before.set_ups else READY), ""


def try_size(
    workload: Workload, plan: Plan, job: Job, step: Callable[[Any], Any], device: torch.device, wait: Callable[[], None]
) -> dict[str, Any]:
    """Returns the event, the reason of a fallback, and the times of the first and of the second call."""
    batches = [workload.fresh_inputs(seed, str(device)) for seed in (0, 1)]
    before = shape_counts(plan, job)
    seconds = []
    for batch in batches:
        wait()
        start_s = time.perf_counter()
        step(batch)
        wait()
        seconds.append(time.perf_counter() - start_s)
    after = shape_counts(plan, job)
    event, reason = event_between(before, after)
    # Beyond its limit of recompilations, torch runs a new size eagerly and does not count this as a fallback, so the
    # profiler tells whether compiled code ran.
    if event == READY and after.fallbacks and "compile" in plan and not _runs_compiled_code(step, batches[0]):
        event, reason = FALLS_BACK, after.reason
    return {"event": event, "reason": reason, "first_s": seconds[0], "step_s": seconds[1]}


def _runs_compiled_code(step: Callable[[Any], Any], batch: Any) -> bool:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step(batch)
    return any(_REGION in event.key for event in profile.key_averages())

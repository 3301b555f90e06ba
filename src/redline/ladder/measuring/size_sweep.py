"""Tries a plan at every size of a range of shapes, in the process in which the plan was timed."""

import time
from collections.abc import Mapping, Sequence

from redline.ladder.measuring.trial import Arm, TrialSpec
from redline.ladder.measuring.worker_pool import WorkerFailed
from redline.ladder.shape_ranges import FAILS, ShapeRange, SizeResult


def sweep(
    arm: Arm, spec: TrialSpec, ranges: Sequence[ShapeRange], allowed_s: float
) -> dict[str, tuple[SizeResult, ...]]:
    """Returns what the plan did at each size, by the label of the range; sizes beyond the allowed time are left out.

    What the plan did at the timed shapes is already known. The other sizes are tried in an order that spreads them over
    the whole range, so that those tried before the time is over still represent the range.
    """
    deadline = time.monotonic() + allowed_s
    found = {}
    for one in ranges:
        results = {label: _known(arm, label) for label in one.shapes() if label in arm.events}
        shapes = one.every()
        left = [label for label in shapes if label not in results]
        for label in sorted(left, key=lambda label: _reversed_bits(left.index(label))):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                break
            try:
                answer = arm.worker.ask("try_size", left_s, address=spec.address, options=shapes[label])
                results[label] = SizeResult(label, **answer)
            except WorkerFailed as failure:
                if failure.kind != "timeout":
                    results[label] = SizeResult(label, FAILS, reason=str(failure))
                if failure.kind in ("timeout", "crash", "oom"):
                    deadline = 0.0  # the process has ended
                    break
        order = {label: place for place, label in enumerate({**one.every(), **one.shapes()})}
        found[one.label] = tuple(sorted(results.values(), key=lambda result: _size(one, order, result)))
    return found


def _known(arm: Arm, label: str) -> SizeResult:
    event, reason = arm.events[label]
    return SizeResult(label, event, arm.setup_s.get(label, 0.0), arm.step_s[label], reason)


def _size(one: ShapeRange, order: Mapping[str, int], result: SizeResult) -> tuple[float, ...]:
    shape = {**one.every(), **one.shapes()}[result.shape]
    return (*(float(shape[key]) for key, value in one.options.items() if isinstance(value, range)), order[result.shape])


def _reversed_bits(index: int) -> int:
    return int(f"{index:016b}"[::-1], 2)

"""Selects the time steps of a sampler, out of 1,000."""

from redline.errors import ModelError
from redline.models.samplers.noise_process import STEPS


def spaced_timesteps(steps: int, strength: float = 1.0) -> tuple[int, ...]:
    """Returns evenly spaced time steps, the noisiest first; a lower strength starts with less noise.

    The number of steps does not depend on the strength, so that a captured CUDA graph works for every strength.
    """
    if not 1 <= steps <= STEPS:
        raise ModelError(f"the number of steps must be from 1 to {STEPS}, not {steps}.")
    if not 0 < strength <= 1:
        raise ModelError(f"strength must be above 0 and at most 1, not {strength}.")
    noisiest = strength * STEPS
    times = tuple(max(round(noisiest - index * noisiest / steps) - 1, 0) for index in range(steps))
    if len(set(times)) < steps:
        raise ModelError(f"a strength of {strength} is too low for {steps} distinct time steps.")
    return times


def intervals(times: tuple[int, ...]) -> list[tuple[int, int | None]]:
    """Returns pairs of consecutive time steps; the last is paired with None, which stands for the clean image."""
    check_times(times)
    return list(zip(times, (*times[1:], None), strict=True))


def check_times(times: tuple[int, ...]) -> None:
    if not times or any(not 0 <= time < STEPS for time in times):
        raise ModelError(f"time steps must be from 0 to {STEPS - 1}, not {times}.")
    if any(later >= time for time, later in zip(times, times[1:], strict=False)):
        raise ModelError(f"time steps must decrease, not {times}.")

"""Which of the 1,000 time steps a sampler visits."""

from redline.errors import ModelError
from redline.models.samplers.noise_process import STEPS


def spread(steps: int, strength: float = 1.0) -> tuple[int, ...]:
    """Evenly down from the noisiest, which is what few steps need; a lower strength starts with less noise.

    The number of steps stays the same whatever the strength, so that a recorded frame can be played with another one.
    """
    if not 1 <= steps <= STEPS:
        raise ModelError(f"a sampler takes from 1 to {STEPS} steps, not {steps}.")
    if not 0 < strength <= 1:
        raise ModelError(f"strength is above 0 and at most 1, not {strength}.")
    noisiest = strength * STEPS
    times = tuple(max(round(noisiest - index * noisiest / steps) - 1, 0) for index in range(steps))
    if len(set(times)) < steps:
        raise ModelError(f"a strength of {strength} leaves too few time steps for {steps} steps.")
    return times


def intervals(times: tuple[int, ...]) -> list[tuple[int, int | None]]:
    """Each time step with the one after it; the last is followed by the clean picture."""
    check_times(times)
    return list(zip(times, (*times[1:], None), strict=True))


def check_times(times: tuple[int, ...]) -> None:
    if not times or any(not 0 <= time < STEPS for time in times):
        raise ModelError(f"time steps are whole numbers from 0 to {STEPS - 1}, not {times}.")
    if any(later >= time for time, later in zip(times, times[1:], strict=False)):
        raise ModelError(f"time steps go down, from more noise to less, not {times}.")

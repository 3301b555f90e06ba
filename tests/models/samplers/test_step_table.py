"""Which time steps a sampler visits."""

import pytest

from redline.errors import ModelError
from redline.models.samplers import intervals, spaced_timesteps


def test_timesteps_start_at_the_strength_and_are_evenly_spaced() -> None:
    assert (
        spaced_timesteps(1) == (999,)
        and spaced_timesteps(4) == (999, 749, 499, 249)
        and spaced_timesteps(4, 0.5) == (499, 374, 249, 124)
    )
    assert spaced_timesteps(1, 0.001) == (0,) and spaced_timesteps(1000) == tuple(range(999, -1, -1))
    assert intervals((999, 499)) == [(999, 499), (499, None)] and intervals((0,)) == [(0, None)]


@pytest.mark.parametrize(("steps", "strength"), [(0, 1.0), (1001, 1.0), (1, 0.0), (1, 1.01), (3, 0.002)])
def test_invalid_timesteps_raise(steps: int, strength: float) -> None:
    with pytest.raises(ModelError):
        spaced_timesteps(steps, strength)


@pytest.mark.parametrize("times", [(), (1000,), (-1,), (5, 5), (4, 5)])
def test_times_go_down_from_999_to_0(times: tuple[int, ...]) -> None:
    with pytest.raises(ModelError, match="time steps"):
        intervals(times)

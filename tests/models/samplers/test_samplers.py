"""Samplers by their own laws: an exact model's picture is found, orders are what they claim, bad input is said."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from redline.errors import ModelError
from redline.models.samplers import (
    SAMPLERS,
    Sampler,
    State,
    clean_weights,
    noise_process,
    sampler_table,
    spaced_timesteps,
)

PICTURE = (1, 3, 6, 7)


def exact(process: str, prediction: str, picture: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """A model that knows the picture, and says it in the way of `prediction`."""
    known = noise_process(process)

    def predict(noisy: Tensor, times: Tensor) -> Tensor:
        alpha, sigma = known.alpha[int(times[0])], known.sigma[int(times[0])]
        noise = (noisy - alpha * picture) / sigma
        said = {"sample": picture, "epsilon": noise, "v": alpha * noise - sigma * picture, "velocity": noise - picture}
        return said[prediction]

    return predict


@pytest.mark.parametrize(
    ("process", "prediction"),
    [("flow", "sample"), ("flow", "velocity"), ("scaled_linear", "epsilon"), ("linear", "v"), ("cosine", "sample")],
)
@pytest.mark.parametrize("name", sorted(SAMPLERS))
@pytest.mark.parametrize(("steps", "strength"), [(1, 1.0), (3, 0.7), (4, 0.31)])
def test_a_perfect_model_recovers_the_image(
    name: str, process: str, prediction: str, steps: int, strength: float
) -> None:
    if name == "flow_euler" and process != "flow":
        with pytest.raises(ModelError, match=f"needs the noise process 'flow', not '{process}'"):
            sampler_table(name, process, prediction, steps, strength)
        return
    sampler = Sampler(sampler_table(name, process, prediction, steps, strength), "cpu")
    picture, noise = torch.rand(PICTURE) * 2 - 1, torch.randn(sampler.noises, *PICTURE)
    found = sampler.sample(exact(process, prediction, picture), noise, picture if strength < 1 else None)
    torch.testing.assert_close(found, picture, rtol=0, atol=2e-4)


@pytest.mark.parametrize(("name", "order"), [("ddim", 1), ("flow_euler", 1), ("dpm_solver", 2)])
def test_the_error_converges_with_the_order_of_the_solver(name: str, order: int) -> None:
    """Pictures of one normal distribution: the way from noise to them is known, and an error to half the step seen."""
    process, spread_px = noise_process("flow"), 0.4

    def predict(noisy: Tensor, times: Tensor) -> Tensor:
        alpha, sigma = process.alpha[int(times[0])], process.sigma[int(times[0])]
        return noisy * alpha * spread_px**2 / ((alpha * spread_px) ** 2 + sigma**2)

    def error(steps: int) -> float:
        # From the middle to a time with a little noise left: at the two ends solvers are of first order by design.
        sampler = Sampler(SAMPLERS[name](process, "sample", tuple(range(799, 98, -700 // steps))), "cpu")
        sampler._weights = sampler._weights.double()
        state = State(torch.ones(1, 1, 1, 1, dtype=torch.float64))
        for index in range(sampler.steps - 1):
            state = sampler.step(index, state, predict(state.noisy, sampler.times[index]))
        ends = [math.hypot(process.alpha[time] * spread_px, process.sigma[time]) for time in (799, 99)]
        return abs(float(state.noisy) - ends[1] / ends[0])

    fewer, more = error(35), error(70)
    assert order - 0.25 < math.log2(fewer / more) < order + 0.5


def test_flow_euler_is_ddim_of_a_flow() -> None:
    for steps in (1, 3, 4):
        one, other = (sampler_table(name, "flow", "velocity", steps, 0.9) for name in ("ddim", "flow_euler"))
        assert torch.tensor(one.rows, dtype=torch.float64).allclose(torch.tensor(other.rows, dtype=torch.float64))


def test_a_change_of_strength_overwrites_the_table_in_place() -> None:
    picture, noise = torch.rand(PICTURE), torch.randn(3, *PICTURE)

    def predict(noisy: Tensor, times: Tensor) -> Tensor:
        return torch.sin(noisy) + times / 1000

    for name in sorted(SAMPLERS):
        strong, weak = (sampler_table(name, "flow", "sample", 3, strength) for strength in (1.0, 0.5))
        sampler = Sampler(strong, "cpu")
        places = (sampler.times.data_ptr(), sampler._weights.data_ptr())
        first = sampler.sample(predict, noise, picture)
        sampler.retune(weak)
        assert places == (sampler.times.data_ptr(), sampler._weights.data_ptr())
        expected = Sampler(weak, "cpu").sample(predict, noise, picture)
        assert torch.equal(sampler.sample(predict, noise, picture), expected)
        assert (first - expected).abs().max() > 1e-3
    with pytest.raises(ModelError, match="cannot change from 3 to 2 steps"):
        sampler.retune(sampler_table("ddim", "flow", "sample", 2))
    with pytest.raises(ModelError, match="cannot change from ddim to distilled, which needs more images"):
        Sampler(sampler_table("ddim", "flow", "sample", 2), "cpu").retune(
            sampler_table("distilled", "flow", "sample", 2)
        )


@pytest.mark.parametrize("name", sorted(SAMPLERS))
def test_a_frame_is_one_compiled_graph(name: str) -> None:
    sampler = Sampler(sampler_table(name, "flow", "sample", 3, 0.8), "cpu")

    def frame(picture: Tensor, noise: Tensor) -> Tensor:
        return sampler.sample(lambda noisy, times: torch.tanh(noisy + picture) * (times + 1), noise, picture)

    compiled = torch.compile(frame, fullgraph=True, backend="eager", dynamic=False)
    given = torch.rand(PICTURE), torch.randn(sampler.noises, *PICTURE)
    torch.testing.assert_close(compiled(*given), frame(*given))


def test_timesteps_are_evenly_spaced() -> None:
    assert (
        spaced_timesteps(4) == (999, 749, 499, 249)
        and spaced_timesteps(1) == (999,)
        and spaced_timesteps(2, 0.5) == (499, 249)
    )
    assert len(spaced_timesteps(1000)) == 1000 and spaced_timesteps(1000)[-1] == 0
    for steps, strength, sentence in (
        (0, 1.0, "must be from 1 to 1000, not"),
        (1001, 1.0, "must be from 1 to 1000, not"),
        (2, 0.0, "above 0 and at most 1"),
        (2, 1.5, "above 0 and at most 1"),
        (4, 0.001, "is too low for"),
    ):
        with pytest.raises(ModelError, match=sentence):
            spaced_timesteps(steps, strength)


def test_invalid_samplers_raise() -> None:
    flow = noise_process("flow")
    with pytest.raises(ModelError, match="unknown sampler 'euler' .available: ddim"):
        sampler_table("euler", "flow", "sample", 2)
    with pytest.raises(ModelError, match="unknown noise process 'edm'"):
        noise_process("edm")
    with pytest.raises(ModelError, match="only supported by the noise process 'flow'"):
        noise_process("linear", 2.0)
    with pytest.raises(ModelError, match="above zero"):
        noise_process("flow", 0.0)
    with pytest.raises(ModelError, match="1 to 4 steps, not 5"):
        sampler_table("distilled", "flow", "sample", 5)
    with pytest.raises(ModelError, match="cannot start from pure noise"):
        sampler_table("ddim", "flow", "epsilon", 2)
    with pytest.raises(ModelError, match="'flow' does not support the prediction 'v'"):
        clean_weights(flow, "v", 5)
    with pytest.raises(ModelError, match="unknown prediction 'score'"):
        clean_weights(flow, "score", 5)
    for times in ((), (1000,), (-1,), (3, 5), (5, 5)):
        with pytest.raises(ModelError, match="time steps"):
            SAMPLERS["ddim"](flow, "sample", times)
    sampler = Sampler(sampler_table("distilled", "flow", "sample", 2), "cpu")
    with pytest.raises(ModelError, match="needs 2 noise images, not 1"):
        sampler.sample(lambda noisy, times: noisy, torch.randn(1, *PICTURE))
    with pytest.raises(ModelError, match="needs fresh noise"):
        sampler.step(0, sampler.begin(torch.randn(PICTURE)), torch.randn(PICTURE))

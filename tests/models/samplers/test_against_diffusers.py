"""Every sampler goes the way of diffusers' scheduler of that name, step by step, from the same noise."""

from collections.abc import Callable
from typing import Any

import diffusers
import pytest
import torch
from torch import Tensor

from redline.models.samplers import (
    PREDICTIONS,
    Sampler,
    ddim,
    distilled,
    dpm_solver,
    flow_euler,
    noise_process,
    spaced_timesteps,
)

# Of their own use of numpy.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
SHAPE = (2, 3, 7, 5)
# What diffusers calls them.
THEIRS = {"sample": "sample", "epsilon": "epsilon", "v": "v_prediction", "velocity": "flow_prediction"}


def model(seed: int) -> Callable[[Tensor, Tensor], Tensor]:
    mix = torch.randn(3, 3, generator=torch.Generator().manual_seed(seed))

    def predict(noisy: Tensor, times: Tensor) -> Tensor:
        return torch.tanh(torch.einsum("bchw,cd->bdhw", noisy, mix)) + times.view(-1, 1, 1, 1) / 1000

    return predict


def path(sampler: Sampler, predict: Callable[[Tensor, Tensor], Tensor], noise: list[Tensor]) -> list[Tensor]:
    state, seen = sampler.begin(noise[0]), []
    for index in range(sampler.steps):
        output = predict(state.noisy, sampler.times[index])
        state = sampler.step(index, state, output, noise[index + 1])
        seen.append(state.noisy)
    return seen


def their_path(
    scheduler: Any, times: Any, predict: Callable[[Tensor, Tensor], Tensor], noise: Tensor, **options: Any
) -> list[Tensor]:
    noisy, seen = noise.clone(), []
    # Their flows count a time step by its sigma, ours by its place in the table, one lower.
    offset = 1 if times.is_floating_point() else 0
    for time in times:
        own = (time.round().long() - offset).expand(len(noise))
        noisy = scheduler.step(predict(noisy, own), time, noisy, return_dict=False, **options)[0]
        seen.append(noisy)
    return seen


def agree(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=2e-4, atol=2e-4 * float(other.abs().max()))


def noises(count: int) -> list[Tensor]:
    return [torch.randn(SHAPE) for _ in range(count)]


BETAS = {
    "scaled_linear": {"beta_schedule": "scaled_linear", "beta_start": 0.00085, "beta_end": 0.012},
    "linear": {"beta_schedule": "linear", "beta_start": 0.0001, "beta_end": 0.02},
    "cosine": {"beta_schedule": "squaredcos_cap_v2"},
}


@pytest.mark.parametrize("steps", [1, 2, 4, 10])
@pytest.mark.parametrize("prediction", ["sample", "epsilon", "v"])
@pytest.mark.parametrize("process", ["scaled_linear", "linear"])
def test_ddim(process: str, prediction: str, steps: int) -> None:
    options: Any = {**BETAS[process], "prediction_type": THEIRS[prediction], "timestep_spacing": "trailing"}
    scheduler = diffusers.DDIMScheduler(clip_sample=False, set_alpha_to_one=True, **options)
    scheduler.set_timesteps(steps)
    sampler = Sampler(ddim(noise_process(process), prediction, spaced_timesteps(steps)), "cpu", batch=2)
    assert sampler.times[:, 0].tolist() == scheduler.timesteps.tolist()
    start, predict = noises(1) * (steps + 1), model(steps)
    agree(path(sampler, predict, start), their_path(scheduler, scheduler.timesteps, predict, start[0]))


@pytest.mark.parametrize("steps", [1, 2, 3, 4, 10, 20])
@pytest.mark.parametrize("prediction", ["sample", "epsilon", "v"])
@pytest.mark.parametrize("process", ["scaled_linear", "linear"])
def test_dpm_solver(process: str, prediction: str, steps: int) -> None:
    options: Any = {**BETAS[process], "prediction_type": THEIRS[prediction], "timestep_spacing": "trailing"}
    scheduler = diffusers.DPMSolverMultistepScheduler(solver_order=2, final_sigmas_type="zero", **options)
    scheduler.set_timesteps(steps)
    sampler = Sampler(dpm_solver(noise_process(process), prediction, spaced_timesteps(steps)), "cpu", batch=2)
    assert sampler.times[:, 0].tolist() == scheduler.timesteps.tolist()
    start, predict = noises(1) * (steps + 1), model(steps)
    agree(path(sampler, predict, start), their_path(scheduler, scheduler.timesteps, predict, start[0]))


@pytest.mark.parametrize("steps", [2, 3, 5])
def test_dpm_solver_on_a_flow(steps: int) -> None:
    """Their own sigmas stop short of pure noise, and are put into both."""
    scheduler = diffusers.DPMSolverMultistepScheduler(
        solver_order=2, final_sigmas_type="zero", use_flow_sigmas=True, prediction_type="flow_prediction"
    )
    times = spaced_timesteps(steps, strength=0.8)
    scheduler.set_timesteps(steps)
    process = noise_process("flow")
    scheduler.sigmas = torch.tensor([*[process.sigma[time] for time in times], 0.0])
    sampler = Sampler(dpm_solver(process, "velocity", times), "cpu", batch=2)
    start, predict = noises(1) * (steps + 1), model(steps)
    theirs = [start[0]]
    for time, counted in zip(times, scheduler.timesteps, strict=True):
        output = predict(theirs[-1], torch.tensor([time, time]))
        theirs.append(scheduler.step(output, counted, theirs[-1], return_dict=False)[0])
    agree(path(sampler, predict, start), theirs[1:])


@pytest.mark.parametrize("shift", [1.0, 3.0])
@pytest.mark.parametrize("steps", [1, 2, 4, 8])
def test_flow_euler(steps: int, shift: float) -> None:
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=shift)
    times = spaced_timesteps(steps)
    straight = noise_process("flow")
    scheduler.set_timesteps(sigmas=[straight.sigma[time] for time in times])
    sampler = Sampler(flow_euler(noise_process("flow", shift), "velocity", times), "cpu", batch=2)
    start, predict = noises(1) * (steps + 1), model(steps)
    theirs = [start[0]]
    for time, counted in zip(times, scheduler.timesteps, strict=True):
        output = predict(theirs[-1], torch.tensor([time, time]))
        theirs.append(scheduler.step(output, counted, theirs[-1], return_dict=False)[0])
    agree(path(sampler, predict, start), theirs[1:])


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_distilled_on_a_flow(steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = diffusers.schedulers.FlowMatchLCMScheduler()
    times = spaced_timesteps(steps)
    process = noise_process("flow")
    scheduler.set_timesteps(sigmas=[process.sigma[time] for time in times])
    noise, predict = noises(steps + 1), model(steps)
    given = iter(noise[1:])
    monkeypatch.setattr(
        "diffusers.schedulers.scheduling_flow_match_lcm.randn_tensor", lambda *args, **options: next(given)
    )
    sampler = Sampler(distilled(process, "velocity", times), "cpu", batch=2)
    agree(path(sampler, predict, noise), their_path(scheduler, scheduler.timesteps, predict, noise[0]))


@pytest.mark.parametrize("prediction", ["sample", "epsilon", "v"])
@pytest.mark.parametrize("steps", [1, 2, 4])
def test_distilled_as_latent_consistency_models_are(
    prediction: str, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: Any = {**BETAS["scaled_linear"], "prediction_type": THEIRS[prediction]}
    scheduler = diffusers.LCMScheduler(clip_sample=False, **options)
    times = spaced_timesteps(steps)
    scheduler.set_timesteps(timesteps=list(times))
    noise, predict = noises(steps + 1), model(steps)
    given = iter(noise[1:])
    monkeypatch.setattr("diffusers.schedulers.scheduling_lcm.randn_tensor", lambda *args, **options: next(given))
    sampler = Sampler(distilled(noise_process("scaled_linear"), prediction, times), "cpu", batch=2)
    theirs = their_path(scheduler, scheduler.timesteps, predict, noise[0])
    agree(path(sampler, predict, noise)[-1:], theirs[-1:])


@pytest.mark.parametrize("process", sorted(BETAS))
def test_noise_is_added_as_theirs(process: str) -> None:
    options: Any = BETAS[process]
    scheduler = diffusers.DDIMScheduler(**options)
    alpha, sigma = noise_process(process).tables(torch.device("cpu"))
    times, picture, noise = torch.tensor([3, 870]), torch.randn(SHAPE), torch.randn(SHAPE)
    expected = scheduler.add_noise(picture, noise, times)
    seen = alpha[times, None, None, None] * picture + sigma[times, None, None, None] * noise
    torch.testing.assert_close(seen, expected, rtol=1e-3, atol=1e-4)


def test_every_prediction_has_a_name_of_theirs() -> None:
    assert set(THEIRS) == set(PREDICTIONS)

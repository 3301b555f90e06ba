"""Bundled workloads build the same twice, react to their input, and their gates tell right from broken."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from redline.errors import WorkloadError
from redline.ladder.gate import all_finite
from redline.ladder.job import Job, TrainingStep
from redline.ladder.rewrites.io_adapter import Boundary
from redline.ladder.workload import Workload, call
from redline.ladder.workloads import BUNDLED
from redline.ladder.workloads.addresses import load_workload
from redline.ladder.workloads.drct import smooth_images, super_resolution
from redline.ladder.workloads.unet import video_unet
from redline.models.drct import DrctConfig
from redline.models.resnet import ResNet
from redline.models.vit import Attention, VisionTransformer
from redline.nn import WindowAttention

SMALL: dict[str, dict[str, int]] = {
    "resnet": {"batch": 2, "size": 64},
    "vit": {"size": 64, "width": 96, "depth": 3, "heads": 3},
    "gpt": {"batch": 2, "length": 24, "width": 32, "depth": 2, "heads": 2, "vocabulary": 101},
}
TOO_LARGE_FOR_A_TEST = {"unet_100m", "unet_390m", "unet_880m", "gpt_124m", "drct", "drct_l"}


def small_workloads() -> list[Workload]:
    tiny_unet = video_unet(8, batch=1, size=64)
    return [load_workload(name, options) for name, options in SMALL.items()] + [tiny_unet]


def test_every_bundled_name_is_covered() -> None:
    assert set(BUNDLED) == set(SMALL) | TOO_LARGE_FOR_A_TEST


@pytest.mark.parametrize("name", BUNDLED)
def test_bundled_inputs_follow_the_options(name: str) -> None:
    workload = load_workload(name, {"batch": 3})
    assert workload.name == name
    for leaf in pytree.tree_leaves(workload.fresh_inputs(0, "cpu")):
        assert leaf.shape[0] == 3
    assert workload.items == 3 * (load_workload(name, {"batch": 1}).items)
    assert len(workload.gates) == 2


@pytest.mark.parametrize("name", BUNDLED)
def test_unknown_option_is_named(name: str) -> None:
    with pytest.raises(WorkloadError, match="'bach'"):
        load_workload(name, {"bach": 3})


@pytest.mark.parametrize("workload", small_workloads(), ids=lambda w: w.name or "unet")
def test_builds_the_same_twice_and_reacts_to_its_input(workload: Workload) -> None:
    one, other = workload.fresh_model("cpu"), workload.fresh_model("cpu")
    for (name, a), (_, b) in zip(one.state_dict().items(), other.state_dict().items(), strict=True):
        assert torch.equal(a, b), name
    with torch.no_grad():
        output = call(one, workload.fresh_inputs(0, "cpu"))
        again = call(other, workload.fresh_inputs(0, "cpu"))
        else_ = call(one, workload.fresh_inputs(1, "cpu"))
    assert all_finite(output)
    assert torch.equal(output, again)
    assert (output - else_).norm() > 0.3 * output.norm(), "an input must matter far more than any gate allows"
    assert 0.1 < output.std() < 10


def verdicts_of(workload: Workload) -> Callable[..., list[bool]]:
    """Whether each gate passes, over some batches, after a change to a copy of the model: a function of the change."""
    model, seeds = workload.fresh_model("cpu"), range(2)
    with torch.no_grad():
        references = [call(model, workload.fresh_inputs(seed, "cpu")) for seed in seeds]

    @torch.no_grad()
    def verdicts(change: Callable[[nn.Module], Any], batches: int = len(seeds)) -> list[bool]:
        changed = copy.deepcopy(model)
        replaced = change(changed)
        if isinstance(replaced, nn.Module):
            changed = replaced
        passed = [True] * len(workload.gates)
        for seed in seeds[:batches]:
            output = call(changed, workload.fresh_inputs(seed, "cpu")).float()
            for index, gate in enumerate(workload.gates):
                passed[index] &= gate.judge(references[seed], output).passed
        return passed

    return verdicts


def rounded(bits: int) -> Callable[[nn.Module], None]:
    """Weights per output channel and activations per tensor, rounded to so many bits."""

    def change(model: nn.Module) -> None:
        levels = 2**bits - 1
        for module in model.modules():
            if not isinstance(module, (nn.Conv2d, nn.ConvTranspose2d, nn.Linear)):
                continue
            weight = module.weight
            scale = weight.abs().amax(dim=tuple(range(1, weight.ndim)), keepdim=True) / (levels // 2)
            weight.copy_((weight / scale).round() * scale)
            module.register_forward_pre_hook(round_input)

    def round_input(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        low, high = args[0].aminmax()
        scale = (high - low) / (2**bits - 1)
        return (((args[0] - low) / scale).round() * scale + low, *args[1:])

    return change


def bf16_weights(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.copy_(parameter.to(torch.bfloat16).float())


def nothing(model: nn.Module) -> None:
    pass


class Constant(nn.Module):
    """Answers every input with what it said to the first one."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.answer: Tensor | None = None

    def forward(self, *args: Any) -> Tensor:
        self.answer = self.model(*args) if self.answer is None else self.answer
        return self.answer


def test_resnet_gates() -> None:
    workload = load_workload("resnet", {"batch": 4, "size": 128})
    verdicts = verdicts_of(workload)

    def lost_shift(model: nn.Module) -> None:
        assert isinstance(model, ResNet)
        norm = model.get_submodule("stages.3.1.norm2")
        assert isinstance(norm, nn.BatchNorm2d)
        norm.bias.zero_()

    def lost_mean(model: nn.Module) -> None:
        norm = model.get_submodule("stages.1.0.norm1")
        assert isinstance(norm, nn.BatchNorm2d) and norm.running_mean is not None
        norm.running_mean.zero_()

    assert all(verdicts(nothing))
    assert all(verdicts(bf16_weights))
    assert all(verdicts(rounded(8)))
    assert not any(verdicts(rounded(6), batches=1))
    assert not any(verdicts(lost_shift, batches=1))
    assert not any(verdicts(lost_mean, batches=1))
    assert not any(verdicts(Constant))


def test_resnet_batch_norm_is_not_trivial() -> None:
    model = load_workload("resnet", SMALL["resnet"]).fresh_model("cpu")
    for name, norm in model.named_modules():
        if isinstance(norm, nn.BatchNorm2d):
            assert norm.running_mean is not None and norm.running_var is not None
            assert norm.momentum == 0.1
            for tensor in (norm.weight, norm.bias, norm.running_mean, norm.running_var):
                assert tensor.std() > 0.01, name
            assert (norm.running_var > 0).all()


def test_vit_gates() -> None:
    workload = load_workload("vit")
    verdicts = verdicts_of(workload)

    def uniform(model: nn.Module, blocks: range = range(12)) -> None:
        assert isinstance(model, VisionTransformer)
        for index in blocks:
            attention = model.get_submodule(f"blocks.{index}.attention")
            assert isinstance(attention, Attention)
            attention.scale = 0.0

    assert all(verdicts(bf16_weights, batches=1))
    assert not any(verdicts(rounded(5), batches=1))
    assert not any(verdicts(uniform, batches=1))
    assert not any(verdicts(lambda model: uniform(model, range(1)), batches=1))
    assert not any(verdicts(Constant))


class InBf16(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model.to(torch.bfloat16)

    def forward(self, frame: Tensor, timestep: Tensor, previous_frame: Tensor) -> Tensor:
        return self.model(frame.bfloat16(), timestep, previous_frame.bfloat16())


def test_unet_gates() -> None:
    verdicts = verdicts_of(video_unet(8, batch=1, size=64))

    def without(name: str) -> Callable[[nn.Module], None]:
        def change(model: nn.Module) -> None:
            weight = model.get_submodule(name).weight
            assert isinstance(weight, nn.Parameter)
            weight.zero_()

        return change

    assert all(verdicts(InBf16))
    assert not any(verdicts(without("draft.encoder_attention.out"), batches=1))
    assert not any(verdicts(without("refine.bottom.conv2"), batches=1))
    assert not any(verdicts(without("refine.film"), batches=1))
    assert not any(verdicts(Constant))


def test_drct_gates() -> None:
    config = DrctConfig.of(2, 2, width=24, growth=8, features=8, window=8)
    verdicts = verdicts_of(super_resolution(config, batch=1, size=48))

    def without_biases(model: nn.Module) -> None:
        for name, parameter in model.named_parameters():
            if name.endswith("relative_position_bias_table"):
                parameter.zero_()

    def never_shifted(model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, WindowAttention):
                module.shift = 0

    assert all(verdicts(bf16_weights))
    assert not any(verdicts(without_biases, batches=1))
    assert not any(verdicts(never_shifted, batches=1))
    assert not any(verdicts(Constant))


def test_unet_size_must_halve_four_times() -> None:
    with pytest.raises(WorkloadError, match="size 40"):
        load_workload("unet_100m", {"size": 40})


def training(workload: Workload, optimizer: Any = None) -> TrainingStep:
    model = workload.fresh_model("cpu")
    step = Job.of(model, loss=workload.loss, optimizer=optimizer or workload.optimizer).finish()
    assert isinstance(step, TrainingStep)
    return step


def judged(workload: Workload, step: TrainingStep, steps: int = 3) -> list[Tensor]:
    """As a trial sees a training step: the losses of some steps, then the first step's gradients."""
    losses, gradients = [], []
    for seed in range(steps):
        losses.append(step(workload.fresh_inputs(seed, "cpu")))
        if seed == 0:
            gradients = [g.clone() for g in step.gradients().values()]
    return [torch.stack(losses), *gradients]


def passes(workload: Workload, reference: list[Tensor], seen: list[Tensor]) -> list[bool]:
    return [gate.judge(reference, seen).passed for gate in workload.gates]


def test_gpt_gates(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = load_workload("gpt", {"batch": 2, "length": 64, "depth": 2})
    assert workload.training
    reference = judged(workload, training(workload))
    assert passes(workload, reference, judged(workload, training(workload))) == [True, True]

    idle = judged(workload, training(workload, lambda parameters: torch.optim.SGD(parameters, lr=0.0)))
    assert passes(workload, reference, idle) == [False, True]

    attention = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional, "scaled_dot_product_attention", lambda q, k, v, is_causal: attention(q, k, v)
    )
    assert passes(workload, reference, judged(workload, training(workload)))[1] is False


def test_gpt_learns_and_ignores_the_last_position() -> None:
    workload = load_workload("gpt", SMALL["gpt"])
    assert workload.loss is not None
    batch = workload.fresh_inputs(0, "cpu")
    assert batch["tokens"].min() >= 0 and batch["tokens"].max() < 101
    logits = torch.randn(2, 24, 101)
    expected = torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch["tokens"][:, 1:].flatten())
    torch.testing.assert_close(workload.loss(logits, batch), expected)

    step = training(workload)
    losses = [float(step(batch)) for _ in range(20)]
    assert losses[-1] < 0.95 * losses[0]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["resnet", "vit", "unet_100m", "unet_880m"])
def test_bf16_passes_on_a_gpu(name: str) -> None:
    workload = load_workload(name)
    model = workload.fresh_model("cuda")
    half = Boundary(copy.deepcopy(model).to(torch.bfloat16), torch.bfloat16)
    with torch.no_grad(), torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        for seed in (10, 11, 12):
            batch = workload.fresh_inputs(seed, "cuda")
            reference, output = call(model, batch), call(half, batch)
            for gate in workload.gates:
                assert gate.judge(reference, output).passed, str(gate.judge(reference, output))


@pytest.mark.gpu
def test_resnet_weights_do_not_depend_on_tf32() -> None:
    workload = load_workload("resnet")
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=True):
        one = workload.fresh_model("cuda").state_dict()
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        other = workload.fresh_model("cuda").state_dict()
    for name, tensor in one.items():
        assert torch.equal(tensor, other[name]), name


def test_images_have_finer_waves_in_later_channels() -> None:
    torch.manual_seed(0)
    spectrum = torch.fft.rfft(smooth_images(4, 512) - 0.5, dim=-1).abs().sum((0, 2))
    peaks = spectrum[:, 1:].argmax(-1) + 1
    assert peaks[0] < peaks[1] < peaks[2]

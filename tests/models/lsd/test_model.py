"""Every input reaches the output, at any size of picture, in one compiled graph; impossible inputs are one sentence."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from redline.errors import ModelError
from redline.models.lsd import SIZES, Lsd, LsdConfig

SMALL = LsdConfig(patch=2, width=16, multipliers=(1, 2, 4), blocks=2, attending=2, control=8)


def fresh(config: LsdConfig = SMALL, **sizes: int) -> tuple[Lsd, dict[str, Tensor]]:
    return Lsd(config).eval(), inputs(config, **sizes)


def inputs(config: LsdConfig, batch: int = 1, height: int = 24, width: int = 32) -> dict[str, Tensor]:
    pictures = {name: torch.rand(batch, 3, height, width) * 2 - 1 for name in ("noisy", "frame", "previous")}
    return {**pictures, "timestep": torch.randint(1000, (batch,)), "control": torch.rand(batch, config.control)}


def change(one: Tensor, other: Tensor, frame: Tensor) -> float:
    """How much of what the network adds to the frame is another."""
    return float((one - other).norm() / (one - frame).norm())


@pytest.mark.parametrize(
    ("size", "millions"), [("tiny", (0.6, 1.5)), ("light", (95, 105)), ("medium", (370, 410)), ("heavy", (850, 910))]
)
def test_sizes_and_channels_are_multiples_of_eight(size: str, millions: tuple[float, float]) -> None:
    with torch.device("meta"):
        model = Lsd(LsdConfig.of(size))
    assert millions[0] <= sum(weight.numel() for weight in model.parameters()) / 1e6 <= millions[1]
    for name, module in model.named_modules():
        if isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)):
            assert module.in_channels % 8 == 0 and module.out_channels % 8 == 0, name
        if isinstance(module, nn.Linear):
            assert module.in_features % 8 == 0 and module.out_features % 8 == 0, name
    assert set(model.state_dict()) == {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize("config", [SMALL, SIZES["tiny"], replace(SMALL, patch=1, attending=0)], ids=str)
@torch.no_grad()
def test_it_reacts_to_every_input(config: LsdConfig) -> None:
    model, given = fresh(config)
    output = model(**given)
    frame = given["frame"]
    assert output.shape == frame.shape and torch.equal(output, model(**given))
    for name in ("noisy", "previous"):
        assert change(output, model(**{**given, name: torch.rand_like(frame) * 2 - 1}), frame) > 0.05, name
        assert change(output, model(**{**given, name: given[name] + 0.01}), frame) > 1e-4, name
    moved = {**given, "frame": torch.rand_like(frame) * 2 - 1}
    assert change(output - frame, model(**moved) - moved["frame"], torch.zeros(1)) > 0.05
    later = (given["timestep"] + 1) % 1000
    assert change(output, model(**{**given, "timestep": later}), frame) > 1e-4
    assert change(output, model(**{**given, "timestep": (given["timestep"] + 500) % 1000}), frame) > 1e-2
    assert change(output, model(**{**given, "control": 1 - given["control"]}), frame) > 1e-3


@torch.no_grad()
def test_no_control_is_a_control_of_zeros() -> None:
    model, given = fresh()
    nothing = {**given, "control": None}
    torch.testing.assert_close(model(**nothing), model(**{**given, "control": torch.zeros(1, 8)}))
    without = Lsd(replace(SMALL, control=0)).eval()
    assert without(**nothing).shape == given["frame"].shape
    with pytest.raises(ModelError, match="control must have the shape .1, 0."):
        without(**given)


@pytest.mark.parametrize(("height", "width"), [(1, 1), (1, 37), (8, 8), (23, 17), (40, 33)])
@torch.no_grad()
def test_images_of_any_size(height: int, width: int) -> None:
    model, given = fresh(height=height, width=width)
    output = model(**given)
    assert output.shape == (1, 3, height, width) and output.isfinite().all()
    # Padding is the edge repeated, so a picture padded so by hand gives the same.
    across, down = max(-width % 8, 16 - width), max(-height % 8, 16 - height)
    by_hand = {
        name: nn.functional.pad(given[name], (0, across, 0, down), mode="replicate")
        for name in ("noisy", "frame", "previous")
    }
    torch.testing.assert_close(model(**{**given, **by_hand})[..., :height, :width], output)


@torch.no_grad()
def test_images_of_a_batch_are_independent() -> None:
    model, given = fresh(batch=3, height=16, width=21)
    together = model(**given)
    for index in range(3):
        alone = model(**{name: value[index : index + 1] for name, value in given.items()})
        torch.testing.assert_close(together[index : index + 1], alone, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_attention_and_the_bottom_reach_the_output() -> None:
    model, given = fresh()
    output = model(**given)
    for name in ("encoder.2.attention.out", "encoder.1.attention.out", "decoder.0.attention.out", "up.0", "film"):
        weight = model.get_submodule(name).weight
        assert isinstance(weight, nn.Parameter)
        before = weight.clone()
        weight.zero_()
        assert change(output, model(**given), given["frame"]) > 5e-3, name
        weight.copy_(before)


def test_gradients_are_the_same_when_activations_are_computed_again() -> None:
    model, given = fresh(height=16, width=16)
    seen = []
    for wanted in (False, True):
        model.recompute(wanted)
        model.zero_grad()
        kept: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, kept=kept: (kept.append(x.numel()), x)[1], lambda x: x):
            loss = model(**given).square().mean()
        loss.backward()
        gradients = [weight.grad.clone() for weight in model.parameters() if weight.grad is not None]
        seen.append((gradients, sum(kept)))
    assert all(torch.equal(one, other) for one, other in zip(seen[0][0], seen[1][0], strict=True))
    assert seen[1][1] < 0.6 * seen[0][1]


def test_autocast_copies_of_weights_are_not_kept() -> None:
    """Of every pass that a gradient is taken through together, autocast's copies would be kept once more."""
    model, given = fresh(batch=7, height=8, width=8)
    model.recompute()
    kept: list[Tensor] = []
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda x: (kept.append(x), x)[1], lambda x: x),
        torch.autocast("cpu", torch.bfloat16),
    ):
        model(**given)
    weights = [one for name, one in model.named_parameters() if name.startswith(("up", "down", "film"))]
    large = {weight.numel() for weight in weights if weight.ndim > 1}
    assert not [x.shape for x in kept if x.dtype == torch.bfloat16 and x.numel() in large]


@torch.no_grad()
def test_whole_in_one_compiled_graph() -> None:
    model, given = fresh(height=9, width=14)
    compiled = torch.compile(model, fullgraph=True, backend="eager", dynamic=False)
    torch.testing.assert_close(compiled(**given), model(**given), rtol=1e-4, atol=1e-5)


def test_no_device_value_is_read() -> None:
    """On meta tensors there are no values, so a question for one would raise."""
    with torch.device("meta"):
        model = Lsd(SMALL)
        given = {name: value.to("meta") for name, value in inputs(SMALL, height=13, width=10).items()}
    assert model(**given).shape == (1, 3, 13, 10)


def test_time_steps_stay_apart_in_half_precision() -> None:
    model, given = fresh()
    model.to(torch.bfloat16)
    near = model.sinusoids[torch.tensor([998, 999])].float()
    assert (near[0] - near[1]).norm() / near[0].norm() > 0.1
    # fp32 pictures keep their own precision: the network's part alone is rounded.
    assert model(**given).dtype == torch.float32


def test_invalid_inputs_and_settings_raise() -> None:
    model, given = fresh()
    for change_, sentence in (
        ({"frame": torch.rand(1, 4, 8, 8)}, "shape .batch, 3, height, width"),
        ({"frame": torch.rand(1, 3, 0, 8)}, "shape .batch, 3, height, width"),
        ({"noisy": torch.rand(1, 3, 8, 8)}, "must have the same shape"),
        ({"timestep": torch.rand(1)}, "integers, one for each"),
        ({"timestep": torch.tensor([1, 2])}, "integers, one for each"),
        ({"control": torch.rand(1, 3)}, "control must have the shape .1, 8., not .1, 3."),
    ):
        with pytest.raises(ModelError, match=sentence):
            model(**{**given, **change_})
    for wrong, sentence in (
        ({"patch": 3}, "patch = 3 must be one of"),
        ({"width": 12}, "width = 12 must be .* a multiple of 8"),
        ({"multipliers": (1,)}, "multipliers = "),
        ({"blocks": 0}, "blocks = 0"),
        ({"attending": 4}, "attending = 4 must be at most 3"),
        ({"control": 3}, "control = 3 must be .* a multiple of 8"),
    ):
        with pytest.raises(ModelError, match=sentence):
            replace(SMALL, **wrong)
    with pytest.raises(ModelError, match="unknown LSD size 'huge' .available: tiny, light, medium, heavy"):
        LsdConfig.of("huge")


@pytest.mark.parametrize("index", range(3), ids=["soft", "softer", "previous"])
@torch.no_grad()
def test_the_frame_is_blended_by_predicted_weights(index: int) -> None:
    """With a weight of one for one of them and no change, that one is the output."""
    model, given = fresh(height=16, width=24)
    nn.init.zeros_(model.head.weight)
    nn.init.zeros_(model.head.bias)
    frame = given["frame"]
    torch.testing.assert_close(model(**given), frame)
    side = model.config.patch**2
    model.head.bias[(3 + index) * side : (4 + index) * side] = 1
    soft = nn.functional.avg_pool2d(frame, 3, 1, 1, count_include_pad=False)
    softer = nn.functional.avg_pool2d(soft, 5, 1, 2, count_include_pad=False)
    torch.testing.assert_close(model(**given), (soft, softer, given["previous"])[index])

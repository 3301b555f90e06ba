"""Each gate fails on a planted wrong output, and NaN never passes."""

import pytest
import torch

from redline import Gate
from redline.errors import GateError
from redline.ladder.gate import INFERENCE_GATES, all_finite, worst
from redline.ladder.measuring.judge import Refused, judge
from redline.ladder.metrics import METRICS


def picture(seed: int = 0) -> torch.Tensor:
    return torch.rand(2, 3, 24, 31, generator=torch.Generator().manual_seed(seed))


def training_outputs(noise: float = 0.0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    losses, gradient = torch.tensor([2.0, 1.5, 1.2]), torch.randn(40, generator=generator)
    return [losses * (1 + noise), gradient * (1 + noise) + noise * torch.randn(40, generator=generator)]


LIMITS = {
    "relative_error": 1e-2,
    "max_error": 1e-2,
    "cosine": 0.999,
    "psnr": 35.0,
    "image_psnr": 35.0,
    "ssim": 0.98,
    "top1": 0.99,
    "agreement": 0.99,
    "kl_divergence": 1e-4,
    "loss_difference": 1e-2,
    "gradient_difference": 1e-2,
}


def tokens(seed: int = 0) -> torch.Tensor:
    return torch.randint(0, 9, (3, 41), generator=torch.Generator().manual_seed(seed))


def outputs(metric: str) -> list[torch.Tensor]:
    if metric == "agreement":
        return [picture(), tokens()]
    return training_outputs() if metric in ("loss_difference", "gradient_difference") else [picture()]


def broken(metric: str) -> list[torch.Tensor]:
    if metric == "agreement":
        return [picture(), tokens(1)]
    return training_outputs(0.1) if metric in ("loss_difference", "gradient_difference") else [picture(1)]


def test_every_metric_is_tested_here() -> None:
    assert set(LIMITS) == set(METRICS)


@pytest.mark.parametrize("metric", METRICS)
def test_gates_pass_equal_outputs_and_fail_a_planted_wrong_one(metric: str) -> None:
    gate = Gate(metric, LIMITS[metric])
    assert gate.judge(outputs(metric), outputs(metric)).passed
    assert not gate.judge(outputs(metric), broken(metric)).passed


@pytest.mark.parametrize("metric", METRICS)
def test_gates_pass_a_rounding_error(metric: str) -> None:
    near = [t * (1 + 1e-5) if t.is_floating_point() else t for t in outputs(metric)]
    assert Gate(metric, LIMITS[metric]).judge(outputs(metric), near).passed


@pytest.mark.parametrize("metric", [m for m in METRICS if m not in ("top1", "agreement")])
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_nan_and_infinity_never_pass(metric: str, poison: float) -> None:
    bad = [t.clone() for t in outputs(metric)]
    bad[0].flatten()[0] = poison
    bad[-1].flatten()[0] = poison
    assert not Gate(metric, LIMITS[metric]).judge(outputs(metric), bad).passed
    assert not all_finite(bad)


def test_integer_outputs_beside_floats_get_an_agreement_gate() -> None:
    expected, wrong = [picture(), tokens()], [picture(), tokens(1)]
    good, bad = (judge([Gate("cosine", 0.999)], [expected], [seen]) for seen in (expected, wrong))
    assert [score.metric for score in good] == ["cosine", "agreement"] and all(score.passed for score in good)
    assert [score.passed for score in bad] == [True, False]
    lenient = judge([Gate("cosine", 0.999), Gate("agreement", 0.0)], [expected], [wrong])
    assert len(lenient) == 2 and all(score.passed for score in lenient)
    assert [score.metric for score in judge([Gate("top1", 0.9)], [[tokens()]], [[tokens()]])] == ["top1"]


def test_an_output_that_ignores_its_input_is_refused_within_all_limits() -> None:
    """A large constant offset hides the effect of the input from all metrics."""
    constant, batches = torch.full((40,), 5.0), [0.01 * torch.randn(40) for _ in range(2)]
    expected = [[constant + batch] for batch in batches]
    gates = list(INFERENCE_GATES)
    assert all(score.passed for score in judge(gates, expected, expected))
    with pytest.raises(Refused, match="the output no longer follows the input"):
        judge(gates, expected, [[constant], [constant]])
    assert all(score.passed for score in judge(gates, expected[:1], [[constant]]))  # why one batch is not enough


def test_known_values() -> None:
    zeros, tenth = [torch.zeros(1, 1, 16, 16)], [torch.full((1, 1, 16, 16), 0.1)]
    assert METRICS["psnr"].measure(zeros, tenth) == pytest.approx(20.0)
    assert METRICS["relative_error"].measure([torch.ones(4)], [torch.full((4,), 1.5)]) == pytest.approx(0.5)
    assert METRICS["max_error"].measure([torch.zeros(3)], [torch.tensor([0.0, -2.0, 1.0])]) == 2.0
    assert METRICS["cosine"].measure([torch.tensor([1.0, 0.0])], [torch.tensor([1.0, 1.0])]) == pytest.approx(0.5**0.5)
    assert METRICS["top1"].measure([torch.eye(4)], [torch.eye(4).roll(1, 0)]) == 0.0
    assert METRICS["top1"].measure([torch.tensor([1, 2, 3])], [torch.tensor([1, 2, 4])]) == pytest.approx(2 / 3)
    assert METRICS["ssim"].measure([picture()], [picture()]) == pytest.approx(1.0)
    even, skewed = [torch.zeros(1, 2)], [torch.tensor([[0.0, 1.0]]).log_softmax(-1)]
    expected = torch.nn.functional.kl_div(skewed[0], torch.full((1, 2), 0.5), reduction="sum")
    assert METRICS["kl_divergence"].measure(even, skewed) == pytest.approx(float(expected), rel=1e-5)


def test_a_custom_gate_function_can_fail() -> None:
    gate = Gate(
        "agreement",
        0.9,
        function=lambda r, o: float((r[0].sign() == o[0].sign()).float().mean()),
        better="higher",
    )
    reference = [torch.randn(100)]
    assert gate.judge(reference, reference).passed
    assert not gate.judge(reference, [-reference[0]]).passed


def test_outputs_of_another_shape_or_dtype_raise() -> None:
    with pytest.raises(GateError, match="shape"):
        INFERENCE_GATES[0].judge([torch.zeros(2)], [torch.zeros(3)])
    with pytest.raises(GateError, match="tensors"):
        INFERENCE_GATES[0].judge([torch.zeros(2)], [torch.zeros(2), torch.zeros(2)])
    with pytest.raises(GateError, match="no tensor"):
        INFERENCE_GATES[0].judge([], [])


def test_invalid_gates_raise() -> None:
    with pytest.raises(GateError, match="unknown metric 'psnrr'"):
        Gate("psnrr", 1)
    with pytest.raises(GateError, match="finite"):
        Gate("psnr", float("nan"))
    with pytest.raises(GateError, match="better"):
        Gate("mine", 1, function=lambda r, o: 0.0)


def test_the_worst_batch_counts() -> None:
    gate = Gate("relative_error", 0.1)
    one, two = gate.judge([torch.ones(2)], [torch.ones(2)]), gate.judge([torch.ones(2)], [torch.zeros(2)])
    assert worst([one, two]) is two and worst([two, one]) is two


@pytest.mark.parametrize("metric", ["psnr", "ssim"])
def test_small_outputs_are_judged_on_their_own_scale(metric: str) -> None:
    picture = [torch.rand(1, 3, 16, 16) * 0.01]
    nothing, close = [torch.zeros_like(picture[0])], [picture[0] * 1.001]
    large = [[one * 500 for one in each] for each in (picture, nothing, close)]
    for seen, same in ((nothing, large[1]), (close, large[2])):
        assert METRICS[metric].measure(picture, seen) == pytest.approx(
            METRICS[metric].measure(large[0], same), rel=1e-6
        )
    assert METRICS[metric].measure(picture, nothing) < {"psnr": 10, "ssim": 0.5}[metric]


@pytest.mark.parametrize("metric", ["relative_error", "cosine", "psnr"])
def test_a_large_correct_output_does_not_hide_a_small_wrong_one(metric: str) -> None:
    large, small = torch.randn(4, 1000), 0.1 * torch.randn(4, 10)
    assert Gate(metric, LIMITS[metric]).judge([large, small], [large, small]).passed
    wrong = small.flip(0) * 30 if metric == "psnr" else -5 * small
    assert not Gate(metric, LIMITS[metric]).judge([large, small], [large, wrong]).passed


def test_scores_beside_boxes_in_pixels_are_judged_on_their_own_scale() -> None:
    boxes, scores = 1280 * torch.rand(50, 4), torch.rand(50)
    for gate in INFERENCE_GATES:
        assert gate.judge([boxes, scores], [boxes, scores * 1.001]).passed
        assert not gate.judge([boxes, scores], [boxes, torch.zeros(50)]).passed
        assert not gate.judge([boxes, 0.01 * scores], [boxes, -0.01 * scores]).passed


def test_large_gradients_do_not_hide_a_small_wrong_one() -> None:
    """The few weights of a norm layer have the wrong sign; they are a fiftieth of the total norm."""
    losses, matrix, norm = torch.ones(3), torch.randn(400, 400), 0.5 * torch.randn(100)
    gate = Gate("gradient_difference", 0.05)
    assert gate.judge([losses, matrix, norm], [losses, matrix * 1.01, norm * 0.99]).passed
    for scale in (1, 1e-3):
        assert not gate.judge([losses, matrix, scale * norm], [losses, matrix, -scale * norm]).passed
    # Rounding noise in a gradient that should be zero is not an error.
    assert gate.judge([losses, matrix, norm * 1e-6], [losses, matrix, -norm * 1e-6]).passed


def test_two_gates_of_one_metric_are_both_evaluated() -> None:
    from redline.ladder.measuring.judge import judge, worst_per_gate

    reference, output = [torch.ones(100)], [torch.ones(100) * 1.05]
    gates = (Gate("relative_error", 0.1), Gate("relative_error", 0.01))
    scores = worst_per_gate(judge(gates, [reference], [output]) * 2, shapes=2)
    assert [score.passed for score in scores] == [True, False]


def test_image_psnr_uses_a_peak_of_1_and_the_worst_image() -> None:
    sky = 0.6 + 0.01 * picture()
    rounded = sky.to(torch.bfloat16).float()
    gate = Gate("image_psnr", 40.0)
    assert gate.judge(sky, rounded).passed and not Gate("psnr", 40.0).judge(sky, rounded).passed
    spoiled = sky.clone()
    spoiled[1, :, :2] = 0
    assert not gate.judge(sky, spoiled).passed
    alone, beside = gate.judge(sky[1], spoiled[1]).value, gate.judge(sky, spoiled).value
    assert beside == pytest.approx(alone)
    with pytest.raises(GateError, match="three dimensions"):
        gate.judge(torch.rand(4, 4), torch.rand(4, 4))

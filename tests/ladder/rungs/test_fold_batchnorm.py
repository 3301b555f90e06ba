import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from redline.errors import RungError
from redline.ladder.job import Job
from redline.ladder.metrics import relative_error
from redline.ladder.plan import Plan
from redline.ladder.rungs.fold_batchnorm import FoldBatchnorm, find_pairs
from redline.machine.machine import Machine

CPU = Machine.detect("cpu")
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def lived_in(model: nn.Module) -> nn.Module:
    """Statistics and weights as training leaves them: nothing at 0 or 1."""
    for module in model.modules():
        if isinstance(module, NORMS) and module.running_mean is not None:
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2.0)
            if module.affine:
                nn.init.uniform_(module.weight, 0.5, 2.0)
                nn.init.normal_(module.bias)
    return model.eval()


class Residual(nn.Module):
    """conv → norm twice; the second convolution's norm is in a branch."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, 5, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(5)
        self.conv2 = nn.Conv2d(5, 5, 3, padding=1)
        self.bn2 = nn.BatchNorm2d(5, affine=False)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.bn1(self.conv1(x)))
        return torch.relu(self.bn2(self.conv2(x)) + x)


class SeenTwice(nn.Module):
    """The convolution's output also goes elsewhere, so it must stay as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.conv(x)
        return self.bn(y) + y


class CalledTwice(SeenTwice):
    def forward(self, x: Tensor) -> Tensor:
        return self.conv(self.bn(self.conv(x)))


class SharedWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn, self.other = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.Conv2d(3, 3, 1)
        self.other.weight = self.conv.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.bn(self.conv(x)))


class ReadsWeight(SeenTwice):
    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.conv(x)) * self.conv.weight.mean()


class Branching(nn.Module):
    """Cannot be traced; its Sequential can still be read."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.conv, self.bn = nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(x)
        return self.bn(self.conv(y)) if y.sum() > -1e30 else y


class Tapping(Branching):
    """Cannot be traced, and takes its Sequential apart."""

    def forward(self, x: Tensor) -> Tensor:
        tapped = self.body[0](x)
        y = self.body[1](tapped * 2)
        return y if y.sum() > -1e30 else x


class Remembering(Residual):
    """Keeps its last input, as models with a cache do."""

    last: Any = None

    def forward(self, x: Tensor) -> Tensor:
        self.last = x
        return super().forward(x)


class Optional(nn.Module):
    """Which path it takes depends on an input that is usually left out."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

    def forward(self, x: Tensor, skip: Tensor | None = None) -> Tensor:
        y = self.conv(x)
        return self.bn(y) if skip is None else self.bn(y + skip) + y


def fold(model: nn.Module, *samples: Any) -> Job:
    return FoldBatchnorm().apply(Job.of(model, samples))


def norms(job: Job) -> int:
    return sum(isinstance(m, NORMS) for m in job.model.modules())


FOLDABLE: dict[str, tuple[Any, tuple[int, ...]]] = {
    "residual": (Residual, (2, 3, 7, 6)),
    "conv1d": (lambda: nn.Sequential(nn.Conv1d(3, 5, 3), nn.BatchNorm1d(5)), (2, 3, 9)),
    "conv3d": (lambda: nn.Sequential(nn.Conv3d(2, 3, 2, bias=False), nn.BatchNorm3d(3)), (2, 2, 4, 5, 3)),
    "grouped": (lambda: nn.Sequential(nn.Conv2d(6, 9, 3, groups=3), nn.BatchNorm2d(9)), (2, 6, 5, 7)),
    "transposed": (
        lambda: nn.Sequential(nn.ConvTranspose2d(3, 5, 2, stride=2), nn.BatchNorm2d(5)),
        (2, 3, 4, 5),
    ),
    "linear": (lambda: nn.Sequential(nn.Linear(5, 7, bias=False), nn.BatchNorm1d(7), nn.ReLU()), (4, 5)),
    "branching": (Branching, (2, 3, 6, 5)),
}


@pytest.mark.parametrize("with_sample", [True, False])
@pytest.mark.parametrize("name", FOLDABLE)
def test_folding_is_exact_in_fp64(name: str, with_sample: bool) -> None:
    torch.manual_seed(0)
    make, shape = FOLDABLE[name]
    model = lived_in(make()).double()
    sample = (torch.randn(shape, dtype=torch.float64),) if with_sample else ()
    job = fold(model, *sample)
    assert norms(job) < sum(isinstance(m, NORMS) for m in model.modules())
    x = torch.randn(shape, dtype=torch.float64)
    with torch.no_grad():
        assert relative_error([model(x)], [job.finish()(x)]) < 1e-14
    assert FoldBatchnorm().proof(job)


def test_fp32_weights_are_rounded_once() -> None:
    torch.manual_seed(0)
    model = lived_in(Residual())
    x = torch.randn(2, 3, 7, 6)
    with torch.no_grad():
        expected = copy.deepcopy(model).double()(x.double())
    job = fold(model, x)
    assert relative_error([expected], [job.finish()(x)]) < 1e-6
    exact = fold(copy.deepcopy(model).double()).model.state_dict()
    assert all(torch.equal(t, exact[name].float()) for name, t in job.model.state_dict().items())


def test_the_model_stays_the_users_own_class() -> None:
    job = fold(lived_in(Residual()))
    assert type(job.model) is Residual
    assert type(job.model.conv1) is nn.Conv2d
    assert job.model.conv1.bias is not None
    assert type(job.model.bn1) is nn.Identity


def test_tracing_leaves_nothing_behind_in_the_model() -> None:
    job = Job.of(lived_in(Remembering()))
    assert len(find_pairs(job)[0]) == 2
    assert job.model.last is None


def test_proof_says_how_the_pairs_were_found() -> None:
    x = torch.randn(2, 3, 7, 6)
    assert (
        FoldBatchnorm().proof(fold(lived_in(Residual())))
        == "2 BatchNorm(s) folded, 0 remaining; pairs found by tracing"
    )
    assert FoldBatchnorm().proof(fold(lived_in(Residual()), x)).endswith("by tracing, confirmed on a sample")
    proof = FoldBatchnorm().proof(fold(lived_in(Branching())))
    assert proof.startswith(
        "1 BatchNorm(s) folded, 1 remaining; pairs found inside nn.Sequential only, because tracing"
    )


@pytest.mark.parametrize("with_sample", [True, False])
@pytest.mark.parametrize("kind", [SeenTwice, CalledTwice, SharedWeight, ReadsWeight])
def test_shared_outputs_are_not_folded(kind: type[nn.Module], with_sample: bool) -> None:
    torch.manual_seed(0)
    model = lived_in(kind())
    x = torch.randn(2, 3, 4, 5)
    job = Job.of(model, (x,) if with_sample else ())
    assert find_pairs(job)[0] == []
    assert "not used elsewhere" in FoldBatchnorm().why_not(CPU, job)
    applied = FoldBatchnorm().apply(job)
    assert FoldBatchnorm().proof(applied) == ""
    with torch.no_grad():
        assert torch.equal(applied.finish()(x), model(x))


def test_sample_detects_a_sequential_whose_children_are_called_separately() -> None:
    assert find_pairs(Job.of(lived_in(Tapping()), (torch.randn(2, 3, 6, 5),)))[0] == []


def test_optional_inputs_decide_the_path() -> None:
    torch.manual_seed(0)
    model = lived_in(Optional())
    x, skip = torch.randn(2, 3, 4, 5), torch.randn(2, 3, 4, 5)
    assert find_pairs(Job.of(model))[0] == []
    assert find_pairs(Job.of(model, ((x, skip),)))[0] == []
    assert find_pairs(Job.of(model, ({"x": x, "skip": skip},)))[0] == []
    assert find_pairs(Job.of(model, (x,)))[0] == [("conv", "bn")]
    with torch.no_grad():
        assert relative_error([model(x)], [fold(model, x).finish()(x)]) < 1e-6


def test_norms_without_fixed_statistics_are_not_folded() -> None:
    training = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)).train()
    free = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3, track_running_stats=False)).eval()
    for model in (training, free):
        assert find_pairs(Job.of(model))[0] == []


def test_hooks_and_grouped_transposed_convolutions_stay() -> None:
    hooked = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)).eval()
    hooked[0].register_forward_hook(lambda module, inputs, output: output * 2)
    grouped = nn.Sequential(nn.ConvTranspose2d(4, 4, 2, groups=2), nn.BatchNorm2d(4)).eval()
    for model in (hooked, grouped):
        assert find_pairs(Job.of(model))[0] == []


def test_folded_linear_accepts_only_2d_inputs() -> None:
    torch.manual_seed(0)
    model = lived_in(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)))
    fast = fold(model).finish()
    rows, cubes = torch.randn(3, 4), torch.randn(3, 4, 4)
    with torch.no_grad():
        assert relative_error([model(rows)], [fast(rows)]) < 1e-6
    # On a cube the BatchNorm would have normed another dimension than the Linear's.
    with pytest.raises(RungError, match="2-D inputs, not 3-D"):
        fast(cubes)


def test_the_users_model_and_the_random_state_are_left_alone() -> None:
    model = lived_in(Residual())
    before, text = {name: t.clone() for name, t in model.state_dict().items()}, str(model)
    state = torch.get_rng_state()
    job = fold(model, torch.zeros(2, 3, 7, 6))
    assert torch.equal(torch.get_rng_state(), state)
    job.finish()(torch.randn(2, 3, 7, 6))
    assert str(model) == text
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in job.model.modules())


def test_why_not() -> None:
    assert FoldBatchnorm().why_not(CPU) == ""
    assert FoldBatchnorm().why_not(CPU, Job.of(nn.Linear(2, 2))) == "the model has no BatchNorm"
    assert FoldBatchnorm().why_not(CPU, Job.of(lived_in(Residual()))) == ""
    assert not FoldBatchnorm.training


def test_plan_round_trip() -> None:
    assert Plan.parse(str(Plan((FoldBatchnorm(),)))) == Plan((FoldBatchnorm(),))

import copy
import itertools
from collections import OrderedDict
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from redline.errors import RungError
from redline.ladder.job import Job
from redline.ladder.metrics import relative_error
from redline.ladder.plan import Plan
from redline.ladder.rungs.align import Align, Padded, PaddedSequential
from redline.machine.machine import Machine

CPU = Machine.detect("cpu")
GPU = replace(CPU, device="cuda:0", features=("tensor cores",))
ODD = (3, 5, 13, 30, 53)
ROUNDING = 1e-6


def exact(model: nn.Module, *inputs: Tensor) -> Tensor:
    with torch.no_grad():
        return copy.deepcopy(model).double()(*(x.double() for x in inputs))


def padded(model: nn.Module, multiple: int = 8) -> Job:
    return Align(multiple).apply(Job.of(model))


def joints(job: Job) -> int:
    return sum(len(m.joints) for m in job.model.modules() if isinstance(m, PaddedSequential))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("inputs", "outputs"), list(itertools.product(ODD, repeat=2)))
def test_linear_with_odd_widths(inputs: int, outputs: int, bias: bool) -> None:
    model = nn.Linear(inputs, outputs, bias=bias)
    fast = padded(model).finish()
    for shape in ((4, inputs), (2, 3, inputs), (inputs,)):
        x = torch.randn(shape)
        seen = fast(x)
        assert seen.is_contiguous()
        assert relative_error([exact(model, x)], [seen]) < ROUNDING


@pytest.mark.parametrize("options", [
    {},
    {"bias": False},
    {"stride": 2, "padding": 1},
    {"padding": "same", "dilation": 2},
    {"padding": 2, "padding_mode": "reflect"},
    {"padding": (1, 2), "padding_mode": "circular", "stride": (2, 1)},
])  # fmt: skip
@pytest.mark.parametrize(("inputs", "outputs"), [(3, 5), (5, 3), (13, 16), (8, 30), (30, 53)])
def test_convolution_with_odd_widths(inputs: int, outputs: int, options: dict) -> None:
    model = nn.Conv2d(inputs, outputs, 3, **options)
    fast = padded(model).finish()
    for shape in ((2, inputs, 9, 7), (inputs, 8, 9)):
        x = torch.randn(shape)
        seen = fast(x)
        assert seen.is_contiguous()
        assert relative_error([exact(model, x)], [seen]) < ROUNDING


def test_padded_weights_are_zero() -> None:
    model = nn.Conv2d(13, 30, 3)
    job = padded(model)
    inner = job.model.layer
    assert inner.weight.shape == (32, 16, 3, 3)
    assert (inner.in_channels, inner.out_channels) == (16, 32)
    assert torch.equal(job.model.weight, model.weight)
    assert torch.equal(job.model.bias, model.bias)
    assert float(inner.weight[30:].detach().abs().sum() + inner.weight[:, 13:].detach().abs().sum()) == 0
    assert float(inner.bias[30:].detach().abs().sum()) == 0
    sixteen = padded(nn.Linear(13, 30), 16).model.layer
    assert (sixteen.in_features, sixteen.out_features) == (16, 32)


def chain() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 13, 3), nn.GELU(), nn.MaxPool2d(2), nn.Conv2d(13, 30, 3), nn.Sigmoid(),
        nn.Conv2d(30, 5, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
        nn.Linear(5, 53), nn.SiLU(), nn.Dropout(0.5), nn.Linear(53, 7),
    ).eval()  # fmt: skip


def test_sequential_passes_padded_tensors_on() -> None:
    torch.manual_seed(0)
    model = chain()
    job = padded(model)
    # Two between the three convolutions and one between the Linear layers; none across the Flatten.
    assert joints(job) == 3
    widths = []
    for layer in (m for m in job.model.modules() if isinstance(m, Padded)):
        layer.layer.register_forward_hook(lambda m, i, o: widths.append((i[0].shape[1], o.shape[1])))
        layer.register_forward_hook(lambda m, i, o: widths.append(o.shape[1]))
    x = torch.randn(2, 3, 17, 15)
    assert relative_error([exact(model, x)], [job.finish()(x)]) < ROUNDING
    assert widths == [(8, 16), 16, (16, 32), 32, (32, 8), 5, (8, 56), 56, (56, 8), 7]


def test_each_child_of_a_sequential_still_works_alone() -> None:
    torch.manual_seed(0)
    model = chain()
    fast = padded(model).model
    assert isinstance(fast, PaddedSequential)
    x = torch.randn(2, 3, 17, 15)
    with torch.no_grad():
        seen = expected = x
        for old, new in zip(model, fast, strict=True):
            expected, seen = old(expected), new(seen)
            assert seen.shape == expected.shape
            assert relative_error([expected], [seen]) < 4 * ROUNDING


def test_modules_that_mix_channels_need_unpadded_tensors() -> None:
    torch.manual_seed(0)
    for between in (nn.BatchNorm2d(13), nn.GroupNorm(1, 13), nn.Softmax(1)):
        model = nn.Sequential(nn.Conv2d(8, 13, 3), between, nn.Conv2d(13, 8, 1)).eval()
        job = padded(model)
        assert joints(job) == 0
        x = torch.randn(2, 8, 6, 5)
        assert relative_error([exact(model, x)], [job.finish()(x)]) < 4 * ROUNDING
    mlp = nn.Sequential(nn.Linear(4, 13), nn.LayerNorm(13), nn.Linear(13, 4)).eval()
    assert joints(padded(mlp)) == 0
    x = torch.randn(3, 4)
    assert relative_error([exact(mlp, x)], [padded(mlp).finish()(x)]) < 4 * ROUNDING


def test_padding_is_cut_between_convolution_and_linear() -> None:
    torch.manual_seed(0)
    # The Linear works on the picture's width, which happens to be as large as the channel count.
    model = nn.Sequential(nn.Conv2d(3, 13, 1), nn.ReLU(), nn.Linear(13, 5)).eval()
    job = padded(model)
    assert joints(job) == 0
    x = torch.randn(2, 3, 4, 13)
    assert relative_error([exact(model, x)], [job.finish()(x)]) < ROUNDING


def test_nested_and_named_sequentials_keep_their_names() -> None:
    torch.manual_seed(0)
    inner = nn.Sequential(OrderedDict(a=nn.Linear(5, 13), b=nn.ReLU(), c=nn.Linear(13, 3)))
    relu = nn.ReLU()
    model = nn.Sequential(inner, relu, nn.Linear(3, 5), relu, nn.Linear(5, 9)).eval()
    job = padded(model)
    assert joints(job) == 2
    assert isinstance(job.model[0], PaddedSequential)
    assert isinstance(job.model[0].c, Padded)
    x = torch.randn(4, 5)
    assert relative_error([exact(model, x)], [job.finish()(x)]) < ROUNDING


class Shared(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(13, 13)
        self.two = self.one
        self.loop = nn.Sequential(self.one, nn.Tanh(), self.one)

    def forward(self, x: Tensor) -> Tensor:
        return self.loop(self.two(x)) + self.one(x)


def test_a_layer_used_in_several_places_stays_one() -> None:
    torch.manual_seed(0)
    model = Shared().eval()
    job = padded(model)
    assert job.model.one is job.model.two is job.model.loop[0] is job.model.loop[2]
    x = torch.randn(2, 13)
    assert relative_error([exact(model, x)], [job.finish()(x)]) < ROUNDING


class Transformer(nn.Module):
    """torch's own encoder layer reads its Linear layers' weights past their forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(12, 2, 30, batch_first=True)
        self.head = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.layer(x))


def test_weight_attribute_is_unpadded() -> None:
    torch.manual_seed(0)
    model = Transformer().eval()
    x = torch.randn(2, 7, 12)
    assert relative_error([exact(model, x)], [padded(model).finish()(x)]) < 4 * ROUNDING


class Odd(nn.Linear):
    def forward(self, input: Tensor) -> Tensor:
        return super().forward(input) + float(self.weight.mean())


def test_unsupported_layers_are_not_padded() -> None:
    hooked = nn.Linear(5, 5)
    hooked.register_forward_pre_hook(lambda module, inputs: None)
    for layer in (Odd(5, 5), nn.Conv2d(6, 6, 3, groups=3), hooked, nn.Conv1d(5, 5, 3)):
        assert "all plain" in Align().why_not(GPU, Job.of(layer))
        assert Align().proof(padded(layer)) == ""


def test_channels_last_survives() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 13, 3), nn.BatchNorm2d(13), nn.Conv2d(13, 5, 3)).eval()
    plan, job = Plan.parse("channels_last + align").build(Job.of(model), GPU)
    weights = [m.layer.weight for m in job.model.modules() if isinstance(m, Padded)]
    assert all(w.is_contiguous(memory_format=torch.channels_last) for w in weights)
    x = torch.randn(2, 3, 9, 8)
    seen = job.finish()(x)
    assert seen.is_contiguous(memory_format=torch.channels_last)
    assert relative_error([exact(model, x)], [seen]) < 4 * ROUNDING
    assert all(rung.proof(job) for rung in plan.rungs)


def test_the_users_model_is_left_alone() -> None:
    model = chain()
    before, text = {name: t.clone() for name, t in model.state_dict().items()}, str(model)
    padded(model).finish()(torch.randn(2, 3, 17, 15))
    assert str(model) == text
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())


def test_proof_counts_layers_and_work() -> None:
    job = padded(nn.Sequential(nn.Linear(5, 13), nn.ReLU(), nn.Linear(13, 8), nn.ReLU(), nn.Linear(8, 8)))
    # 8·16 − 5·13 = 63 and 16·8 − 13·8 = 24, over 169 before.
    assert Align().proof(job) == (
        "2 layers padded to multiples of 8: 87 more multiply-adds per output position "
        "(+51.5% in those layers), cut-and-pad pairs avoided: 1"
    )


def test_why_not() -> None:
    assert "tensor cores" in Align().why_not(CPU)
    assert Align().why_not(GPU) == ""
    assert Align().why_not(GPU, Job.of(nn.Linear(5, 8))) == ""
    assert "multiples of 8" in Align().why_not(GPU, Job.of(nn.Linear(16, 8)))
    assert Align(16).why_not(GPU, Job.of(nn.Linear(16, 8))) == ""
    assert Align().proof(padded(nn.Linear(16, 8))) == ""


def test_options() -> None:
    with pytest.raises(RungError, match="multiple"):
        Align(1)
    assert Plan.parse("align(multiple=16)") == Plan((Align(16),))
    assert str(Plan((Align(16),))) == "align(multiple=16)"


def test_one_graph_under_a_compiler() -> None:
    torch.manual_seed(0)
    job = padded(chain())
    x = torch.randn(2, 3, 17, 15)
    with torch.no_grad():
        compiled = torch.compile(job.model, backend="eager", fullgraph=True)
        assert torch.equal(compiled(x), job.model(x))
    torch._dynamo.reset()


@pytest.mark.gpu
@pytest.mark.parametrize("plan", ["fp16(check=false) + align", "fp16(check=false) + channels_last + align"])
def test_on_cuda_in_fp16(plan: str) -> None:
    torch.manual_seed(0)
    model = chain()
    x = torch.randn(2, 3, 17, 15)
    expected = exact(model, x)
    built, job = Plan.parse(plan).build(Job.of(model.cuda()), Machine.detect("cuda"))
    seen = job.finish()(x.cuda()).cpu()
    # Five layers, each with inputs, weights and outputs rounded to 11 bits.
    assert relative_error([expected], [seen]) < 20 * 2**-11
    assert all(rung.proof(job) for rung in built.rungs)

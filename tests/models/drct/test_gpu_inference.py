"""The packed groups give what the plain ones give, whatever the widths, and go on doing so when they are converted."""

import copy

import pytest
import torch

from redline.ladder.gate import Gate
from redline.ladder.job import Applied
from redline.ladder.plan import Plan
from redline.ladder.rungs.fp16 import find_overflow
from redline.ladder.rungs.fused_ops import FusedOps
from redline.ladder.workloads.drct import draw
from redline.models.drct import Drct, DrctConfig
from redline.models.drct.gpu_inference import PackedBody, PackedLinear, channel_indices, pack_upsampling, padded

USUAL = DrctConfig.of(2, 1, window=4, features=8)
ODD = DrctConfig.of(3, 2, width=20, growth=6, features=8, window=4)


def packed(model: Drct) -> Drct:
    other = copy.deepcopy(model)
    other.pack(torch.device("cuda"))
    return other


@pytest.mark.parametrize("config", [USUAL, ODD], ids=["180 channels", "20 channels"])
@torch.no_grad()
def test_output_equals_that_of_the_original_groups(config: DrctConfig) -> None:
    model = draw(Drct(config)).eval().double()
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases far from one and zero
            parameter.add_(0.1 * torch.randn_like(parameter))
    picture = torch.rand(2, 3, 8, 12).double()
    expected, found = model(picture), packed(model)(picture)
    assert (found - expected).norm() <= 1e-6 * expected.norm()  # moments and sums are fp32


def test_pixels_are_shuffled_by_whole_rows_of_features() -> None:
    """And the layout is the rows' from the first convolution to the last; what comes out is plane by plane."""
    for factor in (2, 3):
        convolution = torch.nn.Conv2d(5, 7 * factor**2, 3, padding=1)
        plain = torch.nn.Sequential(copy.deepcopy(convolution), torch.nn.PixelShuffle(factor))
        x = torch.rand(2, 5, 6, 4).to(memory_format=torch.channels_last)
        with torch.no_grad():
            found = pack_upsampling(torch.nn.Sequential(convolution, torch.nn.PixelShuffle(factor)))(x)
            assert torch.allclose(found, plain(x), atol=1e-6) and found.shape == (2, 7, 6 * factor, 4 * factor)
        assert found.is_contiguous(memory_format=torch.channels_last)
    model, seen = packed(draw(Drct(ODD)).eval()), []

    def note(_module: object, _inputs: object, output: torch.Tensor) -> None:
        seen.append(output.is_contiguous(memory_format=torch.channels_last))

    for module in model.modules():
        if isinstance(module, torch.nn.Conv2d):
            module.register_forward_hook(note)
    with torch.no_grad():
        assert model(torch.rand(2, 3, 8, 12)).is_contiguous()
    assert len(seen) == 5 and all(seen)


def test_pieces_and_heads_begin_at_multiples_of_eight() -> None:
    assert channel_indices([5, 3]).tolist() == [0, 1, 2, 3, 4, 8, 9, 10]
    model = Drct(ODD)
    model.pack(torch.device("cuda"))
    (body,) = model.layers
    assert isinstance(body, PackedBody)
    shapes = [tuple(module.weight.shape) for module in body.modules() if isinstance(module, PackedLinear)]
    assert all(columns % 8 == 0 and channels % 8 == 0 for columns, channels in shapes)
    heads, size = ODD.heads[0], 20 // ODD.heads[0]
    assert shapes[0] == (3 * heads * padded(size), 24)


def test_sums_follow_the_weights_when_they_are_rounded() -> None:
    """Else the mean of a row would not cancel."""
    model = draw(Drct(ODD))
    model.pack(torch.device("cuda"))
    model.bfloat16()
    for module in model.modules():
        if isinstance(module, PackedLinear):
            assert module.weight.dtype == torch.bfloat16 and module.weight_sums.dtype == torch.float32
            assert torch.equal(module.weight_sums, module.weight.float().sum(1))


def test_the_original_groups_are_released() -> None:
    """Else a rung that quantizes linear layers would change such as nobody calls."""
    model = Drct(ODD)
    before = sum(parameter.numel() for parameter in model.parameters())
    model.pack(torch.device("cuda"))
    assert not any(isinstance(module, torch.nn.Linear) for module in model.modules())
    assert sum(parameter.numel() for parameter in model.parameters()) < before / 2


def test_no_module_returns_uninitialized_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who looks for overflow in what modules give would take it for one."""
    empty_like = torch.empty_like

    def unclean(tensor: torch.Tensor) -> torch.Tensor:
        return empty_like(tensor).fill_(torch.inf if tensor.dtype == torch.float16 else 0)

    monkeypatch.setattr(torch, "empty_like", unclean)
    assert not find_overflow(packed(draw(Drct(ODD)).eval()), (torch.rand(1, 3, 8, 12),), torch.device("cpu"))


@pytest.mark.gpu
@pytest.mark.parametrize("launch", ["", "cuda_graph", "compile"])
@pytest.mark.parametrize("precision", ["fp16", "bf16", ""])
@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_on_a_gpu_it_is_the_kernels(launch: str, precision: str) -> None:
    """And no less exact than the plain operations in the same dtype."""
    model = draw(Drct(DrctConfig.of(4, 2))).eval()
    picture = torch.rand(1, 3, 48, 80)
    with torch.no_grad():
        expected = model.double()(picture.double())
    model.float().cuda()

    def error(*rungs: str) -> tuple[float, Applied]:
        plan = Plan.parse(" + ".join(rung for rung in rungs if rung))
        fast = plan.apply(model, samples=picture.cuda(), gates=(Gate("psnr", 40.0),))
        found = fast(picture.cuda()).cpu().double()
        return ((found - expected).norm() / expected.norm()).item(), fast

    # Convolutions without TF32: it would hide whatever the kernels get wrong in fp32.
    with torch.backends.cudnn.flags(enabled=True, allow_tf32=False):
        found, fast = error("fused_ops", precision, launch)
        plain = error(precision)[0] if precision else 1e-4 / 1.5
    assert found < 1.5 * plain
    assert FusedOps().proof(fast.job) == "1 Drct by triton" + ("" if precision else "; no TF32")

import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from redline.errors import RungError
from redline.ladder.gate import Gate
from redline.ladder.job import Job
from redline.ladder.metrics import relative_error
from redline.ladder.plan import Plan
from redline.ladder.rewrites.quantize import is_quantized, stored_bytes
from redline.ladder.rungs.bf16 import Bf16
from redline.ladder.rungs.fp8 import Fp8
from redline.machine.machine import Machine

CPU = Machine.detect("cpu")
HOPPER = replace(CPU, device="cuda:0", name="Hopper", capability=(9, 0), ceilings=None)
AMPERE = replace(HOPPER, name="Ampere", capability=(8, 6))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 72), nn.Linear(72, 64)).eval()


def inputs(seed: int, rows: int = 5) -> Tensor:
    return torch.randn(rows, 64, generator=torch.Generator().manual_seed(seed))


def test_why_not() -> None:
    assert "does not support fp8" in Fp8().why_not(CPU)
    assert Fp8().why_not(AMPERE) == "Ampere has no fp8 tensor cores (compute capability 8.9 or newer required)"
    assert Fp8().why_not(HOPPER) == ""
    assert Fp8().why_not(HOPPER, Job.of(net())) == ""
    assert "no linear layer" in Fp8().why_not(HOPPER, Job.of(nn.Conv2d(3, 4, 3)))
    odd = Job.of(nn.Linear(72, 72))
    assert "none of the 1 linear layers" in Fp8().why_not(HOPPER, odd)
    assert Fp8(mode="weight_only").why_not(HOPPER, odd) == ""
    assert "granularity=row needs bf16" in Fp8(granularity="row").why_not(HOPPER, Job.of(net()))
    assert Fp8(granularity="row").why_not(HOPPER, Bf16().apply(Job.of(net()))) == ""


def test_missing_torchao_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    assert Fp8().why_not(HOPPER) == 'torchao is not installed: pip install "redline[int8]"'


def test_granularity_is_resolved_by_the_weights() -> None:
    assert Fp8().resolve(Job.of(net())) == Fp8(granularity="tensor")
    assert Fp8().resolve(Bf16().apply(Job.of(net()))) == Fp8(granularity="row")
    assert Fp8(mode="weight_only").resolve(Job.of(net())) == Fp8(mode="weight_only", granularity="row")


@pytest.mark.parametrize("granularity", ["row", "tensor"])
def test_weight_only_output_is_right_and_the_users_model_is_left_alone(granularity: str) -> None:
    model = net()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    rung = Fp8(mode="weight_only", granularity=granularity)
    job = rung.apply(Job.of(model))
    x = inputs(0)
    for name, layer in (("0", job.model[0]), ("2", job.model[2]), ("3", job.model[3])):
        original = before[f"{name}.weight"]
        restored = layer.weight.dequantize()
        # 3 bits of mantissa: half a step of 1/8; below the smallest normal number, half of a fixed step.
        scale = layer.weight.scale
        assert bool(((restored - original).abs() <= original.abs() / 16 * 1.001 + scale * 2**-10).all())
    stored = nn.Sequential(*(m for m in net())).double()
    for name in ("0", "2", "3"):
        stored[int(name)].weight.data = job.model[int(name)].weight.dequantize().double()
    assert relative_error([stored(x.double())], [job.finish()(x)]) < 1e-6
    assert relative_error([model(x)], [job.finish()(x)]) < 2**-4
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert job.precision == "fp32"
    assert rung.proof(job).startswith("3 of 3 linear layers hold fp8 weights (weight only)")
    assert stored_bytes(job.model[0].weight) < model[0].weight.nbytes / 3


class Tensorcores:
    """Stands in for `torch._scaled_mm`: refuses what a GPU refuses, and computes in fp64."""

    def __init__(self) -> None:
        self.calls: list[tuple[torch.dtype, bool]] = []

    def __call__(
        self,
        a: Tensor,
        b: Tensor,
        scale_a: Tensor,
        scale_b: Tensor,
        bias: Tensor | None = None,
        out_dtype: torch.dtype | None = None,
        use_fast_accum: bool = False,
    ) -> Tensor:
        assert a.dtype == b.dtype == torch.float8_e4m3fn
        assert a.is_contiguous() and b.t().is_contiguous()
        assert a.shape[1] % 16 == 0 and b.shape[1] % 16 == 0
        assert scale_a.dtype == scale_b.dtype == torch.float32 and scale_a.is_contiguous() and scale_b.is_contiguous()
        if scale_a.ndim:
            assert scale_a.shape == (a.shape[0], 1) and scale_b.shape == (1, b.shape[1]) and out_dtype == torch.bfloat16
        else:
            assert not scale_b.ndim
        if bias is not None:
            assert bias.dtype == out_dtype != torch.float32
        self.calls.append((out_dtype or a.dtype, bias is not None))
        product = (a.double() * scale_a.double()) @ (b.double() * scale_b.double())
        return (product if bias is None else product + bias.double()).to(out_dtype)


@pytest.mark.parametrize(
    ("dtype", "granularity", "adds_bias"),
    [
        (torch.bfloat16, "row", True),
        (torch.bfloat16, "tensor", True),
        (torch.float16, "tensor", True),
        (torch.float32, "tensor", False),
    ],
)
def test_dynamic_products(
    dtype: torch.dtype, granularity: str, adds_bias: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    cores = Tensorcores()
    monkeypatch.setattr(torch, "_scaled_mm", cores)
    model = net().to(dtype)
    rung = Fp8(granularity=granularity)
    job = rung.apply(Job.of(model))
    x = torch.stack([inputs(0), 50 * inputs(1)]).to(dtype)
    x[0, 2] = 0
    found = job.finish()(x)
    assert found.dtype == dtype and found.shape == (2, 5, 64)
    assert cores.calls == [(dtype, adds_bias)]
    assert 1e-3 < relative_error([model(x)], [found]) < 2**-4
    assert job.precision == "fp8" and rung.proof(job).startswith("1 of 3 linear layers hold fp8 weights (dynamic)")
    assert stored_bytes(job.model[0].weight) == 64 * 96 + 4 * (96 if granularity == "row" else 1)


def test_fp8_values_are_the_nearest_and_never_overflow() -> None:
    from redline.ladder.rewrites.fp8_weight import quantized

    rows = torch.randn(7, 32, generator=torch.Generator().manual_seed(0)) * 10.0 ** torch.arange(-3, 4).view(7, 1)
    rows[3] = 0
    for per_row, shape in ((True, (7, 1)), (False, ())):
        values, scales = quantized(rows, per_row)
        assert scales.shape == shape and bool(torch.isfinite(values.float()).all())
        back = values.double() * scales.double()
        assert bool(((back - rows).abs() <= rows.abs() / 16 * 1.001 + scales * 2**-10).all())
        # The largest value of a row, or of all, takes the largest number that fp8 has.
        assert float(values.float().abs().amax()) == 448


def test_progressive_leaves_the_layers_that_fail_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "_scaled_mm", Tensorcores())
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)).eval()
    x = inputs(0)

    def error(*left: str) -> float:
        return relative_error([model(x)], [Fp8(skip=left).apply(Job.of(model)).finish()(x)])

    best, other = sorted(("0", "2"), key=lambda name: error(*({"0", "2"} - {name})))
    job = Job.of(model, samples=(x,), gates=(Gate("relative_error", 0.3 * error(other) + 0.7 * error()),))
    rung = Fp8(progressive=True)
    assert rung.checks_gates and rung.why_not(HOPPER, job) == "" and "sample" in rung.why_not(HOPPER, Job.of(model))
    assert rung.resolve(job) == Fp8(granularity="tensor", skip=(other,))
    with pytest.raises(RungError, match=f"fp8: quantizing only '{best}'"):
        rung.resolve(replace(job, gates=(Gate("relative_error", 1e-7),)))
    assert Fp8().fallbacks("refused", False) == ((rung,),) and not rung.fallbacks("refused", False)


@pytest.mark.slow
def test_compiler_fuses_the_quantization_with_the_operation_before_it() -> None:
    from torch._inductor.utils import run_and_get_code

    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 96, bias=False)).eval().bfloat16()
    job = Fp8(granularity="row").apply(Job.of(model))
    x = inputs(0).bfloat16()
    with torch.no_grad():
        compiled = torch.compile(lambda rows: job.model(rows), fullgraph=True)
        found, (code,) = run_and_get_code(compiled, x)
        assert relative_error([job.model(x)], [found]) < 0.02
    # One kernel normalizes and quantizes the input, and torch multiplies.
    assert code.count("async_compile.") == 1 + code.count("async_compile.wait") and "_scaled_mm" in code


def test_skip_small_and_odd_layers_are_left_alone() -> None:
    chosen = Fp8()._layers(Job.of(net()))
    assert set(chosen) == {"0"}  # 72 is no multiple of 16
    assert set(Fp8(mode="weight_only", skip=("2",))._layers(Job.of(net()))) == {"0", "3"}
    assert set(Fp8(mode="weight_only", min_features=73)._layers(Job.of(net()))) == set()
    with pytest.raises(RungError, match="'9'"):
        Fp8(skip=("9",))._layers(Job.of(net()))


def test_proof_counts_unquantized_layers() -> None:
    rung = Fp8(mode="weight_only", skip=("3",))
    job = rung.apply(Job.of(net()))
    assert "1 not quantized because a size is not a multiple of 16" in rung.proof(job)
    assert rung.proof(replace(job, model=net())) == ""


def test_nan_raises() -> None:
    model = net()
    model[2].weight.data[0, 0] = float("inf")
    with pytest.raises(RungError, match="layer '2' contains NaN or infinity"):
        Fp8(mode="weight_only").apply(Job.of(model))


def test_round_trip() -> None:
    plan = Plan((Fp8(mode="weight_only", granularity="row", skip=("a.b", "c"), min_features=16),))
    assert Plan.parse(str(plan)) == plan


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("plan", "compiled"),
    [
        ("fp8", False),
        ("bf16 + fp8", False),
        ("bf16 + fp8", True),
        ("bf16 + fp8(granularity=tensor)", False),
        ("fp8(mode=weight_only)", False),
        ("fp8(mode=weight_only)", True),
    ],
)
def test_on_a_gpu(plan: str, compiled: bool) -> None:
    model = net().cuda()
    machine = Machine.detect("cuda")
    parsed = Plan.parse(plan)
    resolved, job = parsed.build(Job.of(model, samples=(inputs(0).cuda(),)), machine)
    count = 3 if "weight_only" in plan else 1
    assert sum(is_quantized(m.weight) for m in job.model.modules() if isinstance(m, nn.Linear)) == count
    assert resolved.rungs[-1].proof(job).startswith(f"{count} of 3 linear layers hold fp8 weights")
    assert job.precision == ("fp32" if "weight_only" in plan else "fp8")
    for rows in (1, 33):
        x = inputs(rows, rows).cuda()
        run = torch.compile(job.model, dynamic=False) if compiled else job.model
        with torch.no_grad():
            # Weights and inputs of one layer with 3 bits of mantissa, and bf16 around it.
            assert relative_error([model(x)], [run(x)]) < 2**-4

import logging
import sys
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from forked_python import ForkedPython
from redline.errors import RungError
from redline.ladder.gate import Gate
from redline.ladder.job import Job
from redline.ladder.metrics import relative_error
from redline.ladder.plan import Plan, Unavailable
from redline.ladder.rewrites import sensitivity
from redline.ladder.rewrites.io_adapter import unwrapped
from redline.ladder.rewrites.quantize import is_quantized, linear_layers, stored_bytes
from redline.ladder.rung import Rung
from redline.ladder.rungs.autocast import Autocast
from redline.ladder.rungs.bf16 import Bf16
from redline.ladder.rungs.channels_last import ChannelsLast
from redline.ladder.rungs.int8 import Int8, products_are_exact
from redline.machine.machine import Machine
from redline.nn.linear import Linear

CPU = replace(Machine.detect("cpu"), hardware_dtypes=("fp32", "bf16", "int8"), ceilings=None)
SLOW = replace(CPU, hardware_dtypes=("fp32",))
MODES = ("weight_only", "dynamic", "static")


class Net(nn.Module):
    """Odd sizes, a layer below the limit, and two calls of different rank."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(37, 67), nn.GELU(), nn.Linear(67, 37))
        self.head = nn.Linear(37, 5)

    def forward(self, x: Tensor, *, shift: float = 0.0) -> dict[str, Tensor]:
        return {"y": self.head(x + self.body(x)) + shift}


def net() -> Net:
    torch.manual_seed(0)
    return Net().eval()


def inputs(seed: int) -> Tensor:
    return torch.randn(3, 11, 37, generator=torch.Generator().manual_seed(seed))


def expected_linear(layer: nn.Linear, x: Tensor, mode: str) -> Tensor:
    """What one quantized layer must compute, in fp64, from the integers that it stores."""
    w = layer.weight
    qdata, scale = w.qdata.double(), w.scale.double()
    if mode != "weight_only":
        top = 127 if products_are_exact(torch.device("cpu")) else 63
        step = w.act_quant_scale if mode == "static" else x.abs().amax(-1, keepdim=True) / (top + 0.5)
        # In fp32 as torchao does: the largest of each row lies on the border between two integers.
        x = (x * (1.0 / step)).round().clamp(-top - 1, top).double() * step.double()
    return x.double() @ (qdata * scale).T + layer.bias.double()


@pytest.mark.cpu
@pytest.mark.parametrize("mode", MODES)
def test_layer_equals_its_dequantized_integers(mode: str) -> None:
    torch.manual_seed(3)
    original = nn.Linear(37, 67)
    model = nn.Sequential(original)
    job = Int8(mode=mode, min_features=1).apply(Job.of(model, samples=(inputs(0), inputs(1))))
    layer = job.model[0]
    scale = layer.weight.scale
    assert scale.shape == (67, 1)
    # Symmetric, per channel, and rounded to the nearest step.
    error = (layer.weight.dequantize() - original.weight).abs()
    assert bool((error <= 0.5001 * scale).all())
    for seed in (2, 3):
        x = inputs(seed)
        expected = expected_linear(layer, x, mode)
        assert relative_error([expected], [job.finish()(x)]) < 1e-6


@pytest.mark.cpu
@pytest.mark.parametrize("mode", MODES)
def test_output_is_close_and_the_users_model_is_left_alone(mode: str) -> None:
    model = net()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    plan = Plan((Int8(mode=mode, min_features=8),))
    resolved, job = plan.build(Job.of(model, samples=(inputs(0), inputs(1))), CPU)
    fast = job.finish()
    for seed in (5, 6):
        x = inputs(seed)
        reference = model(x, shift=0.25)["y"]
        output = fast(x, shift=0.25)["y"]
        assert output.shape == reference.shape and output.dtype == torch.float32
        # 7 bits of magnitude: half a step of 1/127 of the largest value, in weights and inputs of two layers.
        assert 0 < relative_error([reference], [output]) < 0.02
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert not any(is_quantized(p) for p in model.parameters())
    assert Plan.parse(str(resolved)) == resolved
    assert job.precision == ("fp32" if mode == "weight_only" else "int8")


@pytest.mark.parametrize("mode", MODES)
def test_proof_counts_layers_and_bytes(mode: str) -> None:
    rung = Int8(mode=mode, min_features=8)
    job = rung.apply(Job.of(net(), samples=(inputs(0),)))
    proof = rung.proof(job)
    assert proof.startswith(f"2 of 3 linear layers hold int8 weights ({mode.replace('_', ' ')})")
    assert "1 not quantized" in proof
    weight = job.model.body[0].weight
    assert 37 * 67 <= stored_bytes(weight) < 37 * 67 * 1.5 < weight.nbytes
    assert ("calibrated by minmax on 1 batches" in proof) == (mode == "static")


def test_proof_is_empty_when_nothing_is_quantized() -> None:
    rung = Int8(min_features=8)
    job = rung.apply(Job.of(net()))
    assert rung.proof(replace(job, model=net())) == ""


def test_original_weights_are_freed() -> None:
    job = Int8(min_features=8).apply(Job.of(net()))
    assert set(job.parameters) == {"body.0.bias", "body.2.bias", "head.weight", "head.bias"}


def test_layers_choose_their_implementation_before_compilation() -> None:
    layer = Int8().apply(Job.of(nn.Sequential(Linear(64, 96)))).model[0]
    assert layer._int8_cache is not None and layer._int8_cache[1] is not None


def test_no_global_setting_changes() -> None:
    import torch._inductor.config as inductor

    before = (
        inductor.coordinate_descent_tuning,
        inductor.force_fuse_int_mm_with_mul,
        logging.root.handlers[:],
    )
    fast = Int8(mode="dynamic", min_features=8).apply(Job.of(net())).finish()
    fast(inputs(0))
    assert before == (
        inductor.coordinate_descent_tuning,
        inductor.force_fuse_int_mm_with_mul,
        logging.root.handlers[:],
    )
    assert torch.get_float32_matmul_precision() == "highest"


@pytest.mark.parametrize("calibration", ["minmax", "percentile", "mse"])
def test_calibration_decides_the_scale(calibration: str) -> None:
    x = inputs(0)
    x[0, 0, 0] = 50.0
    rung = Int8(mode="static", calibration=calibration, percentile=99.0, min_features=1)
    job = rung.apply(Job.of(nn.Sequential(nn.Linear(37, 9)), samples=(x,)))
    limit = float(job.model[0].weight.act_quant_scale) * (127 if products_are_exact(torch.device("cpu")) else 63)
    if calibration == "minmax":
        assert limit == pytest.approx(50.0)
    elif calibration == "percentile":
        assert limit == pytest.approx(float(torch.quantile(x.abs().double(), 0.99)), abs=2 * 50 / 4096)
    else:
        assert limit < 50.0


@pytest.mark.parametrize("mode", MODES)
def test_nan_raises(mode: str) -> None:
    model = net()
    with torch.no_grad():
        model.body[2].weight[3, 4] = float("nan")
    with pytest.raises(RungError, match="NaN or infinity"):
        Int8(mode=mode, min_features=8).apply(Job.of(model, samples=(inputs(0),)))


def test_nan_in_a_sample_is_refused() -> None:
    x = inputs(0)
    x[0, 0, 0] = float("nan")
    with pytest.raises(RungError, match="'body.0': its inputs on the samples contain NaN"):
        Int8(mode="static", min_features=8).apply(Job.of(net(), samples=(x,)))


def test_nan_in_a_call_propagates() -> None:
    fast = Int8(mode="dynamic", min_features=8).apply(Job.of(net())).finish()
    x = inputs(0)
    x[1, 2, 3] = float("nan")
    assert bool(fast(x)["y"][1, 2].isnan().all())


def test_skip_uses_the_users_names_below_other_rungs() -> None:
    job = Bf16().apply(Job.of(net(), samples=(inputs(0),)))
    job = Int8(skip=("body.2",), min_features=8).apply(job)
    user = job.model.model
    assert is_quantized(user.body[0].weight)
    assert not is_quantized(user.body[2].weight)
    job.finish()(inputs(1)[:1, :2])
    whole = Int8(skip=("body",), min_features=1).apply(Job.of(net()))
    assert [is_quantized(m.weight) for m in whole.model.modules() if isinstance(m, nn.Linear)] == [
        False,
        False,
        True,
    ]


@pytest.mark.parametrize("rung", [Autocast(), ChannelsLast()])
def test_names_are_the_users_under_any_wrapper(rung: Rung) -> None:
    job = rung.apply(rung.apply(Job.of(net())))
    assert list(linear_layers(job.model)) == ["body.0", "body.2", "head"]
    assert unwrapped(job.model) is job.model.model.model


def test_skip_of_an_unknown_name_is_refused() -> None:
    with pytest.raises(RungError, match="'body.7'"):
        Int8(skip=("body.7",)).apply(Job.of(net()))


def test_options_are_checked() -> None:
    with pytest.raises(RungError, match="calibration=mse needs mode=static"):
        Int8(calibration="mse")
    with pytest.raises(RungError, match="percentile"):
        Int8(mode="static", calibration="percentile", percentile=0.0)


@pytest.mark.cpu
def test_why_not() -> None:
    convolutions = Job.of(nn.Sequential(nn.Conv2d(3, 4, 3)))
    assert "onnxruntime(int8=static) quantizes convolutions" in Int8().why_not(CPU, convolutions)
    assert "none of the 3 linear layers" in Int8(min_features=1000).why_not(CPU, Job.of(net()))
    assert "needs sample inputs" in Int8(mode="static", min_features=8).why_not(CPU, Job.of(net()))
    assert "progressive=true needs sample inputs" in Int8(progressive=True).why_not(CPU, Job.of(net()))
    assert Int8().why_not(SLOW) == ""
    assert "no hardware support for int8" in Int8(mode="dynamic").why_not(SLOW)
    assert Int8(min_features=8).why_not(CPU, Job.of(net())) == ""


def test_missing_torchao_is_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao", None)
    assert Int8().why_not(CPU) == 'torchao is not installed: pip install "redline[int8]"'
    with pytest.raises(Unavailable, match="torchao is not installed"):
        Plan((Int8(),)).build(Job.of(net()), CPU)


@pytest.mark.cpu
def test_variants_follow_the_machine() -> None:
    assert [str(rung) for rung in Int8.variants(SLOW)] == ["int8"]
    assert [str(rung) for rung in Int8.variants(CPU)] == [
        "int8",
        "int8(mode=dynamic)",
        "int8(mode=static, calibration=mse)",
    ]


class Fragile(nn.Module):
    """One layer whose rounding errors are blown up, between layers that hardly matter."""

    def __init__(self) -> None:
        super().__init__()
        self.easy = nn.Linear(32, 32)
        self.fragile = nn.Linear(32, 32)
        self.calm = nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        return 0.01 * self.easy(x) + 10.0 * self.fragile(x) + 0.1 * self.calm(x)


@pytest.mark.cpu
@pytest.mark.parametrize("mode", MODES)
def test_progressive_skips_the_sensitive_layer_and_resolves_the_plan(mode: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(9, 32)
    job = Job.of(Fragile(), samples=(x,), gates=(Gate("relative_error", 1e-3),))
    weights = dict(job.model.named_parameters())
    resolved = Int8(mode=mode, progressive=True, min_features=8).resolve(job)
    assert resolved == Int8(mode=mode, skip=("fragile",), min_features=8)
    assert all(p is weights[name] for name, p in job.model.named_parameters())
    assert Plan.parse(str(Plan((resolved,)))).rungs == (resolved,)
    reference = job.model(x)
    output = resolved.apply(job).finish()(x)
    assert job.gates[0].judge(reference, output).passed


def test_progressive_quantizes_all_passing_layers_or_raises() -> None:
    torch.manual_seed(0)
    samples = (torch.randn(9, 32),)
    loose = Job.of(Fragile(), samples=samples, gates=(Gate("relative_error", 0.5),))
    assert Int8(progressive=True, min_features=8).resolve(loose) == Int8(min_features=8)
    tight = Job.of(Fragile(), samples=samples, gates=(Gate("relative_error", 1e-12),))
    with pytest.raises(RungError, match="quantizing only 'easy', the least sensitive of 3 layers, fails a gate"):
        Int8(progressive=True, min_features=8).resolve(tight)


class Even(nn.Module):
    """Layers that all do the same harm, one after another."""

    def __init__(self, layers: int = 12, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def test_progressive_counts_the_errors_of_the_rungs_before_it() -> None:
    torch.manual_seed(0)
    model, x = Even(), torch.randn(9, 64)

    def built(plan: Plan, limit: float) -> tuple[Plan, float]:
        resolved, job = plan.build(Job.of(model, (x,), (Gate("relative_error", limit),)), CPU)
        assert job.expected == ()
        return resolved, relative_error([model(x)], [job.finish()(x)])

    alone, both = (built(plan, 1.0)[1] for plan in (Plan((Bf16(),)), Plan((Bf16(), Int8()))))
    # Room for some layers beside bf16's own error, and not for all of them.
    limit = (alone + both) / 2 / 0.9
    resolved, error = built(Plan((Bf16(), Int8(progressive=True))), limit)
    left = resolved.rungs[1]
    assert isinstance(left, Int8) and 0 < len(left.skip) < 12 and error <= 0.9 * limit


@pytest.mark.parametrize(
    ("limit", "better", "perfect", "stricter"),
    [
        (0.03, "lower", 0.0, 0.027),
        (-0.99, "lower", -1.0, -0.991),
        (0.99, "higher", 1.0, 0.991),
        (95.0, "higher", 100.0, 95.5),
        (40.0, "higher", float("inf"), 44.0),
        (1.0, "higher", 1.0, 1.0),
    ],
)
def test_progressive_keeps_a_margin_for_other_inputs(
    limit: float, better: str, perfect: float, stricter: float
) -> None:
    gate = Gate("mine", limit, function=lambda reference, output: perfect, better=better)
    found = sensitivity._with_margin(gate, [torch.zeros(1)])
    assert found.limit == pytest.approx(stricter) and found.direction == better
    if perfect != float("inf"):
        assert found.judge(torch.zeros(1), torch.zeros(1)).passed


def test_attention_and_transformer_layers_still_run() -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True, dropout=0.0).eval()
    x = torch.randn(2, 5, 16)
    rung = Int8(mode="static", min_features=8)
    job = rung.apply(Job.of(model, samples=(x,)))
    assert rung.proof(job).startswith("2 of 3 linear layers")
    assert relative_error([model(x)], [job.finish()(x)]) < 0.02


def test_nothing_is_imported_or_printed_before_it_is_needed(forked_python: ForkedPython) -> None:
    code = (
        "import sys, warnings; warnings.simplefilter('error'); import redline; "
        "from redline.ladder.rungs.int8 import Int8; "
        "assert 'torchao' not in sys.modules; import torch; assert not torch.cuda.is_initialized(); "
        "from redline.ladder.job import Job; m = torch.nn.Linear(64, 64); j = Int8().apply(Job.of(m)); "
        "assert 'torchao' in sys.modules"
    )
    done = forked_python.run(code)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_float64_model_is_named() -> None:
    job, mixed = Job.of(net().double(), (inputs(0).double(),)), net()
    assert all("linear layers are in float64" in Int8(mode=mode).why_not(CPU, job) for mode in MODES)
    mixed.head.double()
    assert "head" not in Int8(min_features=1)._layers(Job.of(mixed))

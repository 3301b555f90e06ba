import logging
import sys
import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from redline.errors import RungError
from redline.ladder.job import Job
from redline.ladder.metrics import relative_error
from redline.ladder.plan import Plan
from redline.ladder.rewrites import onnx_engine
from redline.ladder.rewrites.onnx_quantize import is_int8
from redline.ladder.rungs.channels_last import ChannelsLast
from redline.ladder.rungs.onnxruntime import Onnxruntime
from redline.machine.machine import Machine

pytestmark = pytest.mark.usefixtures("quick_onnx_export")

CPU = Machine.detect("cpu")
GPU = replace(CPU, device="cuda:0", name="GPU", capability=(9, 0))


class Cnn(nn.Module):
    """Odd channel counts and sizes, batch norm, a residual sum, and a linear head."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 9, 3, padding=1)
        self.norm = nn.BatchNorm2d(9)
        self.body = nn.Conv2d(9, 9, 3, padding=1, bias=False)
        self.head = nn.Linear(9, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.stem(x)))
        x = torch.relu(x + self.body(x))
        return self.head(x.mean((2, 3)))


def cnn() -> Cnn:
    torch.manual_seed(0)
    model = Cnn()
    with torch.no_grad():
        model.train()
        model(torch.randn(8, 3, 11, 13))  # batch norm gets statistics worth folding
    return model.eval()


def pictures(seed: int, shape: tuple[int, ...] = (2, 3, 11, 13)) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.fixture(scope="module")
def applied() -> Any:
    """One export shared by the tests that only look at it."""
    return Plan((Onnxruntime(),)).apply(cnn(), pictures(0))


@pytest.fixture(scope="module")
def exports() -> dict[object, bytes]:
    """What was exported for the tests that share it."""
    return {}


@pytest.fixture
def exported_once(exports: dict[object, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of what follows: an export takes a second, and the same weights and shapes give the same one again."""
    export = onnx_engine._export

    def remember(model: nn.Module, tensors: Sequence[Tensor], path: Path) -> None:
        weights = tuple(weight.numpy().tobytes() for weight in model.state_dict().values())
        same = (str(model), weights, tuple(tensor.shape for tensor in tensors))
        if same not in exports:
            export(model, tensors, path)
            exports[same] = path.read_bytes()
        path.write_bytes(exports[same])

    monkeypatch.setattr(onnx_engine, "_export", remember)


def test_output_is_that_of_the_model(applied: Any) -> None:
    reference = cnn().double()
    for seed in (1, 2, 3):
        x = pictures(seed)
        assert relative_error([reference(x.double())], [applied(x)]) < 1e-6


def test_proof_counts_the_nodes_that_ran(applied: Any) -> None:
    rung = Onnxruntime(provider="cpu")
    engine = next(iter(applied.model.engines.values()))
    assert {node.provider for node in engine.nodes} == {"CPUExecutionProvider"}
    assert "Gemm" in {node.operator for node in engine.nodes}
    expected = f"{len(engine.nodes)} nodes ran on CPUExecutionProvider; 1 session, one per input shape"
    assert rung.proof(applied.job) == expected
    nothing = replace(applied.job, evidence={"onnxruntime": type(applied.model)(nn.Identity(), None)})
    assert rung.proof(nothing) == ""
    # fp32 was run, so a claim of int8 has no evidence.
    assert Onnxruntime(provider="cpu", int8="static").proof(applied.job) == ""


def test_weight_bytes_are_those_of_the_graph(applied: Any) -> None:
    model = cnn()
    folded = sum(p.nbytes for m in (model.stem, model.body, model.head) for p in m.parameters())
    everything = sum(t.nbytes for t in model.state_dict().values())
    assert folded <= applied.model.weight_bytes <= everything + 256


def test_the_users_model_flags_and_logging_are_left_alone(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    model = cnn()
    before = {name: t.clone() for name, t in model.state_dict().items()}
    state = (torch.get_num_threads(), logging.root.handlers[:], logging.root.level, list(warnings.filters))
    fast = Plan((Onnxruntime(int8="static", calibration="percentile"),)).apply(model, pictures(0))
    fast(pictures(1))
    assert state == (
        torch.get_num_threads(),
        logging.root.handlers[:],
        logging.root.level,
        list(warnings.filters),
    )
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert list(tmp_path.glob("redline-onnx-*")) == []
    assert tuple(capfd.readouterr()) == ("", "")


@pytest.mark.cpu
@pytest.mark.usefixtures("exported_once")
def test_static_int8_quantizes_convolutions() -> None:
    model = cnn()
    rung = Onnxruntime(int8="static")
    fast = Plan((rung,)).apply(model, [pictures(0), pictures(1)])
    errors = [relative_error([model(pictures(s))], [fast(pictures(s))]) for s in (2, 3, 4)]
    # 8 bits of range: half a step of 1/255 of the span, in weights and inputs of three layers.
    assert 0 < max(errors) < 0.03
    proof = rung.proof(fast.job)
    assert "in int8 (" in proof and "QLinearConv 2" in proof
    assert fast.job.precision == "int8"
    assert fast.model.weight_bytes < sum(p.nbytes for p in model.parameters()) / 2


@pytest.mark.usefixtures("exported_once")
def test_percentile_clips_outliers() -> None:
    model = nn.Sequential(nn.Linear(32, 32)).eval()
    with torch.no_grad():
        model[0].weight[:, 0] = 0.0  # the outlier widens the range of the input, and nothing else
    x = torch.randn(64, 32, generator=torch.Generator().manual_seed(0))
    spiked = x.clone()
    spiked[0, 0] = 400.0
    errors = {}
    for options in ("calibration=minmax", "calibration=percentile, percentile=99.9"):
        fast = Plan.parse(f"onnxruntime(int8=static, {options})").apply(model, spiked, check=False)
        errors[options.partition(",")[0]] = relative_error([model(x)], [fast(x)])
    assert errors["calibration=percentile"] < 0.1 * errors["calibration=minmax"]


@pytest.mark.cpu
@pytest.mark.usefixtures("exported_once")
def test_dynamic_int8_quantizes_linear_layers_only() -> None:
    model = cnn()
    rung = Onnxruntime(int8="dynamic")
    fast = Plan((rung,)).apply(model, pictures(0))
    assert 0 < relative_error([model(pictures(1))], [fast(pictures(1))]) < 0.02
    engine = next(iter(fast.model.engines.values()))
    assert len([node for node in engine.nodes if is_int8(node.operator)]) == 1
    convolutions = nn.Sequential(nn.Conv2d(3, 4, 3)).eval()
    nothing = Plan((rung,)).apply(convolutions, pictures(0))
    assert rung.proof(nothing.job) == ""


@pytest.mark.usefixtures("exported_once")
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_nan_never_passes_calibration(bad: float) -> None:
    x = pictures(0)
    x[0, 0, 0, 0] = bad
    with pytest.raises(RungError, match="NaN or infinity"):
        Onnxruntime(int8="static").apply(Job.of(cnn(), samples=(x,)))


class Nested(nn.Module):
    """Keyword inputs, inputs that are no tensors, an unused one, and an output of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 3)

    def forward(
        self, x: Tensor, times: int = 1, *, mask: Tensor | None = None, unused: Tensor | None = None
    ) -> dict[str, Any]:
        y = self.linear(x) * times
        if mask is not None:
            y = y * mask
        return {"y": y, "pair": (x, None, y.sum(), 7), "again": y, "rows": torch.arange(x.shape[0])}


def assert_same(expected: dict[str, Any], seen: dict[str, Any]) -> None:
    assert list(seen) == list(expected)
    torch.testing.assert_close(seen["y"], expected["y"])
    torch.testing.assert_close(seen["again"], expected["y"])
    assert torch.equal(seen["rows"], expected["rows"])
    assert isinstance(seen["pair"], tuple)
    assert torch.equal(seen["pair"][0], expected["pair"][0])
    assert seen["pair"][1] is None and seen["pair"][3] == 7
    assert seen["pair"][2].shape == ()
    torch.testing.assert_close(seen["pair"][2], expected["pair"][2])


def test_any_nesting_of_inputs_and_outputs() -> None:
    torch.manual_seed(0)
    model = Nested().eval()
    sample = {"x": torch.randn(4, 5), "mask": torch.rand(4, 3), "unused": torch.randn(2), "times": 2}
    fast = Plan((Onnxruntime(),)).apply(model, sample)
    for _ in range(2):
        x, mask, unused = torch.randn(4, 5), torch.rand(4, 3), torch.randn(2)
        seen = fast(mask=mask, unused=unused, times=2, x=x)  # in another order than the sample
        assert_same(model(x, 2, mask=mask), seen)
    assert len(fast.model.engines) == 1
    assert_same(model(x, 3, mask=mask), fast(x=x, times=3, mask=mask, unused=unused))
    assert len(fast.model.engines) == 2  # a number is part of the graph


def test_a_new_shape_is_exported_once() -> None:
    model = cnn()
    rung = Onnxruntime()
    fast = Plan((rung,)).apply(model, pictures(0))
    for shape in ((1, 3, 7, 9), (2, 3, 11, 13), (1, 3, 7, 9)):
        x = pictures(1, shape)
        torch.testing.assert_close(fast(x), model(x), rtol=1e-5, atol=1e-6)
    assert len(fast.model.engines) == 2
    assert "2 sessions" in rung.proof(fast.job)


@pytest.mark.usefixtures("exported_once")
def test_new_shape_in_int8_warns_about_calibration() -> None:
    model = cnn()
    fast = Plan((Onnxruntime(int8="static"),)).apply(model, pictures(0))
    x = pictures(1, (1, 3, 7, 9))
    with pytest.warns(UserWarning, match="int8 is calibrated on its inputs"):
        output = fast(x)
    assert relative_error([model(x)], [output]) < 0.03


def test_external_weights_are_read_before_the_folder_is_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    save = torch.onnx.ONNXProgram.save
    monkeypatch.setattr(torch.onnx.ONNXProgram, "save", lambda self, path: save(self, path, external_data=True))
    monkeypatch.setattr("redline.ladder.rungs.onnxruntime._EXTERNAL_BYTES", 0)
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64)).eval()
    x = torch.randn(3, 64)
    for plan, bound in (("onnxruntime", 1e-6), ("onnxruntime(int8=static)", 0.03)):
        fast = Plan.parse(plan).apply(model, x)
        assert relative_error([model(x)], [fast(x)]) < bound


def test_on_top_of_another_rung() -> None:
    model = cnn()
    fast = Plan((ChannelsLast(), Onnxruntime())).apply(model, pictures(0))
    x = pictures(1)
    torch.testing.assert_close(fast(x), model(x), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("threads", [0, 1])
def test_threads_are_torchs_unless_told(threads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    import onnxruntime

    from redline.ladder.rewrites.onnx_engine import _session

    seen: list[Any] = []
    monkeypatch.setattr(onnxruntime, "InferenceSession", lambda path, options, providers: seen.append(options))
    _session(Path("model.onnx"), [("CPUExecutionProvider", {})], threads)
    assert seen[0].intra_op_num_threads == (threads or torch.get_num_threads())


class Untraceable(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x * 3


def test_failed_export_raises_rung_error() -> None:
    with pytest.raises(RungError, match="exporting the model to ONNX failed: .+") as error:
        Onnxruntime().apply(Job.of(Untraceable(), samples=(torch.randn(3),)))
    assert "\n" not in str(error.value)


class Opaque(nn.Module):
    def forward(self, x: Tensor) -> object:
        return object()


def test_output_without_tensors_raises() -> None:
    with pytest.raises(RungError, match="object, contains no tensor"):
        Onnxruntime().apply(Job.of(Opaque(), samples=(torch.randn(3),)))


def test_call_without_tensors_raises() -> None:
    with pytest.raises(RungError, match="gets no tensor"):
        Onnxruntime().apply(Job.of(Opaque(), samples=((3,),)))


def test_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job.of(cnn(), samples=(pictures(0),))
    assert Onnxruntime().why_not(CPU, job) == ""
    assert "needs sample inputs" in Onnxruntime().why_not(CPU, Job.of(cnn()))
    assert "no bf16 kernels on a CPU" in Onnxruntime().why_not(CPU, replace(job, precision="bf16"))
    assert "provider=cuda needs a CUDA GPU" in Onnxruntime(provider="cuda").why_not(CPU)
    assert "provider=cpu cannot run" in Onnxruntime(provider="cpu").why_not(GPU)
    monkeypatch.setattr("redline.ladder.rungs.onnxruntime._available", lambda: ["CPUExecutionProvider"])
    assert 'pip install "redline[onnx-gpu]"' in Onnxruntime().why_not(GPU)
    providers = ["CUDAExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr("redline.ladder.rungs.onnxruntime._available", lambda: providers)
    assert Onnxruntime().why_not(GPU) == ""
    assert "no int8 kernels" in Onnxruntime(int8="static").why_not(GPU)
    assert [str(r) for r in Onnxruntime.variants(GPU)] == ["onnxruntime(provider=cuda)"]
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    assert Onnxruntime().why_not(CPU) == 'onnxscript not installed: pip install "redline[onnx]"'
    assert Onnxruntime().why_not(GPU) == 'onnxscript not installed: pip install "redline[onnx-gpu]"'


def test_options_are_checked_and_round_trip() -> None:
    with pytest.raises(RungError, match="calibration=percentile needs int8=static"):
        Onnxruntime(calibration="percentile")
    with pytest.raises(RungError, match="threads"):
        Onnxruntime(threads=-1)
    with pytest.raises(RungError, match="percentile"):
        Onnxruntime(int8="static", calibration="percentile", percentile=20.0)
    plan = Plan((Onnxruntime(provider="cpu", int8="static", calibration="percentile", percentile=99.9, threads=2),))
    assert Plan.parse(str(plan)) == plan
    assert Onnxruntime().resolve(Job.of(cnn())) == Onnxruntime(provider="cpu")
    assert [str(r) for r in Onnxruntime.variants(CPU)] == ["onnxruntime", "onnxruntime(int8=static)"]


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    onnxruntime = pytest.importorskip("onnxruntime")
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        pytest.skip("this onnxruntime has no CUDA provider")
    model = cnn().cuda()
    rung = Onnxruntime()
    fast = Plan((rung,)).apply(model, pictures(0).cuda())
    for seed in (1, 2):
        x = pictures(seed).cuda()
        # Convolutions may run in TF32.
        assert relative_error([model(x)], [fast(x)]) < 2e-3
        assert fast(x).is_cuda
    assert "nodes ran on CUDAExecutionProvider" in rung.proof(fast.job)


def test_int8_removes_half_precision_rungs() -> None:
    static = Onnxruntime(int8="static")
    assert (
        str(Plan.parse("fp16 + channels_last + compile").with_rung(static))
        == "channels_last + onnxruntime(int8=static)"
    )
    assert str(Plan.parse("fp16").with_rung(Onnxruntime())) == "fp16 + onnxruntime"
    half = replace(Job.of(nn.Linear(4, 4), (torch.randn(2, 4),)), precision="fp16")
    assert "needs an fp32 model" in static.why_not(CPU, half)

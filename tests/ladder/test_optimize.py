"""redline.optimize: a model in memory goes to the trial processes, and comes back optimized and unchanged."""

import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import redline
from forked_python import ForkedPython
from redline.errors import RedlineError, WorkloadError
from redline.ladder.measurement import Measurement
from redline.ladder.optimize import OptimizedModel, OptimizedStep

pytestmark = pytest.mark.usefixtures("no_ceilings", "lent_workers", "without_compiler")
QUICK: dict[str, Any] = {"rungs": ["fold_batchnorm"], "sampling": 0.2, "progress": None}

# No `if __name__ == "__main__"`: trial processes must not run the script again.
SCRIPT = """
import torch
from torch import nn

import redline

print("the script runs")


class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(),
            nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 8, 1),
        )

    def forward(self, image):
        return self.layers(image)


model = Network().eval()
batch = torch.rand(4, 3, 64, 64)
fast = redline.optimize(model, samples=batch, {options})
assert torch.allclose(fast(batch), model(batch), rtol=0.05, atol=0.05)
speedup = fast.measurements[-1].speedup()
print(f"plan {{fast.plan}}; lowest speed-up {{speedup.low if speedup else 1.0}}")
"""


def small_network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1))


def test_optimized_model_has_a_plan_measurements_and_a_report(tmp_path: Path) -> None:
    model, batch = small_network(), torch.rand(2, 3, 32, 32)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    heard: list[tuple[str, Measurement | None]] = []
    random_state = torch.get_rng_state()
    fast = redline.optimize(
        model, batch, **{**QUICK, "progress": lambda text, row: heard.append((text, row)), "ablation": False}
    )
    assert isinstance(fast, OptimizedModel) and isinstance(fast, nn.Module)
    assert [row.role for row in fast.measurements if row.rung == "fold_batchnorm"] == ["trial"]
    assert {row.workload for row in fast.measurements} == {"Sequential"}
    assert fast.plan == redline.Plan.parse(fast.measurements[-1].plan) and fast.plan.objective == "latency"
    trials = [row for row in fast.measurements if row.role != "final"]
    assert [row for _, row in heard if row is not None] == [*trials, fast.measurements[-1]]
    # The model, its mode and the random state are as before; the result is another model.
    assert model.training and all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert torch.equal(torch.get_rng_state(), random_state)
    model.eval()
    assert torch.allclose(fast(batch), model(batch), atol=1e-4) and not fast(batch).requires_grad
    assert fast.report(tmp_path / "report.html").read_text().startswith("<!doctype html>")
    assert fast.report(tmp_path / "report.md").read_text().startswith("# ")
    assert "fold_batchnorm" in (fast._repr_html_() or "")
    assert str(tmp_path) not in (tmp_path / "report.html").read_text()


def test_a_given_plan_skips_the_climb(tmp_path: Path) -> None:
    model, batch = small_network().eval(), torch.rand(2, 3, 32, 32)
    redline.Plan.parse("fold_batchnorm").save(tmp_path / "plan.toml")
    for plan in ("fold_batchnorm", tmp_path / "plan.toml", redline.Plan.parse("fold_batchnorm")):
        fast = redline.optimize(model, batch, plan=plan)
        assert str(fast.plan) == "fold_batchnorm" and fast.measurements == ()
        assert torch.allclose(fast(batch), model(batch), atol=1e-4)
    assert fast._repr_html_() is None
    with pytest.raises(RedlineError, match="no report, because the plan was given"):
        fast.report(tmp_path / "report.html")
    with pytest.raises(RedlineError, match="sampling= is for a climb, but plan= skips it"):
        redline.optimize(model, batch, plan="eager", sampling=1)


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, *, scale: Tensor) -> dict[str, Tensor]:
        return {"scaled": self.layer(x) * scale}


@pytest.mark.parametrize(
    "samples",
    [
        {"x": torch.randn(3, 4), "scale": torch.tensor(2.0)},
        [{"x": torch.randn(3, 4), "scale": torch.tensor(2.0)}, {"x": torch.randn(5, 4), "scale": torch.tensor(1.0)}],
    ],
    ids=["a dict", "a list of dicts"],
)
def test_samples_by_name_and_of_several_sizes(samples: Any) -> None:
    """The class is defined in a test module, which the trial processes cannot import."""
    fast = redline.optimize(Named().eval(), samples, **{**QUICK, "rungs": ["tf32"]})
    assert fast(x=torch.ones(1, 4), scale=torch.tensor(1.0))["scaled"].shape == (1, 4)


def test_a_training_step_is_optimized_on_a_copy() -> None:
    model = nn.Linear(8, 8)
    before = model.weight.detach().clone()
    step = redline.optimize(
        model,
        torch.randn(16, 8),
        loss=lambda output, batch: (output - batch.roll(1, 1)).square().mean(),
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
        **{**QUICK, "rungs": ["fused_optimizer"]},
    )
    assert isinstance(step, OptimizedStep)
    batch = torch.randn(16, 8)
    losses = [float(step(batch)) for _ in range(20)]
    assert losses[-1] < losses[0] and torch.equal(model.weight, before)
    assert not torch.equal(step.model.weight, before)


def test_invalid_models_and_samples_raise() -> None:
    with pytest.raises(WorkloadError, match=r"takes a torch\.nn\.Module, not function"):
        redline.optimize(lambda x: x, torch.ones(2))
    with pytest.raises(WorkloadError, match="needs both loss= and optimizer="):
        redline.optimize(nn.Linear(2, 2), torch.randn(2, 2), loss=lambda output, _: output.sum())
    with pytest.raises(WorkloadError, match="holds no tensor"):
        redline.optimize(nn.Linear(2, 2), "text", progress=None)
    with pytest.raises(WorkloadError, match="every tensor in samples= is constant"):
        redline.optimize(nn.Linear(2, 2), torch.ones(2, 2), progress=None)
    model = nn.Linear(2, 2)
    model.lock = threading.Lock()
    with pytest.raises(WorkloadError, match="cannot send the workload to the trial processes: .*give the address"):
        redline.optimize(model, torch.randn(2, 2), progress=None)


def test_a_workload_in_memory_can_be_climbed() -> None:
    workload = redline.Workload(lambda: nn.Linear(4, 4), lambda seed: torch.randn(2, 4), name="mine")
    climbed = redline.climb(workload, device="cpu", **{**QUICK, "rungs": ["tf32"]})
    assert climbed.final.workload == "mine" and climbed.files == {}
    assert climbed.plan.apply(nn.Linear(4, 4))(torch.ones(1, 4)).shape == (1, 4)
    with pytest.raises(RedlineError, match="resume= needs the address of a workload"):
        redline.climb(workload, resume=True)


def test_progress_lines_without_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from redline.ladder.search.progress import print_progress

    monkeypatch.setattr(print_progress, "_printed_s", float("-inf"))
    for text in ("first", "second"):
        print_progress(text, None)
    assert capsys.readouterr().err == "redline: first …\n"


def test_a_script_without_a_main_guard_is_not_run_again(tmp_path: Path, forked_python: ForkedPython) -> None:
    script = tmp_path / "script.py"
    options = 'budget="6s", rungs=["fold_batchnorm"], sampling=0.2, ablation=False'
    script.write_text(SCRIPT.format(options=options), encoding="utf-8")
    code = "import runpy, warnings; warnings.simplefilter('error'); runpy.run_path('script.py', run_name='__main__')"
    seen = forked_python.run(code, cwd=tmp_path)
    check_script(seen)
    assert re.search(r"^plan \S+; lowest speed-up", seen.stdout, re.MULTILINE)
    assert seen.stderr.startswith("redline: ") and "Traceback" not in seen.stderr
    assert {path.name for path in tmp_path.iterdir()} == {"script.py"}


@pytest.mark.alone
@pytest.mark.slow
def test_a_small_network_in_main_becomes_faster_beyond_noise_in_two_minutes(tmp_path: Path) -> None:
    import time

    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(options='budget="45s"'), encoding="utf-8")
    begin_s = time.monotonic()
    command = [sys.executable, "-W", "error", str(script)]
    seen = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=280)
    assert time.monotonic() - begin_s < 120
    check_script(seen)
    low = re.search(r"lowest speed-up ([\d.]+)", seen.stdout)
    assert low is not None and float(low[1]) > 1.0, seen.stdout


def check_script(seen: "subprocess.CompletedProcess[str]") -> None:
    assert seen.returncode == 0, seen.stderr[-3000:]
    assert seen.stdout.count("the script runs") == 1

"""A settings file is a workload that rungs can be applied to, and that learns."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from redline.errors import RedlineError
from redline.ladder.job import Job
from redline.ladder.plan import Plan
from redline.ladder.workloads.addresses import load_workload
from redline.machine.machine import Machine
from redline.training.optimizers import build_optimizer, describe
from redline.training.text.config import TextTraining
from redline.training.text.packing import synthetic_batch
from redline.training.text.workload import make_workload, training_workload


def losses(workload: object, plan: str, steps: int = 4) -> list[float]:
    model, inputs = workload.fresh_model("cpu"), workload.fresh_inputs(0, "cpu")
    job = Job.of(model, (inputs,), workload.gates, workload.loss, workload.optimizer, share=True)
    job = Plan.parse(plan).build(job, Machine.detect("cpu"))[1]
    step = job.finish()
    return [float(step(inputs)) for _ in range(steps)]


def test_the_workload_trains_and_has_options(config: Callable[..., Path]) -> None:
    make = training_workload(str(config()))
    workload = make()
    assert workload.items == 87 and workload.unit == "token" and make.__name__ == "tiny"
    seen = losses(workload, "eager")
    assert seen[-1] < seen[0] < 6
    other = make(batch=5, length=17)
    assert other.items == 85 and other.fresh_inputs(1, "cpu")["tokens_BS"].shape == (5, 17)
    assert training_workload(str(config(("batch = 3", 'batch = "auto"'))))().items == 8 * 29
    with pytest.raises(RedlineError, match="longer than the model's limit"):
        make(length=41)


def test_bundled_settings_go_by_their_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "decoder-tiny").mkdir()  # as a training's --out may be called
    workload = load_workload("train:decoder-tiny", {"batch": 2, "length": 19})
    assert (workload.name, workload.items) == ("decoder-tiny", 38)
    assert losses(workload, "eager", 1)[0] < 8
    with pytest.raises(RedlineError, match="no config .* for a language model: .* or one of decoder-124m, .*-tiny"):
        load_workload("train:decoder-huge")
    with pytest.raises(RedlineError, match="for a super-resolution model, not for a language model"):
        load_workload("train:drct-small-x4")
    with pytest.raises(RedlineError, match="train:CONFIG.toml, train:decoder-tiny, .*or one of"):
        load_workload("decoder-tiny")


@pytest.mark.parametrize("plan", ["checkpoint", "checkpoint(granularity=layer)", "fused_optimizer(backend=fused)"])
def test_rungs_apply_to_it(config: Callable[..., Path], plan: str) -> None:
    workload = training_workload(str(config()))()
    assert losses(workload, plan) == pytest.approx(losses(workload, "eager"), rel=1e-4)


@pytest.mark.parametrize("optimizer", ["muon", "adafactor"])
def test_the_optimizer_is_the_settings_own(config: Callable[..., Path], optimizer: str) -> None:
    workload = training_workload(str(config(("steps = 8", f'steps = 8\noptimizer = "{optimizer}"'))))()
    seen = losses(workload, "eager")
    assert seen[-1] < seen[0]


def test_muon_gets_the_matrices_that_training_gives_it(config: Callable[..., Path]) -> None:
    """Also where one of their sides happens to be the vocabulary's."""
    path = config(("steps = 8", 'steps = 8\noptimizer = "muon"'))
    training = TextTraining.read(path)
    mlp_width = training.model.vocabulary_for(training.tokenizer.vocabulary)
    training = replace(training, model=replace(training.model, mlp_width=mlp_width))
    model = make_workload(training).fresh_model("cpu")
    found = make_workload(training).optimizer(model.parameters())
    assert describe(found) == describe(build_optimizer(model, training.loop))


@pytest.mark.parametrize("backend", ["auto", "fused"])
def test_optimizers_that_are_several_are_not_rebuilt_as_one(config: Callable[..., Path], backend: str) -> None:
    workload = training_workload(str(config(("steps = 8", 'steps = 8\noptimizer = "muon"'))))()
    with pytest.raises(RedlineError, match="wraps several optimizers"):
        losses(workload, f"fused_optimizer(backend={backend})")


def test_synthetic_batches_look_like_packed_text() -> None:
    batch = synthetic_batch(6, 2000, 500, seed=int(torch.randint(1000, ())))
    assert batch.tokens_BS.min() >= 0 and batch.tokens_BS.max() < 500
    ends = batch.targets_BS[:, :-1] < 0
    documents = batch.packing.documents_BS
    assert torch.equal(ends, documents[:, 1:] != documents[:, :-1]) and ends.any()
    kept = ~ends
    assert torch.equal(batch.targets_BS[:, :-1][kept], batch.tokens_BS[:, 1:][kept])
    counts = batch.tokens_BS.flatten().bincount(minlength=500)
    assert counts[0] > 5 * counts[50]
    assert torch.equal(synthetic_batch(2, 9, 50, 3).tokens_BS, synthetic_batch(2, 9, 50, 3).tokens_BS)

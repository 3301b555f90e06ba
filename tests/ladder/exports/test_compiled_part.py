"""A folder with `compile` runs compiled code for the exported form, with the folder's weights, and traces otherwise."""

import gc
import json
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import redline
from artifact_stand_in import StandIn, compilation_left_out
from redline.errors import ModelError
from redline.ladder.exports.ahead_of_time import PackagedModel
from redline.ladder.exports.compiled_part import PackageFirst
from redline.ladder.exports.export import Exported
from redline.ladder.exports.load import read_artifact
from redline.machine.machine import Machine

TINY = Path(__file__).parents[2] / "tiny_workloads.py"
PERCEPTRON = f"{TINY}:perceptron"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Exported]:
    with compilation_left_out():
        out = tmp_path_factory.mktemp("export") / "model"
        yield redline.export("compile", PERCEPTRON, out, device="cpu", progress=None)


def test_the_exported_form_runs_the_compiled_code_with_the_weights_of_the_folder(made: Exported) -> None:
    assert {file.name for file in made.path.iterdir()} == {
        "compiled.json",
        "compiled.pt2",
        "manifest.json",
        "plan.toml",
        "weights.safetensors",
    }
    workload = redline.load_workload(PERCEPTRON)
    batch, loaded = workload.fresh_inputs(5, "cpu"), redline.load_exported(made.path)
    # The package was written with weights of NaN.
    assert torch.allclose(loaded(batch), workload.fresh_model("cpu")(batch), atol=1e-5)
    assert loaded.plan == redline.Plan.parse("compile")


def test_other_shapes_and_numbers_of_threads_are_traced(made: Exported) -> None:
    model, batch = redline.load_workload(PERCEPTRON).fresh_model("cpu"), torch.randn(3, 16)
    loaded = redline.load_exported(made.path)
    with pytest.warns(
        UserWarning, match=r"is not used, because args\[0\] is a tensor of shape \(3, 16\) .* compiled now"
    ):
        assert torch.allclose(loaded(batch), model(batch), atol=1e-5)
    assert torch.allclose(loaded(batch[:2]), model(batch[:2]), atol=1e-5)  # a second warning would be an error
    loaded, threads = redline.load_exported(made.path), torch.get_num_threads()
    torch.set_num_threads(threads + 1)
    try:
        with pytest.warns(UserWarning, match=f"compiled for {threads} thread"):
            loaded(torch.zeros(8, 16))
    finally:
        torch.set_num_threads(threads)


def test_the_threads_of_the_plan_are_those_of_the_compiled_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PackageFirst, "_trace", None)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with compilation_left_out():
            made = redline.export("threads(count=1) + compile", PERCEPTRON, tmp_path / "m", device="cpu", progress=None)
            assert json.loads((made.path / "compiled.json").read_text())["threads"] == 1
    finally:
        torch.set_num_threads(threads)


def test_code_that_does_not_fit_is_not_used(made: Exported) -> None:
    form, manifest = read_artifact(made.path)
    here, batch = Machine.detect("cpu"), torch.zeros(8, 16)
    facts = made.path / "compiled.json"
    whole = facts.read_text()
    other = json.loads(whole)
    other["weights"]["model.first.weight"][2] = [1, 64]
    cases = {
        "it was exported with Redline 0.0.1, and": (replace(manifest, versions={"redline": "0.0.1"}), whole),
        "it was compiled with torch 1.0, and": (
            replace(manifest, versions={**manifest.versions, "torch": "1.0.0"}),
            whole,
        ),
        "it was compiled for another layout of the weight 'first.weight'": (manifest, json.dumps(other)),
    }
    expected = redline.load_exported(made.path)(batch)
    try:
        for reason, (changed, text) in cases.items():
            facts.write_text(text)
            with pytest.warns(UserWarning, match=f"is not used, because {reason}"):
                model = form.load(made.path, changed, here).finish()
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                assert torch.allclose(model(batch), expected, atol=1e-5)
        facts.write_text('{"inputs": {}, "outputs": {}, "weights": {}, "threads": "two"}')
        with pytest.raises(ModelError, match="is damaged: 'threads' is"):
            form.load(made.path, manifest, here)
    finally:
        facts.write_text(whole)


@pytest.mark.parametrize(
    ("plan", "workload", "reason"),
    [
        ("compile", f"{TINY}:remembers", "keeps state between calls .buffer 'seen'."),
        ("compile(dynamic=true)", PERCEPTRON, "kernels for any size"),
    ],
)
def test_what_is_traced_at_every_load(plan: str, workload: str, reason: str, tmp_path: Path) -> None:
    sentence = (
        f"cannot be compiled ahead of time for a folder: .*{reason}.*traces the model again, which takes 0.5 s here"
    )
    with compilation_left_out(), pytest.warns(UserWarning, match=sentence):
        made = redline.export(plan, workload, tmp_path / "model", device="cpu", progress=None)
    assert not list(made.path.glob("compiled.*"))


def test_compiled_code_that_computes_something_else_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PackagedModel, "run", lambda _self, tensors: tensors[0][:, :4] * 100)
    with (
        compilation_left_out(),
        pytest.warns(UserWarning, match=r"differs too much from the model: .*traces the model"),
    ):
        made = redline.export("compile", PERCEPTRON, tmp_path / "model", device="cpu", progress=None)
    assert not list(made.path.glob("compiled.*")) and made.manifest.scores[0].value < 1e-3


SCALED = """
import torch, redline

class Scaled(torch.nn.Linear):
    def forward(self, x):
        return super().forward(x) * torch.tensor([1.0, 2.0, 3.0, 4.0])

def scaled():
    return redline.Workload(lambda: Scaled(16, 4), lambda seed: torch.randn(8, 16))
"""


def test_a_model_with_constants_of_its_own_has_its_weights_in_the_package(tmp_path: Path) -> None:
    (tmp_path / "scaled.py").write_text(SCALED)
    address, batch = f"{tmp_path / 'scaled.py'}:scaled", torch.randn(8, 16)
    with compilation_left_out():
        made = redline.export("compile", address, tmp_path / "model", device="cpu", progress=None)
        assert json.loads((made.path / "compiled.json").read_text())["weights"] == {}
        model = redline.load_workload(address).fresh_model("cpu")
        assert torch.allclose(redline.load_exported(made.path)(batch), model(batch), atol=1e-5)


def test_the_memory_of_the_weights_is_released_with_the_model(made: Exported, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[torch.Tensor] = []  # torch keeps what it is given for ever
    monkeypatch.setattr(StandIn, "load_constants", lambda _self, tensors, *_: kept.extend(tensors.values()))
    loaded = redline.load_exported(made.path)
    weights = {tensor.data_ptr() for tensor in loaded.parameters()}
    assert {tensor.data_ptr() for tensor in kept} == weights
    del loaded
    gc.collect()
    assert not any(tensor.untyped_storage().nbytes() for tensor in kept)

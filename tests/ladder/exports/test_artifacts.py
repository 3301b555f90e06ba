"""Artifacts are checked in a new process, are called like the model, and are refused where they cannot run."""

import zipfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import redline
from artifact_stand_in import compilation_left_out
from forked_python import ForkedPython
from redline.errors import MachineError, ModelError, PlanError, RedlineError
from redline.ladder.exports.export import Exported, put_in_place
from redline.ladder.exports.forms import FORMS, form_for
from redline.ladder.exports.load import read_artifact
from redline.ladder.exports.manifest import check_machine, weights_fingerprint
from redline.ladder.rungs import RUNGS
from redline.machine import processes
from redline.machine.machine import Machine

TINY = Path(__file__).parents[2] / "tiny_workloads.py"
CONVOLUTIONS, PERCEPTRON = f"{TINY}:convolutions", f"{TINY}:perceptron"
CASES = {
    "stand-in.pt2": ("compile", PERCEPTRON),
    "model.pt2": ("compile", PERCEPTRON),
    "model.onnx": ("fold_batchnorm + threads(count=1)", CONVOLUTIONS),
    "model": ("fold_batchnorm + channels_last", CONVOLUTIONS),
}


@contextmanager
def processes_forked(forked_python: ForkedPython) -> Iterator[None]:
    """Spares the new process the import of torch, which takes 2 CPU s."""

    def start(module: str, *arguments: str, environment: Mapping[str, str], **_: Any) -> Any:
        return forked_python.start_module(module, *arguments, environment=environment)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processes, "start_module", start)
        yield


_FORMS = ("stand-in.pt2", pytest.param("model.pt2", marks=pytest.mark.slow), "model.onnx", "model")


@pytest.fixture(scope="module", params=_FORMS)
def made(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, forked_python: ForkedPython
) -> Iterator[Exported]:
    plan, address = CASES[request.param]
    out = tmp_path_factory.mktemp("export") / request.param
    # Only the folder is loaded in a process that is really new here; `test_load_time` does it with every form.
    around = {"stand-in.pt2": compilation_left_out, "model": nullcontext}
    with around.get(request.param, lambda: processes_forked(forked_python))():
        yield redline.export(plan, address, out, options={"batch": 2}, device="cpu", progress=None)


def test_a_loaded_artifact_computes_what_the_model_does(made: Exported) -> None:
    plan, address = CASES[made.path.name]
    workload = redline.load_workload(address, {"batch": 2})
    model, batch = workload.fresh_model("cpu"), workload.fresh_inputs(5, "cpu")
    loaded = redline.load_exported(made.path)
    assert torch.allclose(loaded(batch), model(batch), atol=1e-4) and not loaded(batch).requires_grad
    assert loaded.plan == redline.Plan.parse(plan)
    facts = loaded.manifest
    assert (facts.workload, facts.options, facts.weights) == (address, {"batch": 2}, weights_fingerprint(model))
    assert facts.inputs == {
        "args": {"list": [{"tensor": list(batch.shape), "dtype": "float32"}]},
        "kwargs": {"dict": {}},
    }
    assert facts.versions["torch"] == torch.__version__ and facts.machine["name"] == Machine.detect("cpu").name
    assert [score.metric for score in facts.scores] == ["relative_error", "cosine"]
    assert 0 <= facts.scores[0].value < 1e-3 and made.load_s == facts.load_s > 0.1
    assert made.bytes > sum(p.nbytes for p in model.parameters()) / 2
    assert [path.name for path in made.path.parent.iterdir()] == [made.path.name]


def test_another_shape_is_refused_by_name(made: Exported) -> None:
    if made.path.is_dir():
        pytest.skip("a folder has the model itself, which takes any shape")
    loaded = redline.load_exported(made.path)
    batch = torch.zeros(3, *loaded.manifest.inputs["args"]["list"][0]["tensor"][1:])
    with pytest.raises(ModelError, match=r"args\[0\] is a tensor of shape \(3, .*but the artifact takes .* \(2, "):
        loaded(batch)
    with pytest.raises(ModelError, match="takes the names none, not x"):
        loaded(batch[:2], x=batch)


def test_a_changed_artifact_is_refused(made: Exported, tmp_path: Path) -> None:
    if made.path.is_dir():
        changed = made.path / "weights.safetensors"
        whole = changed.read_bytes()
        changed.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        path = made.path
    else:
        changed, whole, path = made.path, b"", tmp_path / made.path.name
        data = bytearray(made.path.read_bytes())
        data[_inside(made.path)] ^= 1
        path.write_bytes(data)
    try:
        with pytest.raises(
            ModelError, match="has changed since it was exported: export it again|cannot be read|not a readable"
        ):
            redline.load_exported(path)
    finally:
        if whole:
            changed.write_bytes(whole)


def _inside(path: Path) -> int:
    """Returns the place of a byte of the weights or the code."""
    if path.suffix == ".onnx":
        return 200
    with zipfile.ZipFile(path) as package:
        item = max(package.infolist(), key=lambda item: item.file_size)
        return item.header_offset + item.file_size // 2


def test_other_versions_and_machines(made: Exported) -> None:
    form, manifest = read_artifact(made.path)
    here = Machine.detect("cpu")
    check_machine(manifest, here, "model", form.compiled)  # a warning would be an error
    older = replace(manifest, versions={**manifest.versions, "redline": "0.0.1"})
    with pytest.warns(UserWarning, match=r"'model' was exported with redline 0\.0\.1 \(here "):
        check_machine(older, here, "model", form.compiled)
    elsewhere = replace(manifest, machine={**manifest.machine, "name": "Else", "features": ["amx_tf64"]})
    if form.compiled:
        with pytest.raises(MachineError, match="compiled for a machine with amx_tf64 .Else., which .* lacks"):
            check_machine(elsewhere, here, "model", form.compiled)
        with pytest.raises(MachineError, match=r"compiled with torch 1\.0, and this is torch"):
            check_machine(replace(manifest, versions={"torch": "1.0.0"}), here, "model", form.compiled)
    else:
        with pytest.warns(UserWarning, match="exported with Else"):
            check_machine(elsewhere, here, "model", form.compiled)


def test_an_export_that_fails_its_gate_leaves_the_old_one(tmp_path: Path, forked_python: ForkedPython) -> None:
    strict = replace(redline.load_workload(CONVOLUTIONS), gates=(redline.Gate("relative_error", 1e-12),))
    old = tmp_path / "model" / "manifest.json"
    old.parent.mkdir()
    old.write_text("old")
    sentence = "differs too much from the model: relative_error .* nothing was written"
    with processes_forked(forked_python), pytest.raises(ModelError, match=sentence):
        redline.export("fold_batchnorm", strict, old.parent, device="cpu", progress=None)
    assert old.read_text() == "old" and list(tmp_path.rglob("*")) == [old.parent, old]


@pytest.mark.parametrize(
    ("plan", "workload", "out", "sentence"),
    [
        ("onnxruntime", PERCEPTRON, "a.pt2", r"cannot hold the rung onnxruntime: export to an ONNX file \(.onnx\), or"),
        ("onnxruntime", PERCEPTRON, "a", "a folder cannot hold the rung onnxruntime: export to an ONNX file"),
        ("cuda_graph", PERCEPTRON, "a.onnx", r"export to an AOTInductor package \(.pt2\) or a folder, or leave it out"),
        ("eager", PERCEPTRON, "a.bin", r"cannot export to '.*a.bin': a name ends in .pt2"),
        ("eager", f"{TINY}:training", "a.pt2", "is a training workload, and only inference can be exported"),
        ("eager", f"{TINY}:remembers", "a.onnx", "keeps state between calls .*an ONNX file cannot hold: export to a f"),
        ("eager", f"{TINY}:deaf", "a.onnx", "the output does not react to the input"),
    ],
)
def test_what_cannot_be_exported(plan: str, workload: str, out: str, sentence: str, tmp_path: Path) -> None:
    with pytest.raises(RedlineError, match=sentence):
        redline.export(plan, workload, tmp_path / out, device="cpu", progress=None)
    assert list(tmp_path.iterdir()) == []


def test_every_rung_for_inference_has_a_form() -> None:
    for name, rung in RUNGS.items():
        assert not rung.inference or any(name not in form.refused for form in FORMS.values()), name
    assert set().union(*(form.refused for form in FORMS.values())) <= RUNGS.keys()


def test_the_name_decides_the_form(tmp_path: Path) -> None:
    names = {"a.pt2": "aot", "A.ONNX": "onnx", "a": "folder", "v1.2/": "folder", str(tmp_path): "folder"}
    assert {name: form_for(name).name for name in names} == names


def test_a_folder_with_other_files_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RedlineError, match="the folder has files that are not of an export"):
        redline.export("eager", PERCEPTRON, tmp_path, device="cpu", progress=None)


def test_a_folder_is_replaced_whole(tmp_path: Path) -> None:
    for name in ("model", "beside", "beside/made"):
        (tmp_path / name).mkdir()
    (tmp_path / "model" / "old").touch()
    (tmp_path / "beside" / "made" / "new").touch()
    put_in_place(tmp_path / "beside" / "made", tmp_path / "model", tmp_path / "beside")
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["new"]
    with pytest.raises(FileNotFoundError):
        put_in_place(tmp_path / "missing", tmp_path / "model", tmp_path)
    assert [path.name for path in (tmp_path / "model").iterdir()] == ["new"]


def test_files_that_are_no_artifacts(tmp_path: Path) -> None:
    (tmp_path / "a.onnx").write_bytes(b"not a graph")
    with pytest.raises(ModelError, match="there is no artifact"):
        redline.load_exported(tmp_path / "b")
    for path in (tmp_path, tmp_path / "a.onnx"):
        with pytest.raises(ModelError, match="is not an artifact of `redline export"):
            redline.load_exported(path)


def test_a_workload_without_an_address_is_no_folder(tmp_path: Path) -> None:
    given = redline.Workload(build=lambda: torch.nn.Linear(4, 4), inputs=lambda seed: torch.randn(2, 4))
    with pytest.raises(RedlineError, match="the workload needs an address"):
        redline.export("eager", given, tmp_path / "model", device="cpu", progress=None)
    with pytest.raises(PlanError, match="cannot hold the rung int8"):
        redline.export("int8", given, tmp_path / "model.onnx", device="cpu", progress=None)

"""Addresses of models without a workload file: timm, transformers folders, ONNX files and exported programs."""

import contextlib
import copy
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from redline.errors import WorkloadError
from redline.ladder.gate import tensors_of
from redline.ladder.job import Job
from redline.ladder.rungs.bf16 import Bf16
from redline.ladder.workload import Workload, call
from redline.ladder.workloads.addresses import check_file, load_workload
from redline.ladder.workloads.random_weights import replace_near_zero_weights
from redline.machine.quiet import quiet

pytestmark = pytest.mark.usefixtures("quick_onnx_export")

TINY = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}


def outputs(workload: Workload, seed: int = 0) -> list[Tensor]:
    with torch.no_grad():
        return tensors_of(call(workload.fresh_model("cpu"), workload.fresh_inputs(seed, "cpu")))


def reacts(workload: Workload) -> list[Tensor]:
    one, other = outputs(workload, 0), outputs(workload, 1)
    assert float((one[0] - other[0]).norm() / one[0].norm()) > 0.1
    assert all(map(torch.equal, one, outputs(workload, 0))), "every process builds the same model and inputs"
    return one


class Blocks(nn.Module):
    """Stands in for a timm model, with a residual branch that starts at zero."""

    def __init__(self, size: int = 16) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 4, 4)
        self.norm = nn.BatchNorm2d(8)
        self.scale = nn.Parameter(torch.full((8, 1, 1), 1e-6).flatten())
        self.head = nn.Linear(8 * (size // 4) ** 2, 10)
        nn.init.zeros_(self.norm.weight)

    def forward(self, image: Tensor) -> Tensor:
        x = self.stem(image)
        return self.head((x + self.norm(x) * self.scale[:, None, None]).flatten(1))


@pytest.fixture
def timm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module of timm's interface; timm itself needs torchvision, which has no build for a CPU."""

    def create_model(name: str, pretrained: bool, img_size: int = 16) -> nn.Module:
        assert not pretrained
        return Blocks(img_size)

    fake = SimpleNamespace(
        is_model=lambda name: name == "blocks",
        list_models=lambda pattern: ["blocks"],
        get_pretrained_cfg=lambda name: SimpleNamespace(input_size=(3, 16, 16), fixed_input_size=True),
        create_model=create_model,
    )
    monkeypatch.setitem(sys.modules, "timm", fake)


def test_timm_models(timm: None) -> None:
    workload = load_workload("timm:blocks", {"batch": 2})
    assert (workload.items, workload.unit) == (2, "image")
    assert reacts(workload)[0].shape == (2, 10)
    assert workload.fresh_inputs(0, "cpu").shape == (2, 3, 16, 16)
    larger = load_workload("timm:blocks", {"size": 32})
    assert larger.fresh_inputs(0, "cpu").shape == (1, 3, 32, 32)
    assert reacts(larger)[0].shape == (1, 10)


def test_every_layer_of_random_weights_counts() -> None:
    model, image = replace_near_zero_weights(Blocks()).eval(), torch.randn(2, 3, 16, 16)
    with torch.no_grad():
        whole = model(image)
        model.get_parameter("scale").zero_()
        assert float((model(image) - whole).norm() / whole.norm()) > 0.03


def test_an_unknown_timm_model_is_named(timm: None) -> None:
    with pytest.raises(WorkloadError, match=r"timm has no model 'blocs' \(blocks\)"):
        load_workload("timm:blocs")


@pytest.mark.parametrize(
    "address, package", [("timm:resnet50", "timm"), ("hf:folder", "transformers"), ("a.onnx", "onnx")]
)
def test_a_missing_package_is_named(address: str, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(WorkloadError, match=f"needs {package}, which cannot be imported.*pip install {package}"):
        load_workload(address)


def configs() -> dict[str, tuple[Any, str, int]]:
    import transformers as t

    speech: dict[str, Any] = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 64}
    speech |= {"decoder_ffn_dim": 64, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    speech |= {"max_source_positions": 50, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return {
        "encoder": (t.BertConfig(vocab_size=300, **TINY), "", 16),
        "decoder": (t.LlamaConfig(vocab_size=300, **TINY), "LlamaForCausalLM", 16),
        "encoder and decoder": (
            t.T5Config(vocab_size=300, d_model=32, d_ff=64, num_layers=1, num_heads=2, d_kv=16),
            "T5ForConditionalGeneration",
            16,
        ),
        "images": (t.ViTConfig(image_size=32, patch_size=8, **TINY), "ViTForImageClassification", 1),
        "speech": (
            t.WhisperConfig(vocab_size=300, decoder_start_token_id=1, **speech),
            "WhisperForConditionalGeneration",
            1,
        ),
    }


@pytest.mark.parametrize("kind", ["encoder", "decoder", "encoder and decoder", "images", "speech"])
def test_transformers_folders(kind: str, tmp_path: Path) -> None:
    config, architecture, items = configs()[kind]
    config.architectures = [architecture] if architecture else None
    config.save_pretrained(tmp_path)
    workload = load_workload(f"hf:{tmp_path}", {"length": 16})
    assert workload.items == items
    reacts(workload)
    # Only tokens are masked, and only if that was asked for.
    padded = load_workload(f"hf:{tmp_path}", {"length": 16, "padding": 0.5}).fresh_inputs(0, "cpu")
    assert "attention_mask" not in workload.fresh_inputs(0, "cpu")
    assert ("attention_mask" in padded) == ("input_ids" in padded)


def test_a_transformers_folder_with_weights_and_padding(tmp_path: Path) -> None:
    import transformers

    torch.manual_seed(3)
    model = transformers.BertModel(transformers.BertConfig(vocab_size=300, **TINY)).eval()
    model.save_pretrained(tmp_path)
    workload = load_workload(f"hf:{tmp_path}", {"batch": 2, "length": 8, "padding": 0.25})
    batch = workload.fresh_inputs(0, "cpu")
    assert batch["attention_mask"].sum(1).tolist() == [6, 8]
    with torch.no_grad():
        torch.testing.assert_close(outputs(workload)[0], model(**batch)[0])


def test_a_folder_without_a_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match="there is no file .*config.json"):
        load_workload(f"hf:{tmp_path}")


class Mixed(nn.Module):
    """Convolutions, attention and shapes that are computed in the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.Sequential(
            nn.Conv2d(3, 8, 3, 2, 1), nn.BatchNorm2d(8), nn.Hardswish(), nn.MaxPool2d(2, 2),
            nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.SiLU(), nn.Upsample(scale_factor=2),
            nn.ConvTranspose2d(8, 8, 2, 2), nn.GroupNorm(2, 8),
        )  # fmt: skip
        self.encoder = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, activation="gelu")
        self.last = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        tokens = self.convolutions(x).flatten(2).transpose(1, 2)[:, :16]
        return self.last(self.encoder(tokens)).softmax(-1)[:, ::2], tokens.mean((1, 2))


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[nn.Module, Path]:
    """A model, and the folder of its files: ONNX with a variable batch, and an exported program."""
    torch.manual_seed(0)
    folder, model, image = tmp_path_factory.mktemp("files"), Mixed().eval(), torch.randn(2, 3, 32, 32)
    dynamic = {"x": {0: torch.export.Dim("batch")}}
    with quiet():
        program = torch.export.export(model, (image,), dynamic_shapes=dynamic)
        torch.export.save(program, folder / "mixed.pt2")
        torch.onnx.export(
            model,
            (image,),
            folder / "mixed.onnx",
            dynamo=True,
            dynamic_shapes=dynamic,
            input_names=["x"],
            verbose=False,
        )
    return model, folder


@pytest.mark.parametrize("name", ["mixed.onnx", "mixed.pt2"])
def test_files_compute_what_the_model_computes(files: tuple[nn.Module, Path], name: str) -> None:
    model, folder = files
    workload = load_workload(f"{folder}/{name}", {"batch": 3})
    assert workload.items == 3
    own, batch = workload.fresh_model("cpu"), workload.fresh_inputs(1, "cpu")
    with torch.no_grad():
        for expected, seen in zip(call(model, batch), call(own, batch), strict=True):
            torch.testing.assert_close(seen, expected, rtol=1e-4, atol=1e-5)
    first, second = workload.fresh_inputs(0, "cpu"), workload.fresh_inputs(1, "cpu")
    assert not torch.equal(tensors_of(first)[0], tensors_of(second)[0])


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # of torch, compiling its own exported program
@pytest.mark.parametrize("name", ["mixed.onnx", "mixed.pt2"])
def test_rungs_apply_to_files(files: tuple[nn.Module, Path], name: str) -> None:
    workload = load_workload(f"{files[1]}/{name}", {"batch": 2})
    model, batch = workload.fresh_model("cpu"), workload.fresh_inputs(0, "cpu")
    fast = Bf16().apply(Job.of(model)).finish()
    assert len(tensors_of(call(fast, batch))) == 2
    torch.compile(copy.deepcopy(model), backend="eager")(**batch if isinstance(batch, dict) else {"x": batch[0]})


def test_layers_of_an_onnx_file_are_layers_of_torch(files: tuple[nn.Module, Path]) -> None:
    model = load_workload(f"{files[1]}/mixed.onnx").fresh_model("cpu")
    kinds = [type(module) for module in model.modules()]
    assert kinds.count(nn.Conv2d) == 2 and kinds.count(nn.Linear) >= 3


@pytest.mark.parametrize("name", ["absent.onnx", "absent.pt2"])
def test_a_missing_file_is_named(name: str) -> None:
    with pytest.raises(WorkloadError, match=f"there is no file '{name}'"):
        load_workload(name)


@pytest.mark.parametrize("name", ["broken.onnx", "broken.pt2"])
def test_a_broken_file_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(b"not a model")
    with pytest.raises(WorkloadError, match=name):
        load_workload(str(tmp_path / name))


@pytest.mark.parametrize("name", ["mixed.onnx", "mixed.pt2"])
def test_a_damaged_file_is_refused(name: str, files: tuple[nn.Module, Path], tmp_path: Path) -> None:
    whole = (files[1] / name).read_bytes()
    for end, changed in ((len(whole) // 2, b""), (len(whole) - 1, b""), (len(whole) - 60, b"\xff" * 60)):
        (tmp_path / name).write_bytes(whole[:end] + changed)
        with contextlib.suppress(WorkloadError):  # some damage is outside of what is read
            load_workload(str(tmp_path / name))


@pytest.mark.parametrize(
    "config", ["{", '{"a":' * 200_000, "[]", '{"model_type": 5}', '{"model_type": "bert", "hidden_size": "x"}']
)
def test_a_malformed_config_of_a_folder_is_refused(config: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(WorkloadError, match="hf:") as failure:
        load_workload(f"hf:{tmp_path}").fresh_model("cpu")
    assert not str(failure.value).endswith("..")


def test_an_element_type_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    import onnx

    x, y = (onnx.helper.make_tensor_value_info(name, 77, [2, 3]) for name in "xy")
    graph = onnx.helper.make_graph([onnx.helper.make_node("Relu", ["x"], ["y"])], "one", [x], [y])
    onnx.save(onnx.helper.make_model(graph), str(tmp_path / "odd.onnx"))
    with pytest.raises(WorkloadError, match="odd.onnx"):
        load_workload(str(tmp_path / "odd.onnx"))


def test_a_batch_beyond_the_example_repeats_its_rows(tmp_path: Path) -> None:
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(nn.Linear(3, 2), (torch.randn(2, 3),), dynamic_shapes=({0: batch},))
    torch.export.save(program, tmp_path / "linear.pt2")
    workload = load_workload(str(tmp_path / "linear.pt2"), {"batch": 7})
    assert workload.items == 7 and workload.fresh_inputs(0, "cpu")[0].shape == (7, 3)
    assert workload.fresh_model("cpu")(*workload.fresh_inputs(0, "cpu")).shape == (7, 2)


def test_an_unsupported_operator_is_named(tmp_path: Path) -> None:
    import onnx

    make = onnx.helper.make_tensor_value_info
    x, y = (make(name, onnx.TensorProto.FLOAT, [2, 3]) for name in "xy")
    graph = onnx.helper.make_graph([onnx.helper.make_node("Det", ["x"], ["y"], name="the_node")], "one", [x], [y])
    onnx.save(onnx.helper.make_model(graph), str(tmp_path / "model.onnx"))
    with pytest.raises(WorkloadError, match="'Det' is not supported .*the_node"):
        load_workload(f"{tmp_path}/model.onnx").fresh_model("cpu")


class Scaled(nn.Module):
    def forward(self, x: Tensor, other: Tensor, scale: Tensor) -> Tensor:
        return (x - other) * scale


def test_an_exported_program_takes_all_its_inputs_by_name(tmp_path: Path) -> None:
    """An exported program takes some inputs only by position, whatever it was exported with."""
    program = torch.export.export(Scaled(), (torch.ones(3), torch.zeros(3)), {"scale": torch.ones(3)})
    torch.export.save(program, tmp_path / "scaled.pt2")
    workload = load_workload(str(tmp_path / "scaled.pt2"))
    inputs = workload.fresh_inputs(0, "cpu")
    assert isinstance(inputs, dict) and list(inputs) == ["x", "other", "scale"]
    model = workload.fresh_model("cpu")
    expected = Scaled()(**inputs)
    torch.testing.assert_close(call(model, inputs), expected)
    torch.testing.assert_close(model(inputs["x"], other=inputs["other"], scale=inputs["scale"]), expected)


def test_a_missing_python_file_is_named_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(WorkloadError, match=r"there is no file '.*none\.py'\.$"):
        check_file(f"{tmp_path}/none.py:encoder")
    for address in ("resnet", "package.module:encoder", "hf:none.py:encoder", __file__ + ":encoder"):
        check_file(address)

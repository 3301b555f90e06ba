"""Exported networks: the same images come out, int8 is held to its limit, and foreign files are refused."""

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from PIL import Image

from redline.errors import MachineError, ModelError, RedlineError
from redline.ladder.gate import Gate
from redline.ladder.workloads.drct import draw, smooth_images
from redline.models.drct import Drct, DrctConfig
from redline.upscale import export as exporting
from redline.upscale.export import export_onnx, tiles_of
from redline.upscale.network import Network, load_network, load_onnx_network

pytestmark = pytest.mark.usefixtures("quick_onnx_export")


@pytest.fixture(scope="module")
def network() -> Network:
    torch.manual_seed(0)
    model = draw(Drct(DrctConfig.of(2, 1, width=12, growth=6, features=4, window=4))).eval()
    with torch.no_grad():
        # Weights as they are drawn give what no image is: samples far from 0 to 1.
        drawn = model(smooth_images(8, 16))
        span = drawn.max() - drawn.min()
        model.conv_last.weight /= span
        model.conv_last.bias /= span
    return Network(model, 2, 4, "a small DRCT", "digest")


@pytest.fixture(scope="module")
def exported(network: Network, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("export") / "small.onnx"
    result = export_onnx(network, path, 16, smooth_images(2, 16))
    assert result.score.passed and result.bytes == path.stat().st_size
    assert [p.name for p in path.parent.iterdir()] == ["small.onnx"]
    return path


@pytest.fixture
def exported_before(exported: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exporting takes seconds, and what comes after it is looked at."""
    monkeypatch.setattr(exporting, "_export", lambda _module, _tile, path: path.write_bytes(exported.read_bytes()))


@pytest.mark.parametrize("count", [1, 3])
def test_any_number_of_tiles_comes_out_the_same(network: Network, exported: Path, count: int) -> None:
    loaded = load_onnx_network(exported)
    assert (loaded.scale, loaded.window, loaded.tile) == (2, 4, 16) and loaded.digest != network.digest
    tiles = torch.rand(count, 3, 16, 16)
    with torch.no_grad():
        torch.testing.assert_close(loaded.module(tiles), network.module(tiles), atol=1e-4, rtol=1e-4)


@pytest.mark.usefixtures("exported_before")
def test_int8_is_smaller_and_inside_its_limit(network: Network, exported: Path, tmp_path: Path) -> None:
    calibration = [smooth_images(2, 16) for _ in range(3)]
    result = export_onnx(network, tmp_path / "int8.onnx", 16, smooth_images(2, 16), calibration)
    assert result.score.value > 40 and result.bytes < exported.stat().st_size
    assert load_onnx_network(tmp_path / "int8.onnx").name.endswith("(ONNX, int8)")


@pytest.mark.usefixtures("exported_before")
def test_it_tells_how_far_it_is(network: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def quantized(source: Path, target: Path, batches: Iterable[object], *_: object, **__: object) -> None:
        assert len(list(batches)) == 3
        target.write_bytes(source.read_bytes())

    monkeypatch.setattr(exporting, "quantize_static", quantized)
    told: list[tuple[str, int, int]] = []
    tiles = smooth_images(3, 16).split(1)
    export_onnx(network, tmp_path / "a.onnx", 16, tiles[0], tiles, lambda *said: told.append(said))
    assert told == [
        ("exporting a small DRCT as a graph", 0, 0),
        *(("calibrating", done, 3) for done in range(3)),
        ("writing int8 weights", 0, 0),
        ("comparing the file with the network", 0, 0),
    ]


@pytest.mark.usefixtures("exported_before")
def test_int8_is_for_layers_that_read_normalized_numbers(network: Network, tmp_path: Path) -> None:
    """In each of five blocks: queries, keys and values in one, what follows attention, and both of the network."""
    import onnx

    export_onnx(network, tmp_path / "int8.onnx", 16, smooth_images(2, 16), [smooth_images(2, 16)])
    graph = onnx.load(tmp_path / "int8.onnx").graph
    rounded = {node.output[0] for node in graph.node if node.op_type == "DequantizeLinear"}
    kinds = Counter(node.op_type for node in graph.node if set(node.input[:2]) <= rounded)
    assert kinds["MatMul"] == 5 * 4 and "Conv" not in kinds
    assert not any(node.metadata_props for node in graph.node)


@pytest.mark.slow
@pytest.mark.parametrize("scale", [4, 2])
def test_the_shipped_weights_pass_in_int8(scale: int, tmp_path: Path) -> None:
    calibration = [smooth_images(2, 32) for _ in range(3)]
    result = export_onnx(load_network(None, scale), tmp_path / "int8.onnx", 32, smooth_images(2, 32), calibration)
    assert result.score.value > 50


@pytest.mark.usefixtures("exported_before")
def test_what_does_not_agree_is_not_written(network: Network, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exporting, "EXACT", Gate("image_psnr", 199.0))
    with pytest.raises(
        ModelError, match="differs too much from the network: .* at least 199 dB is required; nothing was written"
    ):
        export_onnx(network, tmp_path / "never.onnx", 16, smooth_images(1, 16))
    assert list(tmp_path.iterdir()) == []


def test_files_and_requests_that_cannot_be_used(network: Network, exported: Path, tmp_path: Path) -> None:
    import onnx

    with pytest.raises(ModelError, match="multiple of 4 for a small DRCT, not 18"):
        export_onnx(network, tmp_path / "x.onnx", 18, smooth_images(1, 18))
    (tmp_path / "broken.onnx").write_bytes(exported.read_bytes()[:500])
    with pytest.raises(ModelError, match="not an ONNX model, or damaged"):
        load_onnx_network(tmp_path / "broken.onnx")
    model = onnx.load(str(exported))
    del model.metadata_props[:]
    (tmp_path / "foreign.onnx").write_bytes(model.SerializeToString())
    with pytest.raises(ModelError, match="not written by `redline export`"):
        load_onnx_network(tmp_path / "foreign.onnx")
    with pytest.raises(ModelError, match="no such file"):
        load_onnx_network(tmp_path / "absent.onnx")
    with pytest.raises(MachineError, match="choose cpu, cuda, tensorrt"):
        load_onnx_network(exported, provider="warp")


def test_tiles_are_taken_from_all_pictures_of_any_size(tmp_path: Path) -> None:
    for index, (height, width) in enumerate([(5, 40), (40, 5), (33, 47)]):
        Image.fromarray(np.full((height, width, 3), 80 * index, np.uint8)).save(tmp_path / f"{index}.png")
    tiles = tiles_of(tmp_path, 16, 6)
    assert tiles.shape == (6, 3, 16, 16)
    assert [round(float(tile.mean() * 255)) for tile in tiles] == [0, 0, 80, 80, 160, 160]
    assert torch.equal(tiles, tiles_of(tmp_path, 16, 6))
    (tmp_path / "empty").mkdir()
    with pytest.raises(RedlineError, match="no image"):
        tiles_of(tmp_path / "empty", 16, 1)


def test_pictures_are_enlarged_by_an_exported_network(network: Network, exported: Path, tmp_path: Path) -> None:
    from redline.upscale.session import Upscaling
    from redline.upscale.settings import UpscaleSettings
    from redline.upscale.tasks import Task

    samples = (smooth_images(1, 40)[0].permute(1, 2, 0) * 255).round().byte().numpy()
    Image.fromarray(samples).save(tmp_path / "in.png")
    settings = UpscaleSettings(exported, margin_px=2, ramp_px=2)
    task = Task(tmp_path / "in.png", tmp_path / "onnx.png")
    (outcome,) = Upscaling(settings).run([task])
    assert not outcome.error and (outcome.width, outcome.height) == (80, 80)
    # The same through PyTorch, at the same tile.
    own = Upscaling(settings)
    own.network = replace(network, tile=16)
    own.run([Task(tmp_path / "in.png", tmp_path / "torch.png")])
    with Image.open(tmp_path / "onnx.png") as one, Image.open(tmp_path / "torch.png") as other:
        assert np.abs(np.asarray(one).astype(int) - np.asarray(other)).max() <= 1
    with pytest.raises(
        RedlineError, match="takes tiles of 16, too small for an overlap of 48: export it with --tile 80"
    ):
        Upscaling(UpscaleSettings(exported))
    with pytest.raises(RedlineError, match="is for ×2, not ×4"):
        Upscaling(replace(settings, scale=4))
    for bad in ({"tile": 32}, {"precision": "fp32"}, {"plan": Path("plan.toml")}):
        with pytest.raises(RedlineError, match="has a fixed"):
            UpscaleSettings(exported, **bad)
    with pytest.raises(RedlineError, match="is for ONNX files"):
        UpscaleSettings(provider="cuda")


@pytest.mark.parametrize(
    ("facts", "sentence"),
    [
        ({"window": "0"}, "its metadata says scale 2, window 0, tile 16"),
        ({"tile": "0"}, "its metadata says scale 2, window 4, tile 0"),
        ({"scale": "-2"}, "its metadata says scale -2"),
        ({"window": "3"}, "window 3, tile 16"),
        ({"tile": "32"}, "where its metadata says 3 × 32 × 32"),
        ({"scale": "4"}, "where its metadata says 3 × 64 × 64"),
        ({"scale": "9" * 5000}, f"'redline.scale' of its metadata is '{'9' * 20}…', not a whole number"),
        ({"tile": "9" * 4000}, "'redline.tile' of its metadata is"),
        ({"window": ""}, "'redline.window' of its metadata is '', not"),
        *(
            ({key: None}, f"is damaged: its metadata lacks 'redline.{key}'; export it again")
            for key in ("scale", "window", "tile", "name", "digest", "precision")
        ),
    ],
)
def test_metadata_that_does_not_fit_the_network(
    facts: dict[str, str | None], sentence: str, exported: Path, tmp_path: Path
) -> None:
    model = onnx.load(str(exported))
    found = {entry.key: entry.value for entry in model.metadata_props}
    found |= {f"redline.{key}": value for key, value in facts.items()}
    onnx.helper.set_model_props(model, {key: value for key, value in found.items() if value is not None})
    onnx.save(model, str(tmp_path / "hostile.onnx"))
    with pytest.raises(ModelError, match=sentence):
        load_onnx_network(tmp_path / "hostile.onnx")


def test_mutated_files_end_in_one_sentence(exported: Path, tmp_path: Path) -> None:
    whole, chance, refused = exported.read_bytes(), random.Random(5), 0
    for number in range(20):
        data = bytearray(whole)
        for _ in range(3):
            data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        if number % 2:
            place = chance.randrange(len(data))
            del data[place : place + chance.randint(1, 200)]
        path = tmp_path / f"{number}.onnx"
        path.write_bytes(data)
        try:
            with torch.no_grad():
                load_onnx_network(path).module(torch.zeros(1, 3, 16, 16))
        except ModelError as error:
            refused += 1
            assert str(error).endswith(".") and "\n" not in str(error)
    assert refused

"""What an upscaling is asked to do: limits, presets, and what decides how a result looks."""

from pathlib import Path
from typing import Any

import pytest

from redline.errors import RedlineError
from redline.ladder.plan import Plan
from redline.upscale.images.sink import Encoding
from redline.upscale.settings import ImageSettings, UpscaleSettings, describe, describe_network, with_preset
from redline.upscale.video.settings import VideoSettings

ONNX = Path("model.ONNX")
NETWORK = Path("model.safetensors")


@pytest.mark.parametrize(
    "values",
    [
        {"tile": 1, "tile_batch": 1, "streams": 1, "memory_bytes": 1, "workers": 1},
        {"tile": (1, 2), "margin_px": 0, "ramp_px": 0},
        {"precision": "fp16"},
        {"plan": Plan.parse("tf32")},
        {"weights": ONNX, "provider": "cuda", "tile_batch": 2},
        {"weights": NETWORK, "tile": 64},
        {"images": ImageSettings(max_pixels=1)},
    ],
    ids=str,
)
def test_settings_at_their_limits_are_taken(values: dict[str, Any]) -> None:
    assert UpscaleSettings(**values)


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        ({"precision": "fp4"}, "unknown precision 'fp4'"),
        ({"plan": Plan.parse("tf32"), "precision": "fp32"}, "a plan sets the precision"),
        ({"tile": 0}, "tile = 0 must be at least 1 pixel"),
        ({"tile": (8, 0)}, r"tile = \(8, 0\) must be at least 1 pixel"),
        ({"tile_batch": 0}, "tile_batch = 0 must be a whole number .at least 1."),
        ({"streams": 0}, "streams = 0 must be"),
        ({"memory_bytes": 0}, "memory_bytes = 0 must be"),
        ({"workers": 0}, "workers = 0 must be"),
        ({"margin_px": -1}, "margin_px = -1 must be a whole number .at least 0."),
        ({"ramp_px": -1}, "ramp_px = -1 must be"),
        ({"weights": ONNX, "memory_bytes": 5}, "--tile-batch instead of --memory"),
        ({"weights": ONNX, "tile": 64}, "leave out --tile"),
        ({"weights": ONNX, "plan": Plan.parse("tf32")}, "leave out --plan"),
        ({"weights": ONNX, "precision": "fp16"}, "leave out --precision"),
        ({"provider": "cuda"}, "--provider is for ONNX files"),
        ({"weights": NETWORK, "provider": "cuda"}, "--provider is for ONNX files"),
        ({"images": ImageSettings(max_pixels=0)}, "max_pixels = 0 must be"),
    ],
)
def test_what_cannot_be_asked_is_refused(values: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RedlineError, match=sentence):
        UpscaleSettings(**values)


def test_a_preset_fills_in_what_was_not_asked_for() -> None:
    plain = UpscaleSettings()
    assert with_preset(plain, "balanced") == plain
    assert with_preset(plain, "memory") == UpscaleSettings(tile=256, tile_batch=1, streams=1)
    assert with_preset(UpscaleSettings(tile=64, streams=2), "memory") == UpscaleSettings(
        tile=64, tile_batch=1, streams=2
    )
    quality = with_preset(plain, "quality")
    assert (quality.precision, quality.margin_px, quality.ramp_px) == ("fp32", 32, 32)
    # A plan says its own precision, an ONNX file has its tile, and a limit of memory decides the tile.
    assert with_preset(UpscaleSettings(plan=Path("plan.toml")), "quality").precision == "auto"
    assert with_preset(UpscaleSettings(weights=ONNX), "quality").precision == "auto"
    assert with_preset(UpscaleSettings(weights=ONNX), "memory").tile is None
    assert with_preset(UpscaleSettings(memory_bytes=2**30), "memory").tile is None
    assert with_preset(UpscaleSettings(weights=NETWORK), "memory").tile == 256
    with pytest.raises(RedlineError, match="unknown preset 'best'"):
        with_preset(plain, "best")


def test_a_tile_is_a_side_or_a_width_and_a_height() -> None:
    assert UpscaleSettings().tile_sizes is None
    assert UpscaleSettings(tile=64).tile_sizes == ((64, 64),)
    assert UpscaleSettings(tile=(64, 32)).tile_sizes == ((64, 32),)


def test_everything_that_decides_how_a_result_looks_is_named() -> None:
    network = describe_network(UpscaleSettings(margin_px=3, ramp_px=5), "bf16", "abc")
    assert network == "abc bf16 margin=3 ramp=5"
    settings = UpscaleSettings(
        images=ImageSettings(wrap=True, encoding=Encoding(quality=7)),
        videos=VideoSettings(crf=20.0, keep_going=True),
    )
    video, image = describe(settings, "network", True), describe(settings, "network", False)
    assert video.startswith("network codec=auto crf=20.0") and "keep_going=True" in video
    assert image.startswith("network wrap=True strip=False") and "quality=7" in image

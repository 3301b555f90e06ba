"""The Python API: every kind of image comes back as the same kind, with the pixels that the command writes."""

import doctest
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import redline
from redline.errors import RedlineError
from redline.models.drct import Drct, DrctConfig, save_drct
from redline.upscale import tile_choice
from redline.upscale import upscaler as module
from redline.upscale.tasks import Listener, Outcome, Task
from redline.upscale.tile_choice import TileCost
from redline.upscale.upscaler import Upscaler

from .video.clips import make_clip


@pytest.fixture(scope="module")
def upscaler(tmp_path_factory: pytest.TempPathFactory) -> Upscaler:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("weights") / "tiny.safetensors"
    save_drct(Drct(DrctConfig.of(2, 1, width=12, growth=6, features=4, window=4)), path)
    return Upscaler(path, device="cpu", workers=1)


def noise(*shape: int, dtype: type = np.uint8) -> np.ndarray:
    return np.random.default_rng(0).integers(0, np.iinfo(dtype).max + 1, shape, dtype=dtype)


def smooth_alpha(samples: np.ndarray) -> np.ndarray:
    samples = samples.copy()
    samples[..., -1] = np.linspace(0, 255, samples.shape[1], dtype=np.uint8)
    return samples


def test_examples_in_docstrings(monkeypatch: pytest.MonkeyPatch) -> None:
    # Measuring the memory of a tile takes most of the time.
    monkeypatch.setattr(tile_choice, "measure_cost", lambda *_: TileCost(0, 4000.0))
    tested = doctest.testmod(module)
    assert not tested.failed and tested.attempted >= 8
    assert redline.Upscaler is Upscaler


@pytest.mark.parametrize("shape", [(20, 30), (20, 30, 1), (20, 30, 2), (20, 30, 3), (20, 30, 4)])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_arrays_keep_their_shape_and_depth(shape: tuple[int, ...], dtype: type, upscaler: Upscaler) -> None:
    large = upscaler(noise(*shape, dtype=dtype))
    assert large.shape == (40, 60, *shape[2:]) and large.dtype == dtype


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
def test_floats_agree_with_integers(channels: int, upscaler: Upscaler) -> None:
    samples = noise(20, 30, channels)
    samples = smooth_alpha(samples) if channels in (2, 4) else samples
    exact = upscaler(samples).astype(np.float64)
    array = upscaler(samples.astype(np.float64) / 255)
    tensor = torch.from_numpy(samples).permute(2, 0, 1).float() / 255
    batch = upscaler(torch.stack([tensor, tensor]))
    assert array.dtype == np.float64 and batch.shape == (2, channels, 40, 60) and batch.dtype == torch.float32
    assert torch.equal(batch[0], batch[1]) and torch.allclose(upscaler(tensor), batch[0], atol=1e-6)
    visible = exact[..., -1:] > 20 if channels in (2, 4) else np.ones_like(exact[..., :1], bool)
    for floats in (array, batch[0].permute(1, 2, 0).numpy()):
        assert np.abs(np.where(visible, floats * 255 - exact, 0)).max() < 0.51


def test_transparent_and_opaque_floats_stay_exact(upscaler: Upscaler) -> None:
    image = torch.rand(4, 20, 30)
    image[3] = 1
    assert (upscaler(image)[3] == 1).all()
    image[3] = 0
    assert (upscaler(image) == 0).all()


def test_a_seamless_texture_wraps(upscaler: Upscaler) -> None:
    wrapping = Upscaler(upscaler.settings.weights, device="cpu", wrap=True)
    samples = noise(24, 32, 3)
    moved = np.roll(samples, (8, 8), (0, 1))
    for image, other in ((samples, moved), (samples / 255, moved / 255)):
        rolled = np.roll(wrapping(image), (16, 16), (0, 1)).astype(float)
        assert np.abs(rolled - wrapping(other)).max() <= (1 if image.dtype == np.uint8 else 1e-3)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "I;16"])
def test_pillow_images(mode: str, upscaler: Upscaler) -> None:
    image = Image.fromarray(noise(20, 30, dtype=np.uint16)) if mode == "I;16" else None
    image = image or Image.fromarray(noise(20, 30, 4)).convert("RGB").convert(mode)
    image.info["dpi"] = (300, 300)
    large = upscaler(image)
    assert large.size == (60, 40) and large.info["dpi"] == (300, 300)
    assert large.mode == {"1": "L", "P": "RGB", "CMYK": "RGB"}.get(mode, mode)


def test_a_path_gives_what_the_command_writes(upscaler: Upscaler, tmp_path: Path) -> None:
    Image.fromarray(smooth_alpha(noise(90, 120, 4))).save(tmp_path / "a.png")
    large = upscaler(tmp_path / "a.png")
    (outcome,) = upscaler.run(tmp_path / "a.png", tmp_path / "b.png")
    assert not outcome.error and (outcome.width, outcome.height) == large.size == (240, 180)
    assert np.array_equal(np.asarray(large), np.asarray(Image.open(tmp_path / "b.png")))


def test_16_bit_rgb_as_a_pillow_image_is_rounded_with_a_warning(
    upscaler: Upscaler, tmp_path: Path, logged: list[logging.LogRecord]
) -> None:
    from redline.upscale.images.sink import ImageSink

    with ImageSink(tmp_path / "deep.png", 30, 20, 3, 16) as sink:
        sink.write_rows(noise(20, 30, 3, dtype=np.uint16))
    assert upscaler(tmp_path / "deep.png").mode == "RGB"
    (warning,) = logged
    assert "rounded to 8 bits" in warning.getMessage()


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (3, "cannot upscale a int"),
        (np.zeros((3, 10, 10)), "not an image"),
        (np.zeros((10, 10, 3), np.int64), "not an image"),
        (np.zeros((0, 10, 3), np.uint8), "no pixels"),
        (torch.zeros(3, 4, 4, dtype=torch.uint8), "floating point"),
        (torch.zeros(1, 3, 0, 4), "no pixels"),
        (Image.new("F", (3, 3)), "mode 'F'"),
        ("missing.png", "does not exist"),
    ],
)
def test_what_is_no_image_raises(image: object, message: str, upscaler: Upscaler) -> None:
    with pytest.raises(RedlineError, match=message):
        upscaler(image)  # type: ignore[call-overload]


def test_an_unknown_model_lists_the_bundled_ones(tmp_path: Path) -> None:
    with pytest.raises(RedlineError, match="unknown model 'drct-large': choose drct-small-x2, drct-small-x4"):
        Upscaler("drct-large")
    with pytest.raises(RedlineError, match="no bundled model for ×3: the bundled models are drct-small-x2"):
        Upscaler(scale=3)(noise(20, 30, 3))


def test_a_folder_with_images_and_a_video(upscaler: Upscaler, tmp_path: Path) -> None:
    inside, out = tmp_path / "in", tmp_path / "out"
    inside.mkdir()
    for name in ("a.png", "b.png"):
        Image.fromarray(noise(20, 30, 3)).save(inside / name)
    make_clip(inside / "c.mp4", frames=3)
    (inside / "d.png").write_bytes(b"no image")
    seen: list[tuple[str, float]] = []
    outcomes = upscaler.run([inside], out, progress=lambda task, share: seen.append((task.source.name, share)))
    assert [outcome.task.source.name for outcome in outcomes] == ["a.png", "b.png", "c.mp4", "d.png"]
    assert [bool(outcome.error) for outcome in outcomes] == [False, False, False, True]
    assert {("a.png", 1.0), ("b.png", 1.0), ("c.mp4", 1.0)} <= set(seen) and all(0 <= share <= 1 for _, share in seen)
    again = upscaler.run([inside], out, resume=True)
    assert [outcome.skipped for outcome in again] == [True, True, True, False]


def test_a_listener_hears_everything(upscaler: Upscaler, tmp_path: Path) -> None:
    Image.fromarray(noise(20, 30, 3)).save(tmp_path / "a.png")
    started: list[Task] = []
    finished: list[Outcome] = []
    said: list[str] = []
    fresh = Upscaler(upscaler.settings.weights, device="cpu", codec="hevc")
    listener = Listener(say=said.append, finished=finished.append, started=started.extend)
    outcomes = fresh.run(tmp_path / "a.png", progress=listener)
    assert finished == outcomes and [task.source.name for task in started] == ["a.png"]
    assert any("--codec has no effect" in text for text in said) and any("tile" in text for text in said)


def test_larger_images_get_larger_tiles(upscaler: Upscaler) -> None:
    fresh = Upscaler(upscaler.settings.weights, device="cpu")
    sizes = []
    for side in (100, 40, 200, 100):
        fresh(noise(side, side, 3))
        runner = fresh._session.tile_runner
        assert runner is not None
        sizes.append(runner.tiling.largest.pixels)
    assert sizes[0] == sizes[1] < sizes[2] == sizes[3]

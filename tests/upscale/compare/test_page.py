"""The page of before and after: what is on it, what is left out, how large it can become, and that names do no harm."""

import base64
import html
import io
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageCms

import redline.files.atomic
from redline.cli import upscale as command
from redline.errors import RedlineError
from redline.models.drct import Drct, DrctConfig, save_drct
from redline.upscale.compare import page as compare
from redline.upscale.compare.page import check_page, render_comparison, write_comparison
from redline.upscale.compare.views import make_views, middle_of, most_detailed, open_upright
from redline.upscale.images.vips import load_vips
from redline.upscale.tasks import Outcome, Task
from upscale.video.clips import make_clip, repeated, upscale

IMAGE = re.compile(r'<img src="data:image/webp;base64,([A-Za-z0-9+/=]+)" width="(\d+)" height="(\d+)"')


def noise(height: int, width: int, channels: int = 3, seed: int = 0) -> np.ndarray:
    samples = np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)
    return samples[..., 0] if channels == 1 else samples


def smooth(height: int, width: int) -> np.ndarray:
    y, x = np.mgrid[0:height, 0:width]
    return np.stack([x * 200 / width + 20, y * 200 / height + 20, (x + y) * 90 / (width + height) + 60], -1).astype(
        np.uint8
    )


def enlarged(samples: np.ndarray, scale: int = 2) -> np.ndarray:
    return samples.repeat(scale, 0).repeat(scale, 1)


def pair(folder: Path, name: str, samples: np.ndarray, scale: int = 2) -> Task:
    """A source and its result, as files."""
    task = Task(folder / "in" / name, folder / "out" / name)
    for path, pixels in ((task.source, samples), (task.target, enlarged(samples, scale))):
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)
    return task


def images(page: str) -> list[np.ndarray]:
    """What a browser would show, in the order of the page: before, after, before …"""
    found = []
    for data, width, height in IMAGE.findall(page):
        with Image.open(io.BytesIO(base64.b64decode(data, validate=True))) as image:
            assert image.size == (int(width), int(height))
            found.append(np.asarray(image))
    assert len(found) % 2 == 0 and len(found) == page.count("<img ")
    return found


def text(page: str) -> str:
    """The words of a page."""
    return " ".join(
        html.unescape(re.sub(r"<style>.*?</style>|<script>.*?</script>|<[^>]*>", " ", page, flags=re.S)).split()
    )


def test_a_picture_lies_over_its_source(tmp_path: Path) -> None:
    samples = smooth(60, 83)
    task = pair(tmp_path, "photo.png", samples)
    page = render_comparison([Outcome(task, 166, 120, 1.5, ("a note",))])
    before, after = images(page)
    for side in (before, after):
        # Compressed, and the source by a bicubic filter that does not move it.
        assert side.shape == (120, 166, 3) and np.abs(side.astype(int) - enlarged(samples)).mean() < 3
    said = text(page)
    for part in ("photo.png", "83 × 60", "166 × 120", "×2", "1.5 s", "a note", "The whole "):
        assert part in said
    assert 'type="range"' in page and "most detail" not in page and "left out" not in page and "Not shown" not in page


def test_it_loads_nothing(tmp_path: Path) -> None:
    page = render_comparison([Outcome(pair(tmp_path, "a.png", noise(20, 30)))])
    assert "default-src 'none'" in page
    assert all(link.startswith("data:image/webp") for link in re.findall(r'(?:src|href)="([^"]*)"', page))
    assert not re.search(r"https?:|//[a-z]|@import|url\(|fetch|XMLHttp", page.replace("// ", ""))


def test_a_large_result_is_reduced_and_goes_along_in_part_at_full_resolution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare, "_IMAGE_PX", 90_000)
    samples = smooth(700, 900)
    samples[310:470, 520:700] = noise(160, 180)  # more detail than anywhere else
    task = pair(tmp_path, "large.png", samples)
    page = render_comparison([Outcome(task)])
    before, after, part_before, part_after = images(page)
    height, width = after.shape[:2]
    assert 80_000 < height * width <= 90_000 and abs(width / height - 900 / 700) < 0.01 and before.shape == after.shape
    assert part_after.shape == part_before.shape == (640, 960, 3)
    # It is the result pixel by pixel, from the place that the page marks.
    marked = re.search(r'style="left: ([\d.]+)%; top: ([\d.]+)%', page)
    assert marked is not None
    x, y = round(float(marked[1]) / 100 * 1800), round(float(marked[2]) / 100 * 1400)
    assert 1400 - 960 <= x <= 1040 and 940 - 640 <= y <= 620  # all of the noise is inside
    original = enlarged(samples)[y : y + 640, x : x + 960].astype(int)
    flat = np.abs(np.diff(original, axis=1, prepend=original[:, :1])).max(-1) < 10
    assert np.abs(part_after.astype(int) - original)[flat].mean() < 4
    assert np.corrcoef(part_after.mean(-1).ravel(), original.mean(-1).ravel())[0, 1] > 0.97
    assert np.corrcoef(part_before.mean(-1).ravel(), original.mean(-1).ravel())[0, 1] > 0.8
    assert f"reduced to {width} × {height}" in text(page) and "most detail at 100%" in text(page)


@pytest.mark.parametrize("seed", range(3))
def test_the_most_detailed_region(seed: int) -> None:
    rng = np.random.default_rng(seed)
    samples = np.full((301, 417, 3), 90, np.uint8)
    x, y = int(rng.integers(0, 417 - 90)), int(rng.integers(0, 301 - 60))
    samples[y : y + 60, x : x + 90] = noise(60, 90, seed=seed) // 4
    samples[:, 200:] += 130  # one hard edge is no detail
    region = most_detailed(load_vips().Image.new_from_array(samples, interpretation="srgb"), 120, 90)
    assert 0 <= region.left <= 417 - 120 and 0 <= region.top <= 301 - 90
    across = min(region.left + 120, x + 90) - max(region.left, x)
    down = min(region.top + 90, y + 60) - max(region.top, y)
    assert across * down >= 0.8 * 90 * 60


def test_names_do_no_harm(tmp_path: Path) -> None:
    names = [
        "<script>alert(1)<∕script>.png",
        "\" onerror='alert(1)' x=\".png",
        "{{ 7 * 7 }} & [Q=1] %d ü 日本 🦋.png",
        b"caf\xe9.png".decode("utf-8", "surrogateescape"),
    ]
    outcomes = [Outcome(pair(tmp_path, name, noise(9, 11))) for name in names]
    bad = Task(tmp_path / "in" / "<b>.png", tmp_path / "out" / "b.png")
    outcomes += [Outcome(bad, error="cannot read '<img src=x onerror=alert(1)>'.")]
    write_comparison(tmp_path / "page.html", outcomes)
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert len(images(page)) == 8
    assert page.count("<script>") == 1 and "<b>" not in page and "<img src=x" not in page
    assert not re.search(r"<[^>]* onerror=", re.sub(r'"[^"]*"', '""', page))
    said = text(page)
    assert (
        all(name in said for name in names[:3]) and "caf\ufffd.png" in said and "<img src=x onerror=alert(1)>" in said
    )


def test_failed_skipped_missing_and_damaged(tmp_path: Path) -> None:
    done, skipped, gone, cut, replaced = (
        pair(tmp_path, f"{name}.png", noise(20, 30, seed=number))
        for number, name in enumerate(("done", "skipped", "gone", "cut", "replaced"))
    )
    failed = Task(tmp_path / "in" / "failed.png", tmp_path / "out" / "failed.png")
    gone.target.unlink()
    cut.source.write_bytes(cut.source.read_bytes()[:-700])
    replaced.target.write_text("no image")
    outcomes = [Outcome(done, 60, 40, 2.0), Outcome(skipped, skipped=True), Outcome(gone), Outcome(cut)]
    page = render_comparison([*outcomes, Outcome(replaced), Outcome(failed, error="it is cut short.")])
    assert len(images(page)) == 4
    shown, _, not_shown = text(page).partition("Not shown")
    assert re.search("2 (images|pictures), ", shown)
    assert "done.png" in shown and "skipped.png" in shown and "in 2 s" in shown
    assert shown.count("30 × 20") == shown.count("60 × 40") == 2 and shown.count(" in 2 s") == 1
    for name in ("gone", "cut", "replaced", "failed"):
        assert f"{name}.png" not in shown and f"{name}.png" in not_shown
    assert "it does not exist" in not_shown and "it is cut short." in not_shown
    nothing = render_comparison([Outcome(failed, error="it is cut short.")])
    assert "Nothing was enlarged" in text(nothing) and "it is cut short." in text(nothing) and not images(nothing)


def test_the_number_of_pictures_is_limited_and_the_page_says_so(tmp_path: Path) -> None:
    outcomes = [Outcome(pair(tmp_path, f"{n:02}.png", noise(8, 8, seed=n))) for n in range(27)]
    page = render_comparison(outcomes)
    assert len(images(page)) == 2 * 24 and "3 more were enlarged" in text(page)
    assert "23.png" in text(page) and "24.png" not in text(page)
    assert "1 more was enlarged and is left out" in text(render_comparison(outcomes[:3], max_images=2))


def test_the_page_stays_small_whatever_is_on_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images share pixels and bytes, so that noise, which nothing compresses, cannot make it large."""
    monkeypatch.setattr(compare, "_PAGE_PX", 150_000)
    monkeypatch.setattr(compare, "_PAGE_BYTES", 60_000)
    outcomes = [Outcome(pair(tmp_path, f"{n}.png", noise(180, 290, seed=n))) for n in range(3)]
    sides = images(render_comparison(outcomes))
    assert len(sides) == 12 and all(side.shape[0] * side.shape[1] <= 50_000 for side in sides[::4] + sides[1::4])
    free, tight = (make_views(*openers(outcomes[0].task), 40_000, data_bytes) for data_bytes in (10**9, 60_000))
    assert free.crop is not None and tight.crop is not None
    for large, small in ((free.whole, tight.whole), (free.crop, tight.crop)):
        assert len(small.before) + len(small.after) < 0.7 * (len(large.before) + len(large.after))


def openers(task: Task) -> tuple[Callable[[], object], Callable[[], object]]:
    return lambda: open_upright(task.source), lambda: open_upright(task.target)


@pytest.mark.parametrize("shape", [(1, 1, 3), (1, 700, 3), (900, 2, 3), (31, 17, 1), (33, 40, 4)])
def test_any_shape(shape: tuple[int, int, int], tmp_path: Path) -> None:
    views = make_views(*openers(pair(tmp_path, "a.png", noise(*shape), 4)), pixels=2_000, data_bytes=10**9)
    assert views.before_size == (shape[1], shape[0]) and views.after_size == (4 * shape[1], 4 * shape[0])
    assert views.whole.width * views.whole.height <= 2_000
    assert views.has_alpha == (shape[2] == 4)
    assert views.is_reduced == (views.crop is not None) == (16 * shape[0] * shape[1] > 2_000)


def test_transparency_stays_and_nothing_bleeds_in(tmp_path: Path) -> None:
    samples = np.zeros((40, 50, 4), np.uint8)
    samples[:, :25] = (200, 100, 50, 255)  # opaque on the left, transparent black on the right
    page = render_comparison([Outcome(pair(tmp_path, "cut out.png", samples))])
    assert 'class="frame alpha"' in page
    for side in images(page):
        assert side.shape == (80, 100, 4) and side[:, :46, 3].min() == 255 and side[:, 54:, 3].max() == 0
        seen = side[..., 3] > 128
        assert np.abs(side[seen][:, :3].astype(int) - (200, 100, 50)).mean() < 4


def test_orientation_depth_and_profile_are_honoured(tmp_path: Path) -> None:
    turned = smooth(40, 64)
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned to the right
    Image.fromarray(turned).save(tmp_path / "turned.jpg", exif=exif, quality=95, subsampling=0)
    Image.fromarray(np.rot90(turned, -1)).save(tmp_path / "upright.png")
    upright = open_upright(tmp_path / "turned.jpg").numpy()
    assert np.abs(upright.astype(int) - np.rot90(turned, -1)).mean() < 3
    deep = np.random.default_rng(0).integers(0, 65536, (20, 30), dtype=np.uint16)
    Image.fromarray(deep).save(tmp_path / "deep.png")
    assert np.abs(open_upright(tmp_path / "deep.png").numpy()[..., 1].astype(int) - deep / 257).max() <= 1
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    Image.fromarray(turned).save(tmp_path / "profile.png", icc_profile=profile)
    assert np.abs(open_upright(tmp_path / "profile.png").numpy().astype(int) - turned).max() <= 2
    Image.fromarray(turned).save(tmp_path / "broken.png", icc_profile=b"no profile" * 40)
    assert np.array_equal(open_upright(tmp_path / "broken.png").numpy(), turned)


def test_a_film_is_shown_by_its_middle(tmp_path: Path) -> None:
    def draw(number: int, width: int, height: int) -> np.ndarray:
        return np.full((height, width, 3), 5 * number + 10, np.uint8)  # how bright it is tells which frame it is

    make_clip(tmp_path / "video.mp4", frames=40, draw=draw)
    upscale(tmp_path / "video.mp4", tmp_path / "big.mp4")
    make_clip(tmp_path / "short.mp4", frames=4, draw=draw)
    (tmp_path / "broken.mp4").write_bytes((tmp_path / "big.mp4").read_bytes()[:900])
    names = ("big.mp4", "short.mp4", "broken.mp4")
    page = render_comparison([Outcome(Task(tmp_path / "video.mp4", tmp_path / name)) for name in names])
    before, after = images(page)
    assert before.shape == after.shape == (64, 96, 3)
    assert abs(before.mean() - 110) < 6 and abs(after.mean() - 110) < 6
    assert "48 × 32" in text(page) and "frame at 0:00.8" in text(page)
    not_shown = text(page).partition("Not shown")[2]
    assert "cannot find the frame at 0.80 s of 'video.mp4' in 'short.mp4'." in not_shown
    assert "'broken.mp4' is not a readable video" in not_shown


@pytest.mark.parametrize(("name", "rotation"), [("video.mp4", 90), ("video.mkv", 0), ("video.ts", 0), ("odd.mkv", 0)])
def test_the_moment_is_the_same_in_any_film(name: str, rotation: int, tmp_path: Path) -> None:
    """Turned, with times that do not start at zero, and with a column and a row more for the encoder."""
    size = (33, 21) if name == "odd.mkv" else (48, 32)
    codec = {"codec": "ffv1", "pixel_format": "yuv444p", "options": {}} if name == "odd.mkv" else {}
    make_clip(tmp_path / name, frames=30, size=size, rotation=rotation or None, **codec)
    scale = 3 if name == "odd.mkv" else 2
    target = tmp_path / f"big{'.mkv' if name == 'video.ts' else Path(name).suffix}"
    upscale(tmp_path / name, target, enlarge=repeated(scale), scale=scale, codec="h264")
    before, after, seconds = middle_of(tmp_path / name, target)
    width, height = reversed(size) if rotation else size
    assert before.shape == (height, width, 3) and after.shape == (scale * height, scale * width, 3)
    assert abs(seconds - 0.6) < 0.01 and np.abs(enlarged(before, scale).astype(int) - after).mean() < 6
    bright = before.mean(-1)
    if rotation:  # the bright corner, top left as stored, is turned to the left with the rest
        assert bright[-height // 3 :, : width // 3].mean() > bright.mean()


def test_a_folder_keeps_its_structure_and_its_place_goes_unsaid(tmp_path: Path) -> None:
    outcomes = [Outcome(pair(tmp_path, name, noise(8, 9))) for name in ("a.png", "b/a.png", "b/c/d.png")]
    page = render_comparison(outcomes)
    assert re.findall(r"<h2>(.*?)</h2>", page) == ["a.png", "b/a.png", "b/c/d.png"]
    assert str(tmp_path) not in page


def test_the_page_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "pages" / "page.html"
    first, second = (Outcome(pair(tmp_path, f"{n}.png", noise(20, 30, seed=n))) for n in range(2))
    write_comparison(path, [first, second])
    long = path.read_text()
    write_comparison(path, [second])
    assert path.read_text() == render_comparison([second]) and len(path.read_text()) < len(long)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(redline.files.atomic.os, "replace", full)
    with pytest.raises(RedlineError, match="cannot write .*page.html.: No space left on device."):
        write_comparison(path, [first, second])
    assert path.read_text() == render_comparison([second])
    assert [file.name for file in path.parent.iterdir()] == ["page.html"]


def test_a_page_that_cannot_be_written_is_said_before_any_work(tmp_path: Path) -> None:
    check_page(tmp_path / "new" / "folder" / "page.html")
    (tmp_path / "folder.html").mkdir()
    (tmp_path / "file").touch()
    for path, sentence in (
        ("photo.jpg", "must end in .html"),
        ("folder.html", "is a folder"),
        ("file/a.html", "is not a folder"),
    ):
        with pytest.raises(RedlineError, match=sentence):
            check_page(tmp_path / path)
    assert not (tmp_path / "new").exists()


def test_the_command_writes_the_page(tmp_path: Path) -> None:
    torch.manual_seed(0)
    weights = tmp_path / "tiny.safetensors"
    save_drct(Drct(DrctConfig.of(2, 1, width=12, growth=6, features=4, window=4)), weights)
    for number in range(3):
        pair(tmp_path, f"{number}.png", noise(24, 31, seed=number))
    page = tmp_path / "page.html"
    options = {"weights": weights, "device": "cpu", "tile": "96", "compare": page}
    command.upscale([tmp_path / "in"], tmp_path / "made", **options)
    first = page.read_text()
    assert len(images(first)) == 6 and re.findall(r"<h2>(.*?)</h2>", first) == ["0.png", "1.png", "2.png"]
    # What an earlier run did is on the page again, in the same order.
    (tmp_path / "made" / "1.png").unlink()
    command.upscale([tmp_path / "in"], tmp_path / "made", resume=True, **options)
    again = page.read_text()
    assert all(np.array_equal(one, other) for one, other in zip(images(first), images(again), strict=True))
    assert re.findall(r"<h2>(.*?)</h2>", again) == ["0.png", "1.png", "2.png"]
    with pytest.raises(RedlineError, match="must end in .html"):
        command.upscale([tmp_path / "in" / "0.png"], tmp_path / "x.png", weights=weights, compare=tmp_path / "0.png")
    assert not (tmp_path / "x.png").exists()

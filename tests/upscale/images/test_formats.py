"""What a format cannot hold is said before any work is done."""

from pathlib import Path

import numpy as np
import pytest

from redline.upscale.images.formats import FORMATS, ImageError, check_can_hold, format_for
from redline.upscale.images.sink import ImageSink


@pytest.mark.parametrize(
    ("form", "width", "height", "channels", "bits", "said"),
    [
        ("jpeg", 65_501, 10, 3, 8, "JPEG is limited to 65,500 pixels per side and the image has 65,501 × 10"),
        ("webp", 10, 16_384, 3, 8, "WebP is limited to 16,383"),
        ("avif", 16_385, 10, 3, 8, "AVIF is limited to 16,384"),
        ("jpeg", 10, 10, 4, 8, "JPEG cannot hold transparency: choose png"),
        ("jpeg", 10, 10, 2, 8, "JPEG cannot hold transparency: choose png"),
        ("gif", 10, 10, 3, 8, "GIF files can be read but not written"),
        ("png", 0, 10, 3, 8, "cannot write 0 × 10"),
        ("bmp", 10, 10, 3, 8, "BMP files can be read but not written: choose png"),
        ("png", 10, 10, 5, 8, "5 channels"),
    ],
)
def test_what_cannot_be_held_is_refused(
    form: str, width: int, height: int, channels: int, bits: int, said: str
) -> None:
    with pytest.raises(ImageError, match=said):
        check_can_hold(FORMATS[form], width, height, channels, bits)


@pytest.mark.parametrize(("form", "side"), [("jpeg", 65_500), ("webp", 16_383), ("avif", 16_384)])
def test_the_encoders_agree_on_the_largest_side(tmp_path: Path, form: str, side: int) -> None:
    assert check_can_hold(FORMATS[form], side, 1, 3, 8) == ()
    with ImageSink(tmp_path / f"a{FORMATS[form].suffixes[0]}", side, 1, 3, 8) as sink:
        sink.write_rows(np.zeros((1, side, 3), np.uint8))


@pytest.mark.parametrize(("form", "notes"), [("png", 0), ("tiff", 0), ("jpeg", 1), ("webp", 1), ("avif", 1)])
def test_16_bits_are_rounded_with_a_note(form: str, notes: int) -> None:
    assert len(check_can_hold(FORMATS[form], 10, 10, 3, 16)) == notes
    assert check_can_hold(FORMATS[form], 10, 10, 3, 8) == ()


def test_the_name_decides_what_is_written() -> None:
    assert [format_for(Path(name)).name for name in ("a.PNG", "b.jpeg", "c.tif", "d.b.webp")] == [
        "png",
        "jpeg",
        "tiff",
        "webp",
    ]
    for name in ("a.bmp", "a", "a.gif"):
        with pytest.raises(ImageError, match=r"one of \.png, \.jpg, \.webp, \.tif, \.avif"):
            format_for(Path(name))

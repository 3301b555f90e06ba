"""libvips comes late, says what is missing, and its remarks become a cause."""

import subprocess
import sys
from pathlib import Path

import pytest

from redline.upscale.images.formats import ImageError
from redline.upscale.images.source import open_image
from redline.upscale.images.vips import load_vips, reason


def test_importing_redline_and_its_pictures_leaves_libvips_alone() -> None:
    code = "import sys, redline, redline.upscale.images; sys.exit('pyvips' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_without_libvips_a_sentence_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.png").write_bytes(b"\x89PNG\r\n\x1a\n" + bytes(50))
    load_vips.cache_clear()
    monkeypatch.setitem(sys.modules, "pyvips", None)
    with pytest.raises(ImageError, match=r"pip install 'pyvips\[binary\]'"):
        open_image(tmp_path / "a.png")


def test_the_operation_cache_is_off() -> None:
    assert load_vips().cache_get_max() == 0


@pytest.mark.parametrize(
    ("detail", "cause"),
    [
        ("VipsJpeg: premature end of JPEG image\n", "premature end of JPEG image"),
        (
            "z: write error\nsystem error: No space left on device\nvips2png: unable to write\n",
            "No space left on device",
        ),
        ("a.avif: bad seek to 12\nheif: Invalid input: Corrupt frame (2.0)\n", "Invalid input: Corrupt frame"),
        ("wbuffer_write: write failed\nsystem error: Unknown error -1\n", "its data is damaged or truncated"),
        ("", "its data is damaged or truncated"),
    ],
)
def test_remarks_become_one_cause(detail: str, cause: str) -> None:
    assert reason(detail) == cause

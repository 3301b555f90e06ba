"""Writes a before/after image for the docs: a reduced photo enlarged by bicubic interpolation and by `redline upscale`.

    python benchmarks/before_after.py PHOTO --center 0.49 0.27

The photo is reduced by `--shrink` (Lanczos); a region around `--center` (shares of width and height) is enlarged
four times by both.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

REGION_PX = (120, 100)
SCALE = 4
GAP_PX, CAPTION_PX = 12, 34


def cut_region(photo: Image.Image, shrink: int, center: tuple[float, float]) -> Image.Image:
    """Returns the region of `REGION_PX` around `center` of the reduced photo, moved inside of its borders."""
    small = photo.convert("RGB").resize((photo.width // shrink, photo.height // shrink), Image.Resampling.LANCZOS)
    sides = zip(center, REGION_PX, small.size, strict=True)
    left, top = (min(max(round(c * size - length / 2), 0), size - length) for c, length, size in sides)
    return small.crop((left, top, left + REGION_PX[0], top + REGION_PX[1]))


def side_by_side(images: Sequence[tuple[str, Image.Image]]) -> Image.Image:
    width = sum(image.width for _, image in images) + GAP_PX * (len(images) - 1)
    sheet = Image.new("RGB", (width, images[0][1].height + CAPTION_PX), "white")
    draw, x = ImageDraw.Draw(sheet), 0
    for caption, image in images:
        sheet.paste(image, (x, 0))
        draw.text((x + 2, image.height + 6), caption, fill=(40, 40, 40), font=ImageFont.load_default(20))
        x += image.width + GAP_PX
    return sheet


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Writes a before/after image of `redline upscale`.")
    parser.add_argument("photo", type=Path)
    parser.add_argument("--center", type=float, nargs=2, default=(0.5, 0.5), metavar=("X", "Y"))
    parser.add_argument("--shrink", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("docs/images/upscale.jpg"))
    options = parser.parse_args(arguments)
    region = cut_region(Image.open(options.photo), options.shrink, tuple(options.center))
    with tempfile.TemporaryDirectory() as folder:
        source, target = Path(folder, "region.png"), Path(folder, "enlarged.png")
        region.save(source)
        command = [sys.executable, "-m", "redline", "upscale", str(source), "-o", str(target), "--precision", "fp32"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        enlarged = Image.open(target).convert("RGB")
    bicubic = region.resize(enlarged.size, Image.Resampling.BICUBIC)
    sheet = side_by_side([(f"bicubic, {SCALE}x", bicubic), (f"redline upscale, {SCALE}x", enlarged)])
    sheet.save(options.out, quality=92, subsampling=0)
    print(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())

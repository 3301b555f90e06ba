"""Packs training data for super-resolution into a small folder: the most detailed part of each photo, drawn images, and
test sets for scoring.

    python benchmarks/super_resolution_data.py --photos photos --photos photos-more --exclude 'bysa-*' \
        --test-set Set5 --test-set Set14 --out .carry/sr-crops

Photos are reduced first, which removes compression artefacts and the blur of the lens, and then cut to the window in
which bicubic interpolation loses most. The folder holds `train/photos`, `train/drawn`, the test sets (lossless) and
`sources.json`, which names every source. The same inputs, fonts and seed give the same images.
"""

import argparse
import fnmatch
import json
import math
import shutil
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from drawn_images import draw_image, find_fonts
from PIL import Image

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".tif")
# The reduction factor by number of pixels. Large photos come straight from cameras and are softer.
REDUCTIONS = ((2.1e6, 1.75), (0.4e6, 1.5), (0.0, 1.0))
# Photos in which bicubic interpolation loses less than this, in levels of 255, have too little detail.
LEAST_DETAIL = 0.8
DRAWN_PX = 576


@dataclass(frozen=True)
class Encoding:
    """How images are stored: AVIF is half as large as JPEG of the same error, but not every Pillow reads it."""

    suffix: str
    quality: int

    def save(self, image: Image.Image, path: Path) -> int:
        path = path.with_suffix(self.suffix)
        if self.suffix == ".avif":
            image.save(path, quality=self.quality, subsampling="4:4:4", speed=8, max_threads=1)
        else:
            image.save(path, quality=self.quality, subsampling="4:4:4")
        return path.stat().st_size


ENCODINGS = {"avif": Encoding(".avif", 80), "jpeg": Encoding(".jpg", 91)}


def pack_photo(path: Path, out: Path, encoding: Encoding, share: float) -> int:
    """Writes the most detailed window of a photo and returns its bytes, or 0 if the photo has no detail."""
    image = Image.open(path).convert("RGB")
    reduction = next(factor for pixels, factor in REDUCTIONS if image.width * image.height >= pixels)
    size = round(image.width / reduction), round(image.height / reduction)
    image = image.resize(size, Image.Resampling.BICUBIC) if reduction > 1 else image
    detail = detail_of(image)
    left, top, side = best_window(detail, math.sqrt(share))
    window = detail[top : top + side[1], left : left + side[0]]
    if window.mean() < LEAST_DETAIL:
        return 0
    box = (left * _CELL, top * _CELL, (left + side[0]) * _CELL, (top + side[1]) * _CELL)
    return encoding.save(image.crop(box), out / path.stem)


_CELL = 16


def detail_of(image: Image.Image) -> np.ndarray:
    """Returns, for each cell of 16 × 16 pixels, how much is lost by reducing 4 times and enlarging again."""
    width, height = image.width // _CELL * _CELL, image.height // _CELL * _CELL
    luma = image.convert("L").crop((0, 0, width, height))
    small = luma.resize((width // 4, height // 4), Image.Resampling.BICUBIC)
    again = small.resize((width, height), Image.Resampling.BICUBIC)
    lost = np.abs(np.asarray(luma, np.float32) - np.asarray(again, np.float32))
    return lost.reshape(height // _CELL, _CELL, width // _CELL, _CELL).mean((1, 3))


def best_window(detail: np.ndarray, share: float) -> tuple[int, int, tuple[int, int]]:
    """Returns left, top and size, in cells, of the window with most detail that spans `share` of both sides."""
    rows, columns = (max(1, round(length * share)) for length in detail.shape)
    sums = np.pad(detail, ((1, 0), (1, 0))).cumsum(0).cumsum(1)
    totals = sums[rows:, columns:] - sums[:-rows, columns:] - sums[rows:, :-columns] + sums[:-rows, :-columns]
    top, left = np.unravel_index(totals.argmax(), totals.shape)
    return int(left), int(top), (columns, rows)


def find_images(folders: list[Path], excluded: list[str]) -> Iterator[Path]:
    for folder in folders:
        for path in sorted(folder.iterdir()):
            wanted = path.suffix.lower() in SUFFIXES
            if wanted and not any(fnmatch.fnmatch(path.name, pattern) for pattern in excluded):
                yield path


def _draw(index: int, out: Path, encoding: Encoding, fonts: list[Path], seed: int) -> int:
    name, image = draw_image(index, DRAWN_PX, fonts, seed)
    return encoding.save(image, out / f"{index:04}-{name}")


def copy_test_set(folder: Path, out: Path) -> None:
    out.mkdir(parents=True)
    for path in sorted(folder.iterdir()):
        if path.suffix.lower() in SUFFIXES:
            Image.open(path).save(out / f"{path.stem}.webp", lossless=True, exact=True)


def main() -> int:
    parser = argparse.ArgumentParser(description="Packs training data for super-resolution.")
    parser.add_argument("--photos", type=Path, action="append", default=[], help="folder of photos; repeatable")
    parser.add_argument("--exclude", action="append", default=[], help="file names to leave out; repeatable")
    parser.add_argument("--test-set", type=Path, action="append", default=[], help="folder to copy; repeatable")
    parser.add_argument("--fonts", type=Path, action="append", default=None, help="folder of fonts; repeatable")
    parser.add_argument("--drawn", type=int, default=120, help="how many images to draw")
    parser.add_argument("--share", type=float, default=0.8, help="share of each photo's area that is kept")
    parser.add_argument("--format", choices=sorted(ENCODINGS), default="avif")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, required=True, help="folder to write, which is replaced")
    arguments = parser.parse_args()

    encoding, out = ENCODINGS[arguments.format], arguments.out
    photos = list(find_images(arguments.photos, arguments.exclude))
    fonts = find_fonts(arguments.fonts or [Path("/usr/share/fonts")])
    if not photos:
        print("no photos found: give a folder with --photos.", file=sys.stderr)
        return 2
    if arguments.drawn and not fonts:
        print("no fonts found for drawing text: give a folder with --fonts.", file=sys.stderr)
        return 2
    shutil.rmtree(out, ignore_errors=True)
    folders = [out / "train" / name for name in ("photos", "drawn")]
    for folder in folders:
        folder.mkdir(parents=True)
    with ProcessPoolExecutor(arguments.jobs) as pool:
        packed = [pool.submit(pack_photo, path, folders[0], encoding, arguments.share) for path in photos]
        drawn = [
            pool.submit(_draw, index, folders[1], encoding, fonts, arguments.seed) for index in range(arguments.drawn)
        ]
        photo_bytes, drawn_bytes = ([job.result() for job in jobs] for jobs in (packed, drawn))
    for folder in arguments.test_set:
        copy_test_set(folder, out / folder.name)
    used = [path for path, size in zip(photos, photo_bytes, strict=True) if size]
    sources = {
        "photos": sorted(f"{path.parent.name}/{path.name}" for path in used),
        "fonts": [path.name for path in fonts],
        "drawn": arguments.drawn,
        "seed": arguments.seed,
    }
    (out / "sources.json").write_text(json.dumps(sources, indent=1) + "\n", encoding="utf-8")
    total = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    said = {"photos": len(used), "photo_bytes": sum(photo_bytes), "drawn_bytes": sum(drawn_bytes), "bytes": total}
    print(json.dumps(said))
    return 0


if __name__ == "__main__":
    sys.exit(main())

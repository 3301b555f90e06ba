"""Makes a film to time `redline stream` with: a camera that moves over a photo, with some noise, as H.264.

python benchmarks/film.py PHOTO film.mp4 [--size 1280x720] [--frames 1200]
"""

import argparse
import math
import sys
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
from PIL import Image

RATE = Fraction(30)
NOISE = 6
# How many pictures until the camera is back at its height, and at its side.
DOWN, ACROSS = 2 * math.pi * 150, 2 * math.pi * 190
# One slice a picture, as films mostly are: several are easier to decode.
ENCODER = {"preset": "fast", "crf": "20", "x264-params": "sliced-threads=0"}


def scene(photo: Path, width: int, height: int) -> np.ndarray:
    """The photo, twice as large as what the camera sees of it at a time."""
    with Image.open(photo) as opened:
        picture = opened.convert("RGB")
    scale = 2 * max(width / picture.width, height / picture.height)
    return np.asarray(picture.resize((math.ceil(picture.width * scale), math.ceil(picture.height * scale))))


def make(photo: Path, film: Path, width: int, height: int, frames: int) -> None:
    world, noise = scene(photo, width, height), np.random.default_rng(0)
    down, across = world.shape[0] - height, world.shape[1] - width
    with av.open(str(film), "w") as container:
        stream = container.add_stream("libx264", rate=RATE, options=ENCODER)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        for number in range(frames):
            top = int(down * (0.5 + 0.5 * math.sin(2 * math.pi * number / DOWN)))
            left = int(across * (0.5 + 0.5 * math.cos(2 * math.pi * number / ACROSS)))
            seen = world[top : top + height, left : left + width].astype(np.int16)
            seen += noise.integers(-NOISE, NOISE + 1, (height, width, 1), dtype=np.int16)
            frame = av.VideoFrame.from_ndarray(seen.clip(0, 255).astype(np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Makes a film of a camera that moves over a photo.")
    parser.add_argument("photo", type=Path)
    parser.add_argument("film", type=Path)
    parser.add_argument("--size", default="512x512", help="WIDTHxHEIGHT, 512x512 by default")
    parser.add_argument("--frames", type=int, default=1200)
    asked = parser.parse_args(arguments)
    width, height = map(int, asked.size.split("x"))
    make(asked.photo, asked.film, width, height, asked.frames)
    return 0


if __name__ == "__main__":
    sys.exit(main())

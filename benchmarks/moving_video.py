"""Makes an H.264 video to time `redline stream` with: a camera moves over a photo, with some noise.

python benchmarks/moving_video.py PHOTO video.mp4 [--size 1280x720] [--frames 1200]
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
# The periods, in frames, of the camera's vertical and horizontal movement.
DOWN, ACROSS = 2 * math.pi * 150, 2 * math.pi * 190
# One slice per frame, as in most videos; several slices are faster to decode.
ENCODER = {"preset": "fast", "crf": "20", "x264-params": "sliced-threads=0"}


def scene(photo: Path, width: int, height: int) -> np.ndarray:
    """Returns the photo, resized to at least twice the size of a frame."""
    with Image.open(photo) as opened:
        image = opened.convert("RGB")
    scale = 2 * max(width / image.width, height / image.height)
    return np.asarray(image.resize((math.ceil(image.width * scale), math.ceil(image.height * scale))))


def make(photo: Path, video: Path, width: int, height: int, frames: int) -> None:
    world, noise = scene(photo, width, height), np.random.default_rng(0)
    down, across = world.shape[0] - height, world.shape[1] - width
    with av.open(str(video), "w") as container:
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
    parser = argparse.ArgumentParser(description="Makes a video of a camera that moves over a photo.")
    parser.add_argument("photo", type=Path)
    parser.add_argument("video", type=Path)
    parser.add_argument("--size", default="512x512", help="WIDTHxHEIGHT, 512x512 by default")
    parser.add_argument("--frames", type=int, default=1200)
    asked = parser.parse_args(arguments)
    width, height = map(int, asked.size.split("x"))
    make(asked.photo, asked.video, width, height, asked.frames)
    return 0


if __name__ == "__main__":
    sys.exit(main())

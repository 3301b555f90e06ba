"""The video that streams are timed with: as many images as asked for, that move, the same every time."""

from pathlib import Path

import numpy as np
from PIL import Image

from benchmark_scripts import load_script
from redline.stream.sources.video_file import VideoFile


def test_a_camera_moves_over_a_photo(tmp_path: Path) -> None:
    script = load_script("moving_video")
    waves = np.sin(np.arange(90)[:, None, None] / 5 + np.arange(120)[None, :, None] / 7 + np.arange(3))
    Image.fromarray((127 + 100 * waves).astype(np.uint8)).save(tmp_path / "photo.png")
    assert script.main([str(tmp_path / "photo.png"), str(tmp_path / "a.mp4"), "--size", "64x48", "--frames", "40"]) == 0
    source = VideoFile(tmp_path / "a.mp4")
    frames = [frame.pixels.float() for frame in source.frames()]
    assert (len(frames), source.height, source.width, source.rate) == (40, 48, 64, 30)
    assert (frames[0] - frames[1]).abs().mean() < (frames[0] - frames[-1]).abs().mean()

"""Writes every frame as a PNG file named by its index, so that a dropped frame leaves a gap in the numbers."""

import io
from pathlib import Path

from PIL import Image

from redline.errors import RedlineError
from redline.files.atomic import check_can_write, write_bytes
from redline.stream.frames import Frame
from redline.stream.sinks import Sink

# A fast compression level, because a live stream has little time per frame.
_COMPRESSION = 1


class ImageFolderSink(Sink):
    """Writes each frame as a PNG file. Every file is complete, so all of them are kept even if the stream fails."""

    def __init__(self, path: Path) -> None:
        if path.exists() and not path.is_dir():
            raise RedlineError(f"{str(path)!r} is not a folder.")
        if path.is_dir() and any(path.iterdir()):
            raise RedlineError(f"the folder {str(path)!r} is not empty: give a new or an empty folder.")
        check_can_write(path)
        self.name, self.path = path.name, path

    def write(self, frame: Frame) -> None:
        data = io.BytesIO()
        Image.fromarray(frame.pixels.numpy()).save(data, "png", compress_level=_COMPRESSION)
        write_bytes(self.path / f"frame_{frame.index:08d}.png", data.getvalue())

    def close(self, complete: bool = True) -> None:
        pass

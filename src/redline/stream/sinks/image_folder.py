"""Every frame as a PNG file, named by its index, so that a dropped frame shows as a gap."""

import io
from pathlib import Path

from PIL import Image

from redline.errors import RedlineError
from redline.files.atomic import check_can_write, write_bytes
from redline.stream.frames import Frame

# Live: the smallest file is worth less than the time it takes.
_COMPRESSION = 1


class ImageFolderSink:
    """Pictures that are written stay, even when the stream ends badly: each is whole."""

    takes_new_size = True

    def __init__(self, folder: Path) -> None:
        if folder.exists() and not folder.is_dir():
            raise RedlineError(f"{str(folder)!r} is no folder.")
        if folder.is_dir() and any(folder.iterdir()):
            raise RedlineError(f"the folder {str(folder)!r} is not empty: two clips would be mixed.")
        check_can_write(folder)
        self.name, self._folder = folder.name, folder

    def write(self, frame: Frame) -> None:
        data = io.BytesIO()
        Image.fromarray(frame.pixels.numpy()).save(data, "png", compress_level=_COMPRESSION)
        write_bytes(self._folder / f"frame_{frame.index:08d}.png", data.getvalue())

    def close(self, whole: bool = True) -> None:
        pass

    def abandon(self) -> None:
        pass

"""Reads the photos of a folder as 8-bit RGB, the format of super-resolution training and benchmarks."""

from pathlib import Path

import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from redline.errors import RedlineError

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".avif", ".bmp", ".tif", ".tiff"})
# Pillow converts images of these modes to 8-bit RGB and loses only transparency.
_MODES = frozenset({"1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr"})


def find_photos(folder: str | Path) -> list[Path]:
    """Returns the files with an image suffix in a folder and its subfolders, in a fixed order; skips hidden files."""
    folder = Path(folder)
    if not folder.is_dir():
        raise RedlineError(f"there is no folder {str(folder)!r}.")
    inside = (path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
    found = sorted(path for path in inside if not any(part.startswith(".") for part in path.relative_to(folder).parts))
    if not found:
        raise RedlineError(f"the folder {str(folder)!r} contains no images ({', '.join(sorted(SUFFIXES))}).")
    return found


def read_photo(path: str | Path) -> Tensor:
    """Returns an image as bytes of (3, H, W)."""
    if (named := Path(path)).is_file() and not named.stat().st_size:
        raise RedlineError(f"cannot read the image {str(path)!r}: it is empty.")
    try:
        with Image.open(path) as image:
            if image.mode not in _MODES:
                raise RedlineError(f"{str(path)!r} is not an 8-bit image (its mode is {image.mode}).")
            width, height = image.size
            data = bytearray(image.convert("RGB").tobytes())
    except UnidentifiedImageError as error:
        raise RedlineError(f"cannot read the image {str(path)!r}: Pillow does not support its format.") from error
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        reason = str(error).strip().rstrip(".") or type(error).__name__
        raise RedlineError(f"cannot read the image {str(path)!r}: {reason}.") from error
    return torch.frombuffer(data, dtype=torch.uint8).view(height, width, 3).permute(2, 0, 1).contiguous()

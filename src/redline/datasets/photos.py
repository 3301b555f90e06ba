"""Photos of a folder as bytes: what is trained on and scored is 8-bit RGB, as the field has it."""

from pathlib import Path

import torch
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from redline.errors import RedlineError

SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".avif", ".bmp", ".tif", ".tiff"})
# What Pillow turns into 8-bit RGB without losing anything but transparency.
_MODES = frozenset({"1", "L", "LA", "P", "RGB", "RGBA", "CMYK", "YCbCr"})


def find_photos(folder: str | Path) -> list[Path]:
    """The pictures of a folder and the folders in it, by their suffix, in a fixed order; hidden ones left out."""
    folder = Path(folder)
    if not folder.is_dir():
        raise RedlineError(f"there is no folder {str(folder)!r}.")
    inside = (path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
    found = sorted(path for path in inside if not any(part.startswith(".") for part in path.relative_to(folder).parts))
    if not found:
        raise RedlineError(f"the folder {str(folder)!r} holds no pictures ({', '.join(sorted(SUFFIXES))}).")
    return found


def read_photo(path: str | Path) -> Tensor:
    """One picture as bytes of (3, H, W)."""
    if (named := Path(path)).is_file() and not named.stat().st_size:
        raise RedlineError(f"cannot read the picture {str(path)!r}: it is empty.")
    try:
        with Image.open(path) as picture:
            if picture.mode not in _MODES:
                raise RedlineError(f"{str(path)!r} is not an 8-bit picture (its mode is {picture.mode}).")
            width, height = picture.size
            data = bytearray(picture.convert("RGB").tobytes())
    except UnidentifiedImageError as error:
        raise RedlineError(f"cannot read the picture {str(path)!r}: it is none that Pillow knows.") from error
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        reason = str(error).strip().rstrip(".") or type(error).__name__
        raise RedlineError(f"cannot read the picture {str(path)!r}: {reason}.") from error
    return torch.frombuffer(data, dtype=torch.uint8).view(height, width, 3).permute(2, 0, 1).contiguous()

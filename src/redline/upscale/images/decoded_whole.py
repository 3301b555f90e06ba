"""Reads formats that the packaged libvips does not support: BMP, TGA, JPEG 2000 and Netpbm.

Files are decoded as a whole when their rows are first needed, except binary Netpbm, which libvips reads strip by strip.
Pillow decodes BMP, TGA and JPEG 2000. Pillow's reader of the detected format is called directly, so that Pillow tries
no other format. FFmpeg decodes JPEG 2000 colour of more than 8 bits, which Pillow would round.
"""

import os
import re
import struct
from dataclasses import dataclass
from pathlib import Path

import av
import numpy as np
from av.packet import Packet
from av.video.codeccontext import VideoCodecContext
from PIL import Image, ImageFile
from PIL.BmpImagePlugin import BmpImageFile
from PIL.Jpeg2KImagePlugin import Jpeg2KImageFile
from PIL.TgaImagePlugin import TgaImageFile

from redline.upscale.images.formats import CODESTREAM_2000, Format, ImageError, boxes
from redline.upscale.images.vips import DAMAGED, VipsImage, load_vips, meaning_of, stretch

_READERS: dict[str, type[ImageFile.ImageFile]] = {"bmp": BmpImageFile, "tga": TgaImageFile, "jp2": Jpeg2KImageFile}
_CHANNELS = {"1": 1, "L": 1, "LA": 2, "RGB": 3, "RGBA": 4}
_AS = {"1": "L", "P": "RGB", "RGBX": "RGB", "YCbCr": "RGB", "PA": "RGBA"}
_GREY_16 = ("I;16", "I;16B", "I;16L")
_MM_PER_INCH = 25.4
# These limits are below those of libvips, which prints to the terminal if its own are exceeded.
_LARGEST_SIDE_PX, _MOST_DPI = 10_000_000, 100_000
_CODESTREAM_BYTES = 4096
_DEEP = ("rgb48le", "rgba64le")
_HEADER_BYTES = 4096
_BITMAPS, _BINARY_SAMPLES = ("P1", "P4"), ("P5", "P6")
# Matches the white space and comments between the numbers of a Netpbm header. After the last number, the header ends
# with exactly one white space character.
_GAP = rb"(?:\s|#[^\n]*\n)+"


@dataclass(frozen=True)
class _Header:
    """An image header. `white` is the maximum of the samples, which have 16 bits if it is above 255.

    `mode` is a mode of Pillow, one of "P1" to "P6" of Netpbm, or empty if FFmpeg decodes the image.
    """

    width: int
    height: int
    channels: int
    white: int
    mode: str
    dpi: tuple[float, float] | None = None
    profile: bytes | None = None
    data_offset: int = 0

    @property
    def deep(self) -> bool:
        return self.white > 255

    @property
    def sample_type(self) -> str:
        return "ushort" if self.deep else "uchar"


def load_header(path: Path, form: Format) -> VipsImage:
    """Returns a blank image with the size, type and metadata of the file; does not decode it."""
    pyvips, header = load_vips(), _read_header(path, form)
    width, height = header.width, header.height
    if not 1 <= min(width, height) <= max(width, height) <= _LARGEST_SIDE_PX:
        raise ImageError(f"cannot read {str(path)!r}: {width:,} × {height:,} is not a valid image size.")
    image = pyvips.Image.black(width, height, bands=header.channels).cast(header.sample_type)
    image = image.copy(interpretation=meaning_of(header.channels, header.deep))
    if header.dpi and all(1 <= number <= _MOST_DPI for number in header.dpi):
        image = image.copy(xres=header.dpi[0] / _MM_PER_INCH, yres=header.dpi[1] / _MM_PER_INCH)
    if header.profile:
        image.set_type(pyvips.GValue.blob_type, "icc-profile-data", header.profile)
    return image


def load_whole(path: Path, form: Format) -> VipsImage:
    """Decodes the image to the full range of 8 or 16 bits; raises `ImageError` if it is damaged."""
    images, header = load_vips().Image, _read_header(path, form)
    shape = (header.width, header.height, header.channels)
    if header.mode in _BINARY_SAMPLES:
        image = images.rawload(os.fsencode(path), *shape, offset=header.data_offset, format=header.sample_type)
        if header.deep and np.little_endian:  # the file has the high byte first
            image = image.byteswap()
    else:
        image = images.new_from_memory(_decode(path, form, header), *shape, header.sample_type)
    return stretch(image, header.white).copy(interpretation=meaning_of(header.channels, header.deep))


def _decode(path: Path, form: Format, header: _Header) -> np.ndarray:
    """Returns the samples, (height, width, channels) of uint8 or uint16."""
    try:
        if form.name == "pnm":
            samples = _decode_netpbm(path.read_bytes()[header.data_offset :], header)
        elif header.deep and header.channels > 1:
            samples = _decode_deep(path)
        else:
            with _opened(path, form) as image:
                samples = np.asarray(image if header.mode in _GREY_16 else image.convert(header.mode))
        samples = samples if samples.ndim == 3 else samples[..., None]
        if samples.shape != (header.height, header.width, header.channels):
            raise ValueError(f"the shape is {samples.shape}")
    except (av.FFmpegError, OSError, SyntaxError, ValueError, IndexError, MemoryError) as error:
        raise ImageError(f"cannot read {str(path)!r}: {DAMAGED}.") from error
    return np.ascontiguousarray(samples, np.uint16 if header.deep else np.uint8)


def _read_header(path: Path, form: Format) -> _Header:
    if form.name == "pnm":
        return _read_netpbm_header(path)
    components, bits, profile = 1, 8, None
    if form.name == "jp2":
        components, bits = _read_depth(path)
        profile = _read_profile(path)
    with _opened(path, form) as image:
        dpi, mode = image.info.get("dpi"), _AS.get(image.mode, image.mode)
        if bits > 8 and components > 1:
            return _Header(*image.size, 4 if components == 4 else 3, _white(bits), "", dpi, profile)
        if mode == "RGB" and "transparency" in image.info:
            mode = "RGBA"
        if mode in _GREY_16:
            return _Header(*image.size, 1, _white(max(bits, 9)), mode, dpi, profile)
        if mode not in _CHANNELS:
            raise ImageError(f"cannot read {str(path)!r}: its mode {image.mode} is neither grey nor RGB.")
        return _Header(*image.size, _CHANNELS[mode], 255, mode, dpi, profile)


def _white(bits: int) -> int:
    """Returns the value of white: decoders store samples of 9 to 16 bits in the upper bits of 16-bit numbers."""
    return (2**bits - 1) << (16 - bits)


def _opened(path: Path, form: Format) -> Image.Image:
    try:
        return _READERS[form.name](path)
    except (OSError, SyntaxError, ValueError, IndexError, KeyError, TypeError, OverflowError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else DAMAGED
        raise ImageError(f"cannot read {str(path)!r}: {reason}.") from error


def _read_depth(path: Path) -> tuple[int, int]:
    """Returns the number of components and their largest number of bits, from the start of the codestream."""
    with path.open("rb") as file:
        start = 0 if file.read(4) == CODESTREAM_2000 else None
        start = next((begin for kind, begin, _ in boxes(file) if kind == b"jp2c"), start)
        if start is None:
            raise ImageError(f"cannot read {str(path)!r}: it holds no JPEG 2000 data.")
        file.seek(start)
        head = file.read(_CODESTREAM_BYTES)
    if head[:4] != CODESTREAM_2000 or len(head) < 43:
        raise ImageError(f"cannot read {str(path)!r}: {DAMAGED}.")
    components = struct.unpack(">H", head[40:42])[0]
    depths = [(byte & 0x7F) + 1 for byte in head[42 : 42 + 3 * components : 3]]
    return components, max(depths, default=8)


def _read_profile(path: Path) -> bytes | None:
    """Returns the ICC profile of a JP2 file, if it has one."""
    with path.open("rb") as file:
        for kind, begin, end in boxes(file):
            if kind != b"jp2h":
                continue
            for inner, start, stop in boxes(file, begin, end):
                file.seek(start)
                if inner == b"colr" and file.read(3)[:1] in (b"\x02", b"\x03"):
                    return file.read(stop - start - 3)
    return None


def _decode_deep(path: Path) -> np.ndarray:
    """Decodes colour of more than 8 bits to (H, W, 3 or 4) of uint16; samples use the highest bits."""
    decoder = av.CodecContext.create("jpeg2000", "r")
    assert isinstance(decoder, VideoCodecContext)
    frame = [*decoder.decode(Packet(path.read_bytes())), *decoder.decode(None)][0]
    if frame.is_corrupt:
        raise ValueError("the frame is damaged")
    if frame.format.name not in _DEEP:
        raise ImageError(
            f"cannot read {str(path)!r}: its samples are {frame.format.name}; convert it to TIFF or PNG first."
        )
    return frame.to_ndarray()


def _read_netpbm_header(path: Path) -> _Header:
    with path.open("rb") as file:
        head = file.read(_HEADER_BYTES)
    mode = head[:2].decode("latin-1")
    numbers = 2 if mode in _BITMAPS else 3
    found = re.match(rb"P\d" + (_GAP + rb"(\d{1,9})") * numbers + rb"\s", head)
    if found is not None:
        width, height, white = (int(number) for number in (*found.groups(), 1)[:3])
        if min(width, height) >= 1 and 1 <= white <= 65535:
            return _Header(width, height, 3 if mode in ("P3", "P6") else 1, white, mode, data_offset=found.end())
    raise ImageError(f"cannot read {str(path)!r}: {DAMAGED}.")


def _decode_netpbm(data: bytes, header: _Header) -> np.ndarray:
    """Decodes Netpbm bitmaps and text formats; raises ValueError if samples are missing or too large."""
    shape = (header.height, header.width, header.channels)
    count = header.height * header.width * header.channels
    if header.mode == "P4":
        rows = np.frombuffer(data, np.uint8, header.height * -(-header.width // 8)).reshape(header.height, -1)
        return 1 - np.unpackbits(rows, axis=1)[:, : header.width]
    text = re.sub(rb"#[^\n]*", b"", data)
    if header.mode == "P1":  # digits need no space between them, and 1 is black
        return (1 - (np.frombuffer(re.sub(rb"[^01]", b"", text), np.uint8, count) - ord("0"))).reshape(shape)
    values = np.array(text.split(maxsplit=count)[:count], dtype=np.int64)
    if values.max() > header.white:
        raise ValueError("a sample is larger than the header allows")
    return values.reshape(shape)

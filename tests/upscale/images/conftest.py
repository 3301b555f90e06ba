"""Images made on the spot, and how the tests read one whole."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from redline.upscale.images.sink import ImageSink
from redline.upscale.images.source import open_image

Maker = Callable[..., np.ndarray]


def make_samples(height: int, width: int, channels: int = 3, bits: int = 8, seed: int | None = None) -> np.ndarray:
    """A smooth image with noise on it, which lossy formats keep near and lossless ones cannot fold away."""
    generator = np.random.default_rng(seed)
    down, across = np.mgrid[0:height, 0:width]
    phases = generator.uniform(0, 6, channels)
    waves = 0.5 + 0.4 * np.sin(down[..., None] / 37 + across[..., None] / 23 + phases)
    noisy = (waves + generator.normal(0, 0.02, waves.shape)).clip(0, 1) * (2**bits - 1)
    return noisy.round().astype(np.uint8 if bits == 8 else np.uint16)


def read_all(path: Path, **options: bool) -> np.ndarray:
    with open_image(path, **options) as source:
        return source.rows(0, source.height)


def copy_picture(source: Path, target: Path, strip: bool = False) -> tuple[str, ...]:
    """Writes what was read, with what it carries, and gives the notes on what could not be kept."""
    with open_image(source) as opened:
        shape = (opened.width, opened.height, opened.channels, opened.bits)
        with ImageSink(target, *shape, metadata=opened.metadata, strip=strip) as sink:
            sink.write_rows(opened.rows(0, opened.height))
    return sink.notes


@pytest.fixture
def copy() -> Callable[..., tuple[str, ...]]:
    return copy_picture


@pytest.fixture
def samples() -> Maker:
    return make_samples


@pytest.fixture
def read_whole() -> Callable[..., np.ndarray]:
    return read_all

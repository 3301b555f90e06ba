"""The settings of an upscaling run, and the presets."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from redline.errors import RedlineError
from redline.files.config_fields import check_fields
from redline.files.limits import NonNegativeInt, PositiveInt
from redline.ladder.plan import Plan
from redline.machine.cores import cores
from redline.upscale.choices import PIXEL_LIMIT
from redline.upscale.images.sink import Encoding
from redline.upscale.video.settings import VideoSettings

# The (width, height) of each tile shape of a run.
TileSizes = tuple[tuple[int, int], ...]

PRECISIONS = ("auto", "fp32", "fp16", "bf16", "int8")


@dataclass(frozen=True)
class Tiles:
    """The tile shapes of a run, the batch size if known, and a digest of the image sizes they were chosen for."""

    sizes: TileSizes
    batch: int | None = None
    chosen_for: str = field(default="", compare=False)


@dataclass(frozen=True)
class ImageSettings:
    wrap: bool = False
    strip: bool = False
    encoding: Encoding = field(default_factory=Encoding)
    max_pixels: PositiveInt = PIXEL_LIMIT
    # How many images are encoded at once. Encoding 16 megapixels takes almost a second on one core.
    encoders: int = field(default_factory=lambda: max(4, min(12, cores() // 2)))


@dataclass(frozen=True)
class UpscaleSettings:
    """None means automatic: tile and batch size from the available memory, two streams, a bundled plan."""

    weights: Path | None = None
    # The scale of the weights. Without `weights`, it selects the bundled weights (None: ×4).
    scale: int | None = None
    device: str = "auto"
    precision: str = "auto"
    plan: Plan | None = None
    # The execution provider for weights in an ONNX file.
    provider: str = "cpu"
    # The side of a square tile, or its width and height.
    tile: int | tuple[int, int] | None = None
    tile_batch: PositiveInt | None = None
    # The number of CUDA streams, of which one computes and the others copy. As many batches of tiles are in flight.
    streams: PositiveInt | None = None
    memory_bytes: PositiveInt | None = None
    # Processes that share the files; by default one per GPU. They split images of over `split_pixels`.
    workers: PositiveInt | None = None
    split_pixels: int = 32_000_000
    # The discarded margin of a tile and the length over which neighbouring tiles are blended, in source pixels.
    margin_px: NonNegativeInt = 16
    ramp_px: NonNegativeInt = 16
    resume: bool = False
    images: ImageSettings = field(default_factory=ImageSettings)
    videos: VideoSettings = field(default_factory=VideoSettings)

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise RedlineError(f"unknown precision {self.precision!r}: choose {', '.join(PRECISIONS)}.")
        if self.plan is not None and self.precision != "auto":
            raise RedlineError("a plan sets the precision: leave out --precision or --plan.")
        if self.is_onnx:
            if self.memory_bytes is not None:
                raise RedlineError(
                    "the memory use of an ONNX network is not measured: give --tile-batch instead of --memory."
                )
            for name, automatic in {"tile": None, "plan": None, "precision": "auto"}.items():
                if getattr(self, name) != automatic:
                    raise RedlineError(f"an ONNX file has a fixed {name}: leave out --{name}.")
        elif self.provider != "cpu":
            raise RedlineError("--provider is for ONNX files: give one with --weights, or leave it out.")
        check_fields(self.images)
        check_fields(self)
        # Not a limit of the field: msgspec 0.22 crashes on a union of a limited integer and a tuple of two.
        if self.tile_sizes and min(self.tile_sizes[0]) < 1:
            raise RedlineError(f"tile = {self.tile} must be at least 1 pixel.")

    @property
    def is_onnx(self) -> bool:
        return self.weights is not None and self.weights.suffix.lower() == ".onnx"

    @property
    def tile_sizes(self) -> "TileSizes | None":
        if self.tile is None:
            return None
        return (self.tile if isinstance(self.tile, tuple) else (self.tile, self.tile),)


PRESETS: dict[str, dict[str, Any]] = {
    # The preset sets no batch size: with a fixed size, incomplete batches would be filled up with copies.
    "speed": {"margin_px": 8, "ramp_px": 8},
    "balanced": {},
    "memory": {"tile": 256, "tile_batch": 1, "streams": 1},
    "quality": {"precision": "fp32", "margin_px": 32, "ramp_px": 32},
}


def with_preset(settings: UpscaleSettings, preset: str) -> UpscaleSettings:
    """Returns the settings with the values of the preset in place of default values."""
    if preset not in PRESETS:
        raise RedlineError(f"unknown preset {preset!r}: choose {', '.join(PRESETS)}.")
    plain = UpscaleSettings()
    chosen = {k: v for k, v in PRESETS[preset].items() if getattr(settings, k) == getattr(plain, k)}
    if settings.plan is not None or settings.is_onnx:
        chosen.pop("precision", None)
    # The preset's tile is not used for an ONNX file, whose tile is fixed, nor under a memory limit, because the tile is
    # then chosen to fit the limit.
    if settings.is_onnx or settings.memory_bytes is not None:
        chosen.pop("tile", None)
    return replace(settings, **chosen)


def describe_network(settings: UpscaleSettings, plan: str, digest: str) -> str:
    """Returns all settings that determine the upscaled pixels, except the tiles, to compare with an earlier run."""
    return f"{digest} {plan} margin={settings.margin_px} ramp={settings.ramp_px}"


def describe(settings: UpscaleSettings, network: str, is_video: bool) -> str:
    """Returns all settings that determine a result, to compare with an earlier run."""
    if is_video:
        videos = settings.videos
        made = f"codec={videos.codec} crf={videos.crf} keep_going={videos.keep_going} strip={videos.strip}"
        return f"{network} {made}"
    images = settings.images
    return f"{network} wrap={images.wrap} strip={images.strip} {images.encoding}"

"""What an upscaling is asked to do, and the presets: names for settings that belong together."""

from dataclasses import dataclass, field, replace
from pathlib import Path

from redline.choices import PIXEL_LIMIT
from redline.errors import RedlineError
from redline.ladder.plan import Plan
from redline.machine.cores import cores
from redline.upscale.images import Encoding
from redline.upscale.video import VideoSettings

# Widths and heights of all tiles of a run.
TileSizes = tuple[tuple[int, int], ...]

PRECISIONS = ("auto", "fp32", "fp16", "bf16", "int8")


@dataclass(frozen=True)
class Tiles:
    """Widths and heights of all tiles of a run, how many at a time, where that is known, and a digest of the sizes of
    the images that they were chosen for."""

    sizes: TileSizes
    batch: int | None = None
    chosen_for: str = field(default="", compare=False)


@dataclass(frozen=True)
class ImageSettings:
    wrap: bool = False
    strip: bool = False
    encoding: Encoding = field(default_factory=Encoding)
    pixel_limit: int = PIXEL_LIMIT
    # How many images may be encoded at once: one of 16 megapixels keeps a core busy for most of a second.
    encoders: int = field(default_factory=lambda: max(4, min(12, cores() // 2)))


@dataclass(frozen=True)
class UpscaleSettings:
    """`None` is for automatic: the tile and the batch from the memory, two streams, the plan from what is shipped."""

    weights: Path | None = None
    # Weights decide it; of those that are shipped, ×4 by default.
    scale: int | None = None
    device: str = "auto"
    precision: str = "auto"
    plan: Plan | None = None
    # What runs weights that are an ONNX file.
    provider: str = "cpu"
    # A side of a tile, or its width and height.
    tile: int | tuple[int, int] | None = None
    tile_batch: int | None = None
    # Of a GPU: one computes and the others copy. So many batches of tiles are under way at once.
    streams: int | None = None
    memory_bytes: int | None = None
    # Processes that share the files; by default one a GPU, where there are several. Images of more pixels than
    # `split_pixels` are shared too.
    workers: int | None = None
    split_pixels: int = 32_000_000
    # What is thrown away at a tile's edge, and over how much neighbours fade into each other; in pixels of the source.
    margin_px: int = 16
    ramp_px: int = 16
    resume: bool = False
    images: ImageSettings = field(default_factory=ImageSettings)
    videos: VideoSettings = field(default_factory=VideoSettings)

    def __post_init__(self) -> None:
        if self.precision not in PRECISIONS:
            raise RedlineError(f"unknown precision {self.precision!r}: choose {', '.join(PRECISIONS)}.")
        if self.plan is not None and self.precision != "auto":
            raise RedlineError("a plan says its own precision: leave out --precision or --plan.")
        limits = dict.fromkeys(("tile", "tile_batch", "streams", "memory_bytes", "workers"), 1)
        limits |= {"margin_px": 0, "ramp_px": 0}
        if self.is_onnx:
            if self.memory_bytes is not None:
                raise RedlineError("what an ONNX file takes is not measured: give --tile-batch, or leave out --memory.")
            given = [n for n in ("tile", "plan") if getattr(self, n) is not None] + ["precision"] * (
                self.precision != "auto"
            )
            if given:
                raise RedlineError(f"an ONNX file has its {given[0]} in it: leave out --{given[0]}.")
        elif self.provider != "cpu":
            raise RedlineError("a provider runs ONNX files: give one with --weights, or leave out --provider.")
        if self.images.pixel_limit < 1:
            raise RedlineError(f"--max-pixels is at least 1, not {self.images.pixel_limit}.")
        for name, least in limits.items():
            given = getattr(self, name)
            for value in given if isinstance(given, tuple) else (given,):
                if value is not None and value < least:
                    # Pixels of overlap are no option: presets choose them.
                    said = name if name.endswith("_px") else "--" + name.removesuffix("_bytes").replace("_", "-")
                    raise RedlineError(f"{said} is at least {least}, not {value}.")

    @property
    def is_onnx(self) -> bool:
        return self.weights is not None and self.weights.suffix.lower() == ".onnx"

    @property
    def tile_sizes(self) -> "TileSizes | None":
        if self.tile is None:
            return None
        return (self.tile if isinstance(self.tile, tuple) else (self.tile, self.tile),)


PRESETS = {
    # The batch stays automatic: a fixed one, as the guide has it, is filled up with tiles that nobody needs.
    "speed": {"margin_px": 8, "ramp_px": 8},
    "balanced": {},
    "memory": {"tile": 256, "tile_batch": 1, "streams": 1},
    "quality": {"precision": "fp32", "margin_px": 32, "ramp_px": 32},
}


def with_preset(settings: UpscaleSettings, preset: str) -> UpscaleSettings:
    """The preset fills in what was left automatic; what was asked for by name stays."""
    if preset not in PRESETS:
        raise RedlineError(f"unknown preset {preset!r}: choose {', '.join(PRESETS)}.")
    plain = UpscaleSettings()
    chosen = {k: v for k, v in PRESETS[preset].items() if getattr(settings, k) == getattr(plain, k)}
    if settings.plan is not None or settings.is_onnx:
        chosen.pop("precision", None)
    # An ONNX file has its own tile, and a limit says how large one may be.
    if settings.is_onnx or settings.memory_bytes is not None:
        chosen.pop("tile", None)
    return replace(settings, **chosen)


def describe_network(settings: UpscaleSettings, plan: str, digest: str) -> str:
    """Everything that decides how enlarged pixels look, but for the tiles, as text: for resuming."""
    return f"{digest} {plan} margin={settings.margin_px} ramp={settings.ramp_px}"


def describe(settings: UpscaleSettings, network: str, is_video: bool) -> str:
    """Everything that decides how a result looks."""
    if is_video:
        videos = settings.videos
        made = f"codec={videos.codec} crf={videos.crf} preset={videos.preset} keep_going={videos.keep_going}"
        return f"{network} {made} strip={videos.strip}"
    images = settings.images
    return f"{network} wrap={images.wrap} strip={images.strip} {images.encoding}"

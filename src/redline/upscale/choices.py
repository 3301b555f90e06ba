"""Names and limits that `--help` shows, in a module of their own, because help imports no large package."""

UPSCALE_PRESETS = ("speed", "balanced", "memory", "quality")

# Images with more pixels than this are refused by default.
PIXEL_LIMIT = 1_000_000_000

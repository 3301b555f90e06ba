"""Renders a profile as an HTML page."""

from pathlib import Path

from redline.files.atomic import write_text
from redline.ladder.profile.memory import LayerMemory
from redline.ladder.profile.result import Profile
from redline.notation import format_bytes, format_rate, format_seconds
from redline.pages import Tile, render_page

# The parts of a layer's memory in the order of the bars. The names are also color classes of the style sheet.
_MEMORY_PARTS = {
    "weights": "weight_bytes",
    "activations": "activation_bytes",
    "gradients": "gradient_bytes",
    "optimizer": "optimizer_bytes",
}


def render_profile(profile: Profile, top: int = 10) -> str:
    """Returns the page; each list and table shows its `top` largest entries."""
    return render_page(
        "redline.ladder.profile",
        "profile.html.jinja",
        profile=profile,
        top=top,
        tiles=_tiles(profile),
        memory_parts=_memory_parts,
        memory_part_names=list(_MEMORY_PARTS),
        percent_of=lambda part, whole: f"{part / whole:.2%}" if whole else "0",
    )


def write_page(profile: Profile, path: Path, top: int = 10) -> None:
    write_text(path, render_profile(profile, top))


def _tiles(profile: Profile) -> list[Tile]:
    tiles = [Tile("Time per step", format_seconds(profile.step_s))]
    if (times := profile.layers) is not None:
        tiles.append(Tile("Arithmetic per step", format_rate(times.flops, "FLOP")))
        if times.ceiling_flops_per_s:
            share = times.flops / profile.step_s / times.ceiling_flops_per_s
            tiles.append(Tile("Of the machine's rate", f"{share:.1%}", f"in {times.precision}"))
    if (memory := profile.memory) is not None:
        tiles.append(Tile("Weights", format_bytes(memory.weight_bytes)))
        if peak := memory.peak_bytes or memory.counted_peak_bytes:
            tiles.append(Tile("Peak memory", format_bytes(peak)))
    if profile.attention is not None:
        tiles.append(Tile("Attention", f"{profile.attention.share:.1%}"))
    return tiles


def _memory_parts(layer: LayerMemory) -> list[tuple[str, int]]:
    sizes = ((name, getattr(layer, field)) for name, field in _MEMORY_PARTS.items())
    return [(name, size) for name, size in sizes if size]

"""A profile as one self-contained page: plain HTML and CSS, no script, no network."""

from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined

from redline.files.atomic import write_text
from redline.ladder.profile.memory import LayerMemory
from redline.ladder.profile.result import Profile
from redline.ladder.profile.sentences import layer_name, measuring_cost, memory_totals
from redline.notation import format_bytes, format_rate, format_seconds

# The parts of a layer's memory, in the order of the bars, with the colour class of each.
_PARTS = (
    ("weights", "weight_bytes"),
    ("activations", "activation_bytes"),
    ("gradients", "gradient_bytes"),
    ("optimizer", "optimizer_bytes"),
)


def _parts(layer: LayerMemory) -> list[tuple[str, int]]:
    return [(name, getattr(layer, field)) for name, field in _PARTS if getattr(layer, field)]


def render_page(profile: Profile, top: int = 10) -> str:
    environment = Environment(
        loader=PackageLoader("redline.ladder.profile", "."),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters |= {
        "seconds": format_seconds,
        "bytes": format_bytes,
        "rate": lambda value: format_rate(value, "FLOP/s"),
        "flop": lambda value: format_rate(value, "FLOP"),
        "percent": lambda share: f"{share:.1%}",
        "layer": layer_name,
        "cost": measuring_cost,
        "totals": memory_totals,
        "part": lambda size, whole: f"{size / whole:.2%}" if whole else "0",
        "parts": _parts,
    }
    template = environment.get_template("profile.html.jinja")
    return template.render(profile=profile, top=top, part_names=[name for name, _ in _PARTS])


def write_page(profile: Profile, path: Path, top: int = 10) -> None:
    write_text(path, render_page(profile, top))

"""Settings of language models that come with Redline, by name."""

from pathlib import Path

from redline.errors import RedlineError
from redline.training.settings import read_toml

CONFIGS = Path(__file__).parents[1] / "configs"


def find_text_settings(name: str) -> Path:
    """A file, or the bundled settings of that name."""
    path = Path(name)
    if path.exists() or path.suffix:
        return path
    # Other kinds of training, whose settings lie beside, know no kinds of models.
    bundled = sorted(file.stem for file in CONFIGS.glob("*.toml") if "kind" in read_toml(file)["model"])
    if name not in bundled:
        raise RedlineError(
            f"there are no settings {name!r} of a language model: give a .toml file, or one of {', '.join(bundled)}."
        )
    return CONFIGS / f"{name}.toml"

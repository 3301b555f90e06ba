"""Finds the language models that come with Redline, so that chat works without a download."""

from pathlib import Path

from redline.errors import ModelError

WEIGHTS = Path(__file__).parent / "weights"
# The model that is used if the caller names none.
DEFAULT = "talk-small"


def bundled_language_models() -> dict[str, Path]:
    """Returns the folders of the bundled language models by their names."""
    return {path.parent.name: path.parent for path in sorted(WEIGHTS.glob("*/config.json"))}


def bundled_language_model(name: str = DEFAULT) -> Path:
    """Returns the folder of a bundled language model. Raises ModelError if there is no model of that name."""
    found = bundled_language_models()
    if name not in found:
        there = f"the bundled models are {', '.join(found)}" if found else "no language model comes with this version"
        raise ModelError(
            f"there is no bundled language model {name!r}: {there}. Give the folder of a model, or train one with "
            f"`redline train {DEFAULT}`."
        )
    return found[name]

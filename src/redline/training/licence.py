"""The licence section of a model card."""

from pathlib import Path

_NAMES = ("licence", "license", "copying")
_MOST_CHARACTERS = 4000


def licence_section(photos: str) -> list[str]:
    """Quotes the licence file in the folder of photos, or says that there is none."""
    folder = Path(photos)
    files = sorted(folder.iterdir()) if folder.is_dir() else []
    found = next((path for path in files if path.is_file() and path.name.lower().startswith(_NAMES)), None)
    lines = ["## Licence", "", "State here under which licence you publish these weights.", ""]
    if found is None:
        return [*lines, "The folder of photos has no licence file: state here under which terms they were used.", ""]
    text = found.read_text(encoding="utf-8", errors="replace")
    quoted = [f"> {line}".rstrip() for line in text[:_MOST_CHARACTERS].strip().splitlines()]
    more = ["> …"] if len(text) > _MOST_CHARACTERS else []
    return [*lines, f"The licences of the photos, from their file `{found.name}`:", "", *quoted, *more, ""]

"""Settings that come with Redline, by name, for each kind of training."""

from pathlib import Path

from redline.errors import RedlineError
from redline.files.untrusted import read_toml

CONFIGS = Path(__file__).parent / "configs"
# What is trained, and by which words of the command line.
_KINDS = {
    "text": ("a language model", "redline train"),
    "drct": ("a super-resolution model", "redline train drct"),
    "lsd": ("a live video model", "redline train lsd"),
}


def find_settings(name: str, kind: str) -> Path:
    """A file, or the bundled settings of that name; a folder of that name is neither."""
    path = Path(name)
    if path.suffix or (path.exists() and not path.is_dir()):
        return path
    bundled = {file.stem: _kind_of(file) for file in sorted(CONFIGS.glob("*.toml"))}
    if bundled.get(name) == kind:
        return CONFIGS / f"{name}.toml"
    what, _ = _KINDS[kind]
    if name in bundled:
        other, command = _KINDS[bundled[name]]
        raise RedlineError(f"the settings {name!r} are of {other}, not of {what}: it is trained by `{command} {name}`.")
    known = ", ".join(one for one, its_kind in bundled.items() if its_kind == kind)
    raise RedlineError(f"there are no settings {name!r} of {what}: give a .toml file, or one of {known}.")


def _kind_of(file: Path) -> str:
    # Only language models come in kinds; the others are named after theirs.
    return "text" if "kind" in read_toml(file, "settings file")["model"] else file.stem.partition("-")[0]

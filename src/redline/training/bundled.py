"""Finds config files by path or by the name of a bundled config, and determines which kind of model they train."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from redline.errors import RedlineError
from redline.files.untrusted import read_toml

CONFIGS = Path(__file__).parent / "configs"
# Maps each kind of config to the kind of model that it trains and to the command that trains it.
_KINDS = {
    "text": ("a language model", "redline train"),
    "drct": ("a super-resolution model", "redline train drct"),
    "lsd": ("a live video model", "redline train lsd"),
}


def find_config(name: str, kind: str | None = None) -> tuple[Path, str]:
    """Returns the path and the kind of a config.

    `name` is the path of a file or the name of a bundled config; a folder of that name is ignored. If `kind` is given,
    a bundled config of another kind raises an error. Otherwise the contents of the config determine the kind.
    """
    if kind is not None and kind not in _KINDS:
        raise RedlineError(f"unknown kind {kind!r}: use one of {', '.join(_KINDS)}.")
    path = Path(name)
    if path.suffix or (path.exists() and not path.is_dir()):
        return path, kind or kind_of(read_toml(path, "config file"))
    bundled = {file.stem: kind_of(read_toml(file, "config file")) for file in sorted(CONFIGS.glob("*.toml"))}
    if name in bundled and kind in (None, bundled[name]):
        return CONFIGS / f"{name}.toml", bundled[name]
    what = f" for {_KINDS[kind][0]}" if kind else ""
    if name in bundled:
        model, command = _KINDS[bundled[name]]
        raise RedlineError(f"the config {name!r} is for {model}, not{what}: train it with `{command} {name}`.")
    known = ", ".join(one for one, its_kind in bundled.items() if kind in (None, its_kind))
    raise RedlineError(f"there is no config {name!r}{what}: give a .toml file, or one of {known}.")


def kind_of(config: Mapping[str, Any]) -> str:
    """Returns "text", "drct" or "lsd" from the keys that only configs of that kind have."""
    model = config.get("model", {})
    if "stages" in config or (isinstance(model, Mapping) and "size" in model):
        return "lsd"
    return "drct" if isinstance(model, Mapping) and {"scale", "groups", "growth"} & model.keys() else "text"

"""Configs are found by file or bundled name."""

from pathlib import Path

import pytest

from redline.errors import RedlineError
from redline.training.bundled import CONFIGS, find_config


@pytest.mark.parametrize(("name", "kind"), [("decoder-tiny", "text"), ("lsd-tiny", "lsd"), ("drct-small-x4", "drct")])
def test_bundled_settings_are_found_by_name_and_kind(name: str, kind: str) -> None:
    names = {file.stem for file in CONFIGS.glob("*.toml")}
    if name not in names:
        name = next(one for one in sorted(names) if one.startswith(name.partition("-")[0]))
    assert find_config(name, kind) == find_config(name) == (CONFIGS / f"{name}.toml", kind)
    other = "lsd" if kind != "lsd" else "text"
    with pytest.raises(RedlineError, match=f"the config '{name}' is for .*, not for"):
        find_config(name, other)


def test_a_file_takes_precedence_and_a_folder_is_ignored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("decoder-tiny").mkdir()
    assert find_config("decoder-tiny", "text") == (CONFIGS / "decoder-tiny.toml", "text")
    Path("mine").touch()
    assert find_config("mine", "lsd") == (Path("mine"), "lsd")
    assert find_config("missing.toml", "text") == (Path("missing.toml"), "text")
    with pytest.raises(RedlineError, match="there is no config 'nothing' for a language model: .* decoder-tiny"):
        find_config("nothing", "text")
    with pytest.raises(RedlineError, match="there is no config 'nothing': .* decoder-tiny, drct-small-x2"):
        find_config("nothing")
    with pytest.raises(RedlineError, match="unknown kind 'gan': use one of text, drct, lsd"):
        find_config("decoder-tiny", "gan")

"""Settings that come with Redline, by name."""

from pathlib import Path

import pytest

from redline.errors import RedlineError
from redline.training.bundled import CONFIGS, find_settings


@pytest.mark.parametrize(("name", "kind"), [("decoder-tiny", "text"), ("lsd-tiny", "lsd"), ("drct-small-x4", "drct")])
def test_bundled_settings_are_found_by_name_and_kind(name: str, kind: str) -> None:
    names = {file.stem for file in CONFIGS.glob("*.toml")}
    if name not in names:
        name = next(one for one in sorted(names) if one.startswith(name.partition("-")[0]))
    assert find_settings(name, kind) == CONFIGS / f"{name}.toml"
    other = "lsd" if kind != "lsd" else "text"
    with pytest.raises(RedlineError, match=f"the settings '{name}' are of .*, not of"):
        find_settings(name, other)


def test_a_file_comes_first_and_a_folder_is_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("decoder-tiny").mkdir()
    assert find_settings("decoder-tiny", "text") == CONFIGS / "decoder-tiny.toml"
    Path("mine").touch()
    assert find_settings("mine", "text") == Path("mine")
    assert find_settings("missing.toml", "text") == Path("missing.toml")
    with pytest.raises(RedlineError, match="there are no settings 'nothing' of a language model: .* decoder-tiny"):
        find_settings("nothing", "text")

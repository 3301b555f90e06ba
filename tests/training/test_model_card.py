"""A model card says under which licences the photos came."""

from pathlib import Path

from redline.training.model_card import licence_section


def test_the_photos_own_file_is_quoted(tmp_path: Path) -> None:
    assert "The folder of photos has no licence file" in licence_section(str(tmp_path))
    assert licence_section(str(tmp_path / "absent")) == licence_section(str(tmp_path))
    (tmp_path / "LICENSES.md").write_text("- `a-*`: CC0 1.0\n\n- `b-*`: CC BY-SA 4.0\n" + "x" * 5000)
    lines = licence_section(str(tmp_path)).splitlines()
    assert lines[0] == "## Licence" and "The licences of the photos, from their file `LICENSES.md`:" in lines
    assert lines[6:9] == ["> - `a-*`: CC0 1.0", ">", "> - `b-*`: CC BY-SA 4.0"] and lines[-1] == "> …"

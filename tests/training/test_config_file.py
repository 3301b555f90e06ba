"""Reading and checking configs: every error names the key, the table, the value and what is allowed."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from redline.errors import RedlineError
from redline.files.config_fields import decode
from redline.training.config_file import override, read_config


@dataclass(frozen=True)
class Example:
    count: int = 1
    share: float = 0.5
    name: str = ""
    sure: bool = False
    sizes: tuple[int, ...] = (1,)
    limit: int | None = None


def test_decode_reads_every_type() -> None:
    table = {"count": 3, "share": 2, "name": "x", "sure": True, "sizes": [4, 5], "limit": 7}
    assert decode(Example, table, "under [example]") == Example(3, 2.0, "x", True, (4, 5), 7)
    assert decode(Example, {"sizes": 2}, "under [example]").sizes == (2,)
    assert decode(Example, {}, "under [example]") == Example()


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ({"cuont": 3}, r"unknown key 'cuont' under \[example\] \(did you mean count\?\)"),
        ({"zebra": 3}, r"unknown key 'zebra' .* \(known: count, share"),
        ({"count": 2.5}, r"count = 2.5 under \[example\] must be a whole number\."),
        ({"count": True}, "count = True .* must be a whole number"),
        ({"count": 2**70}, "count = 1180591620717411303424 .* is not a finite 64-bit number"),
        ({"share": "half"}, "share = 'half' .* must be a number"),
        ({"sure": 1}, "sure = 1 .* must be true or false"),
        ({"sizes": [1, "two"]}, r"sizes = \[1, 'two'\] .* must be a list, each a whole number"),
        ({"limit": "none"}, "limit = 'none' .* must be a whole number"),
        ({"share": float("nan")}, "share = nan .* is not a finite 64-bit number"),
        ({"share": float("inf")}, "share = inf .* is not a finite 64-bit number"),
    ],
)
def test_errors_name_key_table_value_and_type(table: dict[str, object], said: str) -> None:
    with pytest.raises(RedlineError, match=said):
        decode(Example, table, "under [example]")


def test_files_and_sections(tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    path.write_text("[model]\nwidth = 3\n")
    for source in (path, {"model": {"width": 3}}):
        with read_config(source, ("model", "data")) as tables:
            assert tables == {"model": {"width": 3}, "data": {}}
    with pytest.raises(RedlineError, match=rf"^{path}: wrong$"), read_config(path, ("model",)):
        raise RedlineError("wrong")
    unknown = r"a.toml: unknown table \[model\] \(did you mean models"
    with pytest.raises(RedlineError, match=unknown), read_config(path, ("models",)):
        pass
    path.write_text("model = 3\n")
    with pytest.raises(RedlineError, match=r"model must be a table: write \[model\]"), read_config(path, ("model",)):
        pass
    path.write_text("[model\n")
    with pytest.raises(RedlineError, match="not TOML"), read_config(path, ("model",)):
        pass
    with pytest.raises(RedlineError, match="cannot read"), read_config(tmp_path / "none.toml", ("model",)):
        pass


def test_steps_and_minutes_override_each_other() -> None:
    table = {"steps": 3, "seed": 1}
    override(table, steps=None, minutes=None)
    assert table == {"steps": 3, "seed": 1}
    override(table, minutes=2.0)
    assert table == {"minutes": 2.0, "seed": 1}

"""Which of the paths on the command line is the output, and which mistakes must not become one."""

import json
from pathlib import Path

import pytest
from PIL import Image

from redline.errors import RedlineError
from redline.upscale.arguments import Arguments, read_arguments
from redline.upscale.journal import NAME


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for name in ("a.png", "b.png", "in/c.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    return tmp_path


def parts(given: str, out: str | None = None) -> tuple[list[str], str | None]:
    found = read_arguments(given.split(), None if out is None else Path(out))
    return [str(path) for path in found.sources], None if found.out is None else str(found.out)


@pytest.mark.parametrize(
    ("given", "sources", "out"),
    [
        ("a.png", ["a.png"], None),
        ("a.png large.png", ["a.png"], "large.png"),
        ("a.png large", ["a.png"], "large"),
        ("a.png large/", ["a.png"], "large"),
        ("in large", ["in"], "large"),
        ("a.png b.png", ["a.png", "b.png"], None),
        ("a.png in", ["a.png", "in"], None),
        ("absent.png b.png", ["absent.png", "b.png"], None),
        ("absent.png large.png", ["absent.png", "large.png"], None),
        ("a.png b.png large/", ["a.png", "b.png"], "large"),
        ("a.png b.png in", ["a.png", "b.png", "in"], None),
        ("a.png b.png tpyo.png", ["a.png", "b.png", "tpyo.png"], None),
    ],
)
def test_what_paths_mean(given: str, sources: list[str], out: str | None) -> None:
    assert parts(given) == (sources, out)


def test_with_out_all_are_sources() -> None:
    assert parts("a.png absent.png", "x.png") == (["a.png", "absent.png"], "x.png")


def test_a_name_that_could_be_either_is_refused() -> None:
    with pytest.raises(RedlineError, match="to write to a new folder of that name, type 'large/' or use --out"):
        parts("a.png b.png large")


def test_choices_are_said() -> None:
    assert "'large.png': it does not exist, so it is the output" in read_arguments(["a.png", "large.png"], None).note
    assert "'b.png' exists, so it is upscaled too" in read_arguments(["a.png", "b.png"], None).note
    assert read_arguments(["a.png"], None) == Arguments((Path("a.png"),), None)


def test_the_same_command_again_resumes(here: Path) -> None:
    """What a first run wrote exists at the second."""
    (here / "large").mkdir()
    assert parts("in large") == (["in", "large"], None)
    line = {"target": str(here / "large" / "c.png"), "source": str(here / "in" / "c.png")}
    (here / "large" / NAME).write_text("half a li\n" + json.dumps(line) + "\n")
    assert parts("in large") == (["in"], "large")
    assert parts("a.png large") == (["a.png", "large"], None)
    (here / NAME).write_text(json.dumps({"target": str(here / "b.png"), "source": str(here / "a.png")}))
    assert parts("a.png b.png") == (["a.png"], "b.png") and parts("b.png a.png") == (["b.png", "a.png"], None)
    # Several files into one folder, too.
    line = {"target": str(here / "large" / "a.png"), "source": str(here / "a.png")}
    (here / "large" / NAME).write_text(json.dumps(line))
    assert parts("a.png b.png large/") == (["a.png", "b.png"], "large")


@pytest.mark.parametrize(
    ("size", "is_refused"),
    [((40, 80), True), ((20, 40), True), ((10, 20), False), ((40, 79), False), ((25, 50), False)],
)
def test_what_could_be_the_result_of_the_first_path_is_not_enlarged(
    here: Path, size: tuple[int, int], is_refused: bool
) -> None:
    """A single image is not journalled, so only its size tells that an earlier run can have made it."""
    (here / "out dir").mkdir()
    Image.new("RGB", (10, 20)).save("a.png")
    Image.new("RGB", size).save("my b.jpg")
    Image.new("RGB", size).save("out dir/a.webp")
    for last, write in {"my b.jpg": "overwrite", "out dir": "write into"}.items():
        sources = (Path("a.png"), Path(last))
        assert read_arguments(["a.png", last], Path("x")).sources == sources
        assert read_arguments([last, "a.png"], None).sources == sources[::-1]
        if is_refused:
            with pytest.raises(RedlineError) as refused:
                read_arguments(["a.png", last], None)
            both = "to upscale both paths, add --out FOLDER."
            assert str(refused.value) == f"{last!r} exists: to {write} it, use --out {last!r}; {both}"
        else:
            assert read_arguments(["a.png", last], None).sources == sources

"""Settings changed by lines from a growing file, a named pipe and stdin."""

import os
import sys
import threading
import time
from pathlib import Path

import pytest

from patience import HANGS_S, PATIENCE_S
from redline.errors import RedlineError
from redline.models.lsd import save_lsd
from redline.stream.settings import LiveSettings, Settings, SettingsReader, parse_change
from redline.stream.stream import Stream
from stream.small_models import small_lsd

pytestmark = pytest.mark.timeout(HANGS_S)


class Heard(list[str]):
    """The logged messages; `wait` waits for more."""

    def __init__(self) -> None:
        super().__init__()
        self._came = threading.Condition()

    def __call__(self, sentence: str) -> None:
        with self._came:
            self.append(sentence)
            self._came.notify_all()

    def wait(self, count: int) -> None:
        with self._came:
            assert self._came.wait_for(lambda: len(self) >= count, PATIENCE_S), list(self)


@pytest.mark.parametrize(
    ("line", "changes"),
    [
        ("strength=0.4", {"strength": 0.4}),
        (' steps=2  seed=7 prompt="a red fox" ', {"steps": 2, "seed": 7, "prompt": "a red fox"}),
        ("control=0.5,1", {"control": (0.5, 1.0)}),
        ("control=", {"control": ()}),
        ("prompt='x=y'", {"prompt": "x=y"}),
        ("   # nothing but a remark", {}),
        ("", {}),
    ],
)
def test_a_line_is_parsed(line: str, changes: dict[str, object]) -> None:
    assert parse_change(line) == changes


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("strength", "invalid change 'strength': write a name and a value, as in strength=0.4"),
        ("strength=much", "invalid value 'much' for strength"),
        ("steps=1.5", "invalid value '1.5' for steps"),
        ("control=1,,2", "invalid value '1,,2' for control"),
        ('prompt="open', "no closing quotation"),
    ],
)
def test_an_invalid_line_is_refused(line: str, said: str) -> None:
    with pytest.raises(RedlineError, match=said):
        parse_change(line)


def test_a_file_that_grows(tmp_path: Path) -> None:
    path, heard, settings = tmp_path / "changes.txt", Heard(), LiveSettings(Settings(steps=1))
    path.write_text("seed=3\nwarmth=2\nstrength=7\n")
    with SettingsReader(str(path), settings, heard):
        heard.wait(3)
        assert settings.now() == Settings(steps=1, seed=3)
        with path.open("a") as file:
            file.write("stre")
            file.flush()
            time.sleep(0.3)
            file.write("ngth=0.25 steps=2\n")
        heard.wait(4)
    assert settings.now() == Settings(0.25, 2, 3)
    assert heard == [
        "changed seed to 3",
        "unknown setting 'warmth' (supported: strength, steps, seed, control, prompt).",
        "strength must be a number from 0 to 1, not 7.0.",
        "changed strength to 0.25, steps to 2",
    ]


@pytest.mark.parametrize(
    "second", ["strength=0.3\n", "strength=0.25\n", "seed=5\n"], ids=["as long", "longer", "shorter"]
)
def test_a_file_that_is_rewritten(second: str, tmp_path: Path) -> None:
    place, said = tmp_path / "changes", Heard()
    place.write_text("strength=0.9\n")
    settings = LiveSettings(Settings())
    with SettingsReader(str(place), settings, said):
        said.wait(1)
        place.write_text(second)
        said.wait(2)
        with place.open("a") as more:
            more.write("steps=3\n")
        said.wait(3)
    assert [line.split(" to ")[0] for line in said] == [
        "changed strength",
        f"changed {second.split('=')[0]}",
        "changed steps",
    ]
    assert settings.now().steps == 3


def test_a_pipe_outlives_its_writers_and_a_line_without_end(tmp_path: Path) -> None:
    path, heard, settings = tmp_path / "pipe", Heard(), LiveSettings()
    os.mkfifo(path)
    with SettingsReader(str(path), settings, heard):
        for seed in (1, 2):
            path.write_text(f"seed={seed}\n")
            heard.wait(seed)
        path.write_text("x" * 20_000)
        heard.wait(3)
        path.write_text("x" * 20_000 + "\nseed=4\n")
        heard.wait(5)
    assert settings.now().seed == 4 and "a line of more than 16,384 characters" in heard[2]


def test_what_a_file_holds_is_whole_and_what_is_added_is_so_with_the_end_of_its_line(tmp_path: Path) -> None:
    path, heard, settings = tmp_path / "changes.txt", Heard(), LiveSettings()
    path.write_text("seed=3")
    with SettingsReader(str(path), settings, heard):
        heard.wait(1)
        assert settings.now().seed == 3
        with path.open("a") as file:
            file.write("\nseed=4\nseed=5")
        heard.wait(2)
    assert settings.now().seed == 4, "no frame was made with the last one"
    assert heard == [
        "changed seed to 3",
        "changed seed to 4",
        "ignored 'seed=5': the line does not end with a newline.",
    ]


def test_standard_input_ends_and_the_stream_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    out, into = os.pipe()
    heard, settings = Heard(), LiveSettings()
    with open(out) as given, monkeypatch.context() as patch:
        patch.setattr(sys, "stdin", given)
        with SettingsReader("-", settings, heard):
            os.write(into, b"seed=5")
            os.close(into)
            heard.wait(1)
    assert settings.now().seed == 5


@pytest.mark.parametrize("missing", [True, False])
def test_what_cannot_be_read_is_reported_first(tmp_path: Path, missing: bool) -> None:
    place = str(tmp_path / "none") if missing else str(tmp_path)
    with pytest.raises(RedlineError, match="No such file" if missing else "it is neither a file nor a named pipe"):
        SettingsReader(place, LiveSettings(), Heard())


def test_no_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(RedlineError, match="this process has no stdin"):
        SettingsReader("-", LiveSettings(), Heard())


def test_a_running_stream_is_changed(tmp_path: Path) -> None:
    save_lsd(small_lsd(), tmp_path / "small.safetensors", about={})
    path, heard = tmp_path / "changes.txt", Heard()
    path.write_text("strength=0.125\n")
    weights = tmp_path / "small.safetensors"
    stream = Stream("synthetic:16x16,0.4", model=weights, device="cpu", plan="eager", changes=path, log=heard)
    before = threading.active_count()
    stream.run()
    assert stream.settings.now().strength == 0.125 and heard == ["changed strength to 0.125"]
    assert threading.active_count() <= before

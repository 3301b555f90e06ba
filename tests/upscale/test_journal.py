"""Resuming goes by what was read and with what it was made; and what cannot be noted, or was left, is no trouble."""

import os
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from redline.files.partial import hidden_path
from redline.models.drct import Drct, DrctConfig, save_drct
from redline.upscale import journal as journals
from redline.upscale.journal import NAME, Journal
from redline.upscale.session import Upscaling
from redline.upscale.settings import Tiles, UpscaleSettings
from redline.upscale.tasks import Listener, Outcome, Task, find_tasks
from redline.upscale.video.remux import Assembly, assemble
from redline.upscale.video.settings import VideoProgress, VideoSettings
from upscale.video.clips import make_clip, shown


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> UpscaleSettings:
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("weights") / "tiny.safetensors"
    save_drct(Drct(DrctConfig.of(2, 1, width=12, growth=6, features=4, window=4)), path)
    videos = VideoSettings(codec="ffv1", segment_frames=2)
    return UpscaleSettings(path, device="cpu", workers=1, margin_px=4, ramp_px=4, tile=32, videos=videos)


def save(path: Path, colour: tuple[int, int, int]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.full((40, 30, 3), colour, np.uint8)).save(path)
    return path


def images(folder: Path, count: int = 2) -> list[Task]:
    for index in range(count):
        save(folder / "in" / f"{index}.png", (90 * index, 20, 30))
    return find_tasks([folder / "in"], folder / "out", 2)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no disk that is always full")
def test_a_full_disk_at_the_journal_is_said_once_and_ends_nothing(settings: UpscaleSettings, tmp_path: Path) -> None:
    tasks, said, heard = images(tmp_path, 3), [], []
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / NAME).symlink_to("/dev/full")
    outcomes = Upscaling(settings, Listener(said.append, heard.append)).run(tasks, tmp_path / "out")
    assert len(outcomes) == len(heard) == 3 and not any(outcome.error for outcome in outcomes)
    assert said[1:] == ["cannot write the journal: No space left on device; --resume will upscale these files again"]


def test_half_a_line_is_taken_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A disk may have room for a part of it; the next line would be glued to that, and lost too."""
    tasks, write = images(tmp_path, 3), os.write
    journal = Journal(tmp_path, lambda _: "s")
    for index, task in enumerate(tasks):
        save(task.target, (1, 2, 3))
        with monkeypatch.context() as patch:
            if index == 1:
                patch.setattr(journals.os, "write", lambda handle, data: write(handle, data[:40]))
                with pytest.raises(OSError, match="No space left"):
                    journal.record(task, task.source_state(), Tiles(((32, 32),), 1))
            else:
                journal.record(task, task.source_state(), Tiles(((32, 32),), 1))
    again = Journal(tmp_path, lambda _: "s")
    assert [again.is_done(task) for task in tasks] == [True, False, True]


def test_a_name_that_is_no_text_is_noted_like_others(settings: UpscaleSettings, tmp_path: Path) -> None:
    try:
        os.rename(save(tmp_path / "in" / "a.png", (9, 8, 7)), os.fsencode(tmp_path / "in") + b"/\xff\xfe.png")
    except OSError:
        pytest.skip("this file system has no such names")
    tasks = find_tasks([tmp_path / "in"], tmp_path / "out", 2)
    assert not any(outcome.error for outcome in Upscaling(settings).run(tasks, tmp_path / "out"))
    assert Journal(tmp_path / "out", Upscaling(settings).made_as).is_done(tasks[0])


def test_torn_and_damaged_lines_cost_nothing_but_themselves(tmp_path: Path) -> None:
    tasks = images(tmp_path)
    for task in tasks:
        save(task.target, (1, 2, 3))
    journal = Journal(tmp_path, lambda _: "s")
    journal.record(tasks[0], tasks[0].source_state(), Tiles(((32, 32),), 1))
    with journal.path.open("ab") as file:
        file.write(b'{"target": "/x\xc3')
    torn = Journal(tmp_path, lambda _: "s")
    assert torn.is_done(tasks[0]) and not torn.is_done(tasks[1])
    torn.record(tasks[1], tasks[1].source_state(), Tiles(((32, 32),), 1))
    whole = Journal(tmp_path, lambda _: "s")
    assert whole.is_done(tasks[0]) and whole.is_done(tasks[1])


def test_a_source_that_changes_meanwhile_is_done_again(settings: UpscaleSettings, tmp_path: Path) -> None:
    """It was red when it was read, and is blue before the result is there."""
    (task,), said = images(tmp_path, 1), []
    save(task.source, (200, 10, 10))

    def repaint(*_: object) -> None:
        save(task.source, (10, 10, 200))

    out = tmp_path / "out"
    first = Upscaling(settings, Listener(said.append, image_progress=repaint)).run([task], out)
    assert not first[0].error and said[1:] == [
        f"{str(task.source)!r} changed while it was read; --resume will upscale it again"
    ]
    (again,) = Upscaling(replace(settings, resume=True)).run([task], out)
    assert not again.skipped and not again.error
    with Image.open(task.target) as image, Image.open(task.source) as blue:
        assert image.size == (2 * blue.width, 2 * blue.height)
    assert Upscaling(replace(settings, resume=True)).run([task], out)[0].skipped


def test_a_film_that_changes_meanwhile_too(settings: UpscaleSettings, tmp_path: Path) -> None:
    task = Task(tmp_path / "a.mkv", tmp_path / "b.mkv")
    make_clip(task.source, frames=2)

    def touch(*_: object) -> None:
        os.utime(task.source, ns=(1, 1))

    said: list[str] = []
    (outcome,) = Upscaling(settings, Listener(said.append, video_progress=touch)).run([task], tmp_path)
    assert not outcome.error and "changed while it was read" in said[-1]
    assert not Upscaling(replace(settings, resume=True)).run([task], tmp_path)[0].skipped


def test_a_finished_film_is_skipped_when_it_was_made_in_the_same_way(settings: UpscaleSettings, tmp_path: Path) -> None:
    task, again = Task(tmp_path / "a.mkv", tmp_path / "b.mkv"), replace(settings, resume=True)
    make_clip(task.source, frames=2)
    assert not Upscaling(settings).run([task], tmp_path)[0].error
    assert Upscaling(again).run([task], tmp_path)[0].skipped
    # How images are written is nothing to a video; its codec is.
    stripped = replace(again, images=replace(again.images, strip=True))
    assert Upscaling(stripped).run([task], tmp_path)[0].skipped
    other = replace(again, videos=replace(again.videos, codec="h264"))
    assert not Upscaling(other).run([task], tmp_path)[0].skipped


class Killed(BaseException):
    """Stands for the end of the process: nothing catches it on purpose."""


def test_a_resumed_film_is_made_of_the_same_tiles(settings: UpscaleSettings, tmp_path: Path) -> None:
    """Automatic tiles follow the free memory, which is another one every time."""
    task = Task(tmp_path / "a.mkv", tmp_path / "b.mkv")
    make_clip(task.source, frames=12)

    def stop(_task: Task, video: VideoProgress) -> None:
        if video.frames_done >= 4:
            raise Killed

    def killed(settings: UpscaleSettings) -> None:
        with pytest.raises(Killed):
            Upscaling(settings, Listener(video_progress=stop)).run([task], tmp_path)

    killed(replace(settings, tile=(36, 28), tile_batch=1))
    resumed: list[int] = []
    upscaling = Upscaling(
        replace(settings, tile=None, resume=True),
        Listener(video_progress=lambda _, video: resumed.append(video.frames_resumed)),
    )
    assert not upscaling.run([task], tmp_path)[0].error and resumed[0] > 0
    assert upscaling.tile_runner is not None and upscaling.tile_runner.batch == 1
    assert upscaling.tile_runner.tiling.sizes == ((36, 28),)
    # Other tiles that are asked for are used, for all of the video.
    task.target.unlink()
    killed(replace(settings, tile_batch=1))
    (outcome,) = Upscaling(replace(settings, tile=48, tile_batch=1, resume=True)).run([task], tmp_path)
    assert outcome.notes == ("the parts of an earlier run are not used: the tiles changed since",)
    assert len(shown(task.target)) == 12


def test_an_interrupted_run_says_that_parts_are_kept(
    settings: UpscaleSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = [Task(tmp_path / f"{name}.mkv", tmp_path / "out" / f"{name}.mkv") for name in "abc"]
    for task in tasks:
        make_clip(task.source, frames=2)

    def interrupt(assembly: Assembly, target: Path) -> list[str]:
        if target == tasks[1].target:
            raise KeyboardInterrupt
        return assemble(assembly, target)

    monkeypatch.setattr("redline.upscale.video.run.assemble", interrupt)
    said: list[str] = []
    with pytest.raises(KeyboardInterrupt):
        Upscaling(settings, Listener(said.append)).run(tasks, tmp_path / "out")
    kept = f"b.mkv: its finished parts are kept in {str(tmp_path / 'out' / '.b.mkv.redline-parts')!r}: "
    assert said[1:] == [kept + "--resume continues from them; a run without --resume deletes them"]


def known_tiles(upscaling: Upscaling, tasks: list[Task], out: Path) -> Tiles | None:
    earlier = Journal(out, upscaling.made_as).tiles(tasks)
    return upscaling.planner.known_tiles(((1000, 1000),), earlier)


def test_a_resumed_folder_has_its_tiles_and_its_batch(settings: UpscaleSettings, tmp_path: Path) -> None:
    tasks, out = images(tmp_path), tmp_path / "out"
    Upscaling(replace(settings, tile_batch=3)).run(tasks, out)
    tasks[1].target.unlink()
    for tile in (None, 32):
        resumed = Upscaling(replace(settings, tile=tile, resume=True))
        assert known_tiles(resumed, tasks, out) == Tiles(((32, 32),), 3)
    other = Upscaling(replace(settings, tile=48, resume=True))
    assert known_tiles(other, tasks, out) == Tiles(((48, 48),))


def test_what_a_killed_run_left_is_removed_by_the_next(
    settings: UpscaleSettings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file and the folder of a shared image; nothing of a process that lives, or of another machine."""
    tasks, out = images(tmp_path), tmp_path / "out"
    out.mkdir()
    gone = subprocess.Popen(["true"])
    gone.wait()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: gone.pid)
        abandoned = [hidden_path(out / "0.png") for _ in range(2)]
    abandoned[0].touch()
    abandoned[1].mkdir()
    (abandoned[1] / "0.rows").touch()
    living, elsewhere = hidden_path(out / "1.png"), out / f".1.png.{2**22 + 1}.0123{'a' * 8}.redline-partial"
    user = out / ".mine.redline-partial"
    for path in (living, elsewhere, user):
        path.touch()
    assert not any(outcome.error for outcome in Upscaling(settings).run(tasks))
    assert not any(path.exists() for path in abandoned)
    assert living.exists() and elsewhere.exists() and user.exists()


def test_a_file_whose_time_begins_when_it_is_worked_on(settings: UpscaleSettings, tmp_path: Path) -> None:
    """While the first is worked on the others are open already: their wait is not their time."""
    tasks, slow = images(tmp_path, 3), 0.5
    heard: list[Outcome] = []

    def dawdle(task: Task, rows: int, _total: int) -> None:
        if task == tasks[0] and rows == 1:
            time.sleep(slow)

    Upscaling(settings, Listener(finished=heard.append, image_progress=dawdle)).run(tasks)
    seconds = {outcome.task: outcome.seconds for outcome in heard}
    assert seconds[tasks[0]] > slow and 0 < seconds[tasks[1]] < slow


def test_a_name_that_is_taken_is_one_failure_among_others(settings: UpscaleSettings, tmp_path: Path) -> None:
    tasks = images(tmp_path)
    Image.fromarray(np.zeros((9, 9), np.uint8)).save(tmp_path / "in" / "0.gif")
    tasks = find_tasks([tmp_path / "in"], tmp_path / "out", 2)
    heard: list[Outcome] = []
    outcomes = Upscaling(settings, Listener(finished=heard.append)).run(tasks)
    assert [o.task.source.name for o in outcomes if o.error] == ["0.gif"] and len(outcomes) == len(heard) == 3
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["0.png", "1.png"]

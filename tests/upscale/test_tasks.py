"""What paths mean beyond the plain cases: videos under any name, files left out, and two that would become one."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from redline.errors import RedlineError
from redline.upscale import tasks
from redline.upscale.tasks import Task, find_tasks
from upscale.video.clips import make_clip


def image(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.zeros((3, 4, 3), np.uint8)).save(path, format="png" if not path.suffix else None)
    return path


def video(path: Path) -> Path:
    """A video whose name says nothing."""
    make_clip(path.with_suffix(".mkv"), frames=2)
    return path.with_suffix(".mkv").rename(path)


@pytest.mark.parametrize("name", ["clip.xyz", "clip", "clip.bin"])
def test_a_named_file_is_looked_into(name: str, tmp_path: Path) -> None:
    (task,) = find_tasks([video(tmp_path / name)], None, 4)
    assert task.is_video and task.target == tmp_path / "clip-x4.mkv"
    (task,) = find_tasks([tmp_path / name], tmp_path / "large.mp4", 4)
    assert task.is_video and task.target == tmp_path / "large.mp4"


def test_what_is_no_film_is_not_taken_for_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.fromarray(np.zeros((3, 4, 3), np.uint8)).save(tmp_path / "a.pcx")  # which FFmpeg would read
    (tmp_path / "notes.txt").write_text("a text, of which FFmpeg would make moving letters\n" * 9)
    (tmp_path / "empty.xyz").touch()
    for name, sentence in (
        ("a.pcx", "unknown image format"),
        ("notes.txt", "unknown image format"),
        ("empty.xyz", "it is empty"),
    ):
        with pytest.raises(RedlineError, match=sentence):
            find_tasks([tmp_path / name], None, 4)
    # FFmpeg finds a video of one image in these.
    (tmp_path / "b.heic").write_bytes(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic")
    (tmp_path / "c").write_bytes(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic")
    (tmp_path / "d.dng").write_bytes(b"II*\0")
    monkeypatch.setattr(tasks, "probe", None)
    assert find_tasks([tmp_path / "b.heic"], None, 4)[0].target == tmp_path / "b-x4.png"
    assert not find_tasks([tmp_path / "c"], tmp_path / "c.png", 4)[0].is_video
    with pytest.raises(RedlineError, match="a camera's raw file"):
        find_tasks([tmp_path / "d.dng"], None, 4)
    # An image under another name needs a name for the result, and is no video.
    with pytest.raises(RedlineError, match="its name has no image format; use one of"):
        find_tasks([image(tmp_path / "photo")], None, 4)
    with pytest.raises(RedlineError, match=r"large\.txt': unknown image format '\.txt'; use one of \.png"):
        find_tasks([tmp_path / "photo"], tmp_path / "large.txt", 4)
    (task,) = find_tasks([tmp_path / "photo"], tmp_path / "large.png", 4)
    assert not task.is_video
    assert not Task(Path("b.png"), Path("b.mkv")).is_video


def test_a_folder_says_which_files_were_left_out(tmp_path: Path) -> None:
    said: list[str] = []
    for name in ("clip.vob", "deep/clip.MXF", "a.asf", "b.f4v", "c.3gp"):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).touch()
    found = find_tasks([tmp_path / "in"], tmp_path / "out", 4, say=said.append)
    assert all(task.is_video for task in found) and said == []
    assert {task.target.name for task in found} == {"clip.mkv", "a.mkv", "b.mp4", "c.mp4"}
    for name in ("notes.txt", "deep/clip.xyz", ".hidden.txt"):
        (tmp_path / "in" / name).touch()
    assert len(find_tasks([tmp_path / "in"], tmp_path / "out", 4, say=said.append)) == len(found)
    what = f"in {str(tmp_path / 'in')!r} without the suffix of an image or video"
    assert said == [f"skipped 2 files {what}: notes.txt, deep/clip.xyz"]
    for number in range(12):
        (tmp_path / "in" / f"other{number:02d}.txt").touch()
    find_tasks([tmp_path / "in"], tmp_path / "out", 4, say=said.append)
    assert said[1].startswith(f"skipped 14 files {what}: notes.txt, other00.txt") and said[1].endswith(" and 4 more")
    assert said[1].count(", ") == 9


@pytest.mark.usefixtures("folders_called_locked")
def test_a_folder_that_cannot_be_read_is_a_failure(tmp_path: Path) -> None:
    image(tmp_path / "in" / "a.png")
    image(tmp_path / "in" / "locked" / "b.png")
    done, failed = find_tasks([tmp_path / "in"], None, 4)
    assert not done.problem and done.target == tmp_path / "in-x4" / "a.png"
    assert failed.problem == f"cannot read the folder {str(tmp_path / 'in' / 'locked')!r}: Permission denied."
    # It is no folder without images: what is in there is not known.
    (failed,) = find_tasks([tmp_path / "in" / "locked"], None, 4)
    assert "Permission denied" in failed.problem


def test_links_to_folders_are_followed_and_never_in_circles(tmp_path: Path) -> None:
    image(tmp_path / "elsewhere" / "b.png")
    image(tmp_path / "in" / "deep" / "a.png")
    (tmp_path / "in" / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "in" / "deep" / "back").symlink_to(tmp_path / "in")
    (tmp_path / "elsewhere" / "there").symlink_to(tmp_path / "in")
    said: list[str] = []
    found = find_tasks([tmp_path / "in"], tmp_path / "out", 4, say=said.append)
    assert [str(task.target.relative_to(tmp_path / "out")) for task in found] == ["deep/a.png", "link/b.png"]
    circles = [tmp_path / "in" / "deep" / "back", tmp_path / "in" / "link" / "there"]
    tail = "points to a parent folder and was not followed"
    assert said == [f"the symlink {str(link)!r} {tail}" for link in circles]


def test_several_results_need_a_folder(tmp_path: Path) -> None:
    one, two = image(tmp_path / "in" / "a.png"), image(tmp_path / "in" / "b.png")
    for sources in ([tmp_path / "in"], [one, two]):
        with pytest.raises(RedlineError, match=r"out\.png' is named like a file, but several results need"):
            find_tasks(sources, tmp_path / "out.png", 4)
        with pytest.raises(RedlineError, match=r"a\.png' is a file, and several results need a folder"):
            find_tasks(sources, one, 4)
        # A dot alone says nothing, and a folder that is there may be called anything.
        (tmp_path / "there.png").mkdir(exist_ok=True)
        for name in ("v1.2", "there.png"):
            assert find_tasks(sources, tmp_path / name, 4)[0].target == tmp_path / name / "a.png"


def test_formats_have_two_names(tmp_path: Path) -> None:
    assert find_tasks([image(tmp_path / "a.png")], None, 4, "jpg")[0].target.name == "a-x4.jpg"
    for bad in ("gif", "bmp", ""):
        with pytest.raises(RedlineError, match="unknown output format '.*': choose png, jpeg, webp, tiff, avif"):
            find_tasks([tmp_path / "a.png"], None, 4, bad)


def test_a_picture_without_an_ending_is_told_how_to_name_the_result(tmp_path: Path) -> None:
    for name in ("photo", "photo.dat"):
        Image.fromarray(np.zeros((3, 4, 3), np.uint8)).save(tmp_path / name, format="jpeg")
        with pytest.raises(RedlineError, match="set it with --format, or give a file name with --out"):
            find_tasks([tmp_path / name], None, 4)
        assert find_tasks([tmp_path / name], None, 4, "png")[0].target.name == "photo-x4.png"
    with pytest.raises(RedlineError, match=r"use one of .*\.avif\.$"):
        find_tasks([tmp_path / "photo"], tmp_path / "large.bmp", 4)


def test_two_files_of_a_folder_that_would_become_one(tmp_path: Path) -> None:
    """The one that keeps its name is done; the other one is a failure like any other."""
    for name in ("a.gif", "a.png", "b.avi", "b.mkv", "c.jpg"):
        (tmp_path / "in" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "in" / name).touch()
    found = find_tasks([tmp_path / "in"], tmp_path / "out", 4)
    problems = {task.source.name: task.problem for task in found if task.problem}
    assert sorted(problems) == ["a.gif", "b.avi"] and len(found) == 5
    assert "a.png' and" in problems["a.gif"] and problems["a.gif"].endswith(
        f"would both become {str(tmp_path / 'out' / 'a.png')!r}: only {str(tmp_path / 'in' / 'a.png')!r} is upscaled; "
        "rename one or use another folder."
    )
    # With a format for all, the first of two has it.
    webp = find_tasks([tmp_path / "in"], tmp_path / "out", 4, "webp")
    assert [task.source.name for task in webp if task.problem and not task.is_video] == ["a.png"]
    # Files that were named are as many orders: nothing is done.
    with pytest.raises(RedlineError, match="would both become .*: nothing was written; rename one"):
        find_tasks([tmp_path / "in" / "a.gif", tmp_path / "in" / "a.png"], tmp_path / "out", 4)


def test_a_name_and_a_format_that_contradict_each_other(tmp_path: Path) -> None:
    (tmp_path / "a.png").touch()
    with pytest.raises(RedlineError, match=r"b\.png' is not a file name for tiff: change one of them"):
        find_tasks([tmp_path / "a.png"], tmp_path / "b.png", 4, "tiff")
    assert find_tasks([tmp_path / "a.png"], tmp_path / "b.TIF", 4, "tiff")[0].target.name == "b.TIF"


def test_one_bad_file_among_several_named_ones_is_one_failure(tmp_path: Path) -> None:
    good = image(tmp_path / "a.png")
    (tmp_path / "notes.txt").write_text("no image")
    bad = [tmp_path / "absent.png", tmp_path / "notes.txt", image(tmp_path / "photo")]
    found = find_tasks([bad[0], good, *bad[1:]], None, 4)
    assert [task.source for task in found if not task.problem] == [good]
    problems = {task.source.name: task.problem for task in found}
    assert problems["absent.png"] == f"cannot read {str(bad[0])!r}: it does not exist."
    assert "unknown image format" in problems["notes.txt"] and "set it with --format" in problems["photo"]


def test_an_output_that_is_the_source_is_known_at_once(tmp_path: Path) -> None:
    one, two = image(tmp_path / "a.png"), image(tmp_path / "b.png")
    with pytest.raises(RedlineError, match=r"the output '.*a\.png' is the source image; choose another output"):
        find_tasks([one], one, 4)
    (tmp_path / "link.mp4").symlink_to(video(tmp_path / "clip.mp4"))
    with pytest.raises(RedlineError, match="is the source video"):
        find_tasks([tmp_path / "clip.mp4"], tmp_path / "link.mp4", 4)
    assert all("is the source image" in task.problem for task in find_tasks([one, two], tmp_path, 4))
    assert not any(task.problem for task in find_tasks([one, two], tmp_path, 4, "webp"))


def test_formats_that_are_only_read_become_png(tmp_path: Path) -> None:
    for name in ("a.bmp", "b.ppm", "c.tga", "d.jp2", "e.HEIC", "f.gif"):
        (tmp_path / "in" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "in" / name).touch()
    found = find_tasks([tmp_path / "in"], tmp_path / "out", 4)
    assert [task.target.name for task in found] == ["a.png", "b.png", "c.png", "d.png", "e.png", "f.png"]

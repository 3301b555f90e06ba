"""Opening videos: threads, rates and error messages."""

from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from redline.errors import RedlineError
from redline.video import reading as films
from redline.video.reading import conversion_threads, declared_rate, enable_frame_threads, frame_threads, opened


@pytest.mark.parametrize(
    ("cores", "pixels", "threads"), [(8, 0, 1), (8, 2**17, 2), (8, 2**30, 8), (64, 2**30, 16), (1, 2**30, 1)]
)
def test_threads_follow_the_size_of_a_frame(
    cores: int, pixels: int, threads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(films, "cores", lambda: cores)
    assert conversion_threads(pixels) == threads


@pytest.mark.parametrize(
    ("cores", "codec", "count"), [(2, "h264", 1), (8, "h264", 4), (8, "prores", 1), (64, "vp9", 6)]
)
def test_several_frames_are_decoded_at_once_where_a_decoder_can(
    cores: int, codec: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(films, "cores", lambda: cores)
    context = SimpleNamespace(name=codec, thread_count=7, options={"a": "b"})
    stream: Any = SimpleNamespace(codec_context=context, thread_type="SLICE")
    assert enable_frame_threads(stream) == count
    several = count > 1
    assert stream.thread_type == ("FRAME" if several else "SLICE") and context.thread_count == (count if several else 7)
    assert context.options == ({"a": "b", "err_detect": "explode"} if several else {"a": "b"})
    assert frame_threads() == min(cores // 2, 6)


@pytest.mark.parametrize(
    ("average", "guessed", "rate"),
    [
        (Fraction(25), Fraction(30), 25),
        (None, Fraction(30), 30),
        (Fraction(0), Fraction(240), 240),
        (Fraction(90_000), Fraction(24), 24),
        (Fraction(241), None, None),
    ],
)
def test_an_implausible_rate_is_ignored(average: Fraction | None, guessed: Fraction | None, rate: int | None) -> None:
    stream: Any = SimpleNamespace(average_rate=average, guessed_rate=guessed)
    assert declared_rate(stream) == rate


def test_a_file_that_cannot_be_opened_says_why(tmp_path: Path) -> None:
    (tmp_path / "empty.mp4").touch()
    (tmp_path / "text.mp4").write_text("no video")
    for name, sentence in (
        ("none.mp4", "none.mp4' does not exist"),
        ("empty.mp4", "'empty.mp4' is empty"),
        ("text.mp4", "'text.mp4' is not a readable video"),
        ("", "Is a directory"),
    ):
        with pytest.raises(RedlineError, match=sentence), opened(tmp_path / name):
            pass

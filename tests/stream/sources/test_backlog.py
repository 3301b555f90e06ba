"""When the backlog of a live source counts as over."""

import pytest

from redline.stream.sources import backlog
from redline.stream.sources.backlog import Backlog


@pytest.mark.parametrize(
    ("waits_s", "is_over"),
    [((0.004,), False), ((0.004, 0.004), True), ((0.01, 0.003, 0.01), False), ((0.01, 0.0, 0.01, 0.01, 0.0), True)],
)
def test_the_backlog_ends_after_two_waits_in_a_row(waits_s: tuple[float, ...], is_over: bool) -> None:
    passed_over = Backlog()
    for waited_s in waits_s:
        passed_over.read(waited_s)
    assert passed_over.is_over is is_over


@pytest.mark.parametrize(("seconds", "is_over"), [(3.0, False), (3.1, True)])
def test_the_backlog_ends_after_three_seconds(monkeypatch: pytest.MonkeyPatch, seconds: float, is_over: bool) -> None:
    now_s = [100.0]
    monkeypatch.setattr(backlog.time, "monotonic", lambda: now_s[0])
    passed_over = Backlog()
    now_s[0] += seconds
    assert passed_over.is_over is is_over

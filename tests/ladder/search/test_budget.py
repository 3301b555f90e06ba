"""The budget of a climb, and the time limits of its trials."""

import time

import pytest

from redline.ladder.search.budget import Budget


def test_the_race_has_its_time_reserved() -> None:
    budget = Budget(100, 300, time.monotonic() - 60)
    assert budget.left_s == pytest.approx(40, abs=0.1) and not budget.is_spent
    budget.reserved_s = 41
    assert budget.is_spent
    assert not Budget(None, 300).is_spent and Budget(None, 300).left_s == float("inf")


@pytest.mark.parametrize(("expected_s", "limit_s"), [(1, 15), (10, 40), (100, 90)])
def test_time_limit_is_a_multiple_of_the_expected_time_within_the_budget(expected_s: float, limit_s: float) -> None:
    assert Budget(100, 300, time.monotonic() - 10).limit_s(expected_s) == pytest.approx(limit_s, abs=0.1)


def test_the_first_compilation_may_take_all_the_time_that_is_left() -> None:
    assert Budget(100, 300, time.monotonic() - 10).limit_s(10, to_the_end=True) == pytest.approx(90, abs=0.1)
    assert Budget(100, 30, time.monotonic() - 10).limit_s(10, to_the_end=True) == 30
    assert Budget(None, 40).limit_s(1) == 40

"""The budget of a climb, and the time limits of its trials."""

import time
from types import SimpleNamespace
from typing import Any

import pytest

from redline.ladder.plan import Plan, parse_rung
from redline.ladder.search.budget import Budget, known_compile_s


def test_time_limit_of_a_trial_is_a_share_of_the_budget() -> None:
    for spent_s, expected in (
        (0, (False, 300, 150)),
        (600, (False, 140, 60)),
        (930, (False, 24.5, 10.5)),
        (950, (True,)),
    ):
        budget = Budget(1000, 300, time.monotonic() - spent_s)
        limits = (budget.for_trial_s(parse_rung("bf16")), budget.for_trial_s(parse_rung("compile(mode=max-autotune)")))
        assert budget.is_spent is expected[0]
        assert limits == pytest.approx(expected[1:], rel=0.01) or expected[0]
    assert not Budget(None, 300).is_spent and Budget(None, 300).for_trial_s(parse_rung("bf16")) == 300


def test_a_compilation_gets_the_time_that_it_is_known_to_need() -> None:
    compile_ = parse_rung("compile")
    # Of the 30 s that are left a third is too little for what took 12 s; a fifth of 60 s stays for the race.
    late = Budget(60, 300, time.monotonic() - 30)
    assert late.for_trial_s(compile_) == pytest.approx(10.5, rel=0.01)
    assert late.for_trial_s(compile_, 7) == pytest.approx(14, rel=0.01)
    assert late.for_trial_s(compile_, 12) == pytest.approx(18, rel=0.01)
    assert Budget(None, 40).for_trial_s(compile_, 100) == 40


def test_known_compile_time_is_the_longest_set_up_of_a_compiled_plan() -> None:
    rows: Any = [
        SimpleNamespace(plan="compile", setup_s={"a": 10.0, "b": 7.0}),
        SimpleNamespace(plan="compile(regional=true)", setup_s={"": 4.0}),
        SimpleNamespace(plan="compile(mode=max-autotune)", setup_s={"": 55.0}),
        SimpleNamespace(plan="bf16", setup_s={"": 50.0}),
        SimpleNamespace(plan="fp16 + compile", setup_s={}),
    ]
    assert known_compile_s(Plan.parse("bf16 + compile"), rows) == 17
    assert known_compile_s(Plan.parse("bf16"), rows) == known_compile_s(Plan.parse("bf16 + compile"), rows[2:]) == 0
    assert known_compile_s(Plan.parse("compile(mode=max-autotune)"), rows) == 0


def test_kernel_search_is_repeated_with_at_least_half_of_the_earlier_limit() -> None:
    budget = Budget(None, 300)
    assert budget.is_worth_a_search(0.0)
    budget.search_s = 20.0
    assert budget.is_worth_a_search(10.0) and not budget.is_worth_a_search(9.9)


def test_trial_gets_a_minimum_time_limit() -> None:
    assert Budget(1000, 300, time.monotonic() - 999).for_trial_s(parse_rung("bf16")) == 5.0

"""Small models with memory slots learn to find needles on a CPU; the same models without them do not."""

from dataclasses import replace

import pytest

from redline.evaluation.recall import Needle
from redline.models.memory import TitanModel

from .learning import WINDOW, learned, practised, recalled, with_slots

pytestmark = pytest.mark.usefixtures("small_products")


@pytest.mark.parametrize("length", [64, pytest.param(128, marks=pytest.mark.slow)])
def test_slots_find_needles_at_sixteen_times_the_length_and_a_window_finds_none(length: int) -> None:
    task = Needle()

    def enough(model: TitanModel) -> bool:
        return practised(model, task, length) >= 0.98 and practised(model, task, 16 * length, 8) >= 0.98

    model, steps = learned(replace(WINDOW, memory_slots=16), task, length, 32, 1e-2, score_after=60, enough=enough)
    found = recalled(model, task, 16 * length, 16)
    assert found >= 0.95
    # Three needles do not fit into two slots.
    assert recalled(with_slots(model, 2), task, 16 * length, 16) <= found - 0.2
    control, as_many = learned(WINDOW, task, length, 32, 1e-2, steps=steps)
    assert as_many == steps
    assert recalled(control, task, length) <= 0.2

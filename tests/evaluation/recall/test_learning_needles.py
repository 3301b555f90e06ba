"""Memory that works: small models learn to find needles within minutes on a CPU, and the same without memory do not."""

from dataclasses import replace

import pytest

from redline.evaluation.recall import Needle
from redline.models.memory import TitanModel

from .learning import WINDOW, learned, practised, recalled, with_slots

pytestmark = pytest.mark.usefixtures("small_products")


def test_a_bank_of_slots_finds_needles_at_sixteen_times_the_length_and_a_window_finds_none() -> None:
    task = Needle()

    def enough(model: TitanModel) -> bool:
        return practised(model, task, 128) >= 0.98 and practised(model, task, 2048, 8) >= 0.98

    model, steps = learned(replace(WINDOW, memory_slots=16), task, 128, 32, 1e-2, score_after=60, enough=enough)
    found = recalled(model, task, 2048, 16)
    assert found >= 0.95
    # Three needles do not fit into two slots.
    assert recalled(with_slots(model, 2), task, 2048, 16) <= found - 0.2
    control, as_many = learned(WINDOW, task, 128, 32, 1e-2, steps=steps)
    assert as_many == steps
    assert recalled(control, task, 128) <= 0.2

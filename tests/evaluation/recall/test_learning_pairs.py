"""Memory that works: small models learn to recall pairs within minutes on a CPU, and the same without memory do not."""

import pytest

from redline.evaluation.recall import Mqar
from redline.models.memory import TitanModel

from .learning import NEURAL, WINDOW, learned, practised, recalled

pytestmark = pytest.mark.usefixtures("small_products")


def test_neural_memory_recalls_pairs_at_eight_times_the_length_and_a_window_does_not() -> None:
    task = Mqar()

    def enough(model: TitanModel) -> bool:
        # Of 3,072 questions, so that it is no luck: the exam, on others, may miss twice as many.
        return practised(model, task, 64, 128) >= 0.995 and practised(model, task, 512) >= 0.98

    model, steps = learned(NEURAL, task, 64, 64, 1.2e-2, enough=enough)
    assert recalled(model, task, 64, 128) >= 0.99
    assert recalled(model, task, 512) >= 0.95
    control, as_many = learned(WINDOW, task, 64, 64, 1.2e-2, steps=steps)
    assert as_many == steps
    assert recalled(control, task, 64) <= 0.2

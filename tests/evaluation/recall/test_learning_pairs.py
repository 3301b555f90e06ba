"""Small models with neural memory learn to recall pairs on a CPU; the same models without it do not."""

import pytest

from redline.evaluation.recall import Mqar
from redline.models.memory import TitanModel

from .learning import NEURAL, WINDOW, learned, practised, recalled

pytestmark = pytest.mark.usefixtures("small_products")


@pytest.mark.parametrize(
    ("task", "length", "batch", "by_window"),
    [
        # A window sees some of few pairs in a short text.
        pytest.param(Mqar(16, 3, 12), 48, 32, 0.6, id="16 symbols"),
        pytest.param(Mqar(32, 4, 16), 64, 32, 0.2, id="32 symbols", marks=pytest.mark.slow),
        pytest.param(Mqar(), 64, 64, 0.2, id="64 symbols", marks=pytest.mark.slow),
    ],
)
def test_neural_memory_recalls_pairs_at_eight_times_the_length_and_a_window_does_not(
    task: Mqar, length: int, batch: int, by_window: float
) -> None:
    def enough(model: TitanModel) -> bool:
        # Stricter than the test below, which asks other questions.
        return practised(model, task, length, 128) >= 0.995 and practised(model, task, 8 * length) >= 0.98

    model, steps = learned(NEURAL, task, length, batch, 1.2e-2, enough=enough)
    assert recalled(model, task, length, 128) >= 0.99
    assert recalled(model, task, 8 * length) >= 0.95
    control, as_many = learned(WINDOW, task, length, batch, 1.2e-2, steps=steps)
    assert as_many == steps
    assert recalled(control, task, length) <= by_window

"""Tests which tables of rotary positions are valid."""

import pytest

from redline.errors import ModelError
from redline.ops.rope import LinearScaling, Llama3Scaling, rope_tables
from redline.ops.rope.tables import frequencies


@pytest.mark.parametrize(
    ("head_dim", "base", "scaling"),
    [
        (3, 10.0, None),
        (0, 10.0, None),
        (4, 0.0, None),
        (4, 10.0, LinearScaling(0.0)),
        (4, 10.0, Llama3Scaling(0.0, 1.0, 4.0, 64)),
        (4, 10.0, Llama3Scaling(8.0, 0.0, 4.0, 64)),
        (4, 10.0, Llama3Scaling(8.0, 4.0, 4.0, 64)),
        (4, 10.0, Llama3Scaling(8.0, 5.0, 4.0, 64)),
    ],
)
def test_invalid_arguments_are_refused(
    head_dim: int, base: float, scaling: LinearScaling | Llama3Scaling | None
) -> None:
    with pytest.raises(ModelError):
        frequencies(head_dim, base, scaling)


def test_each_pair_of_channels_has_its_own_frequency() -> None:
    assert frequencies(4, 100.0, None).tolist() == pytest.approx([1.0, 0.1])
    assert frequencies(2, 0.5, LinearScaling(4.0)).tolist() == [0.25]
    cos, sin = rope_tables(3, 4, 100.0)
    assert cos.shape == sin.shape == (3, 2)
    assert cos[2].tolist() == pytest.approx([-0.4161468, 0.9800666]) and sin[0].tolist() == [0.0, 0.0]

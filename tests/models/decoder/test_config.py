"""The sizes of a decoder: what follows from its settings, which are refused, and how many weights it has."""

from dataclasses import replace
from typing import Any

import pytest

from redline.errors import ModelError
from redline.models.decoder import Decoder, DecoderConfig

TINY = DecoderConfig(vocabulary=11, width=12, layers=2, heads=3, mlp_width=10)


def test_defaults_of_heads_and_windows() -> None:
    assert (TINY.head_dim, TINY.key_value_heads, TINY.windows) == (4, 3, (None, None))
    given = replace(TINY, key_value_heads=1, head_dim=6, windows=(1, None))
    assert (given.head_dim, given.key_value_heads, given.windows) == (6, 1, (1, None))


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        *[
            ({name: 0}, f"{name} = 0 must be a whole number .at least 1.")
            for name in ("vocabulary", "width", "layers", "mlp_width", "context")
        ],
        ({"width": 13, "head_dim": 0}, "width .13. is not a multiple of heads .3."),
        ({"key_value_heads": 2}, "heads .3. must be a multiple of key_value_heads .2."),
        ({"key_value_heads": -1}, "heads .3. must be a multiple of key_value_heads .-1."),
        ({"head_dim": 1}, "head_dim must be even for rotary positions, not 1"),
        ({"head_dim": 5}, "head_dim must be even for rotary positions, not 5"),
        ({"head_dim": -2}, "head_dim must be even for rotary positions, not -2"),
        ({"rope_base": 0.0}, "rope_base = 0.0 must be a number .above 0."),
        ({"norm_eps": 0.0}, "norm_eps = 0.0 must be"),
        ({"windows": (1,)}, "one entry for each of 2 layers, not 1"),
        ({"windows": (1, 0)}, r"windows = \(1, 0\) must be a list, each a whole number"),
    ],
)
def test_settings_beyond_their_limits_are_refused(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        replace(TINY, **change)


def test_the_smallest_decoder() -> None:
    assert DecoderConfig(1, 2, 1, 1, 1, context=1).head_dim == 2


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"tied_embeddings": True},
        {"key_value_heads": 1, "head_dim": 6},
        {"qkv_bias": True},
        {"out_bias": True},
        {"query_key_norm": True},
    ],
    ids=str,
)
def test_weights_are_counted_without_being_made(change: dict[str, Any]) -> None:
    config = replace(TINY, **change)
    assert config.parameters == sum(weight.numel() for weight in Decoder(config).parameters())

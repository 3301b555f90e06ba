"""Settings that cannot be are refused in one sentence each, and folders under the former names are still read."""

from dataclasses import asdict, replace
from typing import Any

import pytest
import torch

from redline.errors import ModelError
from redline.models.memory import TitanConfig, TitanModel
from redline.training.text.architectures import DecoderSettings, MemorySettings

TINY = TitanConfig(vocabulary=31, width=48, layers=2, heads=4, attention_every=2, segment=8)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"key_value_heads": -2}, r"key_value_heads = -2.* must be a whole number \(at least 0\)"),
        ({"key_value_heads": 3}, r"heads \(4\) must be a multiple of key_value_heads \(3\)"),
        ({"mlp_width": -5}, r"mlp_width = -5.* must be a whole number \(at least 0\)"),
        ({"memory_heads": -1}, r"memory_heads = -1.* must be a whole number \(at least 0\)"),
        ({"memory_key_dim": -1}, r"memory_key_dim = -1.* must be a whole number \(at least 0\)"),
        ({"memory_value_dim": -1}, r"memory_value_dim = -1.* must be a whole number \(at least 0\)"),
        ({"memory_heads": 100}, "the width 48 is too small for 100 memory heads"),
        ({"memory_heads": 100, "memory_key_dim": 4}, "the width 48 is too small for 100 memory heads"),
        ({"norm_eps": -1.0}, r"norm_eps = -1.0.* must be a number \(above 0\)"),
        ({"norm_eps": float("nan")}, "norm_eps = nan.* is not a finite"),
        ({"rope_base": 0}, "rope_base = 0.* must be a number"),
        ({"width": 50}, "the width 50 does not divide into 4 heads of an even size."),
        ({"width": "48"}, "width = '48'.* must be a whole number"),
        ({"layers": 2.0}, "layers = 2.0.* must be a whole number"),
        ({"memory_slots": True}, "memory_slots = True.* must be a whole number"),
        ({"tied_embeddings": 1}, "tied_embeddings = 1.* must be true or false"),
        ({"memory_update": 3}, "memory_update = 3.* must be one of gated_delta, titans"),
    ],
)
def test_what_cannot_be(change: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        replace(TINY, **change)
    with pytest.raises(ModelError, match=sentence):
        TitanConfig.from_dict({**asdict(TINY), **change})


def test_many_memory_heads_of_a_given_size_are_a_memory() -> None:
    config = replace(TINY, memory_heads=100, memory_key_dim=4, memory_value_dim=2)
    assert TitanModel(config)(torch.randint(31, (1, 5))).isfinite().all()


def test_derived_sizes() -> None:
    plain = replace(TINY, width=96)
    assert (plain.head_dim, plain.shared_heads, plain.neural_heads) == (24, 4, 4)
    assert (plain.key_dim, plain.value_dim, plain.feed_forward_width) == (24, 24, 256)
    assert replace(TINY, width=104).feed_forward_width == 320  # 277.3, in whole steps of 64
    few = replace(TINY, memory_heads=3)
    assert (few.key_dim, few.value_dim) == (16, 16)
    assert replace(TINY, segment=8, window_segments=2).span == 24
    assert [replace(TINY, attention_every=3).is_attention(layer) for layer in range(6)] == [False, False, True] * 2
    assert not any(replace(TINY, attention_every=0).is_attention(layer) for layer in range(4))


def test_the_largest_sizes_are_allowed_and_one_more_is_not() -> None:
    most = 2**20
    assert replace(TINY, segment=most // 2, memory_slots=most, memory_compression_ratio=1.0).span == most
    for change in ({"segment": most // 2 + 1}, {"memory_slots": most + 1}, {"memory_compression_ratio": 1.01}):
        with pytest.raises(ModelError):
            replace(TINY, **change)
    for name in ("vocabulary", "layers", "segment", "memory_chunk", "convolution", "memory_compression_ratio"):
        with pytest.raises(ModelError, match=name):
            replace(TINY, **{name: 0})
    assert replace(TINY, layers=1, memory_chunk=1, convolution=1, window_segments=0).span == 8


def test_settings_that_are_missing_are_named() -> None:
    with pytest.raises(ModelError, match="'heads' is missing in the config of a Titans model"):
        TitanConfig.from_dict({"vocabulary": 31, "width": 48, "layers": 2})


def test_one_vocabulary_for_all_kinds_of_models() -> None:
    both = {"width", "layers", "heads", "key_value_heads", "mlp_width", "rope_base", "norm_eps", "tied_embeddings"}
    assert both <= DecoderSettings.__dataclass_fields__.keys() & MemorySettings.__dataclass_fields__.keys()
    settings = MemorySettings(width=16, layers=1, heads=4, key_value_heads=2, mlp_width=24, tied_embeddings=False)
    model = settings.build(30)
    shapes = [tuple(weight.shape) for weight in model.parameters()]
    assert (16, 24) in shapes and settings.config(30).shared_heads == 2
    assert shapes.count((30, 16)) == 2

"""The state of a Titans model does not grow with the text, and its values stay bounded."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from redline.models.memory import TitanModel
from redline.models.memory.neural_memory import NeuralMemory, NeuralState, Titans
from redline.models.memory.token_positions import TokenPositions

from .small_models import KINDS, SMALL, built, tokens


def bytes_held(model: TitanModel, first: int, last: int, piece: int) -> list[int]:
    """What is held of one text at `first` tokens and each doubling up to `last`."""
    state, held, read = model.new_state(1), [], 0
    with torch.no_grad():
        while read < last:
            _, state = model.advance(tokens(1, piece), state)
            read += piece
            if read >= first and read.bit_count() == 1:
                held.append(state.bytes)
    assert read == last and state.position_B.tolist()[-1:] == [read]
    return held


@pytest.mark.parametrize("kind", KINDS)
def test_the_state_does_not_grow(kind: str) -> None:
    model = built(KINDS[kind], torch.float32)
    assert bytes_held(model, 128, 512, 64) == [model.new_state(1).bytes] * 3


@pytest.mark.parametrize("last", [8192, pytest.param(65_536, marks=pytest.mark.slow)])
@pytest.mark.parametrize("update", ["gated_delta", "titans"])
def test_the_state_is_the_same_from_1k_tokens_on(update: str, last: int) -> None:
    """Long segments and few writes, so that it takes seconds; both kinds of layers."""
    long = replace(SMALL, width=16, layers=2, heads=1, key_value_heads=0, memory_heads=1, memory_update=update)
    model = built(replace(long, segment=256, memory_chunk=128, memory_compression_ratio=0.01), torch.float32)
    assert set(bytes_held(model, 1024, last, 1024)) == {model.new_state(1).bytes}


@pytest.mark.parametrize("update", ["gated_delta", "titans"])
@pytest.mark.parametrize("text", ["random", "one token", "two tokens"])
def test_neural_memory_stays_bounded_over_8k_tokens(update: str, text: str) -> None:
    """Of a model that has learnt nothing yet, and in the steps that its gates allow at the most."""
    config = replace(SMALL, width=64, layers=1, heads=2, key_value_heads=0, memory_heads=2, attention_every=0)
    model = built(replace(config, memory_update=update, memory_chunk=64), torch.float32)
    shown = {
        "random": tokens(1, 8192),
        "one token": torch.ones(1, 8192).long(),
        "two tokens": torch.arange(8192)[None] % 2,
    }
    for most in (False, True) if update == "titans" else (False,):
        if most:
            gates = next(module.gates for module in model.modules() if isinstance(module, Titans))
            with torch.no_grad():  # no momentum and the largest step, which overshoots most
                gates.weight.zero_()
                gates.register_forward_hook(
                    lambda _module, _x, out: out + torch.tensor([-9.0, -9.0, 9.0]).repeat_interleave(2)
                )
        with torch.no_grad():
            _, state = model.advance(shown[text], model.new_state(1))
        floats = [tensor for _, tensor in state.named_tensors() if tensor.is_floating_point()]
        largest = torch.stack([tensor.abs().max() for tensor in floats]).max()  # which carries a NaN through
        assert largest < 100


def test_a_growing_state_is_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted fault: a layer of neural memory that never lets go of what its convolution has seen."""
    whole = NeuralMemory.forward

    def hoarding(
        self: NeuralMemory, x_BSD: Tensor, positions: TokenPositions, state: NeuralState
    ) -> tuple[Tensor, ...]:
        kept = len(self.convolution) - 1
        out, after, score = whole(self, x_BSD, positions, replace(state, recent_BTC=state.recent_BTC[:, -kept:]))
        return out, replace(after, recent_BTC=torch.cat([state.recent_BTC, after.recent_BTC], 1)), score

    monkeypatch.setattr(NeuralMemory, "forward", hoarding)
    held = bytes_held(built(replace(SMALL, attention_every=0), torch.float32), 128, 512, 64)
    assert held[0] < held[1] < held[2]


@pytest.mark.parametrize("kind", KINDS)
def test_the_storage_of_a_state_is_its_bytes(kind: str) -> None:
    """As views of what was computed on the way, its tensors would keep the whole piece alive."""
    model = built(KINDS[kind], torch.float32)
    with torch.no_grad():
        _, state = model.advance(tokens(2, 203), model.new_state(2))
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for _, tensor in state.named_tensors()}
    assert sum(storage.nbytes() for storage in storages.values()) <= state.bytes

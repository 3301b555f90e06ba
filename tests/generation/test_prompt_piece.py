"""Pieces of long prompts are captured once and replayed, with the same results as without a capture."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from redline.generation import InferenceEngine
from redline.models.memory import TitanModel

from .conftest import FakeRecorder
from .test_engine import prompts


@torch.no_grad()
def read_on(model: TitanModel, state: Any, texts: Sequence[Sequence[int]]) -> Any:
    """Returns the state after texts of equal or different lengths."""
    cache = model.new_cache(len(texts), 0)
    cache.restore(state)
    longest = max(map(len, texts))
    tokens = torch.tensor([[*text, *[0] * (longest - len(text))] for text in texts])
    model.prefill(tokens, torch.tensor([len(text) for text in texts]), cache)
    return cache.snapshot()


def variant(model: TitanModel, **changes: Any) -> TitanModel:
    return TitanModel(replace(model.config, **changes)).eval()


@pytest.mark.parametrize("slots", [0, 5])
@pytest.mark.parametrize("update", ["gated_delta", "titans"])
def test_pieces_of_a_long_prompt_are_captured_once(slots: int, update: str, memory_model: TitanModel) -> None:
    model = variant(memory_model, memory_slots=slots, memory_update=update)
    plain, recorder = InferenceEngine(model, chunk=19), FakeRecorder()
    engine = InferenceEngine(model, chunk=19, recorder=recorder)
    # 16 tokens a piece, two segments; one row goes on where the other has ended.
    long, longer = prompts(16 * 8 + 3, 16 * 9 + 5)
    assert engine.generate([long, longer], max_tokens=5) == plain.generate([long, longer], max_tokens=5)
    # A piece, and steps of one and of two rows. The last piece of a prompt is its rest.
    assert recorder.recorded <= 3 and recorder.replayed >= 8 + 9 + 4
    # What follows is read by the same recording, however short it is.
    recorded, replayed = recorder.recorded, recorder.replayed
    for batch in (prompts(40, 33), prompts(16, 200)):
        assert engine.generate(batch, max_tokens=2) == plain.generate(batch, max_tokens=2)
    assert recorder.recorded <= recorded + 1 and recorder.replayed >= replayed + 2 + 2 + 1 + 12 + 2


def test_short_prompts_are_not_captured(memory_model: TitanModel) -> None:
    for chunk, lengths in ((16, (16 * 7 + 15, 50)), (7, (500,))):
        recorder = FakeRecorder()
        InferenceEngine(memory_model, chunk=chunk, recorder=recorder).generate(prompts(*lengths), max_tokens=1)
        assert recorder.recorded == 0


def test_a_text_that_continues_within_a_segment_reaches_a_piece(memory_model: TitanModel) -> None:
    """As one text, whatever was read of it at a time."""
    text, recorder = prompts(300)[0], FakeRecorder()
    plain, engine = InferenceEngine(memory_model), InferenceEngine(memory_model, chunk=16, recorder=recorder)
    expected = plain.generate([text], max_tokens=9, state=plain.new_state())[0]
    begun = read_on(memory_model, engine.new_state(), [text[:42]])
    found = engine.generate([text[42:]], max_tokens=9, state=begun)[0]
    assert found == expected and recorder.replayed >= (300 - 42 - 6) // 16
    for (_, one), (_, other) in zip(found.state.named_tensors(), expected.state.named_tensors(), strict=True):
        torch.testing.assert_close(one, other)


def test_rows_at_different_offsets_are_read_one_by_one(memory_model: TitanModel) -> None:
    """No number of tokens brings both to the beginning of a segment."""
    recorder = FakeRecorder()
    engine = InferenceEngine(memory_model, chunk=16, recorder=recorder)
    before = read_on(memory_model, engine.new_state(2), prompts(3, 5))
    batch = prompts(200, 200)
    found = engine.generate(batch, max_tokens=3, state=before)
    plain = InferenceEngine(memory_model, chunk=16).generate(batch, max_tokens=3, state=before)
    assert found == plain


@pytest.mark.parametrize("failure", [torch.OutOfMemoryError("no memory"), RuntimeError("CUDA error: of capture.\n")])
def test_a_failed_capture_falls_back_to_plain_prefill(failure: RuntimeError, memory_model: TitanModel) -> None:
    class Full(FakeRecorder):
        def capture(self, run: Any) -> Any:
            if self.recorded:
                raise failure
            return super().capture(run)

    batch, recorder = prompts(16 * 8), Full()
    engine = InferenceEngine(memory_model, chunk=16, recorder=recorder)
    expected = InferenceEngine(memory_model, chunk=16).generate(batch, max_tokens=5)
    with pytest.warns(
        UserWarning, match=r"because the capture of a CUDA graph failed: (no memory|CUDA error: of capture)\.$"
    ):
        assert engine.generate(batch, max_tokens=5) == expected
    # It is not tried again.
    rehearsed = recorder.rehearsed
    assert engine.generate(batch, max_tokens=5) == expected and recorder.rehearsed == rehearsed

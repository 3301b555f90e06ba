"""Pieces of long prompts are captured once and replayed, with the same results as without a capture."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from redline.generation import InferenceEngine
from redline.generation.session import read_on
from redline.models.memory import TitanModel

from .conftest import FakeRecorder
from .test_engine import prompts


@pytest.mark.parametrize("slots", [0, 5])
@pytest.mark.parametrize("update", ["gated_delta", "titans"])
def test_pieces_of_a_long_prompt_are_captured_once(slots: int, update: str, memory_model: TitanModel) -> None:
    config = replace(memory_model.config, memory_slots=slots, memory_update=update)
    model = TitanModel(config).eval()
    plain, recorder = InferenceEngine(model, chunk=19), FakeRecorder()
    engine = InferenceEngine(model, chunk=19, recorder=recorder)
    # 16 tokens a piece, two segments; one row goes on where the other has ended.
    long, longer = prompts(16 * 8 + 3, 16 * 9 + 5)
    assert engine.generate([long, longer], max_tokens=5) == plain.generate([long, longer], max_tokens=5)
    assert (recorder.recorded, recorder.replayed) == (2, 8 + 4)
    # What follows is read by the same recording, however short it is.
    for batch in (prompts(40, 33), prompts(16, 200)):
        assert engine.generate(batch, max_tokens=2) == plain.generate(batch, max_tokens=2)
    assert (recorder.recorded, recorder.replayed) == (2, 12 + 2 + 1 + 1 + 1)


def test_short_prompts_are_not_captured(memory_model: TitanModel) -> None:
    recorder = FakeRecorder()
    InferenceEngine(memory_model, chunk=16, recorder=recorder).generate(prompts(16 * 7 + 15, 500), max_tokens=2)
    InferenceEngine(memory_model, chunk=7, recorder=recorder).generate(prompts(500), max_tokens=2)
    assert recorder.recorded == 2


def test_a_text_that_continues_within_a_segment_reaches_a_piece(memory_model: TitanModel) -> None:
    """As one text, whatever was read of it at a time."""
    text, recorder = prompts(300)[0], FakeRecorder()
    plain, engine = InferenceEngine(memory_model), InferenceEngine(memory_model, chunk=16, recorder=recorder)
    expected = plain.generate([text], max_tokens=9, state=plain.new_state())[0]
    before = engine.new_state()
    begun = read_on(engine.model, before, [text[:42]], 7, torch.device("cpu"))
    found = engine.generate([text[42:]], max_tokens=9, state=begun)[0]
    assert found == expected and recorder.replayed >= (300 - 42 - 6) // 16
    for (_, one), (_, other) in zip(found.state.named_tensors(), expected.state.named_tensors(), strict=True):
        torch.testing.assert_close(one, other)


def test_rows_at_different_offsets_are_not_captured(memory_model: TitanModel) -> None:
    """No number of tokens brings both to the beginning of a segment."""
    recorder = FakeRecorder()
    engine = InferenceEngine(memory_model, chunk=16, recorder=recorder)
    before = read_on(engine.model, engine.new_state(2), prompts(3, 5), 7, torch.device("cpu"))
    batch = prompts(200, 200)
    found = engine.generate(batch, max_tokens=3, state=before)
    plain = InferenceEngine(memory_model, chunk=16).generate(batch, max_tokens=3, state=before)
    assert found == plain and recorder.recorded == 1


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

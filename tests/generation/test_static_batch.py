"""One batch at a time gives the texts that the continuous engine gives, with and without a captured step."""

import random

import pytest

from redline.errors import MachineError, RedlineError
from redline.generation import InferenceEngine
from redline.generation import SamplingOptions as Sampling
from redline.generation.static_batch import StaticBatchEngine
from redline.models.decoder import Decoder
from redline.models.memory import TitanModel

from .conftest import FakeRecorder

WARM = Sampling(temperature=1.1, top_p=0.9, top_k=40, min_p=0.01, repetition_penalty=1.3, seed=11)


def prompts(*lengths: int) -> list[list[int]]:
    return [[random.randrange(101) for _ in range(length)] for length in lengths]


@pytest.mark.parametrize("recorded", [False, True])
@pytest.mark.parametrize("sampling", [Sampling(), WARM], ids=["greedy", "drawn"])
def test_texts_are_those_of_the_continuous_engine(sampling: Sampling, recorded: bool, model: Decoder) -> None:
    batch = prompts(3, 31, 1, 14)
    expected = InferenceEngine(model).generate(batch, sampling, max_tokens=20, stop_tokens=[7])
    recorder = FakeRecorder() if recorded else None
    engine = StaticBatchEngine(model, chunk=8, recorder=recorder)
    for _ in range(2):  # the second batch reuses the session
        assert engine.generate(batch, sampling, max_tokens=20, stop_tokens=[7]) == expected
    assert recorder is None or (recorder.recorded == 1 and recorder.replayed > 20)
    with engine.stream(batch[:1], sampling, max_tokens=20) as stream:
        streamed = [token for (token,) in stream]
    assert streamed == InferenceEngine(model).generate(batch[:1], sampling, max_tokens=20)[0].tokens
    assert stream.prefill_s > 0 and len(stream.step_s) == 19


def test_a_state_is_continued_as_in_the_continuous_engine(memory_model: TitanModel) -> None:
    batch, more = prompts(70, 5), prompts(3, 9)
    found = []
    for engine in (InferenceEngine(memory_model), StaticBatchEngine(memory_model, chunk=16, recorder=FakeRecorder())):
        first = engine.generate(batch, max_tokens=9, state=engine.new_state(2))
        state = first[0].state.stack([one.state for one in first])
        found.append([*first, *engine.generate(more, max_tokens=5, state=state)])
    assert found[0] == found[1]


def test_a_prompt_of_many_pieces_is_prefilled_by_one_captured_piece(memory_model: TitanModel) -> None:
    (prompt,) = prompts(500)
    recorder = FakeRecorder()
    engine = StaticBatchEngine(memory_model, chunk=16, recorder=recorder)
    assert engine.generate([prompt], max_tokens=5) == StaticBatchEngine(memory_model).generate([prompt], max_tokens=5)
    assert recorder.recorded == 2


def test_what_cannot_run_is_refused(model: Decoder) -> None:
    with pytest.raises(MachineError, match="a CUDA graph needs a CUDA device"):
        StaticBatchEngine(model, graph=True)
    with pytest.raises(RedlineError, match="neither presence_penalty, frequency_penalty nor logit_bias"):
        StaticBatchEngine(model).generate(prompts(3), Sampling(presence_penalty=1.0))
    with pytest.raises(RedlineError, match="the prompt has 120 tokens, and the model's context is 120"):
        StaticBatchEngine(model).generate([[1] * 120])
    with pytest.raises(RedlineError, match="token 101 is not in"):
        StaticBatchEngine(model).generate([[101]])

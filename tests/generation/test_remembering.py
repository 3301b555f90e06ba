"""Texts that go on from a memory and give it back, against the same texts read at once."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from redline.errors import ModelError, RedlineError
from redline.generation import InferenceEngine
from redline.generation import SamplingOptions as Sampling
from redline.models.decoder import Decoder
from redline.models.memory import MemoryState, TitanConfig, TitanModel

from .conftest import FakeRecorder
from .test_engine import prompts


def assert_remembers(state: MemoryState, model: TitanModel, text: Sequence[int]) -> None:
    with torch.no_grad():
        _, expected = model.advance(torch.tensor([text]), model.new_state())
    for (name, one), (_, other) in zip(state.named_tensors(), expected.named_tensors(), strict=True):
        torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-6, msg=name)


@pytest.mark.parametrize("recorded", [False, True])
def test_going_on_is_as_good_as_reading_everything_at_once(recorded: bool, memory_model: TitanModel) -> None:
    model = memory_model.double()
    engine = InferenceEngine(model, chunk=10, recorder=FakeRecorder() if recorded else None)
    texts, states, batch = [[], [], []], engine.new_state(3), prompts(3, 31, 17)
    for _ in range(3):
        texts = [text + prompt for text, prompt in zip(texts, batch, strict=True)]
        expected = engine.generate(texts, max_tokens=12)
        found = engine.generate(batch, max_tokens=12, state=states)
        assert found == expected
        texts = [text + completion.tokens for text, completion in zip(texts, found, strict=True)]
        for text, completion in zip(texts, found, strict=True):
            assert_remembers(completion.state, model, text)
        states, batch = MemoryState.stack([completion.state for completion in found]), prompts(5, 1, 20)


def test_a_row_that_ended_remembers_its_own_text_alone(memory_model: TitanModel) -> None:
    model, batch = memory_model.double(), prompts(9, 10)
    engine = InferenceEngine(model)
    warm = Sampling(temperature=3.0, seed=1)
    free = [completion.tokens for completion in engine.generate(batch, warm, max_tokens=20)]
    stop = next(token for token in free[0][3:] if token not in free[1] and token not in free[0][:3])
    found = engine.generate(batch, warm, max_tokens=20, stop_tokens=[stop], state=engine.new_state(2))
    assert [completion.reason for completion in found] == ["stop", "length"]
    for prompt, completion in zip(batch, found, strict=True):
        assert_remembers(completion.state, model, prompt + completion.tokens)


def test_a_closed_stream_has_the_state_of_its_tokens(memory_model: TitanModel) -> None:
    model, (prompt,) = memory_model.double(), prompts(9)
    engine = InferenceEngine(model)
    stream = engine.stream([prompt], max_tokens=20, state=engine.new_state())
    assert stream.state.position_B.item() == 0
    with stream:
        seen = [next(stream)[0] for _ in range(4)]
    engine.generate(prompts(3), max_tokens=3)
    assert_remembers(stream.state, model, [*prompt, *(token for token in seen if token is not None)])


def test_a_memory_given_stays_as_it_is(memory_model: TitanModel) -> None:
    engine = InferenceEngine(memory_model)
    (completion,) = engine.generate(prompts(20), max_tokens=3, state=engine.new_state())
    before = completion.state.map(lambda _, tensor: tensor.clone())
    engine.generate(prompts(20), max_tokens=3, state=completion.state)
    for (name, one), (_, other) in zip(before.named_tensors(), completion.state.named_tensors(), strict=True):
        assert torch.equal(one, other), name


@pytest.mark.usefixtures("any_precision")
def test_a_state_continues_in_another_precision_and_with_fewer_slots(memory_model: TitanModel) -> None:
    engine = InferenceEngine(memory_model)
    (completion,) = engine.generate(prompts(47), max_tokens=3, state=engine.new_state())
    reduced = memory_model.reduce_memory_slots(completion.state)
    # Within one segment, so that nothing new comes into the bank.
    (again,) = InferenceEngine(memory_model, "bf16").generate(prompts(2), max_tokens=3, state=reduced)
    assert again.state.bytes < completion.state.bytes
    stats = memory_model.get_memory_stats(again.state)
    assert stats["slots"] == 5 and stats["mass"] == memory_model.get_memory_stats(reduced)["mass"]


def test_memories_that_cannot_go_on(model: Decoder, memory_model: TitanModel) -> None:
    for ask in (
        lambda: InferenceEngine(model).new_state(),
        lambda: InferenceEngine(model).generate(prompts(3), state=memory_model.new_state()),
    ):
        with pytest.raises(ModelError, match="^a state needs a model with neural memory; this model has none"):
            ask()
    engine = InferenceEngine(memory_model)
    other = TitanModel(TitanConfig(101, 32, 2, 4, attention_every=2, segment=4, window_segments=3, memory_slots=5))
    for state, words in (
        (memory_model.new_state(2), "the state holds 2 sequences, but 1 were given[.]$"),
        (other.new_state(), "the state belongs to another model: its segment is 4, not 8[.]$"),
        ("memory.safetensors", "the state must be a MemoryState, not a str[.]$"),
    ):
        with pytest.raises(ModelError, match=words):
            engine.generate(prompts(3), max_tokens=2, state=state)
    stream = engine.stream(prompts(3), max_tokens=2)
    with pytest.raises(RedlineError, match="this stream has no state: pass state=engine.new_state"):
        _ = stream.state


def test_one_session_of_a_memory_model_serves_any_length(memory_model: TitanModel) -> None:
    recorder = FakeRecorder()
    engine = InferenceEngine(memory_model, recorder=recorder)
    for length in (3, 300, 700):
        engine.generate(prompts(length), max_tokens=3)
    assert recorder.recorded == 1


def test_without_a_plan_the_weights_are_the_models_own(model: Decoder, memory_model: TitanModel) -> None:
    for one in (model, memory_model):
        for share in (False, True):
            one.train()
            found = dict(InferenceEngine(one, share=share).model.model.named_parameters())
            assert all(found[name] is weight for name, weight in one.named_parameters())
            assert all(module.training for module in one.modules())


@pytest.mark.parametrize(
    "given",
    [
        torch.tensor([[5, 6], [7, 8]]),
        [torch.tensor([5, 6]), [7, 8]],
        ((5, 6), (7, 8)),
        torch.tensor([[5, 6], [7, 8]]).int(),
    ],
)
def test_prompts_may_be_tensors(given: Any, model: Decoder) -> None:
    engine = InferenceEngine(model)
    assert engine.generate(given, max_tokens=4) == engine.generate([[5, 6], [7, 8]], max_tokens=4)


@pytest.mark.parametrize(
    "given", [[1, 2, 3], torch.tensor([1, 2]), torch.tensor(1), [torch.rand(3)], [[1.5]], ["the sea"], [[[1]]], 7]
)
def test_prompts_of_a_wrong_type_raise(given: Any, model: Decoder) -> None:
    with pytest.raises(
        RedlineError, match="^prompts must be lists or tensors of token ids, as in .* a single prompt is"
    ):
        InferenceEngine(model).generate(given)


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(temperature=50.0, top_k=90, top_p=0.99, repetition_penalty=1.2)]
)
def test_tokens_that_the_tokenizer_lacks_are_never_drawn(sampling: Sampling, model: Decoder) -> None:
    def drawn(vocabulary: int | None = None) -> Tensor:
        engine = InferenceEngine(model, vocabulary=vocabulary)
        found = engine.generate([[1], [2], [3]], sampling, max_tokens=40)
        return torch.tensor([completion.tokens for completion in found])

    last = int(drawn().max())
    assert drawn(last).max() < last
    assert torch.equal(drawn(1000), drawn())
    with pytest.raises(RedlineError, match="token 20 is not in the model's vocabulary of 20"):
        InferenceEngine(model, vocabulary=20).generate([[20]])
    with pytest.raises(RedlineError, match="vocabulary must be at least 1 token, not 0"):
        InferenceEngine(model, vocabulary=0)

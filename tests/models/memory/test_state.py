"""What is remembered, as a value: kept, restored, reduced, stacked and taken apart, or refused in one sentence."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from redline.errors import ModelError
from redline.models.memory import MemoryState, TitanConfig, TitanModel

SMALL = TitanConfig(vocabulary=31, width=24, layers=2, heads=4, attention_every=2, segment=8, memory_slots=6)


def tokens(batch: int, length: int) -> Tensor:
    return torch.randint(SMALL.vocabulary, (batch, length))


def remembering(config: TitanConfig = SMALL, batch: int = 1) -> tuple[TitanModel, MemoryState]:
    model = TitanModel(config).eval().requires_grad_(False)
    return model, model.advance(tokens(batch, 43), model.new_state(batch))[1]


def test_a_path_may_be_a_text(tmp_path: Path) -> None:
    model, state = remembering()
    state.save(str(tmp_path / "state.safetensors"))
    restored, more = model.new_state().load(str(tmp_path / "state.safetensors")), tokens(1, 9)
    assert torch.equal(model.advance(more, restored)[0], model.advance(more, state)[0])


def test_a_reduced_memory_is_restored(tmp_path: Path) -> None:
    model, state = remembering(batch=2)
    reduced, more = model.reduce_memory_slots(state), tokens(2, 20)
    reduced.save(tmp_path / "state.safetensors")
    restored = model.new_state().load(tmp_path / "state.safetensors")
    assert restored.bytes == reduced.bytes < state.bytes
    assert torch.equal(model.advance(more, restored)[0], model.advance(more, reduced)[0])


def test_a_state_with_another_number_of_slots_raises(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    model, state = remembering(replace(SMALL, layers=4))
    state.save(path)
    fewer = TitanModel(replace(SMALL, layers=4, memory_slots=5))
    with pytest.raises(
        ModelError, match="another model: 'layers.1.bank.key_BMHD' has the shape .6, 4, 6., not .5, 4, 6.[.]$"
    ):
        fewer.new_state().load(path)
    mixed = {**load_file(path)}
    for name, tensor in model.reduce_memory_slots(state, 2).named_tensors():
        if name.startswith("layers.3.bank"):
            mixed[name] = tensor.contiguous()
    save_file(mixed, path)
    with pytest.raises(ModelError, match="is damaged: its slot banks have 2 and 6 slots[.]$"):
        model.new_state().load(path)


@pytest.mark.parametrize("name", ["layers.0.memory", "layers.1.bank.key_BMHD"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_saved_memory_that_is_not_finite_is_refused(tmp_path: Path, name: str, value: float) -> None:
    path = tmp_path / "state.safetensors"
    model, state = remembering()
    state.save(path)
    found = load_file(path)
    found[name].view(-1)[0] = value
    save_file(found, path)
    with pytest.raises(ModelError, match=f"is damaged: '{name}' has values that are not finite[.]$"):
        model.new_state().load(path)


@pytest.mark.parametrize("rows", [torch.zeros(2, dtype=torch.int64), torch.tensor(3)])
def test_a_saved_memory_of_several_batch_sizes_is_refused(tmp_path: Path, rows: Tensor) -> None:
    path = tmp_path / "state.safetensors"
    model, state = remembering()
    state.save(path)
    save_file({**load_file(path), "position_B": rows}, path)
    with pytest.raises(ModelError, match="is damaged: its tensors have different numbers of sequences[.]$"):
        model.new_state().load(path)


def test_memories_that_differ_are_not_stacked() -> None:
    model, state = remembering()
    with pytest.raises(
        ModelError, match="cannot be stacked: 'layers.1.bank.key_BMHD' is .6, 4, 6. in one and .3, 4, 6. in anot"
    ):
        MemoryState.stack([state, model.reduce_memory_slots(state)])
    _, other = remembering(replace(SMALL, memory_slots=0))
    for states in ([state, other], [other, state]):
        with pytest.raises(ModelError, match="cannot be stacked: only one of them has 'layers.1.bank.age_BM'[.]$"):
            MemoryState.stack(states)
    with pytest.raises(ModelError, match="there are no states to stack[.]$"):
        MemoryState.stack([])


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"layers": 1, "attention_every": 1}, "its layers is 2, not 1"),
        ({"layers": 4}, "its layers is 2, not 4"),
        ({"width": 48}, "its width is 24, not 48"),
        ({"segment": 4, "window_segments": 3}, "its segment is 8, not 4"),
        ({"memory_chunk": 5}, "its memory_chunk is 64, not 5"),
        ({"rope_base": 500.0}, "its rope_base is 10000.0, not 500.0"),
    ],
)
def test_a_memory_of_another_model_is_refused_where_it_is_used(change: dict[str, int], sentence: str) -> None:
    _, state = remembering()
    other = TitanModel(replace(SMALL, **change))
    with pytest.raises(ModelError, match=f"^the state belongs to another model: {sentence}[.]$"):
        other.advance(tokens(1, 5), state)
    with pytest.raises(ModelError, match=f"^the state belongs to another model: {sentence}[.]$"):
        other.new_cache(1, 0).restore(state)


def test_a_memory_in_another_precision_is_refused_where_it_is_used_and_taken_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    model, state = remembering()
    state.save(path)
    for dtype in (torch.bfloat16, torch.float16):
        model.to(dtype)
        name = str(dtype).removeprefix("torch.")
        with pytest.raises(ModelError, match=f"the state is in float32, but the model in {name}: save the state and"):
            model.advance(tokens(1, 5), state)
        logits, _ = model.advance(tokens(1, 5), model.new_state().load(path))
        assert logits.dtype == dtype


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"segment": 4, "window_segments": 3}, "its segment is 8, not 4"),
        ({"memory_chunk": 5}, "its memory_chunk is 64, not 5"),
        ({}, "its weights differ"),
    ],
)
def test_a_file_of_another_model_with_the_same_shapes_is_refused(
    change: dict[str, int], sentence: str, tmp_path: Path
) -> None:
    path = tmp_path / "state.safetensors"
    remembering()[1].save(path)
    with pytest.raises(ModelError, match=f"is the state of another model: {sentence}[.]$"):
        TitanModel(replace(SMALL, **change)).new_state().load(path)


@pytest.mark.parametrize("name", [name for name, _ in TitanModel(SMALL).named_parameters()])
def test_every_weight_identifies_the_model(name: str, tmp_path: Path) -> None:
    """One step of training at a small rate is another model."""
    path = tmp_path / "state.safetensors"
    model, state = remembering()
    state.save(path)
    model.new_state().load(path)
    with torch.no_grad():
        model.get_parameter(name).add_(1e-5)
    with pytest.raises(ModelError, match="is the state of another model: its weights differ[.]$"):
        model.new_state().load(path)
    with pytest.raises(ModelError, match="is the state of another model: its weights differ[.]$"):
        model.get_parameter(name).data.mul_(1.2).add_(0.01)
        model.bfloat16().new_state().load(path)


def test_quantized_weights_are_not_compared(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    model, state = remembering()
    state.save(path)
    model.blocks[0].feed_forward = nn.Identity()
    model.new_state().load(path)


def test_a_file_that_does_not_say_its_model_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "state.safetensors"
    model, state = remembering()
    state.save(path)
    with safe_open(path, "pt") as file:
        about = file.metadata()
    found = load_file(path)
    save_file(found, path)
    with pytest.raises(ModelError, match="does not say which model its state belongs to: create the state again"):
        model.new_state().load(path)
    for damage in (
        {"config": "["},
        {"config": "[]"},
        {"config": "{}"},
        {"weights": '"many"'},
        {"weights": "[[]]"},
        {"numbers": "[1.0]"},
        {"numbers": "{}"},
        {"weights": "{}", "numbers": "[]"},
    ):
        save_file(found, path, {**about, **damage})
        with pytest.raises(ModelError, match="is damaged: its description|the state of another model: its weights"):
            model.new_state().load(path)


def test_memories_of_models_that_differ_in_a_setting_are_not_stacked() -> None:
    states = [remembering(config)[1] for config in (SMALL, replace(SMALL, segment=4, window_segments=3))]
    with pytest.raises(
        ModelError,
        match="different models cannot be stacked: the first differs from another [(]its segment is 8, not 4[)][.]$",
    ):
        MemoryState.stack(states)


def test_prefill_batches_rows_up_to_the_shortest(monkeypatch: pytest.MonkeyPatch) -> None:
    model = TitanModel(SMALL).eval().requires_grad_(False)
    seen, run = [], model._run

    def counting(tokens_BS: Tensor, *rest: Any) -> Any:
        seen.append(tuple(tokens_BS.shape))
        return run(tokens_BS, *rest)

    monkeypatch.setattr(model, "_run", counting)
    cache = model.new_cache(4, 0)
    model.prefill(tokens(4, 20), torch.tensor([20, 3, 0, 20]), cache)
    assert seen == [(3, 3), (2, 17)]
    # Two rows stand at 20, one at 3, one at 0: those whose segments begin together go on together.
    seen.clear()
    model.prefill(tokens(4, 6), torch.tensor([6, 6, 6, 6]), cache)
    assert sorted(seen) == [(1, 6), (1, 6), (2, 6)]


@torch.no_grad()
def test_prefill_of_all_rows_does_not_copy_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """The state is as large as a memory is: prefill of one text, or of many of one length, reads it where it lies."""
    model, text = TitanModel(SMALL).eval(), tokens(3, 40)
    expected, state = model.advance(text, model.new_state(3))
    copied: list[object] = []
    rows = MemoryState.rows
    monkeypatch.setattr(MemoryState, "rows", lambda self, indices: copied.append(indices) or rows(self, indices))
    cache = model.new_cache(3, 0)
    for part in text.split((17, 23), dim=1):
        logits = model.prefill(part, torch.full((3,), part.shape[1]), cache)
    assert not copied
    torch.testing.assert_close(logits, expected[:, -1])
    for (name, one), (_, other) in zip(cache.state.named_tensors(), state.named_tensors(), strict=True):
        torch.testing.assert_close(one, other, msg=lambda said, name=name: f"{name}: {said}")
    model.prefill(text, torch.tensor([40, 40, 9]), cache)
    assert copied == [[0, 1]]  # what all have is read where it lies, and then those that go on are apart


@pytest.mark.parametrize("index", [5, 2, -1])
def test_a_row_that_is_not_there_is_refused(index: int) -> None:
    _, state = remembering(batch=2)
    with pytest.raises(ModelError, match=f"there is no row {index}: the state has 2 rows, counted from 0[.]$"):
        state.row(index)
    with pytest.raises(ModelError, match=f"there is no row {index}: the state has 2 rows, counted from 0[.]$"):
        state.rows([1, index])


@pytest.mark.parametrize("slots", [None, 1, 99])
def test_a_memory_without_a_bank_is_not_reduced(slots: int | None) -> None:
    model, state = remembering(replace(SMALL, memory_slots=0))
    with pytest.raises(ModelError, match="the state has no slot bank that could be reduced[.]$"):
        model.reduce_memory_slots(state, slots)


@pytest.mark.parametrize("slots", [99, 7, 0, -1])
def test_a_bank_is_not_reduced_to_more_or_to_nothing(slots: int) -> None:
    model, state = remembering()
    with pytest.raises(ModelError, match=f"a bank of 6 slots cannot be reduced to {slots}[.]$"):
        model.reduce_memory_slots(state, slots)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (
            torch.zeros(9, dtype=torch.int64),
            "a Titans model takes integers of shape .batch, tokens., not torch.int64 of",
        ),
        (
            torch.ones(1, 9, dtype=torch.bool),
            "a Titans model takes integers of shape .batch, tokens., not torch.bool of",
        ),
        (
            torch.zeros(1, 9),
            "a Titans model takes integers of shape .batch, tokens., not torch.float32 of shape .1, 9.",
        ),
        (torch.zeros(1, 0, dtype=torch.int64), "no tokens were given: the model takes 1 or more[.]$"),
    ],
    ids=["1-D", "truth", "float", "empty"],
)
def test_inputs_other_than_tokens_raise(given: Tensor, sentence: str) -> None:
    model, state = remembering()
    for read in (
        lambda: model(given),
        lambda: model(given, keep_all=True),
        lambda: model.loss(given, given),
        lambda: model.advance(given, state),
        lambda: model.prefill(given, torch.tensor([1]), model.new_cache(1, 9)),
    ):
        with pytest.raises(ModelError, match=sentence):
            read()

"""What must hold of a memory model: every way through a text gives the same, and the memory is a value."""

from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from redline.errors import ModelError
from redline.models.memory import (
    MemoryState,
    TitanConfig,
    load_memory_model,
    save_memory_model,
    windowed_attention,
)
from redline.models.memory.token_positions import TokenPositions
from redline.nn.packing import Packing
from redline.nn.switchable import SwitchableModule

from .small_models import KINDS, SMALL, Products, built, tokens


@pytest.mark.parametrize("key_value_heads", [2, 4])
@pytest.mark.parametrize("window_segments", [1, 3])
def test_a_window_without_a_bank_processes_long_chunks_at_once(
    window_segments: int, key_value_heads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In blocks of queries that are no multiple of a segment, and longer than what the window holds."""
    monkeypatch.setattr(windowed_attention, "_BLOCK", 13)
    config = replace(KINDS["window"], window_segments=window_segments, key_value_heads=key_value_heads)
    model, text = built(config), tokens(2, 200)
    whole, state, outputs = model(text), model.new_state(2), []
    for piece in text.split((5, 90, 1, 2, 102), 1):
        with Products() as products:
            logits, state = model.advance(piece, state)
        # Two in each block of queries, and seven linear layers; segment by segment the linear layers would count again.
        assert products.count <= config.layers * (2 * -(-piece.shape[1] // 13) + 7) + 1
        outputs.append(logits)
    torch.testing.assert_close(torch.cat(outputs, 1), whole, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("kind", KINDS)
def test_every_linear_layer_can_use_the_small_matmul_kernel(kind: str) -> None:
    """Which is what decoding one token is."""
    layers = [module for module in built(KINDS[kind]).modules() if isinstance(module, torch.nn.Linear)]
    assert len(layers) > 8 and all(isinstance(layer, SwitchableModule) for layer in layers)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("pieces", [(61,), (1, 7, 8, 3, 1, 21, 20), (30, 31), (1,) * 61])
def test_processing_in_chunks_equals_processing_the_whole(kind: str, pieces: tuple[int, ...]) -> None:
    model, text = built(KINDS[kind]), tokens(2, 61)
    whole, state, outputs = model(text), model.new_state(2), []
    for piece in text.split(pieces, 1):
        logits, state = model.advance(piece, state)
        outputs.append(logits)
    torch.testing.assert_close(torch.cat(outputs, 1), whole, atol=1e-5, rtol=1e-5)
    assert state.position_B.tolist() == [61, 61]


@pytest.mark.cpu
@pytest.mark.parametrize("kind", KINDS)
def test_single_steps_equal_processing_the_whole(kind: str) -> None:
    model, text = built(KINDS[kind]), tokens(2, 40)
    state, outputs = model.new_state(2), []
    for place in range(40):
        if place % SMALL.segment == 0:
            state = model.settle(state)
        logits, state = model.advance_one(text[:, place], state)
        outputs.append(logits)
    torch.testing.assert_close(torch.stack(outputs, 1), model(text), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_a_change_leaves_everything_before_it_unchanged_and_reaches_far(kind: str) -> None:
    model, text = built(KINDS[kind]), tokens(1, 50)
    other = text.clone()
    other[:, 20] = (other[:, 20] + 1) % SMALL.vocabulary
    one, two = model(text), model(other)
    assert torch.equal(one[:, :20], two[:, :20])
    assert (one[:, 20:27] - two[:, 20:27]).abs().amax((0, 2)).min() > 1e-6
    if kind != "window":
        assert (one[:, -1] - two[:, -1]).abs().max() > 1e-9


@pytest.mark.parametrize("kind", KINDS)
def test_training_mode_and_evaluation_mode_are_the_same(kind: str) -> None:
    model, text = built(KINDS[kind]), tokens(2, 45)
    trained = model.train()(text, keep_all=True), model(text)
    evaluated = model.eval()(text, keep_all=True), model(text)
    assert all(torch.equal(one, other) for one, other in zip(trained, evaluated, strict=True))


def test_a_bank_that_keeps_all_tokens_equals_training() -> None:
    roomy = replace(SMALL, memory_slots=80, memory_compression_ratio=1.0, merge_cosine=1.1)
    model, text = built(roomy), tokens(2, 70)
    torch.testing.assert_close(model(text), model(text, keep_all=True), atol=1e-5, rtol=1e-5)
    full = built(replace(roomy, memory_slots=4))
    assert (full(text) - full(text, keep_all=True)).abs().max() > 1e-4


@pytest.mark.cpu
@pytest.mark.parametrize("kind", KINDS)
def test_packed_documents_equal_separate_ones(kind: str) -> None:
    model, text = built(KINDS[kind]), tokens(2, 61)
    documents = torch.tensor([[0] * 20 + [1] * 30 + [2] * 11, [4] * 3 + [5] * 40 + [9] * 18])
    together = model(text, documents, keep_all=True)
    for row in range(2):
        for number in documents[row].unique():
            inside = documents[row] == number
            alone = model(text[row, inside][None], keep_all=True)
            torch.testing.assert_close(together[row, inside], alone[0], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_number_that_comes_again_is_another_document(kind: str) -> None:
    model, text = built(KINDS[kind]), tokens(1, 36)
    documents = torch.tensor([[0] * 12 + [1] * 12 + [0] * 12])
    alone = model(text[:, 24:], keep_all=True)
    for given in (documents, Packing.of(documents)):
        together = model(text, given, keep_all=True)
        torch.testing.assert_close(together[:, 24:], alone, atol=1e-6, rtol=1e-6)
    numbered = torch.tensor([[0] * 12 + [1] * 12 + [2] * 12])
    assert torch.equal(model.loss(text, text, documents), model.loss(text, text, numbered))


def test_numbering_documents_does_not_synchronize() -> None:
    """What waits for a device's values cannot run where there are none; training would wait in every step."""
    positions = TokenPositions.whole(
        tokens(2, 20).to("meta"), torch.zeros(2, 20, dtype=torch.int32, device="meta"), SMALL
    )
    assert positions.positions_BS.shape == (2, 20)


@pytest.mark.parametrize(
    ("documents", "sentence"),
    [
        (torch.zeros(1, 9), "documents must be integers of shape .batch, tokens., not torch.float32 of shape .1, 9.."),
        (torch.zeros(9, dtype=torch.int32), "documents must be integers of shape .batch, tokens., not torch.int32 of"),
        (torch.zeros(1, 8, dtype=torch.int32), "documents have the shape .1, 8., but the tokens .1, 9.."),
        (Packing.of(torch.zeros(2, 9, dtype=torch.int32)), "documents have the shape .2, 9., but the tokens"),
    ],
)
def test_documents_that_do_not_number_the_tokens(documents: Tensor | Packing, sentence: str) -> None:
    with pytest.raises(ModelError, match=sentence):
        built(SMALL)(tokens(1, 9), documents, keep_all=True)


@pytest.mark.parametrize("kind", KINDS)
def test_sequences_at_different_positions_are_batched(kind: str) -> None:
    model, texts = built(KINDS[kind]), [tokens(1, 13), tokens(1, 40), tokens(1, 24)]
    states = [model.advance(text, model.new_state(1))[1] for text in texts]
    batch, more = MemoryState.stack(states), tokens(3, 21)
    together, after = model.advance(more, batch)
    stepped, state = [], batch
    for place in range(21):
        logits, state = model.advance(more[:, place : place + 1], state)
        stepped.append(logits)
    torch.testing.assert_close(torch.cat(stepped, 1), together, atol=1e-5, rtol=1e-5)
    for row, state in enumerate(states):
        alone, end = model.advance(more[row : row + 1], state)
        torch.testing.assert_close(together[row : row + 1], alone, atol=1e-6, rtol=1e-6)
        for (_, one), (_, other) in zip(after.row(row).named_tensors(), end.named_tensors(), strict=True):
            torch.testing.assert_close(one, other, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_state_continues(kind: str, tmp_path: Path) -> None:
    model, text, more = built(KINDS[kind]), tokens(2, 37), tokens(2, 9)
    _, state = model.advance(text, model.new_state(2))
    state.save(tmp_path / "state.safetensors")
    restored = model.new_state(1).load(tmp_path / "state.safetensors")
    assert torch.equal(model.advance(more, restored)[0], model.advance(more, state)[0])
    for (name, one), (_, other) in zip(restored.named_tensors(), state.named_tensors(), strict=True):
        assert torch.equal(one, other), name


def test_a_state_of_another_model_is_refused(tmp_path: Path) -> None:
    model = built(SMALL)
    model.new_state(2).save(tmp_path / "state.safetensors")
    with pytest.raises(ModelError, match="the state of another model"):
        built(replace(SMALL, memory_slots=5)).new_state(2).load(tmp_path / "state.safetensors")
    with pytest.raises(ModelError, match="the state of another model"):
        built(replace(SMALL, layers=3)).new_state(2).load(tmp_path / "state.safetensors")
    (tmp_path / "state.safetensors").write_bytes(b"nothing")
    with pytest.raises(ModelError, match="is not a readable saved state"):
        model.new_state(1).load(tmp_path / "state.safetensors")


@pytest.mark.parametrize("kind", list(KINDS))
def test_autocast_is_refused_in_a_sentence(kind: str) -> None:
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(ModelError, match=r"bf16 or fp16 instead of autocast\.$"):
        built(KINDS[kind])(tokens(1, 20))


def test_the_score_penalty_is_the_kept_share() -> None:
    model, text = built(SMALL).train(), tokens(2, 30)
    plain = model.loss(text, text)
    model.score_weight = 0.5
    _, scores = model._hidden(text, None, keep_all=True)
    # From 0 at a score of −20 to 1 at 0, and on.
    share = sum(((score.clamp_min(-20) + 20) / 20).mean() for score in scores) / len(scores)
    torch.testing.assert_close(model.loss(text, text) - plain, 0.5 * share)
    torch.testing.assert_close(model.eval().loss(text, text), plain, msg="a model is not judged by it")


def test_memory_stats_before_and_after_reduction() -> None:
    model = built(SMALL)
    _, state = model.advance(tokens(2, 90), model.new_state(2))
    stats = model.get_memory_stats(state)
    banks = 2  # one for each sequence, in the one layer of attention
    assert stats["slots"] == banks * 6 and stats["used"] == banks * 6 and stats["utilization"] == 1
    assert stats["writes"] - stats["evictions"] == stats["used"] and stats["bytes"] == state.bytes
    reduced = model.reduce_memory_slots(state)
    smaller = model.get_memory_stats(reduced)
    assert smaller["slots"] == banks * 3 and smaller["mass"] == stats["mass"] and reduced.bytes < state.bytes
    logits, _ = model.advance(tokens(2, 20), reduced)
    assert torch.isfinite(logits).all()
    with pytest.raises(ModelError, match="cannot be reduced to 7"):
        model.reduce_memory_slots(state, 7)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_cached_rows_of_different_lengths_equal_separate_ones(kind: str) -> None:
    model, texts, more = built(KINDS[kind]), [tokens(1, n) for n in (3, 40, 24)], tokens(3, 25)
    padded, counts = torch.zeros(3, 40, dtype=torch.int64), torch.tensor([3, 40, 24])
    for row, text in enumerate(texts):
        padded[row, : text.shape[1]] = text
    cache = model.new_cache(3, 100)
    for _ in range(2):  # again after a reset
        cache.reset()
        addresses = [tensor.data_ptr() for _, tensor in cache.state.named_tensors()]
        first = model.prefill(padded[:, :20], counts.clamp(max=20), cache)
        second = model.prefill(padded[:, 20:], (counts - 20).clamp(min=0), cache)
        steps = [torch.where((counts > 20)[:, None], second, first)]
        for place in range(25):
            model.prepare(cache)
            steps.append(model.step(more[:, place], cache))
        assert addresses == [tensor.data_ptr() for _, tensor in cache.state.named_tensors()]
    for row, text in enumerate(texts):
        alone = model(torch.cat((text, more[row : row + 1]), 1))[0, text.shape[1] - 1 :]
        torch.testing.assert_close(torch.stack(steps, 1)[row], alone, atol=1e-5, rtol=1e-5)


def test_a_saved_model_comes_back_and_another_is_refused(tmp_path: Path) -> None:
    for config in (SMALL, replace(SMALL, tied_embeddings=False, memory_update="titans")):
        model, text = built(config, torch.float32), tokens(1, 30)
        save_memory_model(model, tmp_path, {"eos_token_id": 3})
        assert torch.equal(load_memory_model(tmp_path)(text), model(text))
    path = tmp_path / "config.json"
    written = path.read_text()
    path.write_text(written.replace('"memory_slots": 6', '"memory_slots": 0'))
    with pytest.raises(
        ModelError, match="do not fit its config.json: 2 weights are unexpected .blocks.1.mixer.score.bias …."
    ):
        load_memory_model(tmp_path)
    path.write_text(written.replace('"vocabulary": 31', '"vocabulary": 32'))
    with pytest.raises(ModelError, match="embedding.weight is .31, 24., not .32, 24."):
        load_memory_model(tmp_path)
    path.write_text(written)
    (tmp_path / "model.safetensors").write_bytes(b"x" * 40)
    with pytest.raises(ModelError, match="is not a readable safetensors file"):
        load_memory_model(tmp_path)


def test_every_dispatching_module_names_its_implementation() -> None:
    modules = [module for module in built(SMALL).modules() if isinstance(module, SwitchableModule)]
    assert {type(module).__name__ for module in modules} >= {"NeuralMemory", "RMSNorm", "SwiGLU", "Head"}
    for module in modules:
        module.implementation = "auto"
        assert module.active_implementation()


def test_what_cannot_be() -> None:
    model = built(SMALL)
    with pytest.raises(ModelError, match="one document at a time"):
        model(tokens(1, 9), torch.zeros(1, 9, dtype=torch.int32))
    with pytest.raises(ModelError, match="the state holds 2 sequences, but 1 were given"):
        model.advance(tokens(1, 9), model.new_state(2))
    for change, sentence in [
        ({"width": 25}, "does not divide into 4 heads"),
        ({"key_value_heads": 3}, "heads .4. must be a multiple of"),
        ({"memory_update": "hebb"}, "one of gated_delta, titans"),
        ({"memory_compression_ratio": 0.0}, "above 0 and at most 1"),
        ({"segment": 0}, "segment = 0 must be"),
    ]:
        with pytest.raises(ModelError, match=sentence):
            replace(SMALL, **change)
    with pytest.raises(ModelError, match="unknown key 'slots' in the config of a Titans model"):
        TitanConfig.from_dict({**asdict(SMALL), "slots": 3})

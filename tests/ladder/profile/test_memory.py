import gc

import pytest
import torch

from redline.ladder.profile.memory import LayerMemory, Memory, measure_memory


def by_name(memory: Memory) -> dict[str, LayerMemory]:
    return {layer.name: layer for layer in memory.layers}


def alive_tensors() -> int:
    gc.collect()
    return sum(1 for thing in gc.get_objects() if issubclass(type(thing), torch.Tensor))


def test_training_memory_is_exact(subject):
    memory = measure_memory(subject("perceptron_training"))
    rows = by_name(memory)
    inner, head = 4 * (64 * 128 + 128), 4 * 128 * 10
    assert (rows["inner"].weight_bytes, rows["head"].weight_bytes) == (inner, head)
    assert (rows["inner"].gradient_bytes, rows["head"].gradient_bytes) == (inner, head)
    # AdamW: two moments per weight and a step counter per parameter.
    assert rows["inner"].optimizer_bytes == 2 * inner + 2 * 4
    assert rows["head"].optimizer_bytes == 2 * head + 4
    # Kept for the backward pass: the ReLU's output (which the head's product keeps too) and the softmax's.
    assert sum(row.activation_bytes for row in rows.values()) == 4 * (8 * 128 + 8 * 10)
    assert memory.weight_bytes == memory.gradient_bytes == inner + head
    assert memory.optimizer_bytes == 2 * (inner + head) + 3 * 4
    assert memory.input_bytes == 4 * 8 * 64
    assert "backward" in memory.activations_are


def test_inference_memory_counts_outputs(subject):
    memory = measure_memory(subject("perceptron"))
    rows = by_name(memory)
    assert rows["inner"].activation_bytes == 4 * 8 * 128
    assert rows["head"].activation_bytes == 4 * 8 * 10
    assert memory.gradient_bytes == memory.optimizer_bytes == 0
    assert "outputs" in memory.activations_are


def test_peak_is_broken_down_by_kind(subject):
    memory = measure_memory(subject("perceptron"))
    # Most is alive when relu runs: its input and its output, on top of weights and the batch.
    expected = memory.weight_bytes + memory.input_bytes + 2 * (4 * 8 * 128)
    assert memory.counted_peak_bytes == expected
    assert memory.at_peak == {
        "weights": memory.weight_bytes,
        "activations": 2 * (4 * 8 * 128),
        "gradients": 0,
        "optimizer": 0,
        "inputs": memory.input_bytes,
        "temporary": 0,
    }
    assert sum(row.at_peak_bytes for row in memory.layers) == expected


def test_the_training_peak_adds_up(subject):
    memory = measure_memory(subject("written_out_training"))
    assert memory.counted_peak_bytes == sum(memory.at_peak.values())
    assert memory.counted_peak_bytes == sum(row.at_peak_bytes for row in memory.layers)
    assert memory.counted_peak_bytes >= memory.weight_bytes + memory.optimizer_bytes + memory.gradient_bytes


def test_checkpointing_saves_activations(subject):
    kept, recomputed = (measure_memory(subject(name)).activation_bytes for name in ("not_recomputing", "recomputing"))
    assert kept is not None and recomputed is not None
    assert recomputed < 0.2 * kept


def test_tied_weights_count_once(subject):
    memory = measure_memory(subject("tied"))
    assert memory.weight_bytes == memory.gradient_bytes == 4 * 50 * 16
    assert by_name(memory)["embedding"].weight_bytes == 4 * 50 * 16


def test_ledger_keeps_no_tensor_alive(subject):
    built = subject("written_out_training")
    measure_memory(built)
    before = alive_tensors()
    measure_memory(built)
    assert alive_tensors() <= before


def test_unavailable_fields_are_none_on_a_cpu(subject):
    memory = measure_memory(subject("perceptron"))
    assert memory.peak_bytes is memory.workspace_bytes is memory.fragmentation_bytes is None
    assert memory.resident_bytes is None or memory.resident_bytes > 10**7


def test_a_compiled_model_still_has_totals(subject):
    memory = measure_memory(subject("compiled"))
    assert memory.weight_bytes == 2 * 4 * (8 * 8 + 8)
    assert memory.activation_bytes is memory.counted_peak_bytes is None


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["written_out_training", "fused", "recomputing"])
def test_cuda_peak_contains_what_was_counted(subject, name):
    memory = measure_memory(subject(name, device="cuda"))
    assert memory.peak_bytes is not None and memory.counted_peak_bytes is not None
    assert memory.reserved_bytes is not None and memory.workspace_bytes is not None
    # The allocator rounds every block up to 512 bytes, so it sees no less than the tensors.
    assert memory.peak_bytes >= memory.counted_peak_bytes > memory.weight_bytes
    assert memory.workspace_bytes == memory.peak_bytes - memory.counted_peak_bytes
    assert memory.fragmentation_bytes == memory.reserved_bytes - memory.peak_bytes >= 0
    assert memory.resident_bytes is None

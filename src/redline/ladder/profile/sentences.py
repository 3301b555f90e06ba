"""What the terminal and the page both say about a profile."""

from redline.ladder.profile.layers import LayerTimes
from redline.ladder.profile.memory import Memory
from redline.notation import format_seconds


def layer_name(name: str) -> str:
    return name or "(model itself)"


def measuring_cost(times: LayerTimes) -> str:
    """How far the picture is from the truth."""
    return (
        f"Layers add up to {format_seconds(times.self_sum_s)}; a step without hooks takes "
        f"{format_seconds(times.step_s)}, with them {format_seconds(times.watched_step_s)} "
        f"({times.overhead:+.0%}), medians of {times.repeats}."
    )


def memory_totals(memory: Memory) -> list[tuple[str, int]]:
    """The lines that this device and plan can give."""
    lines = [
        ("weights and buffers", memory.weight_bytes),
        (f"activations ({memory.activations_are})", memory.activation_bytes),
        ("gradients", memory.gradient_bytes),
        ("optimizer state", memory.optimizer_bytes),
        ("inputs", memory.input_bytes),
        ("peak of all tensors, counted", memory.counted_peak_bytes),
        *((f"· of it {kind}", size) for kind, size in memory.at_peak.items() if size),
        ("peak of the CUDA allocator", memory.peak_bytes),
        ("work space (peak that no tensor explains)", memory.workspace_bytes),
        ("reserved from the device", memory.reserved_bytes),
        ("fragmentation (reserved, not allocated)", memory.fragmentation_bytes),
        ("resident size of the process", memory.resident_bytes),
        ("· at its highest in a step", memory.resident_peak_bytes),
    ]
    return [(what, size) for what, size in lines if size is not None]

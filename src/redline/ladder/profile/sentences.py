"""Sentences about a profile, for the terminal and the page."""

from redline.ladder.profile.layers import LayerTimes
from redline.ladder.profile.memory import Memory
from redline.notation import format_seconds


def layer_name(name: str) -> str:
    return name or "(model)"


def measuring_cost(times: LayerTimes) -> str:
    """Returns a sentence about the overhead of the measurement."""
    return (
        f"The layers add up to {format_seconds(times.self_sum_s)}; a step takes {format_seconds(times.step_s)} without "
        f"hooks and {format_seconds(times.watched_step_s)} with hooks ({times.overhead:+.0%}), medians of "
        f"{times.repeats} steps."
    )


def memory_totals(memory: Memory) -> list[tuple[str, int]]:
    """Returns the totals that are available for the device and the plan."""
    lines = [
        ("weights and buffers", memory.weight_bytes),
        (f"activations ({memory.activations_are})", memory.activation_bytes),
        ("gradients", memory.gradient_bytes),
        ("optimizer state", memory.optimizer_bytes),
        ("inputs", memory.input_bytes),
        ("peak of all tensors", memory.counted_peak_bytes),
        *((f"· {kind} at the peak", size) for kind, size in memory.at_peak.items() if size),
        ("peak of the CUDA allocator", memory.peak_bytes),
        ("workspace (allocator peak minus tensors)", memory.workspace_bytes),
        ("reserved from the device", memory.reserved_bytes),
        ("fragmentation (reserved, not allocated)", memory.fragmentation_bytes),
        ("resident size of the process", memory.resident_bytes),
        ("· peak in a step", memory.resident_peak_bytes),
    ]
    return [(what, size) for what, size in lines if size is not None]

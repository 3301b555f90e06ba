"""The metrics that the page shows as charts; the page adds those that only the browser can measure."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from redline.machine.host_memory import resident_bytes
from redline.stream.browser.broadcast import Broadcast
from redline.stream.browser.images import shown_size
from redline.stream.latency import Latency


def collect_metrics(
    latency: Latency, broadcasts: Mapping[str, Broadcast], now_s: float, device: torch.device, busy_share: float | None
) -> dict[str, Any]:
    """Returns the message for all pages. `busy_share` is the device's, and None before the first frame."""
    return {
        "type": "figures",
        "at_s": now_s,
        "report": asdict(latency.report()),
        "busy_share": busy_share,
        "memory": _memory(device),
        "pictures": {name: _image(broadcast) for name, broadcast in broadcasts.items()},
    }


def _memory(device: torch.device) -> dict[str, int]:
    memory = {"process_bytes": resident_bytes()}
    # Must not initialize CUDA.
    if device.type == "cuda" and torch.cuda.is_initialized():
        memory["gpu_bytes"] = torch.cuda.memory_allocated(device)
        memory["gpu_held_bytes"] = torch.cuda.memory_reserved(device)
    return memory


def _image(broadcast: Broadcast) -> dict[str, int] | None:
    newest = broadcast.newest
    if newest is None:
        return None
    frame = newest.frame
    shown_height, shown_width = shown_size(frame.height, frame.width, frame.pixel_aspect)
    return {
        "frames": newest.count,
        "height": frame.height,
        "width": frame.width,
        "shown_height": shown_height,
        "shown_width": shown_width,
    }

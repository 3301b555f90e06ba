"""What the charts of the page show, as it is measured here; the page adds what only the browser can measure."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch

from redline.machine.host_memory import resident_bytes
from redline.stream.browser.broadcast import Broadcast, Viewer
from redline.stream.browser.images import shown_size
from redline.stream.latency import Latency


def figures(
    latency: Latency, outlets: Mapping[str, Broadcast], now_s: float, device: torch.device, busy_share: float | None
) -> dict[str, Any]:
    """`busy_share` is of the time of `device`; None where no frame was made yet."""
    return {
        "type": "figures",
        "at_s": now_s,
        "report": asdict(latency.report()),
        "busy_share": busy_share,
        "memory": _memory(device),
        "pictures": {name: _picture(outlet) for name, outlet in outlets.items()},
    }


def view_figures(views: dict[str, Viewer]) -> dict[str, Any]:
    """Of one page, p50, p95 and p99: `ages_s` from capture until a picture was sent to it, `sendings_s` the last part
    of that, from the hand-over on."""
    return {
        name: {
            "taken": view.taken,
            "skipped": view.skipped,
            "ages_s": view.ages_s(),
            "sendings_s": view.sendings_s(),
        }
        for name, view in views.items()
    }


def _memory(device: torch.device) -> dict[str, int]:
    memory = {"process_bytes": resident_bytes()}
    # Asking must not be what starts CUDA.
    if device.type == "cuda" and torch.cuda.is_initialized():
        used, held = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
        memory |= {"gpu_bytes": used, "gpu_held_bytes": held}
    return memory


def _picture(outlet: Broadcast) -> dict[str, int] | None:
    put = outlet.newest
    if put is None:
        return None
    frame = put.frame
    shown_height, shown_width = shown_size(frame.height, frame.width, frame.pixel_aspect)
    return {
        "frames": put.count,
        "height": frame.height,
        "width": frame.width,
        "shown_height": shown_height,
        "shown_width": shown_width,
    }

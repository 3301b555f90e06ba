"""Writes a Chrome trace of one step: all operators and kernels, inside ranges named after the layers.

Open it at https://ui.perfetto.dev or chrome://tracing.
"""

import gzip
import tempfile
from pathlib import Path

from torch.profiler import record_function

from redline.files.atomic import write_bytes
from redline.ladder.profile.kernels import profiled
from redline.ladder.profile.subject import Subject
from redline.ladder.profile.tracker import Place, Tracker


def write_trace(subject: Subject, path: Path) -> None:
    """Writes the trace atomically; compressed if the name ends in `.gz`."""
    ranges: list[record_function] = []

    def enter(place: Place) -> None:
        opened = record_function(place.label)
        opened.__enter__()
        ranges.append(opened)

    def leave(place: Place) -> None:
        ranges.pop().__exit__(None, None, None)

    with profiled(subject, record_shapes=True, with_flops=True) as seen:
        if subject.sealed:
            subject.step()
        else:
            with Tracker(subject, enter, leave):
                subject.step()
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(plain))
        data = plain.read_bytes()
    write_bytes(path, gzip.compress(data) if path.name.endswith(".gz") else data)

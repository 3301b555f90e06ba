"""What tests of upscaling share."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture(autouse=True)
def no_measured_ceilings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The shipped plan goes by measured rates where there are some; here by what the hardware says."""
    monkeypatch.setenv("REDLINE_CACHE", str(tmp_path / "no ceilings"))


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sums are split among threads and rounded accordingly, so the same bytes come only from as many threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield
    torch.set_num_threads(before)

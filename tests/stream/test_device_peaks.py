"""Peaks count one run only, and a device that answers is not lost."""

import gc

import pytest
import torch

from redline.machine.memory import free_cuda_caches
from redline.stream.device_peaks import DevicePeaks, is_lost


def test_peaks_are_since_the_last_and_beyond_what_others_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    peaks, seen = iter([700, 300]), []
    monkeypatch.setattr(torch.compiler, "reset", lambda: seen.append("code"))
    monkeypatch.setattr(gc, "collect", lambda: seen.append("cycles"))
    # A build of torch without CUDA does not have it.
    clear = "_cuda_clearCublasWorkspaces"
    monkeypatch.setattr(torch._C, clear, lambda: seen.append("workspaces"), raising=False)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: seen.append("cache"))
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 100)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: seen.append("reset"))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: next(peaks))
    memory = DevicePeaks(torch.device("cuda"))
    assert seen == ["code", "cycles", "workspaces", "cache", "reset"]
    assert (memory.take(), memory.take()) == (600, 200)
    assert seen[5:] == ["reset", "reset"]


def test_a_cpu_has_none_and_is_never_lost() -> None:
    assert DevicePeaks(torch.device("cpu")).take() == 0 and not is_lost(torch.device("cpu"))


def test_what_fails_for_good_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(device: torch.device) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", fails)
    assert is_lost(torch.device("cuda"))


@pytest.mark.gpu
def test_on_a_gpu() -> None:
    gpu = torch.device("cuda")
    kept = torch.zeros(1 << 20, dtype=torch.uint8, device=gpu)
    memory = DevicePeaks(gpu)
    torch.zeros(1 << 24, dtype=torch.uint8, device=gpu)
    assert memory.take() == 1 << 24 and memory.take() == 0
    assert not is_lost(gpu) and kept.numel()


@pytest.mark.gpu
def test_workspaces_of_earlier_runs_do_not_lower_the_peak() -> None:
    """cuBLAS keeps a workspace after its first product, and a CUDA graph capture frees it."""
    gpu = torch.device("cuda")
    square = torch.ones(64, 64, device=gpu)
    free_cuda_caches()
    before_bytes = torch.cuda.memory_allocated(gpu)
    torch.mm(square, square)
    assert torch.cuda.memory_allocated(gpu) > before_bytes
    memory = DevicePeaks(gpu)
    torch.zeros(1 << 20, dtype=torch.uint8, device=gpu)
    torch._C._cuda_clearCublasWorkspaces()
    assert memory.take() == 1 << 20 and memory.take() == 0

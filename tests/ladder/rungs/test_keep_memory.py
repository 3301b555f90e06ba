"""What is freed stays with the process. Its allocator cannot be untold, so each test has a process of its own."""

import os
import re
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

from forked_python import ForkedPython
from redline.ladder.job import Job
from redline.ladder.rungs.keep_memory import KeepMemory, Seen
from redline.machine import host_memory as resident
from redline.machine.host_memory import torch_allocates_by_glibc
from redline.machine.machine import Machine

CPU = Machine.detect("cpu")
GLIBC = pytest.mark.skipif(not torch_allocates_by_glibc(), reason="torch brings an allocator of its own here")

# Activations of 64 MiB each, beyond what glibc ever keeps by itself.
CODE = """
import torch
from torch import nn
from redline.ladder.job import Job
from redline.ladder.rungs import keep_memory
from redline.ladder.rungs.keep_memory import KeepMemory

torch.set_num_threads(1)
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 1024), nn.ReLU(), nn.LeakyReLU(), nn.Linear(1024, 3)).eval()
before = {name: value.clone() for name, value in model.state_dict().items()}
x = torch.randn(16384, 64)
with torch.no_grad():
    expected = model(x)
if not TOLD:
    keep_memory.keep_freed_memory = lambda: None
job = KeepMemory().apply(Job.of(model))
run = job.finish()

# Where glibc's pieces come to lie is another each time: it takes some calls until those it has are all it needs.
for _ in range(16):
    assert torch.equal(run(x), expected)
assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
print(KeepMemory().proof(job) or "no proof: " + KeepMemory().why_no_proof(job))
"""


def say(told: bool, python: ForkedPython) -> str:
    ran = python.run(CODE.replace("TOLD", str(told)))
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


@GLIBC
def test_output_is_unchanged_and_page_faults_decrease(forked_python: ForkedPython) -> None:
    told = say(True, forked_python)
    said = re.match(r"([\d,]+) page faults in the first call, ([\d,]+) in the last of 16", told)
    assert said, told
    first, last = (int(number.replace(",", "")) for number in said.groups())
    assert first > 10 * last


@GLIBC
def test_output_is_unchanged_with_huge_pages() -> None:
    """There are so few of them that one more or less decides about the proof."""
    # torch reads the variable once.
    code, environment = CODE.replace("TOLD", "True"), {**os.environ, "THP_MEM_ALLOC_ENABLE": "1"}
    ran = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert "of 16" in ran.stdout


@GLIBC
def test_proof_is_empty_without_the_allocator_setting(forked_python: ForkedPython) -> None:
    assert say(False, forked_python).startswith("no proof: ")


def test_proof_counts() -> None:
    job = Job.of(nn.Linear(2, 2)).with_evidence("keep_memory", Seen(first=2000, last=3, calls=7))
    assert KeepMemory().proof(job) == "2,000 page faults in the first call, 3 in the last of 7 calls"
    for seen in (Seen(), Seen(first=2000, last=2000, calls=1), Seen(first=2000, last=1500, calls=7)):
        assert KeepMemory().proof(job.with_evidence("keep_memory", seen)) == ""


def test_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert KeepMemory().why_not(replace(CPU, device="cuda:0")) == "torch already caches GPU memory"
    monkeypatch.setattr("redline.ladder.rungs.keep_memory.torch_allocates_by_glibc", lambda: False)
    assert "does not allocate with glibc" in KeepMemory().why_not(CPU)


def test_detects_other_allocators(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resident, "_glibc_bytes", lambda: 5)
    assert not torch_allocates_by_glibc.__wrapped__()
    monkeypatch.setattr(resident.platform, "libc_ver", lambda: ("", ""))
    assert not torch_allocates_by_glibc.__wrapped__()


@GLIBC
def test_32_bit_counters_may_wrap_around(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = iter((2**32 - 5, 64 * 2**20))
    monkeypatch.setattr(resident, "_glibc_bytes", lambda: next(counted))
    assert torch_allocates_by_glibc.__wrapped__()
    assert torch.empty(1).numel() == 1

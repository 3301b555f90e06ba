import gzip
import json
import os

import pytest

from redline.errors import RedlineError
from redline.ladder.profile.kernels import time_kernels
from redline.ladder.profile.ranges import write_trace


def names(trace: dict) -> set[str]:
    return {event.get("name") for event in trace["traceEvents"]}


def test_layers_are_named_in_the_trace(subject, tmp_path):
    path = tmp_path / "trace.json"
    write_trace(subject("written_out_training"), path)
    seen = names(json.loads(path.read_text()))
    assert {"model", "attention.qkv", "attention.qkv backward", "(loss)", "(optimizer)"} <= seen
    assert any("aten::addmm" in str(name) for name in seen)


def test_gz_is_compressed(subject, tmp_path):
    path = tmp_path / "deep" / "trace.json.gz"
    write_trace(subject("perceptron"), path)
    assert "inner" in names(json.loads(gzip.decompress(path.read_bytes())))


def test_nothing_is_written_when_the_step_fails(subject, tmp_path):
    with pytest.raises(RedlineError, match="out of luck"):
        write_trace(subject("broken"), tmp_path / "trace.json")
    assert list(tmp_path.iterdir()) == []


def test_unwritable_folder_raises(subject, tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(RedlineError, match="cannot write"):
        write_trace(subject("perceptron"), tmp_path / "file" / "trace.json")


def test_kernels_are_sorted_and_share_everything(subject):
    before = dict(os.environ)
    kernels = time_kernels(subject("perceptron"))
    assert dict(os.environ) == before
    assert sum(kernel.share for kernel in kernels) == pytest.approx(1)
    assert [k.seconds for k in kernels] == sorted((k.seconds for k in kernels), reverse=True)
    assert {k.name: k.calls for k in kernels}["aten::addmm"] == 1


@pytest.mark.gpu
def test_cuda_kernels_are_kernels(subject):
    kernels = time_kernels(subject("fused", device="cuda"))
    assert kernels and not any(kernel.name.startswith("aten::") for kernel in kernels)
    assert any("gemm" in kernel.name.lower() or "cutlass" in kernel.name.lower() for kernel in kernels)

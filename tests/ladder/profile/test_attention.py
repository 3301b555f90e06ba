import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from redline.ladder.profile.attention import attention_by_kernel, find_attention, measure_attention
from redline.ladder.profile.kernels import KernelTime
from redline.ladder.profile.layers import time_layers


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("written_out", {"attention": {"written out": 1}}),
        ("written_out_training", {"attention": {"written out": 1}}),
        ("fused", {"attention": {"SDPA flash (CPU)": 1}}),
        ("perceptron", {}),
        ("convolutional", {}),
    ],
)
def test_attention_is_found_by_its_data_flow(subject, name, found):
    assert find_attention(subject(name)) == found


def test_the_math_kernel_is_named(subject):
    built = subject("fused")
    with sdpa_kernel(SDPBackend.MATH):
        assert find_attention(built) == {"attention": {"SDPA math": 1}}


def test_torchs_own_layer_is_found(subject):
    found = find_attention(subject("library_attention"))
    assert found, "nothing found"
    assert all(
        "attention" in kernel.lower() or "SDPA" in kernel or "fused" in kernel for kernel in next(iter(found.values()))
    )


def test_weights_that_were_cast_stay_weights(subject):
    built = subject("perceptron")
    with torch.autocast("cpu", torch.bfloat16):
        assert find_attention(built) == {}


def test_share_is_that_of_the_attention_layers(subject):
    built = subject("written_out_training")
    times = time_layers(built, repeats=3)
    rows = {row.name: row for row in times.layers}
    attention = measure_attention(built, times)
    (layer,) = attention.layers
    assert layer.total_s == rows["attention"].total_s
    assert layer.core_s == rows["attention"].self_s + rows["attention.softmax"].self_s
    assert attention.core_share is not None
    assert 0 < attention.core_share < attention.share < 1
    assert attention.share == pytest.approx(layer.total_s / times.self_sum_s)
    assert attention.kernels == ("written out",)


def test_no_attention_is_no_share(subject):
    built = subject("perceptron")
    attention = measure_attention(built, time_layers(built, repeats=1))
    assert attention.share == attention.core_share == 0
    assert attention.layers == attention.kernels == ()


def test_attention_kernels_of_a_compiled_model_are_found_by_name():
    kernels = (KernelTime("flash_fwd_kernel<128>", 2, 3e-3, 0.3), KernelTime("sm90_xmma_gemm", 1, 7e-3, 0.7))
    attention = attention_by_kernel(kernels)
    assert attention.share == pytest.approx(0.3)
    assert attention.core_share is None
    assert "names" in attention.counted


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("backend", "kernel"),
    [
        (SDPBackend.FLASH_ATTENTION, "SDPA flash"),
        (SDPBackend.EFFICIENT_ATTENTION, "SDPA memory-efficient"),
        (SDPBackend.CUDNN_ATTENTION, "SDPA cuDNN"),
        (SDPBackend.MATH, "SDPA math"),
    ],
)
def test_the_gpu_kernel_that_ran_is_named(subject, backend, kernel):
    built = subject("fused", "bf16", device="cuda", length=64, width=256)
    with sdpa_kernel(backend):
        assert find_attention(built) == {"attention": {kernel: 1}}

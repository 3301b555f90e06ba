import itertools
import time
from dataclasses import replace

import pytest
import torch
from torch.nn.modules import module as torch_module

from redline.errors import WorkloadError
from redline.ladder.profile.layers import LayerTime, LayerTimes, time_layers
from redline.machine.machine import Ceilings


def by_name(times: LayerTimes) -> dict[str, LayerTime]:
    return {layer.name: layer for layer in times.layers}


def global_hooks() -> tuple[int, int]:
    return len(torch_module._global_forward_hooks), len(torch_module._global_forward_pre_hooks)


@pytest.fixture
def sleeps_alone_take_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """And looking at the clock does, a microsecond: how busy the machine is must not decide a test."""
    looks, slept = itertools.count(), []
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(time, "perf_counter", lambda: next(looks) * 1e-6 + sum(slept))


@pytest.mark.usefixtures("sleeps_alone_take_time")
def test_known_sleeps_land_in_their_own_layer(subject):
    rows = by_name(time_layers(subject("sleepy"), repeats=3))
    assert rows["first.slow"].forward_self_s == pytest.approx(0.004, abs=1e-4)
    assert rows["second.slow"].forward_self_s == pytest.approx(0.020, abs=1e-4)
    # The block around the sleep took it in total, and hardly any time itself.
    assert rows["second"].forward_s == pytest.approx(0.020, abs=1e-4)
    assert rows["second"].forward_self_s < 1e-4
    assert rows[""].forward_s == pytest.approx(0.024, abs=1e-4)
    assert all(row.backward_s == 0 for row in rows.values())
    assert "(loss)" not in rows and "(optimizer)" not in rows


@pytest.mark.usefixtures("sleeps_alone_take_time")
def test_backward_time_lands_in_the_layer_whose_nodes_ran(subject):
    rows = by_name(time_layers(subject("sleepy_training"), repeats=3))
    assert rows["second.slow"].backward_self_s == pytest.approx(0.012, abs=1e-4)
    # Nobody needs the gradient of the input, so the first sleep never runs backward.
    assert rows["first.slow"].backward_self_s == 0
    assert rows["second"].backward_s >= 0.012 > rows["second"].backward_self_s
    assert rows["first"].backward_s < 1e-4
    assert rows[""].backward_s == pytest.approx(rows["first"].backward_s + rows["second"].backward_s, abs=1e-4)
    assert rows["(optimizer)"].forward_self_s > 0
    assert rows["(loss)"].forward_self_s > 0 and rows["(loss)"].backward_self_s > 0


@pytest.mark.usefixtures("sleeps_alone_take_time")
def test_self_times_add_up_to_the_step(subject):
    times = time_layers(subject("sleepy_training"), repeats=3)
    assert times.self_sum_s == pytest.approx(times.step_s, abs=1e-3)
    assert sum(times.share(layer.self_s) for layer in times.layers) == pytest.approx(1)
    assert times.watched_step_s >= 0.036 and times.step_s >= 0.036  # what the sleeps alone take
    assert times.overhead == pytest.approx(times.watched_step_s / times.step_s - 1)
    assert sum(kind.self_s for kind in times.by_type()) == pytest.approx(times.self_sum_s)
    assert times.largest(1)[0].name == "second.slow"
    assert times.by_type()[0].type == "Slow"


def test_flops_are_exact_forward_and_backward(subject):
    rows = by_name(time_layers(subject("perceptron"), repeats=1))
    assert rows["inner"].flops == 2 * 8 * 64 * 128
    assert rows["head"].flops == 2 * 8 * 128 * 10
    times = time_layers(subject("perceptron_training"), repeats=1)
    rows = by_name(times)
    # The first layer's input needs no gradient: one product forward, one backward. The second: one and two.
    assert rows["inner"].flops == 2 * (2 * 8 * 64 * 128)
    assert rows["head"].flops == 3 * (2 * 8 * 128 * 10)
    assert times.flops == rows["inner"].flops + rows["head"].flops


@pytest.mark.parametrize("name", ["written_out", "fused"])
def test_flops_of_attention_belong_to_the_layer_that_attends(subject, name):
    rows = by_name(time_layers(subject(name), repeats=1))
    assert rows["attention"].flops == 2 * (2 * 2 * 4 * 12 * 12 * 8)


def test_recomputed_layers_count_in_the_backward_pass(subject):
    again, once = (time_layers(subject(name), repeats=2) for name in ("recomputing", "not_recomputing"))
    first = by_name(again)["body.0"]
    assert first.calls == 1
    assert first.flops == by_name(once)["0"].flops + 2 * 256 * 64 * 512
    assert by_name(again)["body"].backward_s >= first.backward_s


def test_share_of_the_ceiling(subject):
    built = subject("perceptron")
    slow = Ceilings(1e9, {"fp32": 1e9}, {"fp32": 5e8})
    times = time_layers(replace(built, machine=replace(built.machine, ceilings=slow)), repeats=1)
    layer = by_name(times)["inner"]
    assert times.ceiling_flops_per_s == 1e9
    assert times.of_ceiling(layer) == pytest.approx(layer.flops / layer.self_s / 1e9)
    unknown = time_layers(replace(built, machine=replace(built.machine, ceilings=None)), repeats=1)
    assert unknown.of_ceiling(by_name(unknown)["inner"]) == 0


def test_nothing_is_left_behind(subject):
    built = subject("sleepy_training")
    before, structure = global_hooks(), str(built.job.model)
    time_layers(built, repeats=1)
    assert global_hooks() == before
    assert str(built.job.model) == structure
    assert built.loss is not None and built.loss.around is None
    for module in built.job.model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks and not module._backward_hooks
    optimizer = built.optimizer
    assert optimizer is not None
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks


def test_a_step_that_raises_leaves_nothing_behind_either(subject):
    built, before = subject("broken"), global_hooks()
    with pytest.raises(WorkloadError, match="out of luck"):
        time_layers(built, repeats=1)
    assert global_hooks() == before


def test_names_are_the_users_own_under_a_plan(subject):
    rows = by_name(time_layers(subject("convolutional", "channels_last"), repeats=1))
    assert {"", "0", "1", "2", "3"} <= set(rows)
    assert rows["0"].type == "Conv2d"


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["written_out_training", "fused"])
def test_cuda_events_give_positive_times(subject, name):
    built = subject(name, device="cuda")
    times = time_layers(built, repeats=5)
    rows = by_name(times)
    assert all(rows[layer].self_s > 0 for layer in ("norm", "attention.qkv", "mlp.0", "head"))
    assert rows[""].forward_s <= times.watched_step_s * 1.05
    if built.training:
        assert all(rows[layer].backward_self_s > 0 for layer in ("attention.qkv", "mlp.0", "head"))
    assert rows["mlp.0"].flops == rows["mlp.2"].flops > 0


@pytest.mark.parametrize("name", ["encoder_layer"])
def test_the_layers_inside_a_transformer_encoder_layer_are_shown(subject, name: str) -> None:
    enabled = torch.backends.mha.get_fastpath_enabled()
    rows = by_name(time_layers(subject(name), repeats=1))
    assert {"linear1", "linear2", "norm1", "self_attn"} <= rows.keys()
    assert rows["linear1"].flops > 0
    assert torch.backends.mha.get_fastpath_enabled() == enabled

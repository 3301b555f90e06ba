"""fp8 takes the large products alone, and says where it cannot be had."""

import pytest
import torch
from torch import nn

from redline.errors import RedlineError
from redline.machine.machine import Machine
from redline.training.precision import is_large, to_fp8, why_no_fp8


def test_which_layers_are_worth_it() -> None:
    assert is_large(nn.Linear(256, 512), "blocks.0.mlp.down")
    assert not is_large(nn.Linear(256, 512), "head") and not is_large(nn.Linear(256, 512), "model.head")
    assert not is_large(nn.Linear(240, 512), "mlp") and not is_large(nn.Linear(264, 512), "mlp")
    assert not is_large(nn.Embedding(512, 512), "embedding")


def test_a_cpu_has_none_and_a_small_model_has_no_use_for_it() -> None:
    assert "has no fp8 arithmetic" in why_no_fp8(Machine.detect("cpu"))
    with pytest.raises(RedlineError, match="no linear layer is at least 256 wide"):
        to_fp8(nn.Sequential(nn.Linear(64, 64)))


def test_layers_are_exchanged_and_their_weights_are_not() -> None:
    pytest.importorskip("torchao")
    model = nn.ModuleDict({"mlp": nn.Linear(256, 512), "small": nn.Linear(64, 64), "head": nn.Linear(256, 512)})
    weights = [id(weight) for weight in model.parameters()]
    assert to_fp8(model) == 1 and [id(weight) for weight in model.parameters()] == weights
    assert [type(layer).__name__ for layer in model.values()] == ["Float8Linear", "Linear", "Linear"]


@pytest.mark.gpu
def test_products_run_in_fp8() -> None:
    pytest.importorskip("torchao")
    machine = Machine.detect("cuda")
    if "fp8" not in machine.hardware_dtypes:
        pytest.skip("no fp8 here")
    plain = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)).cuda().bfloat16()
    fast = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256)).cuda().bfloat16()
    fast.load_state_dict(plain.state_dict())
    weights = [id(weight) for weight in fast.parameters()]
    assert to_fp8(fast) == 2 and [id(weight) for weight in fast.parameters()] == weights
    x = torch.randn(64, 256, device="cuda", dtype=torch.bfloat16)
    for model in (plain, fast):
        model(x).float().square().mean().backward()
    # Values are off by 1/38 in e4m3 and by 1/19 in e5m2, the gradients' dtype. In the first layer's gradient the errors
    # of all products meet, and those of the ReLU, where rounding turns the sign of one number in a hundred: 13 % in
    # the same arithmetic written out.
    for one, two, most in zip(plain.parameters(), fast.parameters(), (0.17, 0.06, 0.06, 0.04), strict=True):
        difference = (one.grad.float() - two.grad.float()).norm() / one.grad.float().norm()
        assert 1e-4 < difference < most

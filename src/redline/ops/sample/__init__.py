"""Samples a token from each row of logits, with noise that depends only on a key, a position and the token id.

Therefore the sampled token does not depend on the other rows, and sampling needs no synchronization with the device.

N: rows, V: vocabulary.
"""

from torch import Tensor

from redline.errors import ModelError
from redline.ops.checks import check_floating, check_integer, check_no_gradient, check_same_device, check_sizes
from redline.ops.dispatch import run
from redline.ops.sample import reference
from redline.ops.sample.reference import mixed, noise

__all__ = ["mixed", "noise", "sample"]


def sample(
    logits_NV: Tensor, temperature_N: Tensor, keys_N: Tensor, drawn_N: Tensor, implementation: str = "auto"
) -> Tensor:
    """Returns tokens (N,) as int64: the most likely token for rows with a temperature of 0, a sample for the others.

    `keys_N` are 32-bit numbers that stand for seeds, and `drawn_N` counts the tokens that were drawn before. A row
    whose logits contain NaN or +∞ or are all −∞ gets −1.
    """
    op = "sample"
    numbers = {"temperature_N": temperature_N, "keys_N": keys_N, "drawn_N": drawn_N}
    if not check_sizes(op, logits_NV=logits_NV, **numbers)["V"]:
        raise ModelError(f"{op}: logits_NV must have at least one column, not {tuple(logits_NV.shape)}.")
    check_floating(op, logits_NV=logits_NV, temperature_N=temperature_N)
    for name in ("keys_N", "drawn_N"):
        check_integer(op, name, numbers[name])
    check_no_gradient(op, logits_NV=logits_NV)
    check_same_device(op, logits_NV=logits_NV, **numbers)
    return run(op, implementation, (logits_NV,), reference.sample, logits_NV, temperature_N, keys_N, drawn_N)

"""What cross-entropy refuses, and that a compiler takes it whole."""

import pytest
import torch

from redline.errors import MachineError, ModelError
from redline.ops.cross_entropy import cross_entropy

LOGITS, TARGET = torch.zeros(3, 5), torch.zeros(3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("logits", "target", "options", "sentence"),
    [
        (LOGITS[0], TARGET, {}, r"\(rows, classes\), not \(5,\)"),
        (LOGITS[:, :0], TARGET, {}, r"not \(3, 0\)"),
        (LOGITS.int(), TARGET, {}, "floating-point logits .* torch.int32"),
        (LOGITS, TARGET[:2], {}, "of 3 rows needs as many"),
        (LOGITS, TARGET.float(), {}, "int64 or int32 targets, not .3,., torch.float32"),
        (LOGITS, TARGET.to("meta"), {}, "the targets are on meta, but the rows are on cpu"),
        (LOGITS, TARGET + 5, {}, "target 5 is neither one of 5 classes nor ignored .-100."),
        (LOGITS, TARGET - 1, {}, "target -1 is neither"),
        (LOGITS, TARGET, {"label_smoothing": 1.1}, "between 0 and 1, not 1.1"),
        (LOGITS, TARGET, {"z_loss": -0.1}, "at least 0, not -0.1"),
        (LOGITS, TARGET, {"reduction": "max"}, "no reduction 'max': it has mean, sum, none"),
        (LOGITS, TARGET, {"implementation": "cuda"}, "no implementation 'cuda'"),
    ],
)
def test_what_does_not_fit_is_refused(
    logits: torch.Tensor, target: torch.Tensor, options: dict[str, object], sentence: str
) -> None:
    with pytest.raises(ModelError, match=sentence):
        cross_entropy(logits, target, **options)


def test_triton_needs_a_cuda_device() -> None:
    kernel = pytest.importorskip("redline.ops.kernel")
    if kernel.INTERPRETED:
        pytest.skip("the interpreter runs anywhere")
    with pytest.raises(MachineError, match="needs a CUDA device"):
        cross_entropy(LOGITS, TARGET, implementation="triton")


def test_the_reference_compiles_whole() -> None:
    logits, target = torch.randn(4, 9, requires_grad=True), torch.randint(9, (4,))
    whole = torch.compile(lambda logits: cross_entropy(logits, target), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(
        torch.autograd.grad(whole(logits), logits), torch.autograd.grad(cross_entropy(logits, target), logits)
    )

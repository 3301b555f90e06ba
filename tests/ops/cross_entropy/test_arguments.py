"""Tests which arguments of cross-entropy are refused."""

import pytest
import torch

from redline.errors import ModelError
from redline.ops.cross_entropy import cross_entropy

LOGITS, TARGET = torch.zeros(3, 5), torch.zeros(3, dtype=torch.int64)


@pytest.mark.parametrize(
    ("logits", "target", "options", "sentence"),
    [
        (LOGITS[0], TARGET, {}, r"\(rows, classes\), not \(5,\)"),
        (LOGITS[:, :0], TARGET, {}, r"not \(3, 0\)"),
        (LOGITS.int(), TARGET, {}, "must be floating-point logits .* torch.int32"),
        (LOGITS, TARGET[:2], {}, r"target_N must have shape \(3,\), not \(2,\)"),
        (LOGITS, TARGET.float(), {}, "target_N must be int32 or int64, not torch.float32"),
        (LOGITS, TARGET.to("meta"), {}, "target_N is on meta, but rows is on cpu"),
        (LOGITS, TARGET + 5, {}, "target 5 is not one of 5 classes, and not ignore_index .-100."),
        (LOGITS, TARGET - 1, {}, "target -1 is not one of"),
        (LOGITS, TARGET, {"label_smoothing": 1.1}, "between 0 and 1, not 1.1"),
        (LOGITS, TARGET, {"z_loss": -0.1}, "at least 0, not -0.1"),
        (LOGITS, TARGET, {"reduction": "max"}, "unknown reduction 'max' .supported: mean, sum, none"),
    ],
)
def test_invalid_arguments_are_refused(
    logits: torch.Tensor, target: torch.Tensor, options: dict[str, object], sentence: str
) -> None:
    with pytest.raises(ModelError, match=sentence):
        cross_entropy(logits, target, **options)

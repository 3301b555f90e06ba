"""Arguments of cross-entropy that are refused."""

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
        (LOGITS.int(), TARGET, {}, "floating-point logits .* torch.int32"),
        (LOGITS, TARGET[:2], {}, "of 3 rows needs as many"),
        (LOGITS, TARGET.float(), {}, "int64 or int32 targets, not .3,., torch.float32"),
        (LOGITS, TARGET.to("meta"), {}, "the targets are on meta, but the rows are on cpu"),
        (LOGITS, TARGET + 5, {}, "target 5 is neither one of 5 classes nor ignored .-100."),
        (LOGITS, TARGET - 1, {}, "target -1 is neither"),
        (LOGITS, TARGET, {"label_smoothing": 1.1}, "between 0 and 1, not 1.1"),
        (LOGITS, TARGET, {"z_loss": -0.1}, "at least 0, not -0.1"),
        (LOGITS, TARGET, {"reduction": "max"}, "no reduction 'max': it has mean, sum, none"),
    ],
)
def test_what_does_not_fit_is_refused(
    logits: torch.Tensor, target: torch.Tensor, options: dict[str, object], sentence: str
) -> None:
    with pytest.raises(ModelError, match=sentence):
        cross_entropy(logits, target, **options)

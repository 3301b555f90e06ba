"""The output layer of a language model, with a fused loss that does not store the logits."""

from torch import Tensor

from redline.nn.linear import Linear
from redline.ops.linear_cross_entropy import linear_cross_entropy


class Head(Linear):
    def __init__(self, width: int, vocabulary: int) -> None:
        super().__init__(width, vocabulary, bias=False)

    def loss(
        self,
        hidden: Tensor,
        targets: Tensor,
        *,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        reduction: str = "mean",
    ) -> Tensor:
        """Returns the cross-entropy of the targets, whose shape is that of `hidden` without the last dimension."""
        return linear_cross_entropy(
            hidden.reshape(-1, self.in_features),
            self.weight,
            targets.reshape(-1),
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            reduction=reduction,
            implementation=self.implementation,
        )

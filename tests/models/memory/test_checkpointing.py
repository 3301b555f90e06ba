"""Activation checkpointing of a Titans model: equal gradients, and what it recomputes and keeps."""

from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from redline.errors import ModelError
from redline.models.memory import TitanModel

from .small_models import KINDS, SMALL, Products, built, tokens


@dataclass
class Training:
    """One forward and backward pass: its gradients and what they took."""

    gradients: list[Tensor]
    mixer_runs: int
    products: int
    kept_bytes: int

    @classmethod
    def of(cls, model: TitanModel, text: Tensor) -> "Training":
        runs, kept = [], {}

        def keep(tensor: Tensor) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        hooks = [block.mixer.register_forward_pre_hook(lambda *_: runs.append(1)) for block in model._each_block()]
        with Products() as products:
            with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
                loss = model.loss(text, text.roll(-1, 1))
            gradients = torch.autograd.grad(loss, list(model.parameters()))
        for hook in hooks:
            hook.remove()
        return cls(list(gradients), len(runs), products.count, sum(kept.values()))


@pytest.mark.parametrize("kind", ["bank", "window", "neural", "titans"])
def test_recomputed_activations_give_the_same_gradients(kind: str) -> None:
    layers = 4  # so that what each of them keeps outweighs what the model does
    model, text = built(replace(KINDS[kind], layers=layers)).train(), tokens(2, 20)
    model.score_weight = 0.1
    plain, found = Training.of(model, text), {}
    for granularity in ("block", "layer", "selective"):
        model.gradient_checkpointing_enable(granularity)
        found[granularity] = Training.of(model, text)
        for one, other in zip(plain.gradients, found[granularity].gradients, strict=True):
            torch.testing.assert_close(one, other)
    block, layer, selective = found.values()
    assert plain.mixer_runs == layers and block.mixer_runs == layer.mixer_runs == 2 * layers
    # What is kept beside the products: of a layer its two inputs, of a block its one.
    assert block.kept_bytes == selective.kept_bytes < layer.kept_bytes < plain.kept_bytes / 4
    # Selective keeps the products, and computes only what lies between them again.
    assert selective.mixer_runs == 2 * layers and selective.products == plain.products
    assert min(block.products, layer.products) > plain.products
    model.gradient_checkpointing_disable()
    again = Training.of(model, text)
    assert (again.mixer_runs, again.products) == (plain.mixer_runs, plain.products)


def test_an_unknown_granularity_is_refused() -> None:
    with pytest.raises(ModelError, match="unknown granularity 'head': use one of block, layer, selective"):
        built(SMALL).gradient_checkpointing_enable("head")

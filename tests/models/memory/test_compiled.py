"""Compiled blocks of a memory model give the losses and gradients of the model as it is, on the CPU too."""

import torch

from redline.models.memory import TitanConfig, TitanModel

# A block of each kind: neural memory, then attention.
SMALL = TitanConfig(
    vocabulary=31, width=8, layers=2, heads=2, attention_every=2, memory_heads=2, memory_chunk=4, segment=4
)


def test_the_backward_pass_of_compiled_blocks() -> None:
    """`aot_eager` runs the traced gradient by PyTorch's own kernels, whose strides must be the traced ones."""
    torch.manual_seed(0)
    model = TitanModel(SMALL).train()
    tokens, documents = torch.randint(31, (2, 6)), torch.arange(6).expand(2, -1) // 5
    expected = model.loss(tokens, tokens, documents)
    gradients = torch.autograd.grad(expected, list(model.parameters()))
    torch.compiler.reset()
    for block in model.blocks:
        block.compile(backend="aot_eager", fullgraph=True)
    loss = model.loss(tokens, tokens, documents)
    torch.testing.assert_close(loss, expected)
    torch.testing.assert_close(torch.autograd.grad(loss, list(model.parameters())), gradients)

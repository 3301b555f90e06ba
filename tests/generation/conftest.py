"""A small decoder whose texts vary, and a recorder that needs no GPU."""

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from redline.models.decoder import Decoder, DecoderConfig
from redline.models.memory import TitanConfig, TitanModel


@pytest.fixture(autouse=True)
def seeded() -> None:
    """The same models and prompts in every run, whatever ran before."""
    random.seed(0)
    torch.manual_seed(0)


@pytest.fixture
def model() -> Decoder:
    """In fp64: the likeliest token must not depend on the order in which a BLAS adds, which the batch may change."""
    config = DecoderConfig(101, 32, 2, 4, 48, key_value_heads=2, context=120, windows=(None, 9))
    model = Decoder(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.25 * torch.randn_like(parameter))
    return model.double()


@pytest.fixture
def memory_model() -> TitanModel:
    config = TitanConfig(
        101, 32, 2, 4, attention_every=2, segment=8, memory_slots=5, memory_compression_ratio=0.5, merge_cosine=0.9
    )
    model = TitanModel(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.25 * torch.randn_like(parameter))
    return model


class FakeRecorder:
    """Records by remembering the function: a replay may rely on nothing but its buffers."""

    def __init__(self) -> None:
        self.rehearsed = self.recorded = self.replayed = 0

    def supports(self, tensors: list[Tensor]) -> bool:
        return True

    def warm_up(self, run: Callable[[], Any]) -> Any:
        self.rehearsed += 1
        return run()

    def capture(self, run: Callable[[], Any]) -> tuple[Any, Callable[[], None]]:
        self.recorded += 1

        def replay() -> None:
            self.replayed += 1
            run()

        return None, replay

    def pool_bytes(self) -> int:
        return 0


@pytest.fixture
def without_warnings() -> Any:
    """The compiler's own imports warn."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield

"""A model is an entry: the loop, the packing and the command know nothing of any of them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from redline.errors import RedlineError
from redline.files.config_fields import decode
from redline.generation import InferenceEngine
from redline.generation.folder import ModelFolder
from redline.nn.packing import Packing
from redline.training.text.architecture import Architecture, check_layers, kept_by_blocks, products_per_token
from redline.training.text.architectures import ARCHITECTURES, DecoderSettings, MemorySettings
from redline.training.text.run import prepare_training, run_text

CPU = torch.device("cpu")
STEPS: list[int] = []
TINY = MemorySettings(width=16, layers=4, heads=2, attention_every=2, segment=8, memory_chunk=4)
SLOTS = replace(TINY, memory_slots=4)


@dataclass(frozen=True)
class Bigram(Architecture):
    """The next token by the last one alone."""

    width: int = 8

    @property
    def limit(self) -> int | None:
        return None

    def build(self, vocabulary: int) -> nn.Module:
        return nn.Sequential(nn.Embedding(vocabulary, self.width), nn.Linear(self.width, vocabulary))

    def loss(self, model: nn.Module, tokens_BS: Tensor, targets_BS: Tensor, packing: Packing, z_loss: float) -> Tensor:
        assert packing.documents_BS.shape == tokens_BS.shape
        return F.cross_entropy(model(tokens_BS).flatten(0, 1), targets_BS.flatten())

    def before_step(self, model: nn.Module, step: int) -> None:
        STEPS.append(step)

    def flops_per_token(self, model: nn.Module, length: int) -> float:
        return 6.0 * products_per_token(model)

    def save(self, model: nn.Module, folder: Path, end: int) -> None:
        folder.mkdir(parents=True)
        save_file(model.state_dict(), folder / "bigram.safetensors")


def test_another_kind_of_model_is_an_entry(
    config: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ARCHITECTURES, "bigram", Bigram)
    STEPS.clear()
    decoder = "width = 16\nlayers = 3\nheads = 2\nmlp_width = 24\ncontext = 40"
    path = config(('kind = "decoder"', 'kind = "bigram"'), (decoder, "width = 12"), ("length = 29", "length = 90"))
    task = prepare_training(path, tmp_path / "out", CPU, False, lambda _: None, lambda _: None)
    losses: list[float] = []
    outcome, result = run_text(
        task, tmp_path / "out", CPU, False, lambda seen: losses.append(seen.loss), lambda _: None
    )
    assert result is not None and losses[-1] < losses[0] and list(range(8)) == STEPS
    assert task.flops_per_item == 6 * 12 * task.vocabulary
    saved = load_file(result.model / "bigram.safetensors")
    assert torch.equal(saved["0.weight"], outcome.model.state_dict()["0.weight"])


def test_a_vocabulary_is_rounded_up_or_checked() -> None:
    assert DecoderSettings().vocabulary_for(257) == 320 and DecoderSettings().vocabulary_for(320) == 320
    assert DecoderSettings(vocabulary=300).vocabulary_for(257) == 300
    with pytest.raises(RedlineError, match="the tokenizer has 301 tokens, and .* is 300"):
        DecoderSettings(vocabulary=300).vocabulary_for(301)


@pytest.mark.parametrize("tied", [True, False])
def test_a_lookup_is_no_product(tied: bool) -> None:
    settings = DecoderSettings(width=16, layers=2, heads=2, mlp_width=24, context=8, tied_embeddings=tied)
    per_block = 16 * 48 + 16 * 16 + 3 * 16 * 24
    assert products_per_token(settings.build(50)) == 2 * per_block + 16 * 50


def test_kept_activations_per_token() -> None:
    """Per block four tensors of the width (two inputs, query, attention's output) and two of the feed-forward's."""
    assert kept_by_blocks(layers=3, width=10, mlp_width=100) == 3 * (10 + 10 + 10 + 10 + 100 + 100)


def test_the_most_layers_are_allowed_and_one_more_is_not() -> None:
    check_layers(2**14)
    with pytest.raises(RedlineError, match=r"layers = 16,385 .* the limit is 16,384"):
        check_layers(2**14 + 1)


def test_flops_of_windowed_attention() -> None:
    narrow = DecoderSettings(width=16, layers=2, heads=2, mlp_width=24, context=512, window=32)
    model = narrow.build(50)
    assert narrow.flops_per_token(model, 512) - 6 * products_per_token(model) == 6 * 2 * 64 * 16


def test_a_memory_model_is_trained_written_and_generated_with(config: Callable[..., Path], tmp_path: Path) -> None:
    decoder = "width = 16\nlayers = 3\nheads = 2\nmlp_width = 24\ncontext = 40"
    memory = "width = 16\nlayers = 2\nheads = 2\nattention_every = 2\nsegment = 8\nmemory_slots = 4\nscore_after = 3"
    path = config(('kind = "decoder"', 'kind = "memory"'), (decoder, memory))
    task = prepare_training(path, tmp_path / "out", CPU, False, lambda _: None, lambda _: None)
    losses: list[float] = []
    _, result = run_text(task, tmp_path / "out", CPU, False, lambda seen: losses.append(seen.loss), lambda _: None)
    assert losses[-1] < losses[0]
    opened = ModelFolder.open(result.model)
    assert opened.model_type == "redline_memory" and opened.stop_tokens
    engine = InferenceEngine(opened.load(torch.float32, CPU))
    assert len(engine.generate([opened.tokenizer.encode("a").ids], max_tokens=20)[0].tokens) <= 20


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"heads": 7}, "does not divide"),
        ({"memory_update": "x"}, "titans"),
        ({"attention_every": 0, "memory_slots": 8}, "attention_every = 0 with layers = 12 gives none"),
        ({"layers": 3, "memory_slots": 8}, "attention_every = 4 with layers = 3 gives none"),
        ({"merge_cosine": 0.9}, "merge_cosine under .* needs memory_slots"),
        ({"use_adaptive_compression": True}, "use_adaptive_compression under .* needs memory_slots"),
        ({"score_after": 5}, "score_after under .* needs memory_slots"),
        ({"layers": 10**9}, "layers = 1,000,000,000 under .* is too large"),
    ],
)
def test_impossible_memory_settings_raise(settings: dict[str, object], sentence: str) -> None:
    with pytest.raises(RedlineError, match=sentence):
        MemorySettings(**settings)


@pytest.mark.parametrize("vocabulary", [64, 300])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("every", [0, 1, 3])
def test_parameters_are_counted_without_building_all_layers(vocabulary: int, tied: bool, every: int) -> None:
    small = {"width": 16, "layers": 7, "heads": 2, "mlp_width": 24, "tied_embeddings": tied}
    for settings in (MemorySettings(**small, attention_every=every), DecoderSettings(**small)):
        built = sum(weight.numel() for weight in settings.build(vocabulary).parameters())
        assert settings.parameters(vocabulary) == built


@pytest.mark.parametrize("change", [{}, {"attention_every": 0}, {"attention_every": 1}, {"layers": 5}], ids=str)
def test_weights_are_counted_without_being_made(change: dict[str, Any]) -> None:
    settings = replace(TINY, **change)
    assert settings.parameters(30) == sum(weight.numel() for weight in settings.build(30).parameters())


@pytest.mark.parametrize(
    "change", [{"merge_cosine": -1.0}, {"merge_cosine": 1.0}, {"score_weight": 0.0, "score_after": 0}], ids=str
)
def test_settings_at_their_limits_are_valid(change: dict[str, Any]) -> None:
    assert decode(MemorySettings, {"memory_slots": 4, **change}, "under [model]")


@pytest.mark.parametrize(
    "change", [{"merge_cosine": -1.1}, {"merge_cosine": 1.1}, {"score_weight": -0.1}, {"score_after": -1}], ids=str
)
def test_settings_beyond_their_limits_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(RedlineError, match=next(iter(change))):
        decode(MemorySettings, {"memory_slots": 4, **change}, "under [model]")


def test_the_score_penalty_starts_at_its_step() -> None:
    settings = replace(SLOTS, score_after=3, score_weight=0.5)
    model = settings.build(30)
    for step, weight in ((0, 0.0), (2, 0.0), (3, 0.5), (4, 0.5)):
        settings.before_step(model, step)
        assert model.score_weight == weight
        assert settings.penalties(step) == (("score penalty",) if weight else ())
    assert TINY.penalties(1000) == () and replace(settings, score_weight=0.0).penalties(1000) == ()


def test_flops_of_attention_and_neural_memory() -> None:
    """Two layers attend, two remember by 2 heads of 8 × 8; forward and backward are six operations a product."""
    matrix = 2 * (3 * 8 * 8 + 4 * (8 + 8))
    for settings, length, seen in ((TINY, 20, 10), (TINY, 400, 16), (SLOTS, 400, 200)):
        model = settings.build(30)
        beside = settings.flops_per_token(model, length) / 6 - products_per_token(model)
        assert beside == 2 * 2 * seen * 16 + 2 * matrix
    assert TINY.kept_per_token == 4 * (4 * 16 + 2 * 64)

"""The config for training on text: unknown, impossible and contradictory values raise errors that name them."""

import tomllib
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch

from redline.errors import RedlineError
from redline.training.bundled import find_config
from redline.training.text.architectures import DecoderSettings, MemorySettings
from redline.training.text.config import TextData, TextLoopSettings, TextTraining
from redline.training.text.corpus import TokenizerSettings

CONFIGS = Path(__file__).parents[3] / "src" / "redline" / "training" / "configs"


def test_arguments_override_the_config(config: Callable[..., Path]) -> None:
    read = TextTraining.read(config())
    assert (read.kind, read.model.limit, read.data.batch, read.loop.steps) == ("decoder", 40, 3, 8)
    assert read.tokens_per_step == 87 and read.loop.betas == (0.9, 0.95)
    other = TextTraining.read(config(), sources=["elsewhere"], minutes=2.0)
    assert other.data.sources == ("elsewhere",) and (other.loop.steps, other.loop.minutes) == (None, 2.0)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("[model]", "[modle]", r"tiny.toml: unknown table \[modle\].*did you mean model"),
        ("width = 16", "widht = 16", r"unknown key 'widht' under \[model\].*did you mean width"),
        ('kind = "decoder"', 'kind = "encoder"', "unknown kind 'encoder' under .*: use one of decoder"),
        ("width = 16", 'width = "16"', "width = '16' .* must be a whole number"),
        ("heads = 2", "heads = 3", "is not a multiple of heads .3."),
        ("length = 29", "length = 41", "rows of 41 tokens are longer than the model's limit of 40"),
        ("batch = 3", 'batch = "many"', 'batch = .many. .* must be a whole number .at least 1. or "auto"'),
        ("batch = 3", "batch = 0", "batch = 0 .* must be a whole number .at least 1."),
        ("batch = 3", "batch = 3.5", "batch = 3.5 .* must be a whole number"),
        ("batch = 3", "batch = true", "batch = True .* must be a whole number"),
        ("validation = 0.1", "validation = 1.0", "validation = 1.0 .* less than 1"),
        ("vocabulary = 280", 'vocabulary = 280\nfile = "x.json"', "exclude each other"),
        ("width = 16", "width = 16\nvocabulary = 270", "vocabularies do not match: .* 280 tokens.* is 270"),
        ("steps = 8", "steps = 8\nminutes = 1", "set either steps or minutes"),
        ('precision = "fp32"', 'precision = "fp4"', "precision = 'fp4' .* must be one of auto, fp32, bf16, fp16, fp8"),
        (
            'precision = "fp32"',
            'precision = "fp32"\nplan = "bf16"',
            'precision = "fp32" .* contradicts bf16 in the plan',
        ),
        ('precision = "fp32"', 'precision = "bf16"\nplan = "autocast"', "contradicts autocast in the plan"),
        ("steps = 8", 'steps = 8\nplan = "bf61"', "unknown rung 'bf61'"),
        ("steps = 8", 'steps = 8\nplan = "absent.toml"', "cannot read the plan"),
        ("steps = 8", 'steps = 8\nplan = "int8"', "int8 in the plan works for inference only"),
        ("steps = 8", 'steps = 8\nplan = "cuda_graph"', "cuda_graph in the plan replaces a whole training step"),
        ("steps = 8", 'steps = 8\nplan = "autocast(dtype=fp16)"', "write fp16 in the plan"),
        ("steps = 8", 'steps = 8\nrate_scaling = "sqrt"', "set rate_scaling and rate_tokens .* together"),
        ("steps = 8", "steps = 8\nrate_tokens = 64", "set rate_scaling and rate_tokens .* together"),
        (
            "steps = 8",
            'steps = 8\nrate_scaling = "cube"\nrate_tokens = 9',
            "rate_scaling = 'cube' .* must be one of none, sqrt, linear",
        ),
        ("steps = 8", "steps = 8\nz_loss = -1", "z_loss = -1 .*at least 0"),
        ("steps = 8", "steps = 8\nseed = -1", "seed = -1 .*at least 0"),
        ("steps = 8", 'steps = 8\noptimizer = "sgd"', "optimizer = 'sgd' .* must be one of adamw"),
        ("steps = 8", 'steps = 8\noptimizer = "adafactor"\nbetas = [0.5, 0.9]', "adafactor has no betas"),
        ("warmup_steps = 2", "warmup_steps = 8", "warmup_steps = 8 do not end within 8 steps"),
        ("warmup_steps = 2", "", "warmup_steps = 200 do not end within 8 steps"),
        ("layers = 3", "layers = 1_000_000_000", "layers = 1,000,000,000 under .model. is too large"),
    ],
)
def test_errors_name_what_is_unknown_or_contradictory(
    config: Callable[..., Path], old: str, new: str, said: str
) -> None:
    with pytest.raises(RedlineError, match=said):
        TextTraining.read(config((old, new)))


@pytest.mark.parametrize(("scaling", "factor"), [("sqrt", 2.0), ("linear", 4.0)])
def test_the_rate_follows_the_batch(config: Callable[..., Path], scaling: str, factor: float) -> None:
    lines = f'steps = 8\nrate_scaling = "{scaling}"\nrate_tokens = 87'
    read = TextTraining.read(config(("steps = 8", lines), ("batch = 3", 'batch = "auto"')))
    assert read.with_batch(12).loop.learning_rate == pytest.approx(0.01 * factor)
    assert read.with_batch(3).loop.learning_rate == pytest.approx(0.01)
    assert TextTraining.read(config()).with_batch(12).loop.learning_rate == 0.01


def test_a_plan_says_the_precision_where_the_settings_do_not(config: Callable[..., Path]) -> None:
    plan = 'plan = "fused_optimizer + checkpoint + fp16 + grad_scaler + compile(regional=true)"'
    loop = TextTraining.read(config(('precision = "fp32"', plan))).loop
    assert loop.asked_precision == "fp16"
    assert str(loop.applied_plan) == "fused_optimizer + checkpoint + compile(regional=true)"
    assert TextTraining.read(config(('precision = "fp32"', ""))).loop.asked_precision == "auto"
    assert TextTraining.read(config(('precision = "fp32"', 'plan = "autocast"'))).loop.asked_precision == "fp32"


def test_a_plan_from_a_file(config: Callable[..., Path], tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text('schema = 1\n[[rung]]\nname = "tf32"\n')
    loop = TextTraining.read(config(("steps = 8", f'steps = 8\nplan = "{tmp_path / "plan.toml"}"'))).loop
    assert str(loop.applied_plan) == "tf32"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("decoder-*.toml")), ids=lambda path: path.stem)
def test_bundled_decoder_configs_are_valid(path: Path) -> None:
    read = TextTraining.read(path, sources=["text"])
    assert read.tokenizer == TokenizerSettings(vocabulary=read.tokenizer.vocabulary)
    if path.stem == "decoder-124m":
        assert read.model.config(50_304).parameters == pytest.approx(124e6, rel=0.01)
    assert {file.stem for file in CONFIGS.glob("decoder-*.toml")} == {"decoder-124m", "decoder-tiny"}


def test_the_bundled_memory_model_is_the_decoder_with_a_memory() -> None:
    decoder, memory = (
        TextTraining.read(CONFIGS / f"{kind}-124m.toml", sources=["text"]) for kind in ("decoder", "memory")
    )
    assert (decoder.data, decoder.loop, decoder.tokenizer) == (memory.data, memory.loop, memory.tokenizer)
    # What its speed is measured with.
    assert memory.model.config(50_304) == MemorySettings(width=768, layers=12, heads=12, mlp_width=2048).config(50_304)
    assert MemorySettings(width=768, layers=12, heads=12).config(50_304).feed_forward_width == 2048
    with torch.device("meta"):
        weights = sum(weight.numel() for weight in memory.model.build(50_304).parameters())
    assert weights == pytest.approx(129e6, rel=0.01)


def test_the_page_has_the_defaults_of_a_memory_model() -> None:
    page = (CONFIGS.parents[3] / "docs" / "commands" / "train.md").read_text(encoding="utf-8")
    blocks = [part.partition("```")[0] for part in page.split("```toml\n")[1:]]
    shown = tomllib.loads(next(block for block in blocks if 'kind = "memory"' in block))["model"]
    assert shown.pop("kind") == "memory"
    assert {name: getattr(MemorySettings(), name) for name in shown} == shown
    shared = {field.name for field in fields(DecoderSettings)}
    assert {field.name for field in fields(MemorySettings)} - shared <= set(shown)


def test_the_page_has_the_defaults_of_everything_else() -> None:
    page = (CONFIGS.parents[3] / "docs" / "commands" / "train.md").read_text(encoding="utf-8")
    shown = tomllib.loads(page.split("```toml\n")[1].partition("```")[0])
    named = {"model": {"kind"}, "data": {"sources"}, "tokenizer": {"vocabulary"}, "training": {"steps"}}
    kinds: dict[str, Any] = {"model": DecoderSettings, "data": TextData, "tokenizer": TokenizerSettings}
    for table, kind in {**kinds, "training": TextLoopSettings}.items():
        defaults = {field.name: field.default for field in fields(kind)}
        for name, value in shown[table].items():
            if name not in named[table]:
                assert defaults[name] == (tuple(value) if isinstance(value, list) else value), name
        told = page.partition("[long-term memory]")[0]
        assert [name for name in defaults if name not in told] == []


def test_all_bundled_settings_of_language_models_are_known() -> None:
    found = {file.stem for file in CONFIGS.glob("*.toml") if not file.stem.startswith(("drct", "lsd"))}
    passkeys = {"recall-passkey-20m", "recall-passkey-20m-window"}
    assert (
        found
        == {"decoder-124m", "decoder-tiny", "memory-124m", "recall-mqar", "recall-needle", "talk-small", "talk-tiny"}
        | passkeys
    )
    assert all(find_config(name) == (CONFIGS / f"{name}.toml", "text") for name in found)

"""A tiny random pipeline, saved by diffusers, gives in our engine what diffusers' own pipeline gives."""

import json
import shutil
import warnings
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from redline.errors import RedlineError
from redline.ladder.plan import Plan
from redline.stream.engine import Engine
from redline.stream.loading import load_model, load_pipeline
from redline.stream.pipeline_frames import PipelineFrames
from redline.stream.settings import LiveSettings, Settings
from stream.small_models import clip

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import diffusers
    import transformers

WORDS = ["<|startoftext|>", "<|endoftext|>", "a", "b", "a</w>", "b</w>", "ab</w>"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    place = tmp_path_factory.mktemp("pipelines") / "tiny-turbo"
    words = tmp_path_factory.mktemp("words")
    (words / "vocab.json").write_text(json.dumps({word: number for number, word in enumerate(WORDS)}))
    (words / "merges.txt").write_text("#version: 0.2\na b</w>\n")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipeline = diffusers.StableDiffusionImg2ImgPipeline(
            vae=diffusers.AutoencoderKL(
                block_out_channels=(8, 16),
                down_block_types=("DownEncoderBlock2D",) * 2,
                up_block_types=("UpDecoderBlock2D",) * 2,
                norm_num_groups=4,
                sample_size=32,
            ),
            unet=diffusers.UNet2DConditionModel(
                block_out_channels=(8, 16),
                layers_per_block=1,
                down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
                up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
                cross_attention_dim=16,
                attention_head_dim=4,
                norm_num_groups=4,
                sample_size=16,
            ),
            text_encoder=transformers.CLIPTextModel(
                transformers.CLIPTextConfig(
                    vocab_size=len(WORDS),
                    hidden_size=16,
                    intermediate_size=16,
                    num_hidden_layers=1,
                    num_attention_heads=2,
                    max_position_embeddings=9,
                    eos_token_id=1,
                    bos_token_id=0,
                )
            ),
            tokenizer=transformers.CLIPTokenizer(
                vocab=str(words / "vocab.json"), merges=str(words / "merges.txt"), model_max_length=9
            ),
            scheduler=diffusers.EulerDiscreteScheduler(
                beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", timestep_spacing="trailing"
            ),
            safety_checker=None,
            feature_extractor=None,
            requires_safety_checker=False,
        )
        pipeline.save_pretrained(place, safe_serialization=True)
    return place


def loaded(folder: Path, plan: str = "") -> PipelineFrames:
    return load_pipeline(folder, Plan.parse(plan), "cpu")


def theirs(folder: Path, latents: Any, steps: int, strength: float, prompt: str, scheduler: str = "") -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipeline = diffusers.StableDiffusionImg2ImgPipeline.from_pretrained(folder, local_files_only=True)
        pipeline.set_progress_bar_config(disable=True)
        if scheduler:
            kind = getattr(diffusers, scheduler)
            pipeline.scheduler = kind.from_config(pipeline.scheduler.config, set_alpha_to_one=True, clip_sample=False)
        made = pipeline(
            prompt,
            image=latents,
            strength=strength,
            num_inference_steps=steps,
            guidance_scale=0.0,
            generator=torch.Generator().manual_seed(7),
            output_type="pt",
        )
    return made.images


@pytest.mark.parametrize(("scheduler", "steps"), [("", 1), ("", 2), ("DDIMScheduler", 1), ("DDIMScheduler", 5)])
def test_a_frame_is_what_diffusers_makes_of_it(folder: Path, scheduler: str, steps: int) -> None:
    """At strength 0.5 diffusers runs half of its steps, as many as ours; DDIM rounds the distance to the next time."""
    frames, picture = loaded(folder), torch.rand(1, 3, 32, 48) * 2 - 1
    program = frames.program(steps, 32, 48)
    program.retune(Settings(0.5, steps, seed=7, prompt="ab a"))
    with torch.inference_mode():
        ours = (program.run(picture, picture) / 2 + 0.5).clamp(0, 1)
        latents = frames.to_latents(picture)
    expected = theirs(folder, latents, 2 * steps, 0.5, "ab a", scheduler)
    assert ours.std() > 0.01
    assert (ours - expected).abs().max() < 2e-4


def test_the_encoder_gives_the_mode_of_theirs(folder: Path) -> None:
    picture = torch.rand(1, 3, 16, 16) * 2 - 1
    frames = loaded(folder)
    with warnings.catch_warnings(), torch.inference_mode():
        warnings.simplefilter("ignore")
        vae = diffusers.AutoencoderKL.from_pretrained(folder / "vae", local_files_only=True)
        expected = vae.encode(picture).latent_dist.mode() * vae.config.scaling_factor
        assert torch.allclose(frames.to_latents(picture), expected, atol=1e-5)


def test_latents_are_shifted_and_scaled_as_the_pipeline_says(folder: Path) -> None:
    """Sets a shift, which no model in these tests has; encoding and decoding must cancel."""
    frames, picture = loaded(folder), torch.randn(1, 4, 2, 2)
    frames._scale, frames._shift = 0.5, 3.0
    frames.encode = frames.decode = lambda given: given
    assert torch.equal(frames.to_latents(picture), (picture - 3.0) * 0.5)
    assert torch.allclose(frames.to_image(frames.to_latents(picture)), picture)


def test_it_runs_through_the_engine_at_any_size(folder: Path) -> None:
    frame = clip(1, 21, 30)[0]
    engine = Engine(loaded(folder), Settings(0.5, 1))
    engine.prepare(21, 30)

    def shown(**changes: Any) -> torch.Tensor:
        return engine(replace(frame, settings=replace(Settings(0.5, 1), **changes)))

    plain = shown()
    assert plain.shape == (21, 30, 3) and torch.equal(shown(), plain), "a still picture stays still"
    for changes in ({"strength": 0.9}, {"seed": 3}, {"steps": 2}, {"prompt": "b b b"}):
        assert not torch.equal(shown(**changes), plain), changes
    assert torch.equal(shown(), plain), "and back"
    with pytest.raises(RedlineError, match=r"does not support --control\.$"):
        engine.model.check(Settings(control=(1.0,)))


def test_a_prompt_is_read_where_it_is_changed_and_never_by_a_frame(folder: Path) -> None:
    """Each number of steps has its own buffers, which must all get a changed prompt."""
    frames = loaded(folder)
    read: list[str] = []
    plainly = frames.read_prompt
    frames.read_prompt = lru_cache(lambda prompt: read.append(prompt) or plainly(prompt))
    settings = LiveSettings(Settings(0.5, 1, prompt="a"), frames.check)
    engine = Engine(frames, settings.now())
    engine.prepare(16, 16)
    frame = clip(1, 16, 16)[0]

    def shown(**changes: Any) -> torch.Tensor:
        settings.change(**changes)
        before = len(read)
        made = engine(replace(frame, settings=settings.now()))
        assert len(read) == before
        return made

    one, other = shown(), shown(prompt="b")
    assert read == ["a", "b"] and not torch.equal(one, other)
    assert not torch.equal(shown(steps=2), other)
    shown(prompt="a")
    assert torch.equal(shown(steps=1), one) and torch.equal(shown(prompt="b"), other)
    with pytest.raises(RedlineError, match=r"the prompt must be a string of at most 2,000 characters\.$"):
        settings.change(prompt="b" * 2001)
    assert settings.now().prompt == "b"


def test_the_unet_runs_under_a_plan(folder: Path) -> None:
    frames, plain = loaded(folder, plan="channels_last"), loaded(folder)
    assert str(frames.plan) == "channels_last"
    picture = torch.rand(1, 3, 32, 32) * 2 - 1
    made = []
    for one in (frames, plain):
        program = one.program(1, 32, 32)
        program.retune(Settings(0.5, 1))
        with torch.inference_mode():
            made.append(program.run(picture, picture))
    assert (made[0] - made[1]).abs().max() < 1e-4
    assert plain.working_bytes(256, 256) > 10 * plain.working_bytes(64, 64)


def test_a_folder_by_itself_is_known_for_what_it_is(folder: Path, tmp_path: Path) -> None:
    found = load_model(folder, Plan(), "cpu")
    assert isinstance(found.frames, PipelineFrames) and (found.steps, found.strength) == (1, 0.5)
    with pytest.raises(RedlineError, match=r"has its own scheduler"):
        load_model(folder, Plan(), "cpu", sampler="ddim")
    with pytest.raises(RedlineError, match=r"is not a model folder: it has no model_index\.json"):
        load_model(tmp_path, Plan(), "cpu")


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (
            lambda place: (place / "model_index.json").write_text("{"),
            r"model_index\.json' is not a readable pipeline: it is not JSON",
        ),
        (lambda place: (place / "model_index.json").write_text("[]"), r"model_index\.json' is not a JSON object"),
        (lambda place: (place / "unet" / "diffusion_pytorch_model.safetensors").unlink(), r"the unet of .* cannot be"),
        (lambda place: (place / "vae" / "diffusion_pytorch_model.safetensors").write_bytes(b"x"), r"the vae of .*"),
        (lambda place: shutil.rmtree(place / "text_encoder"), r"the text_encoder of .* cannot be read"),
        (lambda place: shutil.rmtree(place / "tokenizer"), r"the tokenizer of .* no vocab\.json with merges\.txt\.$"),
        (
            lambda place: (place / "tokenizer" / "tokenizer.json").unlink(),
            r"the tokenizer of .* no tokenizer\.json and",
        ),
        (
            lambda place: rename(place, "unet", "SD3Transformer2DModel"),
            r"its unet is SD3Transformer2DModel, not UNet2D",
        ),
        (lambda place: rename(place, "text_encoder_2", "CLIPTextModelWithProjection"), r"as SDXL"),
        (
            lambda place: rename(place, "scheduler", "FlowMatchEulerDiscreteScheduler"),
            r"not a diffusion process of 1000",
        ),
    ],
)
def test_a_folder_that_is_no_pipeline_is_reported(folder: Path, tmp_path: Path, damage: Any, sentence: str) -> None:
    place = tmp_path / "broken"
    shutil.copytree(folder, place)
    damage(place)
    with pytest.raises(RedlineError, match=sentence) as caught:
        loaded(place)
    assert str(caught.value).endswith(".") and "\n" not in str(caught.value)


def rename(place: Path, part: str, kind: str) -> None:
    index = json.loads((place / "model_index.json").read_text())
    index[part] = ["diffusers", kind]
    (place / "model_index.json").write_text(json.dumps(index))


def halved(folder: Path, place: Path) -> Path:
    shutil.copytree(folder, place)
    for part, name in (
        ("unet", "diffusion_pytorch_model"),
        ("vae", "diffusion_pytorch_model"),
        ("text_encoder", "model"),
    ):
        path = place / part / f"{name}.safetensors"
        half = {key: tensor.half() for key, tensor in load_file(path).items()}
        save_file(half, path.with_name(f"{name}.fp16.safetensors"), {"format": "pt"})
        path.unlink()
    return place


def test_weights_in_half_precision_take_the_room_of_whole_ones(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = halved(folder, tmp_path / "half")
    data = sum(tensor.nbytes for path in folder.glob("*/*.safetensors") for tensor in load_file(path).values())
    monkeypatch.setattr("redline.stream.memory_check.free_bytes", lambda device: data)
    with pytest.raises(RedlineError, match=r"^the weights of the pipeline 'half' take "):
        loaded(place)


def test_weights_in_half_precision_alone_are_found(folder: Path, tmp_path: Path) -> None:
    place = halved(folder, tmp_path / "half")
    frames, whole = loaded(place), loaded(folder)
    picture = torch.rand(1, 3, 32, 32) * 2 - 1
    made = []
    for one in (frames, whole):
        program = one.program(1, 32, 32)
        program.retune(Settings(0.5, 1))
        with torch.inference_mode():
            made.append(program.run(picture, picture))
    assert made[0].dtype == torch.float32 and 0 < (made[0] - made[1]).abs().max() < 0.05


def test_a_unet_that_needs_more_than_a_frame_is_reported(folder: Path, tmp_path: Path) -> None:
    place = tmp_path / "more"
    shutil.copytree(folder, place)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = {**diffusers.UNet2DConditionModel.load_config(place / "unet"), "in_channels": 9}
        diffusers.UNet2DConditionModel.from_config(config).save_pretrained(place / "unet")
    with pytest.raises(RedlineError, match=r"takes 9 channels, but its vae returns 4\.$"):
        loaded(place)


def test_without_the_extra_it_says_what_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("redline.stream.loading.find_spec", lambda name: None if name == "diffusers" else name)
    with pytest.raises(RedlineError, match=r"pipeline needs diffusers: pip install 'redline\[diffusers\]'\.$"):
        loaded(folder)


@pytest.mark.gpu
@pytest.mark.parametrize("plan", ["", "bf16 + channels_last", "fp16 + channels_last"])
def test_on_a_gpu_it_is_one_graph(folder: Path, plan: str) -> None:
    settings = Settings(0.5, 2, prompt="ab")
    engine = Engine(load_pipeline(folder, Plan.parse(plan), "cuda:0"), settings)
    engine.prepare(48, 40)
    picture = clip(1, 48, 40, settings=settings)[0]
    made = [engine(picture) for _ in range(4)]
    assert engine.captures == 1 and all(torch.equal(one, made[0]) for one in made)


def test_weights_that_do_not_fit_are_reported_before_they_are_read(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    both = tmp_path / "tiny-turbo"
    shutil.copytree(folder, both)
    for part in ("unet", "vae"):
        weights = next((both / part).glob("*.safetensors"))
        shutil.copy(weights, weights.with_suffix(".fp16.safetensors"))
    taken = sum(path.stat().st_size for path in folder.glob("*/*.safetensors"))
    monkeypatch.setattr("redline.stream.memory_check.free_bytes", lambda device: taken)
    load_model(both, Plan.parse("eager"), "cpu")
    monkeypatch.setattr("redline.stream.memory_check.free_bytes", lambda device: taken - 1)
    monkeypatch.setattr("redline.stream.loading._read", None)
    with pytest.raises(
        RedlineError, match=r"^the weights of the pipeline 'tiny-turbo' take .* are free on this machine"
    ):
        load_model(both, Plan.parse("eager"), "cpu")

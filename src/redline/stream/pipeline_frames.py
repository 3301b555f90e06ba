"""Adapts a diffusers image-to-image model to the engine: encode, add noise, denoise in a few steps, decode.

The steps follow the noise schedule of the pipeline's scheduler. Classifier-free guidance is not used, because models
distilled to few steps do not need it. Each frame is computed independently of the previous one.
"""

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from redline.errors import ModelError, RedlineError
from redline.ladder.plan import Plan, parse_rung
from redline.machine.quiet import quiet
from redline.models.samplers import MOST_STEPS, STEPS, NoiseProcess, StepTable, ddim, distilled, spaced_timesteps
from redline.stream.frame_model import FrameProgram, ModelControls, apply_plan, copy_async, without_cuda_graphs
from redline.stream.memory_check import peak_live_bytes
from redline.stream.settings import Settings

_PREDICTIONS = {"epsilon": "epsilon", "v_prediction": "v", "sample": "sample"}
_SAMPLE_PX = 8
_CACHED_PROMPTS = 32


class PipelineFrames:
    """A `FrameModel` that runs the three networks of a pipeline."""

    default_steps = 1

    def __init__(
        self,
        parts: dict[str, Any],
        read_prompt: Callable[[str], Tensor],
        scheduler: Any,
        plan: Plan,
        device: torch.device,
        name: str,
    ) -> None:
        """`read_prompt` returns the text embedding for the U-Net, on the CPU."""
        unet, vae = parts["unet"], parts["vae"]
        self.device, self.name, plan = device, name, without_cuda_graphs(plan, device)
        self.is_compiled = "compile" in plan
        self.process, self.prediction = _process(scheduler, name)
        # A latent consistency model is sampled with new noise in every step; all other schedulers are replaced by DDIM.
        self._is_lcm = type(scheduler).__name__ == "LCMScheduler"
        self.controls = ModelControls(MOST_STEPS if self._is_lcm else 8, takes_prompt=True)
        self._scale, self._shift = float(vae.config.scaling_factor), float(getattr(vae.config, "shift_factor", 0) or 0)
        self._latent_channels = int(unet.config.in_channels)
        self._factor = 2 ** (len(vae.config.block_out_channels) - 1)
        self._multiple_px = self._factor * 2 ** (len(unet.config.block_out_channels) - 1)
        # Caches embeddings, so that switching back to an earlier prompt is immediate.
        self.read_prompt = lru_cache(_CACHED_PROMPTS)(read_prompt)
        text = self.read_prompt("").to(device)
        self.text_shape = text.shape
        self._configs = {part: (type(parts[part]), dict(parts[part].config)) for part in ("unet", "vae")}
        # Activations of the supported VAEs would exceed the range of fp16, so a plan with fp16 runs the VAE in bf16.
        vae_plan = plan.with_rung(parse_rung("bf16")) if "fp16" in plan else plan
        latents = torch.randn(1, self._latent_channels, _SAMPLE_PX, _SAMPLE_PX, device=device)
        pixels = torch.rand(1, 3, _SAMPLE_PX * self._factor, _SAMPLE_PX * self._factor, device=device) * 2 - 1
        times = torch.tensor([STEPS // 2], device=device)
        self.plan, self.denoise = apply_plan(plan, Denoiser(unet), device, (latents, times, text))
        _, self.encode = apply_plan(vae_plan, Encoder(vae), device, (pixels,))
        _, self.decode = apply_plan(vae_plan, Decoder(vae), device, (latents,))
        self._dtypes = {part: next(parts[part].parameters()).dtype for part in ("unet", "vae")}

    def check(self, settings: Settings) -> None:
        if settings.control:
            raise RedlineError(f"{self.name} does not support --control.")
        self.read_prompt(settings.prompt)
        self.table(settings)

    def table(self, settings: Settings) -> StepTable:
        strength = max(round(settings.strength * STEPS), settings.steps) / STEPS
        make = distilled if self._is_lcm else ddim
        return make(self.process, self.prediction, spaced_timesteps(settings.steps, strength))

    def padded_px(self, side_px: int) -> int:
        return -(-side_px // self._multiple_px) * self._multiple_px

    def program(self, steps: int, height: int, width: int) -> "PipelineProgram":
        return PipelineProgram(self, steps, height, width)

    def working_bytes(self, height: int, width: int) -> int:
        """Returns the size of three images plus the largest peak of the three networks, usually that of the decoder."""
        with quiet(), torch.device("meta"):
            networks = {
                part: kind.from_config(config).to(self._dtypes[part]) for part, (kind, config) in self._configs.items()
            }
            dtype = self._dtypes["unet"]
            latents = torch.empty(1, *self.latent_shape(height, width), dtype=dtype)
            text, times = torch.empty(self.text_shape, dtype=dtype), torch.zeros(1, dtype=torch.long)
            pixels = torch.empty(1, 3, height, width, dtype=self._dtypes["vae"])
        denoiser, encoder, decoder = Denoiser(networks["unet"]), Encoder(networks["vae"]), Decoder(networks["vae"])
        runs: list[Callable[[], Tensor]] = [
            lambda: denoiser(latents, times, text),
            lambda: encoder(pixels),
            lambda: decoder(latents.to(pixels.dtype)),
        ]
        return 3 * pixels.nbytes + max(peak_live_bytes(run) for run in runs)

    def to_latents(self, frame: Tensor) -> Tensor:
        return (self.encode(frame).float() - self._shift) * self._scale

    def to_image(self, latents: Tensor) -> Tensor:
        return self.decode(latents / self._scale + self._shift).float()

    def latent_shape(self, height: int, width: int) -> tuple[int, ...]:
        return self._latent_channels, height // self._factor, width // self._factor


class PipelineProgram(FrameProgram):
    def __init__(self, frames: PipelineFrames, steps: int, height: int, width: int) -> None:
        super().__init__(frames, steps, (1, *frames.latent_shape(height, width)))
        self._frames = frames
        self._text = torch.zeros(frames.text_shape, device=frames.device)

    def retune(self, settings: Settings) -> None:
        before = self._settings
        super().retune(settings)
        if before is None or before.prompt != settings.prompt:
            copy_async(self._text, self._frames.read_prompt(settings.prompt))

    def run(self, frame: Tensor, previous: Tensor) -> Tensor:
        frames = self._frames

        def predict(noisy: Tensor, times: Tensor) -> Tensor:
            # A sampler step may change the memory layout, and torch.compile would recompile for a new layout.
            return frames.denoise(noisy.contiguous() if frames.is_compiled else noisy, times, self._text)

        latents = self._sampler.sample(predict, self._noise_N, frames.to_latents(frame).contiguous())
        return frames.to_image(latents)


class Denoiser(nn.Module):
    def __init__(self, unet: nn.Module) -> None:
        super().__init__()
        self.unet = unet

    def forward(self, latents: Tensor, times: Tensor, text: Tensor) -> Tensor:
        return self.unet(latents, times, text, return_dict=False)[0]


class Encoder(nn.Module):
    """Returns the mean of the latent distribution, not a sample, so that a still image does not flicker."""

    def __init__(self, vae: Any) -> None:
        super().__init__()
        self.encoder, self.quant_conv = vae.encoder, getattr(vae, "quant_conv", None)
        self.is_distribution = type(vae).__name__ == "AutoencoderKL"

    def forward(self, pixels: Tensor) -> Tensor:
        found = self.encoder(pixels)
        found = found if self.quant_conv is None else self.quant_conv(found)
        return found.chunk(2, dim=1)[0] if self.is_distribution else found


class Decoder(nn.Module):
    def __init__(self, vae: Any) -> None:
        super().__init__()
        self.before, self.decoder = getattr(vae, "post_quant_conv", None), vae.decoder

    def forward(self, latents: Tensor) -> Tensor:
        return self.decoder(latents if self.before is None else self.before(latents))


def _process(scheduler: Any, name: str) -> tuple[NoiseProcess, str]:
    """Returns the scheduler's noise process and prediction type."""
    alphas = getattr(scheduler, "alphas_cumprod", None)
    prediction = getattr(scheduler.config, "prediction_type", "epsilon")
    if alphas is None or len(alphas) != STEPS or prediction not in _PREDICTIONS:
        raise ModelError(
            f"unsupported scheduler of {name}: {type(scheduler).__name__} is not a diffusion process of {STEPS} steps."
        )
    alphas = alphas.double()
    process = NoiseProcess("scheduler", tuple(alphas.sqrt().tolist()), tuple((1 - alphas).sqrt().tolist()))
    return process, _PREDICTIONS[prediction]

"""Validates the restoration of clips: the gain over the input, the effect of the history, and the drift over time.

Three variants (arms) of the same frames are scored: the input itself, each frame restored without history, and the
video restored with the model's own last output as history. The noise is the same for every frame, as in live use.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from redline.datasets.clips import warp_error
from redline.datasets.clips.clips import Clip
from redline.models.lsd import PREDICTION, PROCESS
from redline.models.samplers import Sampler, sampler_table

Restore = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Restoration:
    """The PSNR in dB and the warp error of the three arms, and the warp error of the clean video.

    A warp error is a mean absolute difference of images in [0, 1]. `drift_db` is the decrease of the gain over the
    input from the first quarter of the frames to the last.
    """

    clips: int
    frames: int
    steps: int
    psnr_db: float
    alone_psnr_db: float
    input_psnr_db: float
    warp_error: float
    alone_warp_error: float
    input_warp_error: float
    clean_warp_error: float
    drift_db: float

    @property
    def gain_db(self) -> float:
        return self.psnr_db - self.input_psnr_db


def restorer(model: nn.Module, steps: int, clips: int, side_px: int, device: torch.device) -> Restore:
    """Returns a function that restores a frame, given the history frame; images are in [0, 1]."""
    sampler = Sampler(sampler_table("distilled", PROCESS, PREDICTION, steps), device, clips)
    generator = torch.Generator(device).manual_seed(0)
    noise = torch.randn(sampler.noises, clips, 3, side_px, side_px, generator=generator, device=device)

    def restore(frame: Tensor, previous: Tensor) -> Tensor:
        frame, previous = frame * 2 - 1, previous * 2 - 1
        output = sampler.sample(lambda noisy, times: model(noisy, frame, previous, times), noise, frame)
        return (output.clamp(-1, 1) + 1) / 2

    return restore


@torch.inference_mode()
def judge(restore: Restore, clip: Clip, steps: int) -> Restoration:
    """Evaluates all three arms on a clip; waits for the device only at the end."""
    psnrs, errors = [], []
    before: list[Tensor] = []
    for frame in clip:
        with_history = restore(frame.seen, before[0] if before else frame.seen)
        alone = restore(frame.seen, frame.seen)
        arms = [with_history, alone, frame.seen, frame.clean]
        psnrs.append(torch.stack([psnr_db(arm, frame.clean) for arm in arms[:3]]))
        if before:
            pairs = zip(arms, before, strict=True)
            errors.append(torch.stack([warp_error(now, old, frame.came_from, frame.known) for now, old in pairs]))
        before = arms
    psnr_FA, error_FA = torch.stack(psnrs).double().cpu(), torch.stack(errors).double().cpu()
    gain_F, quarter = psnr_FA[:, 0] - psnr_FA[:, 2], max(len(psnr_FA) // 4, 1)
    return Restoration(
        clip.scene.photos.shape[1],
        len(clip),
        steps,
        *psnr_FA.mean(0).tolist(),
        *error_FA.mean(0).tolist(),
        drift_db=float(gain_F[:quarter].mean() - gain_F[-quarter:].mean()),
    )


def psnr_db(seen_BCHW: Tensor, clean_BCHW: Tensor) -> Tensor:
    """Returns the mean PSNR over the clips."""
    error = (seen_BCHW - clean_BCHW).square().flatten(1).mean(1)
    return (-10 * error.clamp_min(1e-10).log10()).mean()

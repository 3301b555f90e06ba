"""`unet_100m`, `unet_390m`, `unet_880m`: one step of live video diffusion at 64×64, in three sizes.

The inputs are a noisy frame, its time step and the previous frame; the output is the next frame. The weights are
random, but no layer starts at zero, so the output depends on all three inputs.

How the limits were chosen: bf16 has a relative error of about 1.5%. Removing one attention layer gives 5%, and removing
a convolution at the lowest resolution 15%. The limit is 2.5%; the limit of 48 dB also keeps the error below one step of
an 8-bit image (1/255 of the output's range).
"""

import torch

from redline.ladder.gate import Gate
from redline.ladder.workload import Workload
from redline.models.unet import STEPS, VideoUNet

_CHANNELS = 3


def unet_100m(batch: int = 1, size: int = 64) -> Workload:
    """Two U-Nets with base width 64: 98.6M parameters."""
    return video_unet(64, batch, size)


def unet_390m(batch: int = 1, size: int = 64) -> Workload:
    """Two U-Nets with base width 128: 394M parameters."""
    return video_unet(128, batch, size)


def unet_880m(batch: int = 1, size: int = 64) -> Workload:
    """Two U-Nets with base width 192: 887M parameters."""
    return video_unet(192, batch, size)


def video_unet(base: int, batch: int, size: int) -> Workload:
    if size % 16:
        raise ValueError(f"size {size} is not a multiple of 16, but the U-Net halves it four times")

    def inputs(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        frame, previous_frame = torch.randn(2, batch, _CHANNELS, size, size).unbind(0)
        # Time steps are integers, because floats would be rounded in the inputs of a half-precision model.
        timestep = torch.randint(STEPS, (batch,))
        return frame, timestep, previous_frame

    return Workload(
        build=lambda: VideoUNet(base, _CHANNELS),
        inputs=inputs,
        gates=(Gate("relative_error", 0.025), Gate("psnr", 48.0)),
        items=batch,
        unit="frame",
    )

"""DRCT: a super-resolution transformer whose groups are densely connected (Hsu, Lee and Chou, 2024).

All layers between the first and the last convolution work on (B, H, W, C), so that attention windows, norms and the 1×1
convolutions (linear layers on tokens) need no copies. The 3×3 convolutions view the same buffers as channels_last
images. H and W must be multiples of the window.
"""

import torch
from torch import Tensor, nn

from redline.errors import ModelError
from redline.models.drct.blocks import RESIDUAL_SHARE, Group
from redline.models.drct.config import DrctConfig
from redline.models.drct.cpu_inference import WindowedBody
from redline.models.drct.gpu_inference import PackedBody, pack_upsampling
from redline.nn import SwitchableModule

# The mean color of the published models' training images; their weights expect it to be subtracted.
_MEAN = (0.4488, 0.4371, 0.4040)


class Drct(SwitchableModule):
    """Maps images (B, 3, H, W) in [0, 1] to (B, 3, scale·H, scale·W)."""

    mean: Tensor

    def __init__(self, config: DrctConfig) -> None:
        super().__init__()
        self.config = config
        width, features = config.width, config.features
        self.register_buffer("mean", torch.empty(1, 3, 1, 1), persistent=False)
        self.reset_mean()
        self.conv_first = nn.Conv2d(3, width, 3, padding=1)
        self.patch_embed = nn.ModuleDict({"norm": nn.LayerNorm(width)})
        self.layers = nn.ModuleList(Group(config) for _ in range(config.groups))
        self.norm = nn.LayerNorm(width)
        self.conv_after_body = nn.Conv2d(width, width, 3, padding=1)
        self.conv_before_upsample = nn.Sequential(nn.Conv2d(width, features, 3, padding=1), nn.LeakyReLU())
        steps: list[nn.Module] = []
        for factor in config.upsampling:
            steps += [nn.Conv2d(features, factor**2 * features, 3, padding=1), nn.PixelShuffle(factor)]
        self.upsample = nn.Sequential(*steps)
        self.conv_last = nn.Conv2d(features, 3, 3, padding=1)
        self.apply(_initialize)

    def reset_mean(self) -> None:
        """Fills the buffer `mean`, which is not saved with the weights."""
        self.mean.copy_(torch.tensor(_MEAN).view(1, 3, 1, 1))

    def forward(self, image: Tensor) -> Tensor:
        self._check(image)
        first = self.conv_first(image - self.mean)
        tokens = self.patch_embed["norm"](first.permute(0, 2, 3, 1))
        for group in self.layers:
            tokens = group(tokens)
        body = self.conv_after_body(self.norm(tokens).permute(0, 3, 1, 2)) + first
        enlarged = self.conv_last(self.upsample(self.conv_before_upsample(body))) + self.mean
        return enlarged.contiguous()  # the convolutions may return channels_last

    def pack(self, device: torch.device) -> None:
        """Replaces the body by an implementation that is faster on this kind of device, but supports inference only."""
        config = self.config
        if not isinstance(self.layers[0], Group):
            raise ModelError("this DRCT is packed already.")
        if device.type != "cuda":
            self.layers = nn.ModuleList([WindowedBody(self.layers, config.window, RESIDUAL_SHARE)])
            return
        self.layers = nn.ModuleList([PackedBody(self.layers, config.width, config.growth, RESIDUAL_SHARE)])
        self.upsample = pack_upsampling(self.upsample)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                module.to(memory_format=torch.channels_last)  # pyrefly: ignore[no-matching-overload]

    def active_implementation(self) -> str:
        body = self.layers[0]
        return body.active_implementation() if isinstance(body, PackedBody | WindowedBody) else "reference"

    def _check(self, image: Tensor) -> None:
        window = self.config.window
        if image.ndim != 4 or image.shape[1] != 3:
            raise ModelError(f"DRCT takes images of shape (batch, 3, height, width), not {tuple(image.shape)}.")
        if image.shape[2] % window or image.shape[3] % window:
            raise ModelError(f"DRCT needs heights and widths that are multiples of {window}: pad the image.")


def _initialize(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.trunc_normal_(module.weight, std=0.02)
        nn.init.zeros_(module.bias)

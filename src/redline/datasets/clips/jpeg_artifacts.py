"""JPEG compression artifacts in torch: quantized 8 × 8 DCT blocks and chroma subsampling.

Entropy coding is lossless and therefore omitted. All other stages of JPEG process a whole batch on the device, with a
separate quality for each image.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional as F

# The quantization tables of the JPEG standard's annex K, for quality 50.
_LUMA = (
    (16, 11, 10, 16, 24, 40, 51, 61),
    (12, 12, 14, 19, 26, 58, 60, 55),
    (14, 13, 16, 24, 40, 57, 69, 56),
    (14, 17, 22, 29, 51, 87, 80, 62),
    (18, 22, 37, 56, 68, 109, 103, 77),
    (24, 35, 55, 64, 81, 104, 113, 92),
    (49, 64, 78, 87, 103, 121, 120, 101),
    (72, 92, 95, 98, 112, 100, 103, 99),
)
_CHROMA = (
    (17, 18, 24, 47, 99, 99, 99, 99),
    (18, 21, 26, 66, 99, 99, 99, 99),
    (24, 26, 56, 99, 99, 99, 99, 99),
    (47, 66, 99, 99, 99, 99, 99, 99),
    *((99,) * 8,) * 4,
)
_TO_YCC = ((0.299, 0.587, 0.114), (-0.168736, -0.331264, 0.5), (0.5, -0.418688, -0.081312))


class JpegArtifacts:
    """Applies the artifacts; keeps its tables on the device, so that a call copies nothing."""

    def __init__(self, device: torch.device) -> None:
        side = torch.arange(8, dtype=torch.float64)
        dct = torch.cos((2 * side[None] + 1) * side[:, None] * math.pi / 16) / 2
        dct[0] /= math.sqrt(2)
        self._dct = dct.float().to(device)
        self._tables = torch.tensor((_LUMA, _CHROMA), dtype=torch.float32, device=device)
        to_ycc = torch.tensor(_TO_YCC, dtype=torch.float64)
        self._to_ycc, self._to_rgb = to_ycc.float().to(device), torch.linalg.inv(to_ycc).float().to(device)

    def __call__(self, image_BCHW: Tensor, quality_B: Tensor, subsample: bool = True) -> Tensor:
        """Returns images in [0, 1] as decoded from JPEG files of these qualities (1 to 100)."""
        height, width = image_BCHW.shape[-2:]
        levels = (image_BCHW * 255).round()
        padded = F.pad(levels, (0, -width % 16, 0, -height % 16), mode="replicate")
        ycc = torch.einsum("bchw,dc->bdhw", padded, self._to_ycc).round()
        luma, chroma = ycc[:, :1] - 128, ycc[:, 1:]
        if subsample:
            chroma = F.avg_pool2d(chroma, 2)
        luma, chroma = (self._quantized(x, quality_B, kind) for kind, x in enumerate((luma, chroma)))
        if subsample:
            chroma = F.interpolate(chroma, scale_factor=2, mode="bilinear")
        rgb = torch.einsum("bchw,dc->bdhw", torch.cat((luma + 128, chroma), 1), self._to_rgb)
        return rgb[..., :height, :width].round().clamp(0, 255) / 255

    def _quantized(self, x: Tensor, quality_B: Tensor, kind: int) -> Tensor:
        quality = quality_B.float().clamp(1, 100)
        percent = torch.where(quality < 50, (5000 / quality).floor(), 200 - 2 * quality)[:, None, None]
        table = ((self._tables[kind] * percent + 50) / 100).floor().clamp(1, 255)[:, None, None, None]
        batch, channels, height, width = x.shape
        blocks = x.view(batch, channels, height // 8, 8, width // 8, 8).transpose(3, 4)
        coefficients = self._dct @ blocks @ self._dct.mT
        blocks = self._dct.mT @ ((coefficients / table).round() * table) @ self._dct
        return blocks.transpose(3, 4).reshape(x.shape).round().clamp(-128, 127)

"""Synthetic clips: photos, a camera that moves over them, and the degradation of a poor camera.

The same seed and step give the same clip. Motion, positions and degradation do not depend on the device. The noise of a
frame does: it is sampled on the device, with a seed made from the seed, the step and the frame's index.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from redline.datasets.clips.degradation import Degradation
from redline.datasets.clips.jpeg_artifacts import JpegArtifacts
from redline.datasets.clips.scene import Scene
from redline.datasets.clips.settings import ClipSettings
from redline.datasets.photo_crops import PhotoCrops
from redline.datasets.photo_pairs import PhotoSettings

_SPREAD = 1_000_000_007
_FRAMES_APART = 1_000_003


@dataclass(frozen=True)
class Frame:
    """One frame of B clips: the clean image, the degraded image (`seen`), the position of each pixel in the previous
    frame (`came_from`), and a mask of the pixels for which that position is known."""

    clean: Tensor
    seen: Tensor
    came_from: Tensor
    known: Tensor


@dataclass(frozen=True)
class Clip:
    """A sequence of frames, each computed on access."""

    scene: Scene
    degradation: Degradation
    jpeg: JpegArtifacts
    frames: int
    seed: int

    def __len__(self) -> int:
        return self.frames

    def __iter__(self) -> Iterator[Frame]:
        return (self[index] for index in range(self.frames))

    def __getitem__(self, index: int) -> Frame:
        if not 0 <= index < self.frames:
            raise IndexError(index)
        clean = self.scene.image(index)
        generator = torch.Generator(clean.device).manual_seed((self.seed + index * _FRAMES_APART) % 2**63)
        noise = torch.randn(clean.shape, generator=generator, device=clean.device)
        came_from, known = self.scene.motion(index)
        return Frame(clean, self.degradation.apply(clean, noise, self.jpeg), came_from, known)


class Clips:
    """Makes clips: `clip(step, frames)` returns the clips of a step. `photos` replaces the folder in the settings."""

    def __init__(self, settings: ClipSettings, device: torch.device, seed: int = 0, photos: str | None = None) -> None:
        self.settings, self.device, self.seed = settings, device, seed
        photo_settings = PhotoSettings(
            photos or settings.photos,
            shrink=settings.shrink,
            crop_px=settings.world_px,
            batch=2 * settings.batch,
            focus=0.0,
        )
        self.crops = PhotoCrops(photo_settings, 1, device, seed)
        self.jpeg = JpegArtifacts(device)

    @torch.no_grad()
    def clip(self, step: int, frames: int) -> Clip:
        photos = self.crops.batch(step)[1].contiguous()
        generator = torch.Generator().manual_seed((self.seed + 1) * _SPREAD + step)
        scene = Scene.draw(self.settings, photos.unflatten(0, (2, self.settings.batch)), frames, generator)
        degradation = Degradation.draw(self.settings, self.settings.batch, generator).to(self.device)
        return Clip(scene, degradation, self.jpeg, frames, self.seed * _SPREAD + step)

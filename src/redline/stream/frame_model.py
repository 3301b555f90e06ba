"""What the engine asks of a model: a frame's work at a fixed size and number of steps, with all that may change in
buffers that stay where they are. So the work can be recorded once, and another strength, seed or control is other
numbers in the same place.
"""

from typing import Protocol

import torch
from torch import Tensor

from redline.stream.settings import Settings


class FrameProgram(Protocol):
    def retune(self, settings: Settings) -> None:
        """Writes what the settings say into the buffers, behind the work that is under way; nothing waits."""
        ...

    def run(self, frame: Tensor, previous: Tensor) -> Tensor:
        """The new picture, of the frame's shape: all three (1, 3, H, W), fp32, around [-1, 1]."""
        ...


class FrameModel(Protocol):
    @property
    def name(self) -> str: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def most_steps(self) -> int:
        """As far as a slider need go."""
        ...

    @property
    def control_names(self) -> tuple[str, ...]:
        """What the first numbers of the control vector mean to people; empty where there is none."""
        ...

    @property
    def control_least(self) -> float:
        """As far down as a slider of those need go, from 1."""
        ...

    @property
    def takes_prompt(self) -> bool: ...

    def check(self, settings: Settings) -> None:
        """Refuses, with a `RedlineError`, settings that the model cannot run with; makes ready what would hold a frame
        up. From whichever thread wants to change them."""
        ...

    def padded_px(self, side_px: int) -> int:
        """The side that the model takes, the same or larger."""
        ...

    def program(self, steps: int, height: int, width: int) -> FrameProgram:
        """For sides that it takes."""
        ...

    def working_bytes(self, height: int, width: int) -> int:
        """About how much memory a frame takes while it is computed, the weights apart; found without taking any."""
        ...

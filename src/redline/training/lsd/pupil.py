"""The model that learns, beside the average of what it was: its teacher once there are fewer steps to learn.

Both are in one module, so that a checkpoint holds both, and a training that is resumed goes on with the teacher it had.
"""

import copy

import torch
from torch import Tensor, nn

from redline.models.lsd import Lsd


class Pupil(nn.Module):
    """`student` is trained; `teacher`, if any, follows it until it teaches. `seconds` is how long it all took."""

    seconds: Tensor

    def __init__(self, student: Lsd, has_teacher: bool = True) -> None:
        super().__init__()
        self.student = student
        self.teacher = copy.deepcopy(student).requires_grad_(False) if has_teacher else None
        self.register_buffer("seconds", torch.zeros((), dtype=torch.float64))

    @torch.no_grad()
    def teach_later(self, step: int, decay: float) -> None:
        """The teacher takes in the student's weights; early on it is all of them, or it would keep the random start."""
        if self.teacher is None:
            return
        share = 1 - min(decay, step / (10 + step))
        torch._foreach_lerp_(list(self.teacher.parameters()), list(self.student.parameters()), share)

"""The trained model and its teacher, an average of its past weights, in one module, so that checkpoints hold both."""

import copy

import torch
from torch import Tensor, nn

from redline.models.lsd import Lsd


class StudentTeacher(nn.Module):
    """`student` is trained; `teacher` averages its weights until distillation begins. `seconds` counts the time."""

    seconds: Tensor

    def __init__(self, student: Lsd, has_teacher: bool = True) -> None:
        super().__init__()
        self.student = student
        self.teacher = copy.deepcopy(student).requires_grad_(False) if has_teacher else None
        self.register_buffer("seconds", torch.zeros((), dtype=torch.float64))

    @torch.no_grad()
    def update_teacher(self, step: int, decay: float) -> None:
        """Moves the teacher towards the student; early steps move it further, so that it forgets the random weights."""
        if self.teacher is None:
            return
        share = 1 - min(decay, step / (10 + step))
        torch._foreach_lerp_(list(self.teacher.parameters()), list(self.student.parameters()), share)

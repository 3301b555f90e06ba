"""The subject of a profile: a workload with a plan applied, whose step can be run repeatedly.

Unlike a trial, a profile runs in the current process: it builds its own model, and no decision depends on its times.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from redline.errors import RedlineError, WorkloadError
from redline.ladder.job import Applied, Job, TrainingStep
from redline.ladder.plan import Plan
from redline.ladder.rewrites.io_adapter import Boundary
from redline.ladder.rung import Stage
from redline.ladder.workload import Inputs, LossFunction, Workload, describe_error
from redline.machine.machine import Machine

WARMUPS = 2


@dataclass(eq=False)
class WatchedLoss:
    """The loss function of a workload, which a tracker can wrap by setting `around`."""

    loss: LossFunction
    around: Callable[[LossFunction, Any, Inputs], Tensor] | None = None

    def __call__(self, output: Any, batch: Inputs) -> Tensor:
        if self.around is None:
            return self.loss(output, batch)
        return self.around(self.loss, output, batch)


@dataclass(frozen=True)
class Subject:
    """A workload that is ready to be profiled; made by `prepare(workload, plan, machine)`. `step()` runs one step."""

    workload: Workload
    plan: Plan
    machine: Machine
    job: Job
    applied: Applied | TrainingStep
    inputs: Inputs
    loss: WatchedLoss | None
    # The reason why layers cannot be distinguished; empty if they can.
    sealed: str
    # The layers of the user's model by name; "" is the whole model.
    layers: dict[str, nn.Module] = field(repr=False)

    @property
    def device(self) -> torch.device:
        return torch.device(self.machine.device)

    @property
    def training(self) -> bool:
        return self.loss is not None

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        return self.applied.optimizer if isinstance(self.applied, TrainingStep) else None

    def step(self) -> Any:
        try:
            if isinstance(self.applied, TrainingStep):
                return self.applied(self.inputs)
            return self.workload.step(self.applied, self.inputs)
        except RedlineError:
            raise
        except Exception as error:
            raise WorkloadError(f"{self.workload.label}: the step failed: {describe_error(error)}.") from error

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def timed_step(self) -> float:
        """Runs one step with the device synchronized before and after, and returns its seconds."""
        self.wait()
        start = time.perf_counter()
        self.step()
        self.wait()
        return time.perf_counter() - start


def prepare(workload: Workload, plan: Plan, machine: Machine) -> Subject:
    """Builds the model, applies the plan and runs warm-up steps, which include compilation."""
    model = workload.fresh_model(machine.device)
    inputs = workload.fresh_inputs(0, machine.device)
    loss = WatchedLoss(workload.loss) if workload.loss is not None else None
    plan, job = plan.build(Job.of_workload(replace(workload, loss=loss), model, (inputs,)), machine)
    root = job.model
    while isinstance(root, Boundary):
        root = root.model
    subject = Subject(
        workload=workload,
        plan=plan,
        machine=machine,
        job=job,
        applied=job.finish(),
        inputs=inputs,
        loss=loss,
        sealed=_sealed(plan, root),
        layers=dict(root.named_modules()),
    )
    for _ in range(WARMUPS):
        subject.step()
    subject.wait()
    return subject


def _sealed(plan: Plan, root: nn.Module) -> str:
    """Returns why layers cannot be distinguished, or an empty string.

    Hooks on layers inside a compiled, exported or captured model are skipped or compiled into the graph.
    """
    late = [rung.name for rung in plan.rungs if rung.stage >= Stage.COMPILE]
    if late:
        return (
            f"the rung {late[0]} runs the model as a whole, so the table shows kernels instead of layers; "
            "profile without this rung to see the layers."
        )
    for name, module in root.named_modules():
        where = f"layer {name!r} of the model" if name else "the model"
        # torch.compile(model) wraps the model; model.compile() sets this attribute.
        wrapped = type(module).__name__ == "OptimizedModule"
        if wrapped or getattr(module, "_compiled_call_impl", None) is not None:
            return (
                f"{where} is already compiled, so the table shows kernels instead of layers; "
                "profile the uncompiled model to see the layers."
            )
        if isinstance(module, torch.jit.ScriptModule):
            return f"{where} is TorchScript, so the table shows kernels instead of layers."
    return ""

"""Compares an optimized model with the original on the samples."""

import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from redline.errors import Refused
from redline.ladder.gate import all_finite, gates_for
from redline.ladder.job import CallState, Job, entered
from redline.ladder.rewrites.io_adapter import unwrapped
from redline.ladder.rewrites.sample_run import on_device, state_preserved
from redline.ladder.rewrites.state import find_state
from redline.ladder.workload import Inputs, call
from redline.machine.trees import tree_map_only


def state_of(job: Job) -> CallState:
    """Runs the samples, and returns the state that the model keeps between calls, and its random operations."""
    return find_state(job.model, lambda batch: _run(job, batch), job.samples, job.gates)


class OutputCheck:
    """Compares outputs on the samples. Create it before the plan is built, and call it with the optimized model."""

    def __init__(self, job: Job) -> None:
        self.samples, self.gates, self.state = job.samples, job.gates, state_of(job)
        with state_preserved(job.model):
            self.expected = self._outputs(lambda batch: _run(job, batch))

    def __call__(self, optimized: Callable[..., Any], built: Job, plan: str) -> None:
        """Raises Refused if an output on the samples is outside the gates; warns if outputs cannot be compared."""
        # Restores the model's state if the model keeps state between calls. Otherwise the calls change only caches of
        # the plan, which need not be restored.
        with state_preserved(unwrapped(built.model)) if self.state.kept else nullcontext():
            outputs = self._outputs(lambda batch: call(optimized, batch))
        for expected, output in zip(self.expected, outputs, strict=True):
            failed = [s for gate in gates_for(self.gates, expected) if not (s := gate.judge(expected, output)).passed]
            if not failed and all_finite(output) >= all_finite(expected):
                continue
            reason = str(failed[0]) if failed else "it contains NaN or infinity"
            if self.state.random:
                warnings.warn(f"{plan} cannot be checked, because {self.state}.", stacklevel=3)
                return
            because = f"; {self.state}" if self.state.kept else ""
            raise Refused(f"{plan}: the output differs from that of the model on the samples: {reason}{because}.")

    def _outputs(self, run: Callable[[Inputs], Any]) -> list[Any]:
        outputs = []
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(0)
            for batch in self.samples:
                outputs.append(tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), run(batch)))
        return outputs


def _run(job: Job, batch: Inputs) -> Any:
    with entered(job.contexts):
        return call(job.model, on_device(batch, job.device) if job.host_inputs else batch)

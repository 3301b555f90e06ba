"""The code of a worker process: builds a workload, applies a plan, and answers requests about it."""

import functools
import gc
import os
import pickle
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch import nn

from redline.errors import RedlineError, WorkloadError
from redline.ladder.gate import Score, tensors_of
from redline.ladder.job import Job, TrainingStep
from redline.ladder.measuring.callers import Callers, judge_concurrent_calls
from redline.ladder.measuring.judge import (
    TRAINING_STEPS,
    Refused,
    detached,
    judge,
    losses_and_gradients,
    worst_per_gate,
)
from redline.ladder.measuring.new_size import event_between, shape_counts, try_size
from redline.ladder.measuring.reference import run_reference
from redline.ladder.plan import Plan, Unavailable
from redline.ladder.rewrites.quantize import stored_bytes
from redline.ladder.rung import ShapeCounts
from redline.ladder.workload import SAMPLE_SEEDS, Inputs, Workload
from redline.ladder.workloads.addresses import load_workload
from redline.machine.ceilings import with_ceilings
from redline.machine.compiler_files import prepare_compiler
from redline.machine.host_memory import peak_resident_bytes, reset_peak_resident, resident_bytes, return_freed_memory
from redline.machine.machine import Machine
from redline.machine.memory import is_out_of_memory

TIMING_SEEDS = (0, 1, 2, 3)
# After this many seconds, a turn does not repeat its steps again.
_LONGEST_S = 0.05
# The calls of each concurrent caller while the peak is measured.
_PEAK_CALLS = 3


def serve(channel: int) -> None:
    """Answers requests until the parent closes the connection."""
    connection = Connection(channel)
    bench = Bench()
    while True:
        try:
            request, arguments = connection.recv()
        except (EOFError, OSError):
            return
        try:
            answer: dict[str, Any] = {"result": getattr(bench, request)(**arguments)}
        except Exception as error:
            traceback.print_exc()
            answer = {"failed": _kind(error), "message": _sentence(error), "traceback": traceback.format_exc()}
        connection.send(answer)


def _kind(error: Exception) -> str:
    kinds = {Unavailable: "unavailable", Refused: "refused", WorkloadError: "workload"}
    for kind, name in kinds.items():
        if isinstance(error, kind):
            return name
    return "oom" if is_out_of_memory(error) or "out of memory" in str(error).lower() else "error"


def _sentence(error: Exception) -> str:
    if isinstance(error, Unavailable):
        return error.reason
    lines = [line for line in str(error).strip().splitlines() if line.strip()]
    text = lines[0].strip() if lines else "no message"
    return text.rstrip(".") if isinstance(error, RedlineError) else f"{type(error).__name__}: {text}"[:300]


class Bench:
    """One workload under one plan (an arm), or the untouched reference. Each request calls one of its methods."""

    def call(self, function: bytes, path: Sequence[str]) -> Any:
        """Calls a function that was pickled in the parent, after adding the parent's `sys.path`."""
        sys.path += [folder for folder in path if folder not in sys.path]
        return pickle.loads(function)()

    def machine(self, device: str, measure: bool, again: bool = False) -> dict[str, Any]:
        found = Machine.detect(device)
        return (with_ceilings(found, again) if measure else found).as_dict()

    def reference(self, **arguments: Any) -> dict[str, Any]:
        return run_reference(**arguments)

    def setup(
        self,
        address: str,
        shapes: Mapping[str, Mapping[str, Any]],
        device: str,
        plan: str,
        reference: str,
        seeds: Sequence[int],
        callers: int = 0,
        max_error: float = 0.0,
    ) -> dict[str, Any]:
        """Builds the model, applies the plan, runs the first calls, and judges the outputs.

        With `callers`, also judges the outputs of concurrent calls; later samples then time concurrent calls.
        """
        self.device = torch.device(device)
        self.callers = Callers(callers, self.device) if callers else None
        machine = Machine.detect(device)
        self.workloads = {
            label: load_workload(address, options).with_max_error(max_error) for label, options in shapes.items()
        }
        first = next(iter(self.workloads.values()))
        self.rss_before = resident_bytes()
        asked = Plan.parse(plan)
        samples = tuple(first.fresh_inputs(seed, device) for seed in SAMPLE_SEEDS) if asked.rungs else ()
        model = first.fresh_model(device)
        self.batches = {
            label: [workload.fresh_inputs(seed, device) for seed in TIMING_SEEDS]
            for label, workload in self.workloads.items()
        }
        if not machine.is_cuda and any(rung.name == "compile" and not rung.why_not(machine) for rung in asked.rungs):
            prepare_compiler(machine, Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]), Path(tempfile.gettempdir()))
        self.wait()
        start = time.perf_counter()
        job = Job.of_workload(first, model, samples)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            self.plan, self.job = asked.build(job, machine)
            self.run = self.job.finish()
            # By shape: whether the first call set up for it or fell back, and the reason.
            self._events: dict[str, tuple[str, str]] = {}
            self._counts = ShapeCounts()
            setup_s: dict[str, float] = {}
            scores, warmups = self._run_and_judge(reference, seeds, setup_s, start)
            if self.callers is not None and all(score.passed for score in scores):
                for label, workload in self.workloads.items():
                    judge_concurrent_calls(self.callers, workload, self.run, self.batches[label])
            proof = {rung.name: rung.proof(self.job) for rung in self.plan.rungs}
            reasons = {rung.name: rung.why_no_proof(self.job) for rung in self.plan.rungs if not proof[rung.name]}
        # Frees the samples, which would otherwise count as memory of the plan.
        self.job = replace(self.job, samples=())
        for name, reason in reasons.items():
            raise Refused(f"{name} has no proof that it did anything{f': {reason}' if reason else ''}")
        counters = torch._dynamo.utils.counters["inductor"]
        return {
            "plan": str(self.plan),
            "setup_s": setup_s,
            "events": self._events,
            "cached": counters["fxgraph_cache_hit"] > 0,
            "warmups": warmups,
            "scores": tuple(scores),
            "proof": proof,
            "notes": tuple(sorted({_first_line(w) for w in caught if _is_for_users(w)})[:5]),
            "precision": _ceiling_precision(self.job),
            "weight_bytes": _weight_bytes(self.job.model),
            "least_bytes": {label: self._least_bytes(label) for label in self.workloads},
            "step_s": {label: self._one_step_s(label) for label in self.workloads},
        }

    def try_size(self, address: str, options: Mapping[str, Any]) -> dict[str, Any]:
        """Calls the running plan with inputs of another size; returns whether it set up again or fell back."""
        workload = load_workload(address, options)
        step = functools.partial(workload_step, workload, self.run)
        return try_size(workload, self.plan, self.job, step, self.device, self.wait)

    def judge_again(self, reference: str, seeds: Sequence[int]) -> tuple[Score, ...]:
        """Judges the running plan on inputs of other seeds; a training step restarts from the initial weights."""
        if isinstance(self.run, TrainingStep):
            self.run.restart(next(iter(self.workloads.values())).fresh_model(str(self.device)))
        return tuple(self._run_and_judge(reference, seeds, {})[0])

    def _run_and_judge(
        self, reference: str, seeds: Sequence[int], setup_s: dict[str, float], start: float = 0.0
    ) -> tuple[list[Score], int]:
        """Returns the worst score of each gate, and the number of steps; adds the time of each shape to `setup_s`."""
        expected = torch.load(reference, map_location=self.device, weights_only=True)
        scores: list[Score] = []
        steps = 0
        for label, workload in self.workloads.items():
            batches = [workload.fresh_inputs(seed, str(self.device)) for seed in seeds]
            self.wait()
            if setup_s:
                start = time.perf_counter()  # for a later shape, counts only what it adds, such as a recompilation
            mark = functools.partial(self._mark, setup_s, label, start)
            if workload.training and label in expected:
                scores += judge(
                    workload.gates, expected[label], [losses_and_gradients(self.run, batches[:TRAINING_STEPS], mark)]
                )
                steps += TRAINING_STEPS
                continue
            output = workload_step(workload, self.run, batches[0])
            mark()
            steps += 1
            if not workload.training:
                outputs = [detached(output)] + [detached(workload.step(self.run, b)) for b in batches[1:]]
                scores += judge(workload.gates, expected[label], outputs)
                steps += len(batches) - 1
        return worst_per_gate(scores, len(expected)), steps

    def _mark(self, setup_s: dict[str, float], label: str, start: float) -> None:
        self.wait()
        setup_s[label] = time.perf_counter() - start
        before, self._counts = self._counts, shape_counts(self.plan, self.job)
        self._events[label] = event_between(before, self._counts)

    def _one_step_s(self, label: str) -> float:
        """Estimates the time per step, from which the number of steps per sample is chosen; also warms up."""
        workload, batches = self.workloads[label], self.batches[label]
        best = float("inf")
        spent = 0.0
        for turn in range(8):
            self.wait()
            start = time.perf_counter()
            workload_step(workload, self.run, batches[turn % len(batches)])
            self.wait()
            seconds = time.perf_counter() - start
            best, spent = min(best, seconds), spent + seconds
            if turn >= 1 and spent > 1.0:
                break
        return best

    def sample(
        self, steps: Mapping[str, int], warm: Mapping[str, int], repeats: Mapping[str, int] | None = None
    ) -> dict[str, float]:
        """Returns seconds per step for every shape in one turn, after a few untimed steps that refill the caches.

        Times `steps` steps together, `repeats` times, and returns the lower quartile, which stalls do not affect.
        """
        seconds = {}
        for label, workload in self.workloads.items():
            # Each turn starts with the next batch, so that samples cover all of them.
            batches = self.batches[label] = [*self.batches[label][1:], self.batches[label][0]]
            if self.callers is not None:
                seconds[label] = self._sample_requests(label, steps[label], warm[label])
                continue
            for index in range(warm[label]):
                workload_step(workload, self.run, batches[index % len(batches)])
            times = []
            gc.disable()
            try:
                self.wait()
                for _ in range(repeats[label] if repeats else 1):
                    start = time.perf_counter()
                    for index in range(steps[label]):
                        workload_step(workload, self.run, batches[index % len(batches)])
                    self.wait()
                    times.append((time.perf_counter() - start) / steps[label])
                    if sum(times) * steps[label] > _LONGEST_S:
                        break  # steps have become slower since the number of repeats was chosen
            finally:
                gc.enable()
            seconds[label] = sorted(times)[len(times) // 4]
        return seconds

    def _sample_requests(self, label: str, requests: int, warm: int) -> float:
        """Returns the seconds of these requests, which the callers make at the same time, divided by their number."""
        assert self.callers is not None
        workload, batches = self.workloads[label], self.batches[label]

        def call(number: int) -> None:
            workload_step(workload, self.run, batches[number % len(batches)])

        self.callers.run(max(warm, self.callers.count), call, time.perf_counter)
        self.wait()
        gc.disable()
        try:
            return self.callers.run(requests, call, time.perf_counter) / requests
        finally:
            gc.enable()

    def calls(self, count: int, warm: Mapping[str, int]) -> dict[str, list[float]]:
        """Returns the seconds of `count` single calls for every shape in one turn, after a few untimed steps."""
        seconds: dict[str, list[float]] = {}
        for label, workload in self.workloads.items():
            batches = self.batches[label]
            for index in range(warm[label]):
                workload_step(workload, self.run, batches[index % len(batches)])
            taken = seconds[label] = []
            gc.disable()
            try:
                self.wait()
                for index in range(count):
                    start = time.perf_counter()
                    workload_step(workload, self.run, batches[index % len(batches)])
                    self.wait()
                    taken.append(round(time.perf_counter() - start, 9))
            finally:
                gc.enable()
        return seconds

    def peak(self) -> int:
        """Returns the peak memory of steps after set-up, including the memory pools of CUDA graphs."""
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
            held = torch.cuda.memory_reserved(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)
            self._steps_of_every_shape()
            return max(torch.cuda.max_memory_allocated(self.device), held)
        return_freed_memory()
        reset_peak_resident()
        self._steps_of_every_shape()
        return max(peak_resident_bytes() - self.rss_before, 0)

    def _steps_of_every_shape(self) -> None:
        for label, workload in self.workloads.items():
            for batch in self.batches[label][:2]:
                workload_step(workload, self.run, batch)
            if self.callers is not None:
                self._sample_requests(label, _PEAK_CALLS * self.callers.count, 0)
        self.wait()

    def _least_bytes(self, label: str) -> float:
        """Returns the smallest number of bytes that a step must move: the inputs and the weights, each once.

        A training step moves the weights three times: it reads them, writes their gradients, and writes new weights.
        """
        passes = 3 if self.job.training else 1
        inputs = sum(t.nbytes for t in tensors_of(self.batches[label][0]))
        return passes * _weight_bytes(self.job.model) + inputs

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def workload_step(workload: Workload, run: Callable[..., Any], batch: Inputs) -> Any:
    return run(batch) if workload.training else workload.step(run, batch)


def _ceiling_precision(job: Job) -> str:
    """Returns the precision whose ceiling applies: TF32 if torch runs the fp32 convolutions of the model in TF32."""
    convolves = any(isinstance(module, (nn.Conv2d, nn.ConvTranspose2d)) for module in job.model.modules())
    if job.precision == "fp32" and job.device.type == "cuda" and convolves and torch.backends.cudnn.allow_tf32:
        return "tf32"
    return job.precision


def _weight_bytes(model: nn.Module) -> int:
    known = sum(int(getattr(m, "weight_bytes", 0)) for m in model.modules())
    if known:
        return known
    seen = {id(t): t for t in [*model.parameters(), *model.buffers()]}
    return sum(stored_bytes(t) for t in seen.values())


def _is_for_users(warning: warnings.WarningMessage) -> bool:
    return issubclass(warning.category, (UserWarning, RuntimeWarning))


def _first_line(warning: warnings.WarningMessage) -> str:
    return f"{warning.category.__name__}: {str(warning.message).splitlines()[0]}"


if __name__ == "__main__":
    serve(int(sys.argv[1]))

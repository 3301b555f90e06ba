"""A plan: an ordered tuple of rungs that can be parsed, saved and applied to a model."""

import os
import re
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from torch import nn

from redline.errors import PlanError, RedlineError
from redline.files.atomic import write_text
from redline.files.untrusted import read_toml, reading
from redline.ladder.gate import Gate
from redline.ladder.job import Applied, Job, TrainingStep
from redline.ladder.objective import Objective
from redline.ladder.rewrites.calibrate import outputs_on_samples
from redline.ladder.rewrites.output_check import OutputCheck, state_of
from redline.ladder.rewrites.state import training_layers
from redline.ladder.rung import Rung
from redline.ladder.rungs import RUNGS, find_rung
from redline.ladder.workload import Inputs, LossFunction, OptimizerFactory
from redline.machine.machine import Machine
from redline.notation import split_outside_brackets

SCHEMA = 1
_LONG_LIST = re.compile(r"=\[[^\]]{80,}\]")
_RUNG = re.compile(r"\s*([a-z][a-z0-9_]*)\s*(?:\((.*)\))?\s*", re.DOTALL)


@dataclass(frozen=True)
class Plan:
    """An ordered tuple of rungs, made by `Plan.parse("bf16 + compile")` or `Plan.load("plan.toml")`."""

    rungs: tuple[Rung, ...] = ()
    # The objective of the climb that found the plan; not part of equality.
    objective: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if self.objective:
            Objective.named(self.objective)
        order = list(RUNGS)
        names = [rung.name for rung in self.rungs]
        for index, rung in enumerate(self.rungs):
            if rung.name in names[:index]:
                raise PlanError(f"the plan lists {rung.name!r} twice.")
            rivals = [other for other in names[:index] if excluded(rung.name, other)]
            if rivals:
                raise PlanError(f"the plan lists {rung.name!r} and {rivals[0]!r}, which exclude each other: keep one.")
            if index and order.index(rung.name) < order.index(names[index - 1]):
                before, after = self.rungs[index - 1], rung
                raise PlanError(
                    f"the plan is in the wrong order: put {after.name!r} ({after.stage.name.lower()}) before "
                    f"{before.name!r} ({before.stage.name.lower()})."
                )

    @classmethod
    def of(cls, rungs: Iterable[Rung]) -> "Plan":
        """Returns the plan of these rungs, sorted by their order in the registry."""
        order = list(RUNGS)
        return cls(tuple(sorted(rungs, key=lambda rung: order.index(rung.name))))

    @classmethod
    def parse(cls, text: str) -> "Plan":
        """Parses the one-line form. Empty text and `eager` give the empty plan."""
        if text.strip() in ("", "eager"):
            return cls()
        return cls(tuple(parse_rung(part) for part in split_outside_brackets(text, "+")))

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Plan":
        with reading(path, "plan", PlanError):
            return cls.from_document(read_toml(path, "plan", PlanError), str(path))

    @classmethod
    def from_document(cls, document: Mapping[str, Any], origin: str = "plan") -> "Plan":
        schema = document.get("schema")
        if not isinstance(schema, int) or isinstance(schema, bool) or schema < 1:
            raise PlanError(f"{origin!r} is not a plan: it has no integer `schema`.")
        if schema > SCHEMA:
            raise PlanError(f"{origin!r} has schema {schema}, but this Redline reads up to {SCHEMA}: upgrade Redline.")
        unknown = [key for key in document if key not in ("schema", "objective", "rung")]
        if unknown:
            raise PlanError(f"{origin!r}: unknown key {unknown[0]!r} (supported: schema, objective, [[rung]]).")
        entries = document.get("rung", [])
        if not isinstance(entries, list) or not all(isinstance(e, dict) for e in entries):
            raise PlanError(f"{origin!r} is not a plan: write each rung as [[rung]].")
        rungs = []
        for entry in entries:
            options = dict(entry)
            name = options.pop("name", None)
            if not isinstance(name, str):
                raise PlanError(f"{origin!r}: a [[rung]] has no name.")
            rungs.append(make_rung(name, options))
        return cls(tuple(rungs), str(document.get("objective", "")))

    def save(self, path: str | os.PathLike[str], comment: Mapping[str, str] | None = None) -> None:
        """Writes the plan as TOML, atomically."""
        write_text(Path(path), self.to_toml(comment))

    def to_toml(self, comment: Mapping[str, str] | None = None) -> str:
        lines = [f"# {key}: {value}" for key, value in (comment or {}).items()]
        lines += [f"schema = {SCHEMA}"]
        lines += [f"objective = {_toml(self.objective)}"] if self.objective else []
        for rung in self.rungs:
            lines += ["", "[[rung]]", f'name = "{rung.name}"']
            for item in fields(rung):
                value = getattr(rung, item.name)
                if value != item.default:
                    lines.append(f"{item.name} = {_toml(value)}")
        return "\n".join(lines) + "\n"

    def __str__(self) -> str:
        return " + ".join(map(str, self.rungs)) or "eager"

    def __contains__(self, name: str) -> bool:
        return any(rung.name == name for rung in self.rungs)

    def with_rung(self, rung: Rung) -> "Plan":
        """Returns this plan with the rung added, and without the rungs that have the same name or that it excludes."""
        others = [rung.adjust_other(r) for r in self.rungs if r.name != rung.name and not excluded(r.name, rung.name)]
        return Plan.of([*(other for other in others if other is not None), rung])

    def without(self, name: str) -> "Plan":
        return Plan(tuple(rung for rung in self.rungs if rung.name != name))

    def build(self, job: Job, machine: Machine) -> "tuple[Plan, Job]":
        """Applies every rung in order. Returns the plan with its automatic choices resolved, and the job.

        Raises `Unavailable` if a rung cannot be applied.
        """
        resolved: list[Rung] = []
        if any(rung.checks_gates for rung in self.rungs):
            job = replace(job, expected=tuple(outputs_on_samples(job)))
        if job.samples and job.state is None and any(rung.freezes_state for rung in self.rungs):
            job = replace(job, state=state_of(job))
        for rung in self.rungs:
            if (job.training and not rung.training) or (not job.training and not rung.inference):
                raise PlanError(f"{rung.name} is for {'training' if rung.training else 'inference'} only.")
            reason = rung.why_not(machine, job)
            if not reason and rung.freezes_state and job.state is not None and str(job.state):
                reason = f"{job.state}, which is lost when the model is exported"
            if reason:
                raise Unavailable(rung, reason)
            rung = rung.resolve(job)
            job = rung.apply(job)
            resolved.append(rung)
        return Plan(tuple(resolved)), replace(job, expected=())

    def apply(
        self,
        model: nn.Module,
        samples: Inputs | list[Inputs] | None = None,
        *,
        gates: tuple[Gate, ...] = (),
        loss: LossFunction | None = None,
        optimizer: OptimizerFactory | None = None,
        host_inputs: bool = False,
        share: bool = False,
        clip_norm: float | None = None,
        check: bool = True,
    ) -> Applied | TrainingStep:
        """Returns the optimized model, or a training step if `loss` and `optimizer` are given.

        The plan works on a copy of `model`; with `share=True` it changes the model itself, which saves memory.
        `samples` is a batch, or a list of batches, on which rungs calibrate. `optimizer` is a function that takes the
        parameters and returns an optimizer; `clip_norm` limits the norm of the gradients, after loss scaling is undone.

        With `check`, the optimized model is called with the samples and compared with the original: raises `Refused` if
        an output is outside the gates.
        """
        if not isinstance(model, nn.Module):
            raise PlanError(f"model is a {type(model).__name__}, but a plan applies to a torch.nn.Module.")
        batches = tuple(samples) if isinstance(samples, list) else (() if samples is None else (samples,))
        if clip_norm is not None and (loss is None or not clip_norm > 0):
            raise PlanError(f"clip_norm={clip_norm} must be above 0, and needs loss= and optimizer=.")
        job = replace(Job.of(model, batches, gates, loss, optimizer, host_inputs, share), clip_norm=clip_norm)
        compare = None
        if not job.training:
            layers = training_layers(job.model)
            job.model.eval()
            if check and (layers := [layer for layer in layers if layer not in training_layers(job.model)]):
                warnings.warn(
                    f"the model is in training mode ({', '.join(layers[:3])}), but the optimized copy computes like "
                    "the model after eval(): call eval() first.",
                    stacklevel=2,
                )
            if check and batches:
                compare = OutputCheck(job)
                job = replace(job, state=compare.state)
        resolved, job = self.build(job, Machine.detect(str(job.device)))
        applied = job.finish()
        if compare is not None:
            compare(applied, job, str(resolved))
        return applied


def read_plan(plan: "Plan | str | os.PathLike[str]") -> Plan:
    """Reads a plan file or the one-line form; returns a `Plan` unchanged."""
    if isinstance(plan, Plan):
        return plan
    # A one-line plan can be longer than a file name may be: os.path.isfile then returns False, whereas pathlib raises.
    if not isinstance(plan, str) or plan.endswith(".toml") or os.path.isfile(plan):
        return Plan.load(plan)
    return Plan.parse(plan)


class Unavailable(RedlineError):
    """Raised if a rung of the plan cannot be applied; holds that rung and the reason."""

    def __init__(self, rung: Rung, reason: str) -> None:
        super().__init__(f"{rung.name}: {reason.rstrip('.')}.")
        self.rung = rung
        self.reason = reason


def brief(plan: str) -> str:
    """Returns the plan for a table column, with long lists (such as the layers that a rung skips) as `[...]`."""
    return _LONG_LIST.sub("=[...]", plan)


def excluded(one: str, other: str) -> bool:
    return other in RUNGS[one].excludes or one in RUNGS[other].excludes


def parse_rung(text: str) -> Rung:
    """Parses one rung, for example `compile(mode=max-autotune, dynamic=true)`."""
    match = _RUNG.fullmatch(text)
    if match is None:
        raise PlanError(f"cannot parse the rung {text.strip()!r}: write name or name(option=value, …).")
    options: dict[str, Any] = {}
    for part in filter(str.strip, split_outside_brackets(match[2] or "", ",")):
        key, equals, value = part.partition("=")
        if not equals:
            raise PlanError(f"cannot parse {part.strip()!r} in {text.strip()!r}: write option=value.")
        options[key.strip()] = value.strip()
    return make_rung(match[1], options)


def make_rung(name: str, options: Mapping[str, Any]) -> Rung:
    """Builds a rung from its name and its options, which are text or TOML values."""
    cls = find_rung(name)
    known = {item.name: item for item in cls.options()}
    values = {}
    for key, value in options.items():
        if key not in known:
            raise PlanError(f"{name} has no option {key!r} (options: {', '.join(known) or 'none'}).")
        values[key] = _convert(name, key, value, known[key].default)
    return cls(**values)


def _convert(rung: str, key: str, value: Any, default: Any) -> Any:
    """Converts text to the type of the option's default; a TOML value must already have that type."""
    kind = type(default)
    try:
        if kind is bool:
            if isinstance(value, bool):
                return value
            return {"true": True, "false": False}[value.lower()]
        if kind is tuple:
            return tuple(value) if isinstance(value, list) else tuple(value.strip("[]").split())
        if kind is str:
            if not isinstance(value, str):
                raise ValueError
            return value
        if isinstance(value, bool):
            raise ValueError
        return kind(value)
    except (ValueError, KeyError, AttributeError, TypeError):
        raise PlanError(f"{rung}: {key} must be {_KINDS.get(kind, kind.__name__)}, not {value!r}.") from None


_KINDS = {bool: "true or false", int: "an integer", float: "a number", str: "text", tuple: "a list"}


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    return repr(value)

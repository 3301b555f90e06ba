"""A plan: an ordered tuple of rungs that reads, writes and replays."""

import os
import re
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
    """`Plan.parse("bf16 + compile(mode=max-autotune)")`, `Plan.load("plan.toml")`, `plan.apply(model)`."""

    rungs: tuple[Rung, ...] = ()
    # What it was found for, where a climb found it; the same rungs are the same plan all the same.
    objective: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if self.objective:
            Objective.named(self.objective)
        order = list(RUNGS)
        names = [rung.name for rung in self.rungs]
        for index, rung in enumerate(self.rungs):
            if rung.name in names[:index]:
                raise PlanError(f"the plan has {rung.name!r} twice.")
            rivals = [other for other in names[:index] if excluded(rung.name, other)]
            if rivals:
                raise PlanError(f"{rung.name!r} and {rivals[0]!r} exclude each other: keep one.")
            if index and order.index(rung.name) < order.index(names[index - 1]):
                before, after = self.rungs[index - 1], rung
                raise PlanError(
                    f"wrong order: {after.name!r} ({after.stage.name.lower()}) comes before "
                    f"{before.name!r} ({before.stage.name.lower()})."
                )

    @classmethod
    def of(cls, rungs: Iterable[Rung]) -> "Plan":
        """The rungs in their right order."""
        order = list(RUNGS)
        return cls(tuple(sorted(rungs, key=lambda rung: order.index(rung.name))))

    @classmethod
    def parse(cls, text: str) -> "Plan":
        """The one-line form; empty text or `eager` is the empty plan."""
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
            raise PlanError(f"{origin!r} is not a plan: it has no whole number `schema`.")
        if schema > SCHEMA:
            raise PlanError(f"{origin!r} is of schema {schema}, newer than this Redline reads ({SCHEMA}): upgrade it.")
        unknown = [key for key in document if key not in ("schema", "objective", "rung")]
        if unknown:
            known = "schema, objective and [[rung]]"
            raise PlanError(f"{origin!r} has {unknown[0]!r}, which a plan does not: it has {known}.")
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
        """Writes TOML, whole or not at all."""
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
        """This plan with the rung added, in place of itself and of whatever it excludes."""
        others = [rung.beside(r) for r in self.rungs if r.name != rung.name and not excluded(r.name, rung.name)]
        return Plan.of([*(other for other in others if other is not None), rung])

    def without(self, name: str) -> "Plan":
        return Plan(tuple(rung for rung in self.rungs if rung.name != name))

    def build(self, job: Job, machine: Machine) -> "tuple[Plan, Job]":
        """Applies every rung in order; gives the plan with its automatic choices made, and the job."""
        resolved: list[Rung] = []
        if any(rung.judges for rung in self.rungs):
            job = replace(job, expected=tuple(outputs_on_samples(job)))
        for rung in self.rungs:
            if (job.training and not rung.training) or (not job.training and not rung.inference):
                raise PlanError(f"{rung.name} is for {'training' if rung.training else 'inference'} only.")
            reason = rung.why_not(machine, job)
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
    ) -> Applied | TrainingStep:
        """The fast model. The one you pass in is left as it is (`share=True` hands it over, to save its memory).

        `samples` is a batch, or a list of batches, that looks like what the model will see: rungs calibrate on it.
        With `loss` and `optimizer` (a function from parameters to an optimizer) the result is a training step.
        """
        if not isinstance(model, nn.Module):
            raise PlanError(f"a plan is applied to a torch.nn.Module, not to {type(model).__name__}.")
        batches = tuple(samples) if isinstance(samples, list) else (() if samples is None else (samples,))
        job = Job.of(model, batches, gates, loss, optimizer, host_inputs, share)
        if not job.training:
            job.model.eval()
        machine = Machine.detect(str(job.device))
        return self.build(job, machine)[1].finish()


def read_plan(plan: "Plan | str | os.PathLike[str]") -> Plan:
    """Returns the plan itself, the plan in a file, or the plan that is written in one line."""
    if isinstance(plan, Plan):
        return plan
    # os.path.isfile, because a line can be longer than a file name may be, for which pathlib raises.
    if not isinstance(plan, str) or plan.endswith(".toml") or os.path.isfile(plan):
        return Plan.load(plan)
    return Plan.parse(plan)


class Unavailable(RedlineError):
    """A rung of the plan cannot apply here; carries the rung and the sentence."""

    def __init__(self, rung: Rung, reason: str) -> None:
        super().__init__(f"{rung.name}: {reason.rstrip('.')}.")
        self.rung = rung
        self.reason = reason


def brief(plan: str) -> str:
    """A plan for a column of a table: of the many layers that a rung was found to skip only that there are some."""
    return _LONG_LIST.sub("=[...]", plan)


def excluded(one: str, other: str) -> bool:
    return other in RUNGS[one].excludes or one in RUNGS[other].excludes


def parse_rung(text: str) -> Rung:
    """`compile(mode=max-autotune, dynamic=true)` -> the rung."""
    match = _RUNG.fullmatch(text)
    if match is None:
        raise PlanError(f"{text.strip()!r} is not a rung: write name or name(option=value, …).")
    options: dict[str, Any] = {}
    for part in filter(str.strip, split_outside_brackets(match[2] or "", ",")):
        key, equals, value = part.partition("=")
        if not equals:
            raise PlanError(f"{part.strip()!r} in {text.strip()!r} is not option=value.")
        options[key.strip()] = value.strip()
    return make_rung(match[1], options)


def make_rung(name: str, options: Mapping[str, Any]) -> Rung:
    """Builds a rung from its name and its options, given as text or as TOML values."""
    cls = find_rung(name)
    known = {item.name: item for item in cls.options()}
    values = {}
    for key, value in options.items():
        if key not in known:
            takes = ", ".join(known) or "none"
            raise PlanError(f"{name} has no option {key!r} (it takes: {takes}).")
        values[key] = _convert(name, key, value, known[key].default)
    return cls(**values)


def _convert(rung: str, key: str, value: Any, default: Any) -> Any:
    """Text becomes the type of the option's default; a TOML value must already be of it."""
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
        raise PlanError(f"{rung}: {key} wants {_KINDS.get(kind, kind.__name__)}, not {value!r}.") from None


_KINDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text", tuple: "a list"}


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml(v) for v in value) + "]"
    return repr(value)

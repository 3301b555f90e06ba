"""The search order of a climb: which rungs it tries, in which variants, and in which order."""

from collections.abc import Iterator

from redline.errors import RedlineError
from redline.ladder.rung import Rung, Stage
from redline.ladder.rungs import RUNGS
from redline.ladder.search.settings import Settings
from redline.ladder.workload_prefixes import runs_steps_in_parts
from redline.machine.machine import Machine

# These are tried first, because the gain of all others depends on them: a gain in eager mode can be a loss under a
# compiler, and the other way round. A plan still lists its rungs in the order of their stages.
FIRST = ("bf16", "fp16", "fused_ops", "keep_memory", "onnxruntime", "compile", "tensorrt", "cuda_graph")


def candidates(settings: Settings, machine: Machine, training: bool) -> Iterator[list[Rung]]:
    """Yields the variants of each rung in `FIRST`, and then all variants of the other rungs in one list."""
    others: list[Rung] = []
    for name in sorted(RUNGS, key=lambda name: FIRST.index(name) if name in FIRST else len(FIRST)):
        if not may_try(name, settings, training):
            continue
        variants = _variants(name, settings, machine, training)
        if name in FIRST:
            yield variants
        else:
            others += variants
    yield others


def may_try(name: str, settings: Settings, training: bool) -> bool:
    chosen = {rung.name for rung in settings.only}
    # `without` excludes every variant of a rung that it lists without options, and otherwise only the listed variant.
    left_out = {rung.name for rung in settings.without if rung == RUNGS[rung.name]()}
    return not _why_unfit(name, settings, training) and name not in left_out and (not chosen or name in chosen)


def check_asked(settings: Settings, training: bool) -> None:
    """Raises if the user asked for a rung that this workload cannot use."""
    for rung in settings.only:
        if reason := _why_unfit(rung.name, settings, training):
            raise RedlineError(f"{reason}: leave it out of the rungs to try.")


def _why_unfit(name: str, settings: Settings, training: bool) -> str:
    rung = RUNGS[name]
    if not (rung.training if training else rung.inference):
        kinds = ("training steps", "inference")
        asked, given = kinds if rung.training else reversed(kinds)
        return f"{name} is for {asked} only, but the workload runs {given}"
    if runs_steps_in_parts(settings.workload) and rung.stage is Stage.LAUNCH:
        return f"{name} launches whole steps, but `redline train` runs a step in parts"
    return ""


def _variants(name: str, settings: Settings, machine: Machine, training: bool) -> list[Rung]:
    named = [rung for rung in settings.only if rung.name == name]
    plain = not named or named == [RUNGS[name]()]
    variants = RUNGS[name].variants(machine, training) if plain else named
    return [rung for rung in variants if rung not in settings.without]

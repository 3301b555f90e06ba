"""Which rungs a climb tries, in which variants, and in which order."""

from collections.abc import Iterator

from redline.errors import RedlineError
from redline.ladder.plan import parse_rung
from redline.ladder.rung import Rung, Stage
from redline.ladder.rungs import RUNGS
from redline.ladder.search.settings import Settings
from redline.ladder.workload_prefixes import runs_steps_in_parts
from redline.machine.machine import Machine

# What is worth most comes first, because what the others are worth depends on it: a gain in eager mode can be a loss
# under a compiler, and the other way round. A plan lists its rungs in the order of their stages all the same.
FIRST = ("bf16", "fp16", "fused_ops", "keep_memory", "onnxruntime", "compile", "tensorrt", "cuda_graph")


def candidates(settings: Settings, machine: Machine, training: bool) -> Iterator[list[Rung]]:
    """The rungs to try with their variants: those that decide most first and one by one, all others last."""
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
    chosen = {parse_rung(text).name for text in settings.only}
    # A rung is left out whole by its name; with options, only as it is written.
    without = [parse_rung(text) for text in settings.without]
    left_out = {rung.name for rung in without if rung == RUNGS[rung.name]()}
    fits = RUNGS[name].training if training else RUNGS[name].inference
    # Their plans are for `redline train`, whose loop makes a step in parts.
    fits = fits and not (runs_steps_in_parts(settings.workload) and RUNGS[name].stage is Stage.LAUNCH)
    return fits and name not in left_out and (not chosen or name in chosen)


def check_asked(settings: Settings, training: bool) -> None:
    """A rung that was asked for by name and cannot be tried is refused, not passed over."""
    for text in settings.only:
        name = parse_rung(text).name
        kind = "training steps" if RUNGS[name].training else "inference"
        if not (RUNGS[name].training if training else RUNGS[name].inference):
            raise RedlineError(f"{name} is for {kind}, which {settings.workload} is not: leave it out of --rungs.")
        if runs_steps_in_parts(settings.workload) and RUNGS[name].stage is Stage.LAUNCH:
            raise RedlineError(f"{name} launches whole steps, and `redline train` makes them in parts: leave it out.")


def _variants(name: str, settings: Settings, machine: Machine, training: bool) -> list[Rung]:
    named = [rung for text in settings.only if (rung := parse_rung(text)).name == name]
    plain = not named or named == [RUNGS[name]()]
    left_out = [parse_rung(text) for text in settings.without]
    variants = RUNGS[name].variants(machine, training) if plain else named
    return [rung for rung in variants if rung not in left_out]

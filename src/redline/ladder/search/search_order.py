"""The search order of a climb: which rungs it tries, in which variants, and in which order."""

import math
from collections.abc import Callable, Sequence

from redline.errors import RedlineError
from redline.ladder.rung import Rung, Stage
from redline.ladder.rungs import RUNGS
from redline.ladder.search.history import History
from redline.ladder.search.settings import Settings
from redline.ladder.workload_prefixes import runs_steps_in_parts
from redline.machine.machine import Machine

# The speed-up to expect of a rung that was never tried on this machine; `_EXPECTED` is for rungs that are not listed.
EXPECTED_GAIN = {
    "threads": 1.4, "bf16": 1.5, "fp16": 1.5, "fused_ops": 1.2, "onnxruntime": 1.5, "openvino": 1.5, "compile": 1.5,
    "tensorrt": 1.3, "cuda_graph": 1.3, "autocast": 1.2, "channels_last": 1.1, "fused_optimizer": 1.1,
    "fold_batchnorm": 1.08, "sdpa": 1.05, "tf32": 1.2, "cudnn_benchmark": 1.05, "keep_memory": 1.05,
}  # fmt: skip
_EXPECTED = 1.02
# The expected gain of a rung is a weighted mean. These are the weights of `EXPECTED_GAIN` and of each earlier trial of
# the same workload; an earlier trial of another workload has weight 1.
_PRIOR_TRIALS, _SAME_WORKLOAD = 2.0, 4.0


def candidates(settings: Settings, machine: Machine, training: bool) -> list[Rung]:
    """Returns all variants of the rungs that may be tried."""
    names = [name for name in RUNGS if may_try(name, settings, training)]
    return [rung for name in names for rung in variants(name, settings, machine, training)]


def by_gain_per_second(
    rungs: Sequence[Rung], seconds: Callable[[Rung], float], history: History, training: bool, digest: str
) -> list[Rung]:
    """Sorts rungs by their expected gain per second; `seconds` estimates the time of a trial."""
    return sorted(rungs, key=lambda rung: -_expected_gain(rung, history, training, digest) / seconds(rung))


def _expected_gain(rung: Rung, history: History, training: bool, digest: str) -> float:
    """Returns the logarithm of the expected gain: a weighted mean of `EXPECTED_GAIN` and earlier trials."""
    weights, total = _PRIOR_TRIALS, _PRIOR_TRIALS * math.log(EXPECTED_GAIN.get(rung.name, _EXPECTED))
    for record in history.records:
        if record.rung == str(rung) and record.training == training:
            weight = _SAME_WORKLOAD if record.digest == digest else 1.0
            weights, total = weights + weight, total + weight * math.log(max(record.gain, 1.0))
    return total / weights


def may_try(name: str, settings: Settings, training: bool) -> bool:
    chosen = {rung.name for rung in settings.only}
    # An entry of `without` that has no options excludes every variant of the rung; one with options, only this variant.
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


def variants(name: str, settings: Settings, machine: Machine, training: bool) -> list[Rung]:
    named = [rung for rung in settings.only if rung.name == name]
    plain = not named or named == [RUNGS[name]()]
    variants = RUNGS[name].variants(machine, training) if plain else named
    return [rung for rung in variants if rung not in settings.without]

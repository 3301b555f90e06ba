"""The openings of a climb: the whole plans that an expert would type first on this kind of machine."""

from collections.abc import Sequence

from redline.ladder.plan import Plan
from redline.ladder.rung import Rung
from redline.ladder.rungs import RUNGS
from redline.ladder.search.search_order import may_try
from redline.ladder.search.settings import Settings
from redline.machine.machine import Machine

# A plan is an opening only if it contains one of these rungs; otherwise its rungs are tried one by one.
ENGINES = ("compile", "onnxruntime", "openvino", "tensorrt", "cuda_graph")
_GPU = (
    "bf16 + compile(mode=reduce-overhead)",
    "fp16 + compile(mode=reduce-overhead)",
    "bf16 + channels_last + compile(mode=reduce-overhead)",
    "fp16 + channels_last + compile(mode=reduce-overhead)",
)
_GPU_TRAINING = (
    "fused_optimizer + bf16 + compile(mode=reduce-overhead)",
    "fused_optimizer + autocast + compile(mode=reduce-overhead)",
    "fused_optimizer + autocast + compile",
    "fused_optimizer + bf16 + channels_last + compile(mode=reduce-overhead)",
)
_CPU = ("onnxruntime", "openvino", "bf16 + compile(freeze=true)")
_CPU_TRAINING = ("fused_optimizer + bf16 + compile",)


def openings(settings: Settings, machine: Machine, training: bool) -> list[Plan]:
    """Returns the openings without the rungs that this machine or the settings exclude."""
    kinds = {(True, False): _GPU, (True, True): _GPU_TRAINING, (False, False): _CPU, (False, True): _CPU_TRAINING}
    found = [_usable(Plan.parse(text), settings, machine, training) for text in kinds[machine.is_cuda, training]]
    return [plan for plan in dict.fromkeys(found) if any(rung.name in ENGINES for rung in plan.rungs)]


def _usable(plan: Plan, settings: Settings, machine: Machine, training: bool) -> Plan:
    def usable(rung: Rung) -> bool:
        if not machine.is_cuda and rung.name == "bf16" and machine.recommended_precision()[0] != "bf16":
            return False
        return may_try(rung.name, settings, training) and _is_asked(rung, settings) and not rung.why_not(machine)

    return Plan(tuple(rung for rung in plan.rungs if usable(rung)))


def _is_asked(rung: Rung, settings: Settings) -> bool:
    """Returns whether this variant may be tried: a rung that the user gave with options excludes its other variants."""
    named: Sequence[Rung] = [one for one in settings.only if one.name == rung.name]
    return rung not in settings.without and (not named or rung in named or named == [RUNGS[rung.name]()])

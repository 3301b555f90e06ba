"""Where a step's time and memory go, layer by layer. `profile_workload` measures; `write_page` shows."""

from redline.profile.attention import Attention, AttentionLayer
from redline.profile.deeper import Deeper
from redline.profile.kernels import KernelTime
from redline.profile.layers import LayerTime, LayerTimes, TypeTime
from redline.profile.memory import LayerMemory, Memory
from redline.profile.page import write_page
from redline.profile.result import Profile, profile_workload

__all__ = [
    "Attention",
    "AttentionLayer",
    "Deeper",
    "KernelTime",
    "LayerMemory",
    "LayerTime",
    "LayerTimes",
    "Memory",
    "Profile",
    "TypeTime",
    "profile_workload",
    "write_page",
]

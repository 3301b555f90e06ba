"""Profiles the time and memory of a step by layer. `profile_workload` measures; `write_page` writes a page."""

from redline.ladder.profile.attention import Attention, AttentionLayer
from redline.ladder.profile.kernels import KernelTime
from redline.ladder.profile.layers import LayerTime, LayerTimes, TypeTime
from redline.ladder.profile.memory import LayerMemory, Memory
from redline.ladder.profile.page import write_page
from redline.ladder.profile.ranges import Deeper
from redline.ladder.profile.result import Profile, profile_workload

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

"""Profiles the time and memory of a step by layer. `profile` measures, and returns a `Profile`."""

from redline.ladder.profile.attention import Attention, AttentionLayer
from redline.ladder.profile.kernels import KernelTime
from redline.ladder.profile.layers import LayerTime, LayerTimes, TypeTime
from redline.ladder.profile.measure import profile
from redline.ladder.profile.memory import LayerMemory, Memory
from redline.ladder.profile.ranges import Deeper
from redline.ladder.profile.result import Profile

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
    "profile",
]

"""Profiles the time and memory of a step by layer. `profile` measures, and returns a `Profile`."""

from redline.ladder.profile.attention import Attention
from redline.ladder.profile.layers import LayerTimes
from redline.ladder.profile.measure import profile
from redline.ladder.profile.memory import Memory
from redline.ladder.profile.ranges import Deeper
from redline.ladder.profile.result import Profile

__all__ = ["Attention", "Deeper", "LayerTimes", "Memory", "Profile", "profile"]

"""Defines a scene, which is what a topic draws: one or more turns, and the combinations that it uses.

The combinations decide whether the scene is held out: a held-out scene is used for evaluation and never for training.
"""

import zlib
from dataclasses import dataclass

# One of this many combinations is never used for training, so that `redline eval talk` can test the model on it.
HELD_OUT_EVERY = 64


@dataclass(frozen=True, slots=True)
class Turn:
    """What the user says, and the answer.

    `short` is the answer as a word or number, or "" if the answer has no shorter form. `exact` says that no other
    answer is right. `as_is` says that the letter case and punctuation of the user's text matter and must not change.
    """

    user: str
    answer: str
    short: str = ""
    exact: bool = True
    as_is: bool = False


@dataclass(frozen=True, slots=True)
class Scene:
    """Turns that belong together. The turns in `later` refer to those in `turns`, and may follow after other scenes.

    `keys` are the combinations (such as "47 + 38") that the scene uses; a scene without keys is never held out.
    `system` is a system prompt that the answers follow.
    """

    turns: tuple[Turn, ...]
    keys: tuple[str, ...]
    later: tuple[Turn, ...] = ()
    system: str = ""

    @property
    def is_held_out(self) -> bool:
        return any(map(is_held_out, self.keys))


def is_held_out(key: str) -> bool:
    """Returns whether a combination is kept for evaluation, which is decided by a checksum of its text."""
    return zlib.crc32(key.encode()) % HELD_OUT_EVERY == 0


def asked(user: str, answer: str, short: str = "", *, key: str = "", exact: bool = True, as_is: bool = False) -> Scene:
    """Returns a scene of one turn. If `key` is empty, the text of the question is the combination."""
    return Scene((Turn(user, answer, short, exact, as_is),), (key or user,))

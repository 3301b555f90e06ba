"""What a topic draws: a scene of one or more turns, and the combinations that decide whether it is held out."""

import zlib
from dataclasses import dataclass

# One combination in this many is never used for training, so that `redline eval talk` can ask for it.
HELD_OUT_EVERY = 64


@dataclass(frozen=True, slots=True)
class Turn:
    """What the user says, and the answer.

    `short` is the answer as a word or number, or "" if the answer has no shorter form. With `exact`, no other answer is
    right. With `as_is`, the user's text depends on its letter case and punctuation.
    """

    user: str
    answer: str
    short: str = ""
    exact: bool = True
    as_is: bool = False


@dataclass(frozen=True, slots=True)
class Scene:
    """Turns that belong together. The turns of `later` refer to the others and may follow after other scenes.

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
    """Returns whether a combination is kept for evaluation; depends on its text only."""
    return zlib.crc32(key.encode()) % HELD_OUT_EVERY == 0


def asked(user: str, answer: str, short: str = "", *, key: str = "", exact: bool = True, as_is: bool = False) -> Scene:
    """Returns a scene of one turn. Without `key`, the question itself is the combination."""
    return Scene((Turn(user, answer, short, exact, as_is),), (key or user,))

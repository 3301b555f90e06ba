"""Instructions about the form of the answer: in one word, in capitals, as JSON, as a list, as a sentence."""

import json
from collections.abc import Callable
from dataclasses import replace

from redline.datasets.conversations.draw import Draw
from redline.datasets.conversations.scene import Scene, Turn
from redline.datasets.conversations.topics import arithmetic, comparing, facts, reasoning, words_and_forms

_INNER = (arithmetic.scene, comparing.scene, facts.scene, facts.scene, reasoning.scene, words_and_forms.scene)
_SHORT = ("in one word", "with one word only", "briefly", "as short as possible", "without explanation")
_CAPITALS = ("in capital letters", "in capitals", "in upper case")
_LOWER = ("in small letters", "in lower case")
_JSON = ("as JSON", 'as JSON with the key "answer"', "in JSON")
_QUOTED = ("in quotation marks", "between quotation marks")
_TWICE = ("twice", "two times")
Form = Callable[[Turn], str]
# Name of a form: the wordings of its instruction, and a function that returns the answer of a turn in this form. The
# forms in `_NEEDS_SHORT` can only be used for a turn that has a short answer.
FORMS: dict[str, tuple[tuple[str, ...], Form]] = {
    "short": (_SHORT, lambda turn: turn.short),
    "capitals": (_CAPITALS, lambda turn: turn.answer.upper()),
    "lower": (_LOWER, lambda turn: turn.answer.lower()),
    "json": (_JSON, lambda turn: json.dumps({"answer": turn.short}, ensure_ascii=False)),
    "quoted": (_QUOTED, lambda turn: f'"{turn.short}"'),
    "twice": (_TWICE, lambda turn: f"{turn.answer} {turn.answer}"),
}
_NEEDS_SHORT = ("short", "json", "quoted")
_PUT = ("Answer {i}: {q}", "{q} Answer {i}.", "{q} Please answer {i}.", "Please answer {i}: {q}", "{q} ({i})")
_AGAIN = {
    "short": ("In one word, please.", "Say it in one word.", "Only the answer, please.", "Shorter, please."),
    "capitals": ("In capital letters, please.", "Say that in capitals.", "Now in capital letters."),
    "lower": ("In small letters, please.", "Now in lower case."),
    "json": ("Give me that as JSON.", "As JSON, please.", "Now as JSON."),
}
# System prompts that set the form of every answer.
SYSTEM = {
    "short": ("Answer in one word.", "Give only the answer.", "Be as short as possible."),
    "capitals": ("Answer in capital letters.", "Write everything in upper case."),
    "json": ('Answer as JSON with the key "answer".', "Always answer in JSON."),
}


def fits(turn: Turn, form: str) -> bool:
    return not turn.as_is and turn.exact and (form not in _NEEDS_SHORT or bool(turn.short))


def formed(turn: Turn, form: str) -> Turn:
    """Returns the turn with its answer in this form."""
    return replace(turn, answer=FORMS[form][1](turn), short="")


def scene(draw: Draw) -> Scene:
    form = draw.pick(tuple(FORMS))
    inner = draw.pick(_INNER)(draw)
    while not fits(turn := inner.turns[0], form) or turn.user[-1] not in ".?!":
        inner = draw.pick(_INNER)(draw)
    if form in _AGAIN and draw.chance(0.4):
        again = formed(turn, form)
        text = draw.pick(_AGAIN[form])
        keys = (*inner.keys, f"again {text} {inner.keys[0]}")
        return Scene((turn, replace(again, user=text)), keys)
    instruction = draw.pick(FORMS[form][0])
    text = draw.pick(_PUT).format(i=instruction, q=turn.user)
    return Scene((replace(formed(turn, form), user=text),), (*inner.keys, f"{instruction} {inner.keys[0]}"))

"""System prompts that the answers follow: they set the form of all answers, or give the assistant a name."""

from redline.datasets.conversations.draw import Draw
from redline.datasets.conversations.names import person
from redline.datasets.conversations.scene import Scene, Turn
from redline.datasets.conversations.topics import arithmetic, comparing, facts, reasoning, words_and_forms
from redline.datasets.conversations.topics.form import SYSTEM, fits, formed

# System prompts that do not change the answers.
NEUTRAL = (
    "You are a helpful assistant.",
    "You are a friendly assistant.",
    "You are a small and honest assistant.",
    "Answer the questions of the user.",
    "Be helpful and polite.",
    "Help the user.",
)
_INNER = (arithmetic.scene, comparing.scene, facts.scene, facts.scene, reasoning.scene, words_and_forms.scene)


def scene(draw: Draw) -> Scene:
    if draw.chance(0.3):
        return _named(draw)
    form = draw.pick(tuple(SYSTEM))
    system = draw.pick(SYSTEM[form])
    count = draw.whole(1, 4)
    turns: list[Turn] = []
    keys: list[str] = []
    while len(turns) < count:
        inner = draw.pick(_INNER)(draw)
        if all(fits(turn, form) for turn in inner.turns):
            turns += (formed(turn, form) for turn in inner.turns)
            keys += (*inner.keys, f"{system} {inner.keys[0]}")
    return Scene(tuple(turns), tuple(keys), system=system)


def _named(draw: Draw) -> Scene:
    name = person(draw)
    system = draw.pick(
        ("Your name is {}.", "You are {}, a helpful assistant.", "You are an assistant named {}.")
    ).format(name)
    asks = ("What is your name?", "What's your name?", "Who are you?", "How are you called?", "Do you have a name?")
    turns = [Turn(draw.pick(asks), f"My name is {name}.", name)]
    if draw.chance(0.4):
        turns.insert(0, Turn(draw.pick(("Hello.", "Hi!", "Good morning.")), f"Hello! I am {name}. How can I help you?"))
    return Scene(tuple(turns), (f"named {name} {system}",), system=system)

"""Draws whole conversations: an optional system prompt and the scenes of several topics, as OpenAI messages."""

from collections.abc import Iterator
from dataclasses import dataclass

from redline.datasets.conversations.draw import Draw
from redline.datasets.conversations.scene import Scene, Turn
from redline.datasets.conversations.topics import TOPICS, WEIGHTS
from redline.datasets.conversations.topics.system_prompts import NEUTRAL

Message = dict[str, str]
_WEIGHTED = tuple(name for name, weight in WEIGHTS.items() for _ in range(weight))
# After a scene of the topic on the left, the conversation gets no further scene of the topics on the right, because
# such a scene would contradict it.
_ONCE = {"memory": ("memory", "untold"), "untold": ("memory", "untold"), "stories": ("stories",)}
_SCENES = (1, 1, 1, 2, 2, 2, 3, 3, 4, 5, 6, 8, 12)
_OPENINGS = (
    "Please answer: ",
    "Quick question: ",
    "A question: ",
    "OK. ",
    "Hi! ",
    "Hello. ",
    "Thanks. ",
    "Another one: ",
    "Now this: ",
)
# A shorter message, such as a greeting, gets no opening.
_SHORTEST_OPENED = 16
_SYSTEM_SHARE, _NEUTRAL_SHARE, _GREETING_SHARE = 0.1, 0.25, 0.15
_AFTERWARDS = (
    (0.03, ("Are you sure?", "Really?", "Is that right?"), "Yes. {}"),
    (0.03, ("Say that again.", "Can you repeat that?", "What did you say?", "Pardon?"), "{}"),
    (0.04, ("Thank you.", "Thanks!", "Thanks a lot."), "You are welcome!"),
)


def conversation(draw: Draw) -> list[Message]:
    """Returns a conversation for training, which uses no held-out combination.

    >>> messages = conversation(Draw(seed=0, purpose="training", row=8))
    >>> messages[0]["role"], messages[-1]["role"]
    ('user', 'assistant')
    """
    if draw.chance(_SYSTEM_SHARE):
        only = _draw_scene(draw, "system")
        return _messages(draw, only.system, only.turns)
    system = draw.pick(NEUTRAL) if draw.chance(_NEUTRAL_SHARE) else ""
    return _messages(draw, system, _turns(draw, draw.pick(_SCENES)))


def _turns(draw: Draw, scenes: int) -> Iterator[Turn]:
    """Yields the turns of `scenes` scenes, sometimes after a greeting.

    The `later` turns of a scene are kept back and follow at the end of that scene or of a following one.
    """
    excluded: set[str] = set()
    waiting: tuple[Turn, ...] = ()
    if draw.chance(_GREETING_SHARE):
        yield from _draw_scene(draw, "small talk").turns
    for number in range(scenes):
        while (name := draw.pick(_WEIGHTED)) in excluded:
            pass
        excluded.update(_ONCE.get(name, ()))
        drawn = _draw_scene(draw, name)
        for turn in drawn.turns:
            yield turn
            yield from _afterwards(draw, turn)
        waiting += drawn.later
        if waiting and (number == scenes - 1 or draw.chance(0.5)):
            yield from waiting
            waiting = ()


def _afterwards(draw: Draw, turn: Turn) -> Iterator[Turn]:
    """Yields at most one turn that fits after any answer with a short form, such as thanks or "Are you sure?"."""
    if not turn.short:
        return
    share = draw.share()
    for chance, texts, answer in _AFTERWARDS:
        if share < chance:
            yield Turn(draw.pick(texts), answer.format(turn.answer))
            return
        share -= chance


def _draw_scene(draw: Draw, name: str) -> Scene:
    while (drawn := TOPICS[name](draw)).is_held_out:
        pass
    return drawn


def _messages(draw: Draw, system: str, turns: Iterator[Turn] | tuple[Turn, ...]) -> list[Message]:
    messages = [{"role": "system", "content": system}] if system else []
    for turn in turns:
        messages.append({"role": "user", "content": _typed(draw, turn)})
        messages.append({"role": "assistant", "content": turn.answer})
    return messages


def _typed(draw: Draw, turn: Turn) -> str:
    """Returns the user's text as typed: usually unchanged, sometimes after an opening or without final punctuation.

    Part of the texts without final punctuation are also in lower case.
    """
    text, share = turn.user, draw.share()
    if turn.as_is or share < 0.68:
        return text
    if share < 0.84:
        return draw.pick(_OPENINGS) + text if len(text) > _SHORTEST_OPENED else text
    if share < 0.94:
        text = text.lower()
    return text.rstrip("?.! =") or text


@dataclass(frozen=True)
class Question:
    """A held-out question: `messages` is a conversation that ends with the question, `answer` the right answer."""

    topic: str
    messages: list[Message]
    answer: str


# The topics that have held-out questions with one right answer.
ASKED = tuple(name for name in TOPICS if name not in ("small talk", "untold"))


def question(topic: str, number: int, seed: int = 0) -> Question:
    """Returns held-out question `number` of a topic; the same arguments always give the same question.

    >>> question("arithmetic", 0).messages[-1]["role"]
    'user'
    """
    draw = Draw(seed, f"held out {topic}", number)
    while True:
        drawn = TOPICS[topic](draw)
        turns = [*drawn.turns]
        if drawn.later:
            turns += _draw_scene(draw, draw.pick(("arithmetic", "small talk", "words"))).turns
        last = len(turns)
        turns += drawn.later
        places = [place for place, turn in enumerate(turns) if turn.exact and (not drawn.later or place >= last)]
        if drawn.is_held_out and places:
            chosen = draw.pick(places)
            messages = _messages(draw, drawn.system or "", tuple(turns[: chosen + 1]))
            return Question(topic, messages[:-1], turns[chosen].answer)

"""Questions about opposites, plurals and past tenses, and requests to copy or count the words of a text."""

from redline.datasets.conversations.draw import Draw
from redline.datasets.conversations.names import made_up_word, person
from redline.datasets.conversations.scene import Scene, asked
from redline.datasets.conversations.words import OPPOSITES, PAST, PLURALS, WORDS

_OPPOSITES, _PLURALS, _PAST = (tuple(table.items()) for table in (OPPOSITES, PLURALS, PAST))


def scene(draw: Draw) -> Scene:
    return draw.pick((_opposite, _opposite, _plural, _plural, _past, _copy, _number_of_words))(draw)


def _opposite(draw: Draw) -> Scene:
    word, other = draw.pick(_OPPOSITES)
    shown = draw.pick((word, f'"{word}"'))
    forms = (
        f"What is the opposite of {shown}?",
        f"What's the opposite of {shown}?",
        f"Give me the opposite of {shown}.",
        f"Which word is the opposite of {shown}?",
        f"opposite of {shown}",
        f"{shown} is the opposite of what?",
        f"Do you know the opposite of {shown}?",
    )
    return asked(draw.pick(forms), f'The opposite of "{word}" is "{other}".', other)


def _plural(draw: Draw) -> Scene:
    word, many = draw.pick(_PLURALS)
    shown = draw.pick((word, f'"{word}"'))
    forms = (
        f"What is the plural of {shown}?",
        f"What's the plural of {shown}?",
        f"Give me the plural of {shown}.",
        f"plural of {shown}",
        f"One {word}, two …?",
        f"How do you say more than one {word}?",
    )
    return asked(draw.pick(forms), f'The plural of "{word}" is "{many}".', many)


def _past(draw: Draw) -> Scene:
    verb, past = draw.pick(_PAST)
    shown = draw.pick((verb, f'"{verb}"', f'"to {verb}"'))
    forms = (f"What is the past tense of {shown}?", f"Give me the past tense of {shown}.", f"past tense of {shown}")
    return asked(draw.pick(forms), f'The past tense of "{verb}" is "{past}".', past)


def _words(draw: Draw, count: int) -> list[str]:
    return [made_up_word(draw) if draw.chance(0.15) else draw.pick(WORDS) for _ in range(count)]


def _copy(draw: Draw) -> Scene:
    text = " ".join(_words(draw, draw.whole(1, 6)))
    if draw.chance(0.3):
        text = f"{person(draw)} likes {draw.pick(WORDS)} and {draw.pick(WORDS)}"
    form = draw.pick(("Repeat after me: {}", 'Say "{}".', 'Repeat "{}".', "Please say {}", "Write exactly this: {}"))
    return asked(form.format(text), text, key=f"copy {text}", as_is=True)


def _number_of_words(draw: Draw) -> Scene:
    words = _words(draw, draw.whole(2, 7))
    form = draw.pick(('How many words are in "{}"?', "Count the words: {}", 'How many words does "{}" have?'))
    steps = ", ".join(f"{word} {number}" for number, word in enumerate(words, 1))
    text = " ".join(words)
    return asked(form.format(text), f"{steps}. That makes {len(words)} words.", str(len(words)), key=f"words {text}")

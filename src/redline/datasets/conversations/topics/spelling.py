"""Questions about the letters of words: spelling, counting, reversing, the letter at a position, and occurrences."""

from redline.datasets.conversations.draw import Draw
from redline.datasets.conversations.names import made_up_word
from redline.datasets.conversations.scene import Scene, asked
from redline.datasets.conversations.words import WORDS

# The share of words that are made up.
_MADE_UP = 0.3
_ORDINALS = ("first", "second", "third", "fourth")


def scene(draw: Draw) -> Scene:
    word = made_up_word(draw) if draw.chance(_MADE_UP) else draw.pick(WORDS)
    return draw.pick((_spell, _count, _occurrences, _reverse, _ends, _ordinal, _contains))(draw, word)


def _quoted(draw: Draw, word: str) -> str:
    return draw.pick((f'"{word}"', word, f"the word {word}", f'the word "{word}"'))


def _spell(draw: Draw, word: str) -> Scene:
    form = draw.pick(("How do you spell {}?", "Spell {}.", "Can you spell {} for me?", "Please spell {}."))
    return asked(form.format(_quoted(draw, word)), f"{word}: {'-'.join(word)}.", key=f"spell {word}")


def _count(draw: Draw, word: str) -> Scene:
    form = draw.pick(("How many letters are in {}?", "How many letters does {} have?", "Count the letters of {}."))
    steps = ", ".join(f"{letter} {number}" for number, letter in enumerate(word, 1))
    answer = f'{steps}. So "{word}" has {len(word)} letters.'
    return asked(form.format(_quoted(draw, word)), answer, str(len(word)), key=f"count {word}")


def _occurrences(draw: Draw, word: str) -> Scene:
    letter = draw.pick(word) if draw.chance(0.8) else draw.pick("aeinrst")
    found = word.count(letter)
    forms = (
        "How often does the letter {l} occur in {w}?",
        "How many times is {l} in {w}?",
        "How many {l}s are in {w}?",
    )
    seen, marked = 0, []
    for one in word:
        seen += one == letter
        marked.append(f"{one} ({seen})" if one == letter else one)
    times = "once" if found == 1 else f"{found} times"
    answer = f'{"-".join(marked)}. The letter {letter} occurs {times} in "{word}".'
    text = draw.pick(forms).format(l=letter, w=_quoted(draw, word))
    return asked(text, answer, str(found), key=f"occurrences {letter} {word}")


def _reverse(draw: Draw, word: str) -> Scene:
    form = draw.pick(("Reverse {}.", "Write {} backwards.", "What is {} spelled backwards?", "Can you reverse {}?"))
    back = word[::-1]
    answer = f'{"-".join(word)} backwards is {"-".join(back)}, so "{back}".'
    return asked(form.format(_quoted(draw, word)), answer, back, key=f"reverse {word}")


def _ends(draw: Draw, word: str) -> Scene:
    which = draw.pick(("first", "last"))
    letter = word[0] if which == "first" else word[-1]
    quoted = _quoted(draw, word)
    if draw.chance(0.3):
        start = "start" if which == "first" else "end"
        text = f"Which letter does {quoted} {start} with?"
    else:
        text = draw.pick(
            ("What is the {o} letter of {w}?", "Which is the {o} letter of {w}?", "The {o} letter of {w}?")
        )
        text = text.format(o=which, w=quoted)
    return asked(text, f'The {which} letter of "{word}" is {letter}.', letter, key=f"{which} {word}")


def _ordinal(draw: Draw, word: str) -> Scene:
    # Starts with the second letter, because `_ends` asks for the first.
    place = draw.whole(1, min(len(word), len(_ORDINALS)) - 1)
    name = _ORDINALS[place]
    answer = f'{"-".join(word[: place + 1])}: the {name} letter of "{word}" is {word[place]}.'
    return asked(
        f"What is the {name} letter of {_quoted(draw, word)}?", answer, word[place], key=f"ordinal {place} {word}"
    )


def _contains(draw: Draw, word: str) -> Scene:
    letter = draw.pick(word) if draw.chance(0.5) else draw.pick("aeinrstlomk")
    form = draw.pick(("Does {w} contain the letter {l}?", "Is there {a} {l} in {w}?", "Is the letter {l} in {w}?"))
    text = form.format(w=_quoted(draw, word), l=letter, a="an" if letter in "aefhilmnorsx" else "a")
    spelled = "-".join(word)
    yes = letter in word
    answer = f"{'Yes' if yes else 'No'}: {spelled} {'contains' if yes else 'does not contain'} the letter {letter}."
    return asked(text, answer, "Yes" if yes else "No", key=f"contains {letter} {word}")
